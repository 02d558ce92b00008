"""That the two parts of a tiered store are what they must be: said when it is made, in words that name the remedy.

Otherwise it would be an attribute that is missing, or a coroutine that nobody awaits, at the first call.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from semel.errors import ConfigurationError

__all__ = ["check"]

_MADE: Final = {
    False: "TieredStore(PostgresStore(url), RedisCache(redis_url))",
    True: "AsyncTieredStore(AsyncPostgresStore(url), AsyncRedisCache(redis_url))",
}
_OPENED: Final = {
    False: "open_store('tiered:postgresql://…,redis://…')",
    True: "open_async_store('tiered:postgresql://…,redis://…')",
}


def check(primary: Any, cache: Any, *, awaited: bool) -> None:
    """Raise ConfigurationError unless these are a store and a cache of this kind."""
    remedy = f"write {_MADE[awaited]}, or {_OPENED[awaited]}"
    if _is_cache(primary) and _is_store(cache):
        raise ConfigurationError(f"a tiered store takes the store first, and then the cache: {remedy}")
    if not _is_store(primary):
        raise ConfigurationError(f"the primary of a tiered store is a store, not {_shown(primary)}: {remedy}")
    if not _is_cache(cache):
        raise ConfigurationError(f"the cache of a tiered store is a cache, not {_shown(cache)}: {remedy}")
    for part, method in ((primary, primary.execute), (cache, cache.get)):
        if inspect.iscoroutinefunction(method) is not awaited:
            raise ConfigurationError(
                f"{type(part).__name__} is {'sync' if awaited else 'async'}, and the parts of a tiered store are of "
                f"its own kind: write {_MADE[False]}, or in an async program {_MADE[True]}"
            )


def _is_store(part: Any) -> bool:
    return _has(part, "execute", "execute_many", "wait")


def _is_cache(part: Any) -> bool:
    return _has(part, "get", "write", "settle")


def _has(part: Any, *methods: str) -> bool:
    return not inspect.isclass(part) and all(callable(getattr(part, name, None)) for name in methods)


def _shown(part: Any) -> str:
    """Its kind alone: a text may be a URL, with a password in it."""
    if isinstance(part, str):
        return "a text"
    return f"the class {part.__name__}" if inspect.isclass(part) else type(part).__name__
