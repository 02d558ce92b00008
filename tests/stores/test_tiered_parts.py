"""Tiered: the two parts it is made of, checked when it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncRedisCache,
    AsyncSemel,
    AsyncSQLiteStore,
    AsyncTieredStore,
    ConfigurationError,
    MemoryStore,
    RedisCache,
    Semel,
    SQLiteStore,
    StoreUncertain,
    TieredStore,
)
from semel.core.ops import Lookup
from semel.engine.ports import STORE_MEMBERS, AsyncStore, Store
from semel.stores.redis import RedisStore
from semel.stores.tiered.cache import CACHE_MEMBERS, AsyncCache, Cache

NOBODY = "redis://:secret@127.0.0.1:1"
"""Nothing is opened before a first call."""
MADE = {
    TieredStore: "TieredStore(PostgresStore(url), RedisCache(redis_url))",
    AsyncTieredStore: "AsyncTieredStore(AsyncPostgresStore(url), AsyncRedisCache(redis_url))",
}


def sync_parts() -> tuple[Any, Any]:
    return MemoryStore(), RedisCache(NOBODY)


def async_parts() -> tuple[Any, Any]:
    return AsyncMemoryStore(), AsyncRedisCache(NOBODY)


@pytest.mark.parametrize(("kind", "parts"), [(TieredStore, sync_parts), (AsyncTieredStore, async_parts)])
@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (lambda primary, cache: (cache, primary), "takes the store first, and then the cache"),
        (lambda primary, cache: ("sqlite:///secret.db", cache), "the primary of a tiered store is a store, not a text"),
        (lambda primary, cache: (primary, NOBODY), "the cache of a tiered store is a cache, not a text"),
        (lambda primary, cache: (NOBODY, NOBODY), "the primary of a tiered store is a store, not a text"),
        (lambda primary, cache: (None, cache), "is a store, not NoneType"),
        (lambda primary, cache: (primary, None), "is a cache, not NoneType"),
        (lambda primary, cache: (type(primary), cache), "is a store, not the class"),
        (lambda primary, cache: (primary, RedisStore(NOBODY)), "is a cache, not RedisStore"),
    ],
)
def test_what_is_no_store_or_no_cache_is_refused_and_not_quoted(
    kind: Any, parts: Callable[[], Any], spoiled: Callable[[Any, Any], tuple[Any, Any]], words: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        kind(*spoiled(*parts()))
    assert words in str(refused.value)
    assert f"write {MADE[kind]}" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "primary", "cache", "named"),
    [
        (TieredStore, AsyncMemoryStore, RedisCache, "AsyncMemoryStore is async"),
        (TieredStore, MemoryStore, AsyncRedisCache, "AsyncRedisCache is async"),
        (TieredStore, AsyncMemoryStore, AsyncRedisCache, "AsyncMemoryStore is async"),
        (AsyncTieredStore, MemoryStore, AsyncRedisCache, "MemoryStore is sync"),
        (AsyncTieredStore, AsyncMemoryStore, RedisCache, "RedisCache is sync"),
        (AsyncTieredStore, MemoryStore, RedisCache, "MemoryStore is sync"),
    ],
)
def test_a_part_of_the_other_kind_is_named_with_what_to_write(kind: Any, primary: Any, cache: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        kind(primary(), cache(NOBODY))
    assert str(refused.value).startswith(named)
    assert all(words in str(refused.value) for words in MADE.values())


class PassedOn:
    """A part of the caller's own, such as one that measures. It passes on what it does not have itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(("kind", "parts"), [(TieredStore, sync_parts), (AsyncTieredStore, async_parts)])
def test_parts_may_pass_on_what_they_do_not_have_themselves(kind: Any, parts: Callable[[], Any]) -> None:
    primary, cache = parts()
    store = kind(PassedOn(primary), PassedOn(cache))
    assert (store.wakes, store.counts, store.resumes, store.lists, store.adopt) == (True, True, True, True, None)


@pytest.mark.parametrize(("guard", "store"), [(Semel, MemoryStore), (AsyncSemel, AsyncMemoryStore)])
def test_so_may_the_store_of_a_guard(guard: Any, store: Any) -> None:
    passed_on = PassedOn(store())
    assert guard(passed_on).store is passed_on


def test_what_a_store_and_a_cache_declare_is_what_their_protocols_have() -> None:
    def members(protocol: type) -> set[str]:
        return {name for name in {*protocol.__annotations__, *vars(protocol)} if not name.startswith("_")}

    assert members(Store) == members(AsyncStore) == set(STORE_MEMBERS)
    assert members(Cache) == members(AsyncCache) == set(CACHE_MEMBERS)


# -- two databases, one Redis


@pytest.mark.redis
@pytest.mark.server
def test_two_databases_on_one_redis_share_no_answers(tmp_path: Path, redis_url: str) -> None:
    def open_tiered(file: str) -> TieredStore:
        cache = RedisCache(redis_url, timeout=5.0)
        assert cache.connect(10)
        return TieredStore(SQLiteStore(tmp_path / file), cache)

    for file in ("one.db", "two.db"):
        with Semel(open_tiered(file), sweep_every=None) as guard:
            assert guard.run("pay", key=1, call=lambda file=file: file) == file  # type: ignore[misc]
    for file in ("one.db", "two.db"):
        store = open_tiered(file)  # as another process would
        with Semel(store, sweep_every=None) as guard:
            assert guard.run("pay", key=1, call=lambda: "again") == file
            assert store.tally.replayed == 1


@pytest.mark.redis
@pytest.mark.server
def test_two_databases_on_one_redis_share_no_answers_in_event_loops(tmp_path: Path, redis_url: str) -> None:
    async def pay(file: str, result: str) -> tuple[str, int]:
        cache = AsyncRedisCache(redis_url, timeout=5.0)
        assert await cache.connect(10)
        store = AsyncTieredStore(AsyncSQLiteStore(tmp_path / file), cache)

        async def call() -> str:
            return result

        async with AsyncSemel(store, sweep_every=None) as guard:
            return await guard.run("pay", key=1, call=call), store.tally.replayed

    for file in ("one.db", "two.db"):
        assert asyncio.run(pay(file, file)) == (file, 0)
    for file in ("one.db", "two.db"):
        assert asyncio.run(pay(file, "again")) == (file, 1)


@pytest.mark.redis
@pytest.mark.server
def test_a_cache_serves_one_primary(tmp_path: Path, redis_url: str) -> None:
    cache = RedisCache(redis_url)
    one, two = (TieredStore(SQLiteStore(tmp_path / file), cache) for file in ("one.db", "two.db"))
    one.execute(Lookup(bytes(16)))
    with pytest.raises(ConfigurationError, match="another primary"):
        two.execute(Lookup(bytes(16)))
    one.close()
    two.close()


def test_a_primary_that_is_away_is_named_later() -> None:
    """Until then the cache is not used, and the error is that of the Op itself."""
    primary = MemoryStore()
    store = TieredStore(primary, RedisCache(NOBODY))
    works, lost = primary.execute, iter([True, True])

    def execute(op: Any) -> Any:
        answer = works(op)
        if next(lost, False):
            raise StoreUncertain("the answer was lost")
        return answer

    primary.execute = execute  # type: ignore[method-assign]
    with pytest.raises(StoreUncertain):
        store.execute(Lookup(bytes(16)))  # neither the claim of the name is answered, nor the Op
    assert store.cache.name == b""
    assert store.execute(Lookup(bytes(16))) is None
    assert store.cache.name
    store.close()


@pytest.mark.redis
@pytest.mark.server
@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_cache_that_was_closed_answers_again(tmp_path: Path, redis_url: str, twin: str) -> None:
    if twin == "sync":
        store = TieredStore(SQLiteStore(tmp_path / "one.db"), RedisCache(redis_url, timeout=5.0))
        guard = Semel(store, sweep_every=None)
        for replays in range(3):
            with guard:
                assert store.cache.connect(10)
                assert guard.run("pay", key=1, call=lambda: "paid") == "paid"
                assert store.tally.replayed == replays
        return
    awaited = AsyncTieredStore(AsyncSQLiteStore(tmp_path / "one.db"), AsyncRedisCache(redis_url, timeout=5.0))
    async_guard = AsyncSemel(awaited, sweep_every=None)

    async def main() -> None:
        async def call() -> str:
            return "paid"

        for replays in range(3):
            async with async_guard:
                assert await awaited.cache.connect(10)
                assert await async_guard.run("pay", key=1, call=call) == "paid"
                assert awaited.tally.replayed == replays

    asyncio.run(main())
