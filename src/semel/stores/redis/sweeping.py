"""Sweep: what is left to do where the server expires records by itself.

Records that are done, or may be run again, vanish when their time is over: nothing is there to be removed, and
``Swept.removed`` is always 0. What was abandoned past its time and may not be run again stays, and a sweep writes down
that it is unknown. To find those the keys are walked with SCAN, a bounded part in each sweep, and the next one goes on
from there. Calls never do this; claims and look-ups judge such a record the same, swept or not.

The pages are small, for the connection and the event loop are those of the calls: none of them should wait for a page
that takes longer than it would itself. Of each key only the head is read, and most are not asked for anything more.
Redis removes what has expired when it is looked at, or when its own sampling comes by; until then nobody sees it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, TypeAlias

from semel.errors import SemelError
from semel.stores.redis.scripts import Command, scripts
from semel.stores.redis.values import HEAD, is_doubtful, may_be_doubtful

__all__ = ["Walk", "walk"]

SCAN_COUNT: Final = 50
MOST_SCANS: Final = 400
"""In one sweep of one server: about 20,000 keys, whoever they belong to."""

Walk: TypeAlias = Generator[list[Command], list[Any], tuple[bytes, int]]


def walk(prefix: bytes, limit: int, cursor: bytes) -> Walk:
    """Walk the keys of one server from ``cursor`` on; yields batches of commands, answers where it got and how many
    records have become unknown. ``b"0"`` as the answer's cursor: the end was reached."""
    pattern = b"".join(b"\\" + bytes((char,)) if char in b"\\*?[]^-" else bytes((char,)) for char in prefix) + b"*"
    sweep = scripts()["sweep"]
    unknown = 0
    for _ in range(MOST_SCANS):
        if unknown >= limit:
            break
        scan = Command((b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCAN_COUNT))
        ((following, keys),) = _unless_failed((yield [scan]))
        if keys:
            heads = yield [Command((b"GETRANGE", key, 0, HEAD.size - 1)) for key in keys]
            bound = [
                (key, head)
                for key, head in zip(keys, heads, strict=True)
                if isinstance(head, bytes) and may_be_doubtful(head)
            ]
            lives = (yield [Command((b"PTTL", key)) for key, _ in bound]) if bound else []
            doubtful = [
                key
                for (key, head), pttl in zip(bound, lives, strict=True)
                if isinstance(pttl, int) and is_doubtful(head, pttl)
            ]
            chosen = doubtful[: limit - unknown]
            if chosen:
                unknown += sum(_unless_failed((yield [sweep.call(key) for key in chosen])))
            if len(chosen) < len(doubtful):
                break  # the next sweep comes back to this page
        cursor = following
        if cursor == b"0":
            break
    return cursor, unknown


def _unless_failed(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, SemelError):
            raise reply
    return replies
