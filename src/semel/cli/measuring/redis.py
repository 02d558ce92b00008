"""Measured in Redis, under a prefix that nobody else has: records, and the copies of a tiered store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from semel.cli.measuring.samples import Sample
from semel.cli.sizing import Measured
from semel.core.policy import seconds
from semel.errors import SemelError, StoreUnavailable

__all__ = ["copies", "redis"]


def redis(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.redis import RedisStore

    prefix = f"semel-size-{secrets.token_hex(6)}:"
    with closing(RedisStore(url, prefix=prefix)) as store, _usage(url, prefix) as usage:
        taken = usage(sample.write(store))
    return [Measured("redis", "memory", sample.count, taken / sample.count, None, "MEMORY USAGE of each key")]


def copies(url: str, sample: Sample) -> list[Measured]:
    """What the cache of a tiered store takes."""
    from semel.stores.memory import MemoryStore
    from semel.stores.tiered import RedisCache, TieredStore
    from semel.stores.tiered.sync import KEEP

    prefix = f"semel-size-{secrets.token_hex(6)}:"
    cache = RedisCache(url, prefix=prefix, timeout="5s")
    with closing(TieredStore(MemoryStore(), cache)) as store, _usage(url, prefix) as usage:
        if not cache.connect(10.0):
            raise StoreUnavailable("Redis, the cache of the tiered store, cannot be reached")
        ids = sample.write(store)
        cache.settle(b"")
        taken = usage(ids)
    how = "MEMORY USAGE of each copy"
    return [Measured("cache in redis", "memory", sample.count, taken / sample.count, None, how, seconds(KEEP))]


@contextmanager
def _usage(url: str, prefix: str) -> Iterator[Callable[[list[bytes]], float]]:
    """What the keys of these ids take, asked of each server that has some; they are removed in the end."""
    from semel.stores.redis.link import Link
    from semel.stores.redis.scripts import Command
    from semel.stores.redis.servers import Servers
    from semel.stores.tiered.redis_commands import programs_of, settings_of

    settings = settings_of(url, prefix, "5s", "5s")
    servers = Servers(settings, programs_of(settings))
    links: dict[Any, Link] = {}
    keys: list[bytes] = []

    def ask(*words: bytes) -> list[Any]:
        groups: dict[Any, list[bytes]] = {}
        for key in keys:
            groups.setdefault(servers.address_of(key), []).append(key)
        answers: list[Any] = []
        for address, some in groups.items():
            link = links.get(address) or links.setdefault(address, Link(settings, address))
            answers += link.exchange([Command((*words, key)) for key in some])
        return answers

    def usage(ids: list[bytes]) -> float:
        keys.extend(servers.programs.key(id) for id in ids)
        taken = ask(b"MEMORY", b"USAGE")
        for answer in taken:
            if isinstance(answer, SemelError):
                raise answer
        if None in taken:
            raise StoreUnavailable("Redis has not kept all samples: it has no memory left, or forgets what is old")
        return float(sum(taken))

    try:
        yield usage
    finally:
        ask(b"UNLINK")
        for link in links.values():
            link.close()
