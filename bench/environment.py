"""Where it was measured: without this a figure means nothing."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import sys
import tempfile
from importlib import metadata
from time import perf_counter
from typing import Any

__all__ = ["describe", "fsync_microseconds"]

_PACKAGES = (
    "semel",
    "psycopg",
    "psycopg-binary",
    "asyncpg",
    "aws-lambda-powertools",
    "dbos",
    "txoutbox",
    "faststream-outbox",
)


def describe() -> dict[str, Any]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gil_switch_ms": sys.getswitchinterval() * 1000,
        "sqlite": sqlite3.sqlite_version,
        "fsync_us": round(fsync_microseconds(), 1),
        **{name: _version(name) for name in _PACKAGES},
    }


def fsync_microseconds(tries: int = 60) -> float:
    """Writing 4 kB at the end of a file of the temporary folder, and waiting until it is on the disk: the median."""
    taken = []
    with tempfile.TemporaryFile() as file:
        for _ in range(tries):
            began = perf_counter()
            os.write(file.fileno(), b"x" * 4096)
            os.fsync(file.fileno())
            taken.append(perf_counter() - began)
    return statistics.median(taken) * 1e6


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
