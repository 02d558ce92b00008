"""What a Redis server's own settings may cost: read when a store first connects, named, and logged once.

Redis can forget: when its memory is full, when it restarts, when a replica takes over. Whether that is acceptable is
for the operator to say; that it can happen must not be a surprise. Pure: settings in, risks out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from semel.errors import SemelError
from semel.stores.redis.scripts import Command

__all__ = ["QUESTIONS", "Risk", "assess", "described"]

_SETTINGS: Final = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save")
QUESTIONS: Final = [
    *(Command((b"CONFIG", b"GET", name.encode())) for name in _SETTINGS),
    Command((b"INFO", b"replication")),
]
"""What a server is asked."""


@dataclass(frozen=True)
class Risk:
    """Something that the server's settings allow to happen to records."""

    name: str
    """``eviction``, ``no-persistence``, ``snapshots-only``, ``lazy-fsync``, ``asynchronous-replicas``,
    ``partly-confirmed`` or ``unreadable``."""
    what: str
    """What can happen."""
    remedy: str
    """What to change, where it should not."""


def assess(replies: Iterable[Any], *, wait_replicas: int, wait_aof: bool) -> list[Risk]:
    """The risks, from the answers to ``QUESTIONS``; those that could not be read are a risk of their own."""
    *settings, replication = replies
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
                f"these could not be read: {', '.join(unread)}; what they allow is not known",
                "allow CONFIG GET and INFO to this user (ACL: +config|get +info), or check them by hand",
            )
        )
    return found


def described(risks: Iterable[Risk]) -> str:
    """For the log: one line each."""
    return "; ".join(f"{risk.name}: {risk.what} ({risk.remedy})" for risk in risks)


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
