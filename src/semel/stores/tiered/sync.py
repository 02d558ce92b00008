"""The tiered store for threads."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final, TypeVar

from semel.core.ops import Claim, Op
from semel.core.policy import Duration, seconds
from semel.engine.forking import survive_forks
from semel.engine.ports import Store
from semel.errors import ConfigurationError, SemelError
from semel.observe import events
from semel.stores.tiered.parts import check
from semel.stores.tiered.ports import Cache, Tally
from semel.stores.tiered.rules import Rules

__all__ = ["IN_PROGRESS_TTL", "KEEP", "MARK_AFTER", "MAX_COPY_BYTES", "TieredStore", "limits", "telling"]

R = TypeVar("R")
KEEP: Final = "1h"
IN_PROGRESS_TTL: Final = "5s"
MARK_AFTER: Final = "50ms"
MAX_COPY_BYTES: Final = 256 * 1024


class TieredStore:
    """A store that decides, behind a cache that answers replays; losing the cache costs time and nothing else."""

    def __init__(
        self,
        primary: Store,
        cache: Cache,
        *,
        keep: Duration = KEEP,
        in_progress_ttl: Duration = IN_PROGRESS_TTL,
        mark_after: Duration = MARK_AFTER,
        max_copy_bytes: int = MAX_COPY_BYTES,
        on_event: events.EventHook | None = None,
    ) -> None:
        """
        :param primary: the store that decides: PostgreSQL, MySQL, SQLite or any other.
        :param cache: ``RedisCache(url)``.
        :param keep: how long a finished record stays in the cache, if it is not over before.
        :param in_progress_ttl: how long a mark turns duplicates away without asking the primary, at most.
        :param mark_after: how long a handler must run before a mark is made.
        :param max_copy_bytes: bytes of a snapshot beyond which no copy is made.
        :param on_event: called with ``CacheLost`` and ``CacheBack``.
        """
        check(primary, cache, awaited=False)
        self.primary = primary
        self.cache = cache
        self.wakes = primary.wakes
        self.counts = primary.counts
        self.resumes = primary.resumes
        self.adopt = primary.adopt
        self.accept = primary.accept
        self._rules = Rules(cache.tally, **limits(keep, in_progress_ttl, mark_after, max_copy_bytes))
        cache.on_change = telling(on_event)
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._rules.renew()

    @property
    def tally(self) -> Tally:
        """How often the cache has answered, and how often not."""
        return self.cache.tally

    def execute(self, op: Op[R]) -> R:
        rules, cache = self._rules, self.cache
        if type(op) is Claim:
            answered = rules.answer(op, cache.get(op.id))
            if answered is not None:
                return answered  # type: ignore[return-value]
        attempt = rules.ending(op)
        at = monotonic()
        try:
            answer = self.primary.execute(op)
        except BaseException:
            for write in rules.failed(op, attempt, at):
                cache.write(write)
            raise
        writes, settles = rules.told(op, answer, at, monotonic(), attempt)
        for write in writes:
            cache.write(write)
        if settles:
            cache.settle(op.id)
        return answer

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """All of them are asked of the primary, which shares its trips; the cache is told afterwards."""
        rules, cache = self._rules, self.cache
        at = monotonic()
        answers = self.primary.execute_many(ops)
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
                cache.settle(op.id)
        return answers

    def wait(self, id: bytes, seconds: float) -> None:
        self.primary.wait(id, seconds)

    def close(self) -> None:
        self.cache.close()
        self.primary.close()


def limits(keep: Duration, in_progress_ttl: Duration, mark_after: Duration, max_copy_bytes: int) -> dict[str, Any]:
    """The settings in numbers, checked."""
    if type(max_copy_bytes) is not int or max_copy_bytes < 0:
        raise ConfigurationError(f"max_copy_bytes is a number of bytes, not {max_copy_bytes!r}")
    return {
        "keep": seconds(keep, "keep"),
        "in_progress_ttl": seconds(in_progress_ttl, "in_progress_ttl"),
        "mark_after": seconds(mark_after, "mark_after"),
        "max_copy_bytes": max_copy_bytes,
    }


def telling(hook: events.EventHook | None) -> Any:
    """What a cache calls when it is lost, or back: the events go to the hook; one that fails harms nobody."""
    if hook is None:
        return None

    def change(error: str | None) -> None:
        hook(events.CacheBack("", "", "") if error is None else events.CacheLost("", "", "", error))

    return change
