"""What the sync and the async Redis cache share: their settings, and a write as a command."""

from __future__ import annotations

from typing import Any, Final

from semel.core.policy import Duration, seconds
from semel.stores.redis.link import require_redis
from semel.stores.redis.programs import Programs
from semel.stores.redis.scripts import Command
from semel.stores.redis.settings import Settings
from semel.stores.tiered.copies import ServerTime, pack
from semel.stores.tiered.ports import Write

__all__ = ["CONNECT_TIMEOUT", "PREFIX", "TIME", "TIMEOUT", "command_of", "programs_of", "settings_of"]

TIMEOUT: Final = "100ms"
"""How long a caller waits for the cache; where many threads ask at once, twice that."""
CONNECT_TIMEOUT: Final = "2s"
"""How long a new connection may take. It is opened in the background: no caller waits for it."""
PREFIX: Final = "semel-tier:"
TIME: Final = Command((b"TIME",))


def settings_of(url: str, prefix: str | None, timeout: Duration, connect_timeout: Duration) -> Settings:
    require_redis()
    wait = seconds(timeout, "timeout")
    if prefix is None and "prefix=" not in url.partition("?")[2]:
        prefix = PREFIX
    return Settings(
        url, prefix=prefix, connections=1, timeout=wait, connect_timeout=connect_timeout, retry_for=0.0,
        wait_replicas=0, wait_aof=False, wait_timeout=wait / 2,
    )  # fmt: skip


def programs_of(settings: Settings) -> Programs:
    """Of the programs of a Redis store a cache uses only the names of keys."""
    return Programs(settings.prefix, replicas=0, aof=False, wait_ms=1)


def command_of(write: Write, key: bytes, time: ServerTime) -> Command:
    """An instant at which the key ends, not a duration: a command that is late on its way gives it no longer life."""
    if write.record is None:
        return Command((b"DEL", key))
    packed, until = pack(write, write.record, time)
    parts: tuple[Any, ...] = (b"SET", key, packed, b"PXAT", max(1, until))
    return Command(parts)
