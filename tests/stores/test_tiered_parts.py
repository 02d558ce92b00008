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
        (lambda truth, cache: (cache, truth), "takes the store first, and then the cache"),
        (lambda truth, cache: ("sqlite:///secret.db", cache), "the truth of a tiered store is a store, not a text"),
        (lambda truth, cache: (truth, NOBODY), "the cache of a tiered store is a cache, not a text"),
        (lambda truth, cache: (NOBODY, NOBODY), "the truth of a tiered store is a store, not a text"),
        (lambda truth, cache: (None, cache), "is a store, not NoneType"),
        (lambda truth, cache: (truth, None), "is a cache, not NoneType"),
        (lambda truth, cache: (type(truth), cache), "is a store, not the class"),
        (lambda truth, cache: (truth, RedisStore(NOBODY)), "is a cache, not RedisStore"),
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
    ("kind", "truth", "cache", "named"),
    [
        (TieredStore, AsyncMemoryStore, RedisCache, "AsyncMemoryStore is async"),
        (TieredStore, MemoryStore, AsyncRedisCache, "AsyncRedisCache is async"),
        (TieredStore, AsyncMemoryStore, AsyncRedisCache, "AsyncMemoryStore is async"),
        (AsyncTieredStore, MemoryStore, AsyncRedisCache, "MemoryStore is sync"),
        (AsyncTieredStore, AsyncMemoryStore, RedisCache, "RedisCache is sync"),
        (AsyncTieredStore, MemoryStore, RedisCache, "MemoryStore is sync"),
    ],
)
def test_a_part_of_the_other_kind_is_named_with_what_to_write(kind: Any, truth: Any, cache: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        kind(truth(), cache(NOBODY))
    assert str(refused.value).startswith(named)
    assert all(words in str(refused.value) for words in MADE.values())
