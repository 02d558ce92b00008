"""What the sync and the async Redis cache share: their settings, and a write as a command."""

from __future__ import annotations

from typing import Any, Final

from semel.core.policy import Duration, seconds
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.connection import require_redis
from semel.stores.redis.settings import RedisSettings
from semel.stores.tiered.copies import ServerTime, pack
from semel.stores.tiered.ports import Write

__all__ = ["CONNECT_TIMEOUT", "PREFIX", "TIME", "TIMEOUT", "command_of", "settings_of"]

TIMEOUT: Final = "100ms"
"""How long a caller waits for the cache; where many threads ask at once, twice that."""
CONNECT_TIMEOUT: Final = "2s"
"""How long a new connection may take. It is opened in the background: no caller waits for it."""
PREFIX: Final = "semel-tier:"
TIME: Final = RedisCommand((b"TIME",))


def settings_of(url: str, prefix: str | None, timeout: Duration, connect_timeout: Duration) -> RedisSettings:
    require_redis()
    wait = seconds(timeout, "timeout")
    if prefix is None and "prefix=" not in url.partition("?")[2]:
        prefix = PREFIX
    return RedisSettings(
        url, prefix=prefix, lanes=1, timeout=wait, connect_timeout=connect_timeout, patience=0.0,
        wait_replicas=0, wait_aof=False, wait_timeout=wait / 2,
    )  # fmt: skip


def command_of(write: Write, key: bytes, time: ServerTime) -> RedisCommand:
    """An instant at which the key ends, not a duration: a command that is late on its way gives it no longer life."""
    if write.record is None:
        return RedisCommand((b"DEL", key))
    packed, until = pack(write, write.record, time)
    parts: tuple[Any, ...] = (b"SET", key, packed, b"PXAT", max(1, until))
    return RedisCommand(parts)
