"""How a copy of a record is stored in Redis, and the clock that says when the copy ends.

The store behind has its clock, the cache has another, and every process a third. A copy must never outlive its record,
so every calculation errs to the early side::

    TIME sent ────────── T is somewhere in here ────────── reply received
        │                                                        │
        readers count from here: the clock shows T or less       writers count from here: it shows T or more

A process knows the cache's clock only as an interval, because ``TIME`` was answered somewhere between asking and
receiving. Writers calculate from its early end, readers from its late end, and both allow for clocks that drift. A
write carries an instant, not a duration, so a write that is delayed on its way does not extend the copy's life.

What remains is a cache whose clock is set back by more than ``MARGIN``, or whose successor's clock is that far behind.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from semel.core.ops import FOREVER, Record
from semel.core.policy import Duration, seconds
from semel.core.states import State
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.connection import require_redis
from semel.stores.redis.settings import RedisSettings
from semel.stores.tiered.cache import CachedRecord, Write

TIMEOUT: Final = "100ms"
"""How long a caller waits for the cache; twice that if many threads ask at once."""
CONNECT_TIMEOUT: Final = "2s"
"""How long a new connection may take. It is opened in the background, so no caller waits for it."""
PREFIX: Final = "semel-tier:"
MAX_PENDING: Final = 10_000
"""Writes that may wait to be sent; more are dropped, and counted."""
TIME: Final = RedisCommand((b"TIME",))

MARGIN: Final = 2.0
"""Seconds by which a copy ends before its record, at least."""
DRIFT: Final = 0.001
"""How much faster or slower two clocks may run. Quartz is ten times better; a clock that is slewed is half as bad."""
OLD: Final = 30.0
"""Seconds after which the cache is asked for the time again."""
VERSION: Final = 1
_HEAD: Final = struct.Struct(">BBQQIQQQqqHIIi")
_LONGEST: Final = float(1 << 52)


class ServerTime:
    """A server's clock in microseconds, known as an interval. ``at`` is an instant of ``time.monotonic``."""

    __slots__ = ("_known",)

    def __init__(self, asked: float, received: float, answer: Any) -> None:
        self._known = (0.0, 0.0, 0)
        self.learn(asked, received, answer)

    def learn(self, asked: float, received: float, answer: Any) -> None:
        """Take in a reply to ``TIME``. Only the newest counts, because older ones have drifted."""
        self._known = (asked, received, int(answer[0]) * 1_000_000 + int(answer[1]))

    def is_old(self, at: float) -> bool:
        return at - self._known[1] > OLD

    def earliest(self, at: float) -> int:
        """Return the least that the server's clock can show at that instant, which may be in the future."""
        _, received, time = self._known
        span = at - received
        return time + int(span * (1 - DRIFT if span > 0 else 1 + DRIFT) * 1e6)

    def latest(self, at: float) -> int:
        """Return the most that the server's clock can show at that instant."""
        asked, _, time = self._known
        return time + int((at - asked) * (1 + DRIFT) * 1e6)


def pack(write: Write, record: Record, time: ServerTime) -> tuple[bytes, int]:
    """Return the value of a copy, and when it ends, in ms of the server's clock.

    The record's times are stored as they were when it was written. So when they are read, they can only be wrong by
    what the two clocks drifted apart in between.
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


def unpack(id: bytes, reply: Any, now: int) -> CachedRecord | None:
    """Return the entry, from the values of its two keys.

    None if it has ended by the server's clock, is invalid, or is not one of ours.
    """
    raw, invalidated = reply
    if len(raw) < _HEAD.size or raw[0] != VERSION:
        return None
    _, state, nonce, token, attempt, until, written, age, lease_left, expires_in, *sizes = _HEAD.unpack_from(raw)
    if now >= until or state not in (State.DONE, State.RUNNING):
        return None
    if invalidated is not None and token <= int.from_bytes(invalidated):
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
    elapsed = max(0, now - written)
    record = Record(
        id,
        State(state),
        token,
        attempt,
        fingerprint,
        raw[at:] if state == State.DONE else None,
        (lease_left - elapsed) / 1e6,
        (age + elapsed) / 1e6,
        (expires_in - elapsed) / 1e6,
        tenant,
        operation,
        key if sizes[3] >= 0 else None,
    )
    return CachedRecord(record, nonce)


def cache_settings(url: str, prefix: str | None, timeout: Duration, connect_timeout: Duration) -> RedisSettings:
    """Return the settings of the Redis that holds the copies. Nothing is retried, and no replica confirms a write."""
    require_redis()
    wait = seconds(timeout, "timeout")
    if prefix is None and "prefix=" not in url.partition("?")[2]:
        prefix = PREFIX
    return RedisSettings(
        url, prefix=prefix, connections=1, timeout=wait, connect_timeout=connect_timeout, retry_for=0.0,
        wait_replicas=0, wait_aof=False, wait_timeout=wait / 2,
    )  # fmt: skip


def copy_key(prefix: bytes, id: bytes) -> bytes:
    """Return the key of an id's copy."""
    return prefix + id.hex().encode()


def entry_keys(prefix: bytes, id: bytes) -> tuple[bytes, bytes]:
    """Return the key of an id's copy, and the key of the token up to which its copies are invalid.

    The token has a key of its own, because copies and marks come and go, and a process that was paused may write its
    copy late. The braces put it into the same slot of a cluster.
    """
    key = prefix + id.hex().encode()
    return key, prefix + b"{" + key + b"}"


def invalidation(keys: tuple[bytes, bytes], token: int, seconds: float) -> list[RedisCommand]:
    """Return the commands that make the copies with this token and older ones invalid."""
    key, invalid = keys
    life = max(1, int(min(seconds, FOREVER) * 1000))
    return [RedisCommand((b"SET", invalid, token.to_bytes(8), b"PX", life)), RedisCommand((b"DEL", key))]


def write_command(write: Write, key: bytes, time: ServerTime) -> RedisCommand:
    """Return the command of a write. The key expires at an instant, so a delayed command does not extend its life."""
    if write.record is None:
        return RedisCommand((b"DEL", key))
    value, until = pack(write, write.record, time)
    return RedisCommand((b"SET", key, value, b"PXAT", max(1, until)))
