"""Measure in Redis, under a prefix of its own: records, and the copies of a tiered store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

from semel.cli.measuring.samples import Measured, Sample, Work
from semel.core.policy import seconds
from semel.errors import SemelError, StoreUnavailable

BESIDE: Final = 72
"""Bytes of a key that MEMORY USAGE leaves out, in Redis 7: its entry among those that expire (32), what the allocator
adds to its other entry (8), and its share of the two hash tables, which are half empty at worst (16 each)."""
BATCH: Final = 1000
CONNECT_SECONDS: Final = 10.0


def redis(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.redis import RedisStore
    from semel.stores.redis.programs import RedisPrograms
    from semel.stores.redis.settings import PREFIX
    from semel.stores.tiered.copies import cache_settings

    prefix = _prefix(url, PREFIX)
    key_of = RedisPrograms(cache_settings(url, prefix, "5s", "5s")).key
    with _usage(url, prefix, sample, key_of) as usage:
        with closing(RedisStore(url, prefix=prefix)) as store:
            sample.write(store)
        taken = usage()
    how = f"MEMORY USAGE of each key, and {BESIDE} B that it leaves out"
    work = (Work("commands", first=2, again=1),)
    return [Measured("redis", "memory", sample.count, taken, None, how, work=work)]


def copies(url: str, sample: Sample) -> list[Measured]:
    """Measure the cache of a tiered store. It keeps no copies of large answers, so those take nothing."""
    from semel.stores.memory import MemoryStore
    from semel.stores.tiered import RedisCache, TieredStore
    from semel.stores.tiered.copies import PREFIX, copy_key
    from semel.stores.tiered.rules import KEEP, MAX_COPY_BYTES

    if sample.stored() > MAX_COPY_BYTES:
        how = f"no copies are made of answers above {MAX_COPY_BYTES // 1024} KiB (max_copy_bytes=)"
        return [Measured("cache in redis", "memory", 0, 0.0, None, how, 0.0, (Work("commands", first=1, again=1),))]
    prefix = _prefix(url, PREFIX)
    cache = RedisCache(url, prefix=prefix, timeout="5s")
    # The cache has the name of its primary from the first Op on.
    with _usage(url, prefix, sample, lambda id: copy_key(prefix.encode() + cache.name, id)) as usage:
        with closing(TieredStore(MemoryStore(), cache)) as store:  # closed before measuring: its thread writes
            ends = time.monotonic() + CONNECT_SECONDS
            while not cache.connect(0.1):
                sample.interrupts.check()
                if time.monotonic() > ends:
                    raise StoreUnavailable("Redis, the cache of the tiered store, cannot be reached")
            try:
                sample.write(store, after=lambda: cache.settle(b""))
            finally:
                cache.settle(b"")
        taken = usage()
    how = f"MEMORY USAGE of each copy, and {BESIDE} B that it leaves out"
    work = (Work("commands", first=2, again=1),)
    return [Measured("cache in redis", "memory", sample.count, taken, None, how, seconds(KEEP), work)]


def _prefix(url: str, usual: str) -> str:
    """A prefix other than the user's, of the same length (it is measured too), but at least ``size-:``."""
    from semel.stores.tiered.copies import cache_settings

    asked = "prefix=" in url.partition("?")[2]
    users = cache_settings(url, None if asked else usual, "5s", "5s").prefix
    length = max(len("size-:"), len(users.encode()))
    beginning = f"size-{secrets.token_hex(length)}"[: length - 1]
    return f"{beginning}." if users == f"{beginning}:" else f"{beginning}:"


@contextmanager
def _usage(url: str, prefix: str, sample: Sample, key_of: Callable[[bytes], bytes]) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the bytes of one key, asked from each server. The keys are removed at the end."""
    from semel.stores.redis.commands import RedisCommand
    from semel.stores.redis.connection import RedisConnection, Servers
    from semel.stores.tiered.copies import cache_settings

    settings = cache_settings(url, prefix, "5s", "5s")
    servers = Servers(settings)
    links: dict[Any, RedisConnection] = {}

    def ask(*words: bytes) -> Iterator[list[Any]]:
        """Send the command for each key, a batch at a time."""
        groups: dict[Any, list[bytes]] = {}
        for id in sample.ids:
            key = key_of(id)
            groups.setdefault(servers.address_of(key), []).append(key)
        for address, keys in groups.items():
            for first in range(0, len(keys), BATCH):
                if address not in links or links[address].closed:
                    links[address] = RedisConnection(settings, address)
                answers = links[address].exchange([RedisCommand((*words, key)) for key in keys[first : first + BATCH]])
                for answer in answers:
                    if isinstance(answer, SemelError):
                        raise answer
                yield answers

    def usage() -> float:
        taken: list[int] = []
        for answers in ask(b"MEMORY", b"USAGE"):
            if None in answers:
                raise StoreUnavailable("Redis has not kept all samples: it has no memory left, or forgets what is old")
            taken += answers
            sample.interrupts.check()
        return sum(taken) / len(taken) + BESIDE

    def remove() -> None:
        for _ in ask(b"UNLINK"):
            pass

    try:
        for address in servers.masters():  # connect first: if a server is down, nothing is written
            links[address] = RedisConnection(settings, address)
        with sample.interrupts.place(remove, f"the keys {prefix}* (they expire within an hour)"):
            yield usage
    finally:
        for link in links.values():
            link.close()
