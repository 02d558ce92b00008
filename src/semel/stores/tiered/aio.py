# Twin: sync.py is generated from this file by make twins.
# Twin: for one event loop -> for threads
# Twin: awaited=True -> awaited=False
"""The tiered store for one event loop: a primary store that decides, behind a cache that answers replays.

::

    Claim ──▶ cache ── a copy of the finished record? ──▶ replay
                │ no
                ▼
             primary ── answers ──▶ what the rules say is written to the cache

``rules.py`` decides what the cache may answer and what is written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

from semel.core.ops import Claim, Claimed, Complete, Lookup, Op, Resolve
from semel.core.policy import Duration
from semel.core.semantics import resolves
from semel.core.states import ABSENT, DONE, State

# sync only: from semel.engine.forking import survive_forks
from semel.engine.ports import AsyncStore, execute_each_async
from semel.errors import ConfigurationError, SemelError, StoreError, StoreUnavailable
from semel.observe import events
from semel.stores.tiered.cache import AsyncCache, Tally
from semel.stores.tiered.rules import (
    IN_PROGRESS_TTL,
    KEEP,
    MARK_AFTER,
    MAX_COPY_BYTES,
    TierRules,
    check_parts,
    naming_claim,
)

R = TypeVar("R")


class AsyncTieredStore:
    """A primary store that decides, behind a cache that answers replays. Losing the cache only costs time."""

    def __init__(
        self,
        primary: AsyncStore,
        cache: AsyncCache,
        *,
        keep: Duration = KEEP,
        in_progress_ttl: Duration = IN_PROGRESS_TTL,
        mark_after: Duration = MARK_AFTER,
        max_copy_bytes: int = MAX_COPY_BYTES,
        on_event: events.EventHooks | None = None,
    ) -> None:
        """
        :param primary: the store that decides: PostgreSQL, MySQL, SQLite or any other.
        :param cache: ``AsyncRedisCache(url)``.
        :param keep: how long a finished record stays in the cache, if it does not expire earlier.
        :param in_progress_ttl: how long, at most, the cache turns duplicates of a running call away.
        :param mark_after: how long a call must run before the cache does so.
        :param max_copy_bytes: size of a snapshot, in bytes, above which no copy is made.
        :param on_event: called with ``CacheLost`` and ``CacheBack``.
        """
        check_parts(primary, cache, awaited=True)
        self.primary = primary
        self.cache = cache
        self.wakes = primary.wakes
        self.counts = primary.counts
        self.resumes = primary.resumes
        self.lists = primary.lists
        self.trails = primary.trails
        self.adopt = primary.adopt
        self.accept = primary.accept
        self._rules = TierRules(
            cache.tally,
            keep=keep,
            in_progress_ttl=in_progress_ttl,
            mark_after=mark_after,
            max_copy_bytes=max_copy_bytes,
        )
        # sync only: survive_forks(self._rules.reset)
        cache.on_change = _report_to(on_event)
        self._named = False
        """Whether the cache has the name of our primary."""

    @property
    def tally(self) -> Tally:
        """How often the cache has answered, and how often not."""
        return self.cache.tally

    async def execute(self, op: Op[R]) -> R:
        rules, cache = self._rules, self.cache
        if type(op) is Resolve and resolves(op, DONE):
            found = await self._prepare_to_free(op)
            if found is not DONE:
                return found  # type: ignore[return-value]
        if not self._named and not await self._name_cache():
            return await self.primary.execute(op)
        if type(op) is Claim:
            existing = rules.answer(op, await cache.get(op.id))
            if existing is not None:
                return existing  # type: ignore[return-value]
        attempt = rules.before(op)
        at = monotonic()
        try:
            answer = await self.primary.execute(op)
        except BaseException:
            for write in rules.after_error(op, attempt, at):
                cache.write(write)
            raise
        writes, settles = rules.after(op, answer, at, monotonic(), attempt)
        for write in writes:
            cache.write(write)
        if settles:
            await cache.settle(op.id)
        return answer

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run several Ops on the primary, which shares its round trips; then write to the cache."""
        rules, cache = self._rules, self.cache
        if any(type(op) is Resolve and resolves(op, DONE) for op in ops):
            # The Ops before it may finish the record that it frees.
            return await execute_each_async(self.execute, ops)
        try:
            named = self._named or await self._name_cache()
        except SemelError as error:  # none was sent
            return [error] * len(ops)
        if not named:
            return await self.primary.execute_many(ops)
        at = monotonic()
        answers = await self.primary.execute_many(ops)
        now = monotonic()
        for op, answer in zip(ops, answers, strict=True):
            attempt = rules.before(op)
            if isinstance(answer, SemelError):
                writes, settles = rules.after_error(op, attempt, at), False
            else:
                writes, settles = rules.after(op, answer, at, now, attempt)
            for write in writes:
                cache.write(write)
            if settles:
                await cache.settle(op.id)
        return answers

    async def _prepare_to_free(self, op: Resolve) -> State:
        """Make the copies invalid if the record is finished: then the answer is DONE, and the Op is still to be sent.

        Otherwise send the Op in a way that leaves the record alone if it finishes now, because copies of the outcome
        would stay valid. Returns the answer.
        """
        if not await self._invalidate(op):
            unfinished = tuple(state for state in op.states or State if state is not DONE) or (ABSENT,)
            found = await self.execute(replace(op, states=unfinished))
            if found is not DONE:
                return found
            await self._invalidate(op)
        return DONE

    async def _invalidate(self, op: Resolve) -> bool:
        """Make the copies of a finished record invalid before the primary frees it. Raises if that is not certain.

        Otherwise the cache could go on replaying an outcome that somebody has dropped. Returns False if the record is
        not finished, or not the one that the Op names: then there is nothing to do.
        """
        record = await self.primary.execute(Lookup(op.id))
        if record is None or record.token != op.token or record.state is not DONE:
            return False
        try:
            if not self._named and not await self._name_cache():
                raise StoreUnavailable("the primary did not answer")
            await self.cache.invalidate(op.id, record.token, record.expires_in)
        except SemelError as error:
            raise StoreUnavailable(
                "the cache may hold a copy of the outcome, and cannot be told to drop it, so the key is not released. "
                f"Try again when the cache is back: {error}"
            ) from error
        return True

    async def _name_cache(self) -> bool:
        """Ask the primary for its name, or give it one. Returns False if that fails: without it the cache is not used.

        The name is a record of the primary, so all processes that use this database find the same one, and those that
        use another database find another. It is the fingerprint, which a record has from its first moment.
        """
        claim = naming_claim()
        try:
            answer = await self.primary.execute(claim)
            if isinstance(answer, Claimed):
                await self.primary.execute(Complete(claim.id, answer.token, b"", claim.ttl))
        except StoreError:
            return False
        found = claim.fingerprint if isinstance(answer, Claimed) else answer.record.fingerprint
        name = found.hex().encode() + b":"
        if self.cache.name not in (b"", name):
            raise ConfigurationError("this cache belongs to a tiered store with another primary: make one for each")
        self.cache.name, self._named = name, True
        return True

    async def wait(self, id: bytes, seconds: float) -> None:
        await self.primary.wait(id, seconds)

    def open(self) -> None:
        self.primary.open()
        self.cache.open()

    async def close(self) -> None:
        await self.cache.close()
        await self.primary.close()


def _report_to(on_event: events.EventHooks | None) -> Callable[[str | None], None] | None:
    """Return what the cache calls when it is lost or back: it sends the events to the hooks."""
    hook = events.call_hooks(events.hooks_of(on_event), "semel")
    if hook is None:
        return None

    def report(error: str | None) -> None:
        hook(events.CacheBack("", "", "") if error is None else events.CacheLost("", "", "", error))

    return report
