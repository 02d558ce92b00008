"""Set-up of the servers: installs the missing ones where that is possible, and says what is missing where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.servers.base import Server, ServerMissing
from tests.servers.kinds import KINDS

POLICY = Path("/usr/sbin/policy-rc.d")


def missing_is_an_error(environ: Mapping[str, str] = os.environ) -> bool:
    """On a developer's machine a missing server skips its tests; a CI run proves all or fails."""
    return environ.get("CI", "").lower() not in ("", "0", "false", "no")


def install(kinds: Sequence[type[Server]]) -> list[type[Server]]:
    """Install what is missing through apt-get, when we are root; returns the kinds that are still missing."""
    missing = _fetched(kinds)
    ours = [kind for kind in missing if not Path(kind.binaries[0]).is_absolute()]  # else named by the environment
    if ours and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = sorted({package for kind in ours for package in kind.packages})
        print(f"servers: installing {' '.join(packages)}", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        commands = [
            ["apt-get", "-qq", "update"],
            ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *packages],
        ]
        with _no_services():
            for command in commands:
                if subprocess.run(command, env=environment, check=False, stdin=subprocess.DEVNULL).returncode != 0:
                    print(f"servers: failed: {' '.join(command)}", file=sys.stderr)
                    break
    return _fetched(missing)


def _fetched(kinds: Sequence[type[Server]]) -> list[type[Server]]:
    """Those that are missing also when what no package has was fetched."""
    for kind in kinds:
        try:
            kind.fetch()
        except ServerMissing as why:
            print(f"servers: {why}", file=sys.stderr)
    return [kind for kind in kinds if kind.find() is None]


@contextmanager
def _no_services() -> Iterator[None]:
    """While packages are installed, their services do not start: Debian asks this file, 101 is no."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    unknown = [name for name in arguments if name not in KINDS]
    if unknown:
        print(f"servers: unknown: {' '.join(unknown)}; there are: {' '.join(KINDS)}", file=sys.stderr)
        return 2
    kinds = [KINDS[name] for name in arguments or KINDS]
    missing = install(kinds)
    for kind in kinds:
        if kind not in missing:
            print(f"servers: {kind.name}: {kind.binary(kind.binaries[0])}")
    for kind in missing:
        print(f"servers: {kind.name} is missing; install: {' '.join(kind.packages)}", file=sys.stderr)
    if missing and missing_is_an_error():
        return 1
    if missing:
        print("servers: the tests that need them will be skipped", file=sys.stderr)
    return 0
