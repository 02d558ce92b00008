"""The tiered store for one event loop."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, TypeVar

from semel.core.ops import Claim, Op
from semel.core.policy import Duration
from semel.engine.ports import AsyncStore
from semel.errors import SemelError
from semel.observe import events
from semel.stores.tiered.parts import check
from semel.stores.tiered.ports import AsyncCache, Tally
from semel.stores.tiered.rules import Rules
from semel.stores.tiered.sync import IN_PROGRESS_TTL, KEEP, MARK_AFTER, MAX_COPY_BYTES, limits, telling

__all__ = ["AsyncTieredStore"]

R = TypeVar("R")


class AsyncTieredStore:
    """A store that decides, behind a cache that answers replays; losing the cache costs time and nothing else."""

    def __init__(
        self,
        primary: AsyncStore,
        cache: AsyncCache,
        *,
        keep: Duration = KEEP,
        in_progress_ttl: Duration = IN_PROGRESS_TTL,
        mark_after: Duration = MARK_AFTER,
        max_copy_bytes: int = MAX_COPY_BYTES,
        on_event: events.EventHook | None = None,
    ) -> None:
        """As of ``TieredStore``, with an async store and ``AsyncRedisCache(url)``."""
        check(primary, cache, awaited=True)
        self.primary = primary
        self.cache = cache
        self.wakes = primary.wakes
        self.counts = primary.counts
        self.resumes = primary.resumes
        self.adopt = primary.adopt
        self.accept = primary.accept
        self._rules = Rules(cache.tally, **limits(keep, in_progress_ttl, mark_after, max_copy_bytes))
        cache.on_change = telling(on_event)

    @property
    def tally(self) -> Tally:
        """How often the cache has answered, and how often not."""
        return self.cache.tally

    async def execute(self, op: Op[R]) -> R:
        rules, cache = self._rules, self.cache
        if type(op) is Claim:
            answered = rules.answer(op, await cache.get(op.id))
            if answered is not None:
                return answered  # type: ignore[return-value]
        attempt = rules.ending(op)
        at = monotonic()
        try:
            answer = await self.primary.execute(op)
        except BaseException:
            for write in rules.failed(op, attempt, at):
                cache.write(write)
            raise
        writes, settles = rules.told(op, answer, at, monotonic(), attempt)
        for write in writes:
            cache.write(write)
        if settles:
            await cache.settle(op.id)
        return answer

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """All of them are asked of the primary, which shares its trips; the cache is told afterwards."""
        rules, cache = self._rules, self.cache
        at = monotonic()
        answers = await self.primary.execute_many(ops)
        now = monotonic()
        for op, answer in zip(ops, answers, strict=True):
            attempt = rules.ending(op)
            if isinstance(answer, SemelError):
                writes, settles = rules.failed(op, attempt, at), False
            else:
                writes, settles = rules.told(op, answer, at, now, attempt)
            for write in writes:
                cache.write(write)
            if settles:
                await cache.settle(op.id)
        return answers

    async def wait(self, id: bytes, seconds: float) -> None:
        await self.primary.wait(id, seconds)

    async def close(self) -> None:
        await self.cache.close()
        await self.primary.close()
