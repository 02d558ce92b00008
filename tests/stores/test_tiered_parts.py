"""Tiered: the two parts it is made of, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncRedisCache,
    AsyncTieredStore,
    ConfigurationError,
    MemoryStore,
    RedisCache,
    TieredStore,
)
from semel.stores.redis import RedisStore

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
