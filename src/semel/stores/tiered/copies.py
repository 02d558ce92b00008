"""A record as it travels through the cache, and the cache's clock, which says when a copy ends.

The store behind has its clock, the cache has another, and every process a third. A copy must never outlive its record,
so every reckoning errs to the early side. Of the cache's clock a process knows an interval: ``TIME`` was answered
somewhere between asking and hearing. Who writes reckons from its early end, who reads from its late end, and both allow
for clocks that run apart. A write that is late on its way carries an instant, not a duration, so it ends no later.
What remains: a cache whose clock is set back, or whose successor's clock is behind, by more than ``MARGIN``.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from semel.core.ops import Record
from semel.core.states import State
from semel.stores.tiered.ports import Found, Write

__all__ = ["MARGIN", "ServerTime", "pack", "unpack"]

MARGIN: Final = 2.0
"""Seconds before the end of its record at which a copy ends, at the latest."""
DRIFT: Final = 0.001
"""How much faster or slower two clocks may run; quartz is ten times better, a clock being slewed half as bad."""
OLD: Final = 30.0
"""Seconds after which the cache is asked anew what time it is."""
VERSION: Final = 1
_HEAD: Final = struct.Struct(">BBQQIQQQqqHIIi")
_LONGEST: Final = float(1 << 52)


class ServerTime:
    """What is known of a server's clock, in microseconds, as an interval. ``at`` is of ``time.monotonic``."""

    __slots__ = ("_known",)

    def __init__(self, asked: float, heard: float, answer: Any) -> None:
        self._known = (0.0, 0.0, 0)
        self.learn(asked, heard, answer)

    def learn(self, asked: float, heard: float, answer: Any) -> None:
        """``TIME`` was sent and answered at these moments. The newest counts: an old one has drifted."""
        self._known = (asked, heard, int(answer[0]) * 1_000_000 + int(answer[1]))

    def is_old(self, at: float) -> bool:
        return at - self._known[1] > OLD

    def earliest(self, at: float) -> int:
        """The server's clock shows no less at that moment, which may lie in the future."""
        _, heard, time = self._known
        span = at - heard
        return time + int(span * (1 - DRIFT if span > 0 else 1 + DRIFT) * 1e6)

    def latest(self, at: float) -> int:
        """The server's clock shows no more at that moment."""
        asked, _, time = self._known
        return time + int((at - asked) * (1 + DRIFT) * 1e6)


def pack(write: Write, record: Record, time: ServerTime) -> tuple[bytes, int]:
    """The value, and the instant in ms of the server's clock at which it ends.

    The record's times go in as they were when it was written, so what two clocks differ by while it is here is all that
    they can be wrong by when they come out.
    """
    until = max(0, time.earliest(write.until))
    tenant = record.tenant.encode("utf-8", "surrogatepass")
    operation = record.operation.encode("utf-8", "surrogatepass")
    key = b"" if record.key is None else record.key.encode("utf-8", "surrogatepass")
    head = _HEAD.pack(
        VERSION,
        record.state,
        write.nonce,
        record.token,
        record.attempt,
        until,
        max(0, time.earliest(write.at)),
        max(0, int(record.age * 1e6)),
        int(min(_LONGEST, record.lease_left * 1e6)),
        int(min(_LONGEST, record.expires_in * 1e6)),
        len(record.fingerprint),
        len(tenant),
        len(operation),
        -1 if record.key is None else len(key),
    )
    return b"".join((head, record.fingerprint, tenant, operation, key, record.snapshot or b"")), until // 1000


def unpack(id: bytes, raw: bytes, now: int) -> Found | None:
    """What a value says, by the server's clock; None where it has ended, or is none of ours."""
    if len(raw) < _HEAD.size or raw[0] != VERSION:
        return None
    _, state, nonce, token, attempt, until, written, age, lease_left, expires_in, *sizes = _HEAD.unpack_from(raw)
    if now >= until or state not in (State.DONE, State.RUNNING):
        return None
    at = _HEAD.size
    parts: list[bytes] = []
    for size in sizes:
        parts.append(raw[at : at + max(0, size)])
        at += max(0, size)
    if at > len(raw):
        return None
    fingerprint, *names = parts
    try:
        tenant, operation, key = (name.decode("utf-8", "surrogatepass") for name in names)
    except UnicodeDecodeError:
        return None
    passed = max(0, now - written)
    done = state == State.DONE
    record = Record(
        id,
        State(state),
        token,
        attempt,
        fingerprint,
        raw[at:] if done else None,
        (lease_left - passed) / 1e6,
        (age + passed) / 1e6,
        (expires_in - passed) / 1e6,
        tenant,
        operation,
        key if sizes[3] >= 0 else None,
    )
    return Found(record, nonce)
