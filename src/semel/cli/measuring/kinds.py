"""How each kind of store is measured, by URL scheme. The user's own data is never touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from semel.cli.measuring.dynamodb import dynamodb
from semel.cli.measuring.local import memory, sqlite
from semel.cli.measuring.redis import copies, redis
from semel.cli.measuring.samples import Sample
from semel.cli.measuring.sizing import Measured
from semel.cli.measuring.sql import mysql, postgres
from semel.stores.bounds import plain_url
from semel.stores.urls import has_tables, tiers

__all__ = ["MEASURES", "measure"]


def measure(url: str, sample: Sample) -> list[Measured]:
    """Measure in the store of this URL. A tiered store is measured in both tiers."""
    url = plain_url(url)
    has_tables(url)  # raises if no store has such a URL
    return MEASURES[url.partition(":")[0]](url, sample)


def _tiered(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.tiered.copies import cache_settings

    primary, cache = tiers(url)
    cache_settings(cache, None, "5s", "5s")  # refused before anything is written
    measured, cached = measure(primary, sample), copies(cache, sample.again())
    if any(each.records for each in cached):
        seldom = "each retry that the cache has no copy of"
        measured = [replace(each, work=tuple(replace(work, which=seldom) for work in each.work)) for each in measured]
    return [*measured, *cached]


MEASURES: Final[dict[str, Callable[[str, Sample], list[Measured]]]] = {
    "memory": memory,
    "sqlite": sqlite,
    "postgresql": postgres,
    "postgres": postgres,
    "mysql": mysql,
    "mariadb": mysql,
    "redis": redis,
    "rediss": redis,
    "redis+sentinel": redis,
    "rediss+sentinel": redis,
    "redis+cluster": redis,
    "rediss+cluster": redis,
    "unix": redis,
    "dynamodb": dynamodb,
    "tiered": _tiered,
}
"""How each kind of store is measured."""
