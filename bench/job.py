"""The job that all contestants do: a handler that returns a small dict, under keys of which some are known already."""

from __future__ import annotations

import itertools
import secrets
from typing import Any, Final

OPERATION: Final = "bench.pay"
KNOWN: Final = 256
"""Keys that were answered before the clock starts; replays go round them, so that callers seldom meet on one."""
RESULT: Final[dict[str, Any]] = {"id": "pay_1001", "amount": 4200, "ok": True}
_RUN: Final = secrets.token_hex(4)
_numbers: Final = itertools.count()


def handler() -> dict[str, Any]:
    return dict(RESULT)


async def async_handler() -> dict[str, Any]:
    return dict(RESULT)


def fresh_key() -> str:
    """One that nobody in this run has had."""
    return f"{_RUN}-{next(_numbers)}"


def known_key(number: int) -> str:
    return f"{_RUN}-known-{number % KNOWN}"


def raw_id() -> bytes:
    """Sixteen bytes in no order, as a record's identity is."""
    return secrets.token_bytes(16)
