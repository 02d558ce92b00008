"""Records in Redis 7 or newer, or Valkey: a single server, behind Sentinel, or a Cluster."""

from semel.stores.redis.aio import AsyncRedisStore
from semel.stores.redis.sync import RedisStore, risks
from semel.stores.risks import Risk

__all__ = ["AsyncRedisStore", "RedisStore", "Risk", "risks"]
