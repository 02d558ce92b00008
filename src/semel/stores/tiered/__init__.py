"""Two stores as one: a database that decides, and Redis in front of it that answers replays."""

from semel.stores.tiered.aio import AsyncTieredStore
from semel.stores.tiered.aio_redis_cache import AsyncRedisCache
from semel.stores.tiered.cache import AsyncCache, Cache, CachedRecord, Tally, Write
from semel.stores.tiered.redis_cache import RedisCache
from semel.stores.tiered.sync import TieredStore

__all__ = [
    "AsyncCache",
    "AsyncRedisCache",
    "AsyncTieredStore",
    "Cache",
    "CachedRecord",
    "RedisCache",
    "Tally",
    "TieredStore",
    "Write",
]
