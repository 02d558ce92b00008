"""Records in Redis 7 or newer, or Valkey: a single server, behind Sentinel, or a Cluster."""

from semel.core.risks import Risk
from semel.stores.redis.aio import AsyncRedisStore
from semel.stores.redis.sync import RedisStore, risks

__all__ = ["AsyncRedisStore", "RedisStore", "Risk", "risks"]
