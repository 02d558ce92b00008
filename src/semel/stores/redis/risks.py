"""Settings of a Redis server that can lose records. They are read when a store first connects, and logged once.

Redis can forget records: when its memory is full, when it restarts, or when a replica takes over. Whether that is
acceptable is up to the operator, but it must not come as a surprise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from semel.errors import SemelError
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.settings import RedisSettings
from semel.stores.risks import AT_RISK, Risk, clock_skew

_SETTINGS: Final = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save")
QUESTIONS: Final = [
    *(RedisCommand((b"CONFIG", b"GET", name.encode())) for name in _SETTINGS),
    RedisCommand((b"INFO", b"replication")),
    RedisCommand((b"TIME",)),
]
"""The commands to send to a server; ``assess`` reads the replies."""
_log: Final = logging.getLogger("semel.redis")


def assess(replies: Iterable[Any], *, wait_replicas: int, wait_aof: bool) -> list[Risk]:
    """Return the risks that the replies to ``QUESTIONS`` show. Settings that cannot be read are a risk of their own."""
    *settings, replication, _ = replies
    config: dict[str, str] = {}
    for reply in settings:
        if not isinstance(reply, SemelError) and len(reply) == 2:
            config[reply[0].decode()] = reply[1].decode()
    found = [*_memory(config), *_persistence(config, wait_aof)]
    unread = [name for name in _SETTINGS if name not in config]
    if isinstance(replication, SemelError):
        unread.append("INFO replication")
    else:
        lines = (line.partition(":") for line in replication.decode().splitlines())
        found += _replication({name: value for name, _, value in lines}, wait_replicas)
    if unread:
        found.append(
            Risk(
                "unreadable",
                f"these could not be read: {', '.join(unread)}; what they allow is unknown",
                "allow CONFIG GET and INFO to this user (ACL: +config|get +info), or check them by hand",
            )
        )
    return found


class RiskLog:
    """Assesses the servers of one store, and logs each risk once."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._logged: set[str] = set()

    def report(self, replies: Sequence[Any], asked: float, answered: float) -> list[Risk]:
        """Return the risks of a server that replied so to ``QUESTIONS``.

        :param asked: this machine's time when it asked.
        :param answered: this machine's time when it had the replies.
        """
        settings = self._settings
        risks = assess(replies, wait_replicas=settings.wait_replicas, wait_aof=settings.wait_aof)
        unlogged = [risk for risk in risks if risk.name not in self._logged]
        if unlogged:
            self._logged.update(risk.name for risk in unlogged)
            texts = (f"{risk.name}: {risk.what} ({risk.remedy})" for risk in unlogged)
            _log.warning(AT_RISK, "; ".join(texts))
        now = replies[-1]
        if not isinstance(now, SemelError):
            risks += clock_skew(int(now[0]) + int(now[1]) / 1e6, asked, answered)
        return risks


def _memory(config: Mapping[str, str]) -> Iterable[Risk]:
    policy = config.get("maxmemory-policy", "noeviction")
    if policy == "noeviction" or config.get("maxmemory") == "0":
        return
    yield Risk(
        "eviction",
        f"maxmemory-policy is {policy}: when memory is full, records are forgotten, and their operations run again",
        "set maxmemory-policy noeviction (claims are refused when it is full), or give Semel a Redis of its own",
    )


def _persistence(config: Mapping[str, str], wait_aof: bool) -> Iterable[Risk]:
    if config.get("appendonly") == "no":
        if config.get("save") == "":
            yield Risk(
                "no-persistence",
                "neither appendonly nor save is set: a restart forgets every record",
                "set appendonly yes",
            )
        elif "save" in config:
            yield Risk(
                "snapshots-only",
                "appendonly is off: a crash forgets what came after the last snapshot",
                "set appendonly yes",
            )
    elif config.get("appendonly") == "yes" and config.get("appendfsync") != "always" and not wait_aof:
        lazy = config.get("appendfsync")
        every = "about a second" if lazy == "everysec" else "half a minute or more"
        yield Risk(
            "lazy-fsync",
            f"appendfsync is {lazy}: a power cut forgets the last {every}; a crash of Redis does not",
            "set appendfsync always, or open the store with wait_aof=True (Redis 7.2)",
        )


def _replication(info: Mapping[str, str], wait_replicas: int) -> Iterable[Risk]:
    replicas = int(info.get("connected_slaves", "0"))
    if not replicas:
        return
    if not wait_replicas:
        yield Risk(
            "asynchronous-replicas",
            f"writes are confirmed before any of {replicas} replicas has them: a failover forgets the last ones",
            "open the store with wait_replicas=1 or more, and set min-replicas-to-write",
        )
    elif wait_replicas < replicas:
        yield Risk(
            "partly-confirmed",
            f"{wait_replicas} of {replicas} replicas confirm a write: a failover to another one forgets the last",
            f"open the store with wait_replicas={replicas}",
        )
