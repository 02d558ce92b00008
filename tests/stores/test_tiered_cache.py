"""Tiered: what the cache may say, what it costs, and what becomes of a call when the cache is wrong, slow or gone.

Every test runs on both twins. Whether the cache has answered is counted, at the truth and at Redis, never timed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncRedisCache,
    AsyncSemel,
    AsyncTieredStore,
    ConfigurationError,
    InProgress,
    KeyExpired,
    KeyReused,
    MemoryStore,
    RedisCache,
    Semel,
    StoreUnavailable,
    TieredStore,
    Wait,
)
from semel.core.ops import Claim, Claimed, Complete, Lookup, Op, Record, Release, Renew, Resolve
from semel.core.states import TRANSITIONS, Move, State, Takeover
from semel.observe import events
from semel.stores.tiered.cache import MAX_REFUSALS, Tally, Write
from semel.stores.tiered.copies import MARGIN, ServerTime, entry_keys, pack, unpack
from semel.stores.tiered.rules import naming_claim
from tests.servers import RedisClusterServers, RedisServer
from tests.servers.freezing import freeze

PATIENT = 5.0
"""The time-out of the cache where it must answer: this machine may be slow."""
BOUND = 20.0
NAMING = naming_claim()


class Truth(MemoryStore):
    """A memory store that remembers what it was asked, and can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Op[Any]] = []
        self.named: list[Op[Any]] = []
        """The Ops of the record that has the primary's name."""
        self.fails: type[Op[Any]] | None = None
        self.after_lookup: Callable[[], None] | None = None
        """Called once, before a look-up returns."""

    def execute(self, op: Op[Any]) -> Any:
        if op.id == NAMING.id:
            self.named.append(op)
        else:
            self.asked.append(op)
        if self.fails is not None and isinstance(op, self.fails):
            raise StoreUnavailable("broken on purpose")
        answer = super().execute(op)
        if type(op) is Lookup and self.after_lookup is not None:
            other, self.after_lookup = self.after_lookup, None
            other()
        return answer

    @property
    def kinds(self) -> list[str]:
        return [type(op).__name__ for op in self.asked]


class AwaitedTruth(AsyncMemoryStore):
    """The same records, for the async twin."""

    def __init__(self, primary: Truth) -> None:
        super().__init__()
        self._primary = primary

    async def execute(self, op: Op[Any]) -> Any:
        return self._primary.execute(op)

    async def execute_many(self, ops: Any) -> list[Any]:
        return self._primary.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await asyncio.to_thread(self._primary.wait, id, seconds)


class Tiers:
    """A tiered store of either kind, in front of a truth that several may share. Driven from here, step by step."""

    def __init__(self, twin: str, primary: Truth, url: str, cache: dict[str, Any], settings: dict[str, Any]) -> None:
        self.primary = primary
        self._runner = asyncio.Runner() if twin == "async" else None
        cache = {"timeout": PATIENT, **cache}
        self.store: Any
        if self._runner is None:
            self.store = TieredStore(primary, RedisCache(url, **cache), **settings)
            self.guard: Any = Semel(self.store, sweep_every=None)
        else:
            self.store = AsyncTieredStore(AwaitedTruth(primary), AsyncRedisCache(url, **cache), **settings)
            self.guard = AsyncSemel(self.store, sweep_every=None)

    @property
    def tally(self) -> Tally:
        tally: Tally = self.store.tally
        return tally

    def do(self, answer: Any) -> Any:
        """The answer; of the async twin it is awaited."""
        return answer if self._runner is None else self._runner.run(answer)

    def execute(self, op: Op[Any]) -> Any:
        return self.do(self.store.execute(op))

    def connect(self) -> Tiers:
        assert self.do(self.store.cache.connect(BOUND))
        return self

    def run(self, key: str, call: Callable[[], Any], **settings: Any) -> Any:
        if self._runner is None:
            return self.guard.run("pay", key=key, call=call, **settings)

        async def awaited() -> Any:
            return call()

        return self._runner.run(self.guard.run("pay", key=key, call=awaited, **settings))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; the loop of the async twin runs meanwhile."""
        end = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < end, f"it does not come: {self.tally}"
            self.do(time.sleep(0.005) if self._runner is None else asyncio.sleep(0.005))

    def written(self, count: int) -> None:
        self.until(lambda: self.tally.written >= count)

    def close(self) -> None:
        self.do(self.guard.close())
        if self._runner is not None:
            self._runner.close()


Open = Callable[..., Tiers]


@pytest.fixture(params=["sync", "async"])
def twin(request: pytest.FixtureRequest) -> str:
    made: str = request.param
    return made


@pytest.fixture
def primary() -> Truth:
    return Truth()


@pytest.fixture
def open_tiers(twin: str, primary: Truth) -> Iterator[Open]:
    opened: list[Tiers] = []

    def make(url: str, *, connected: bool = True, cache: dict[str, Any] | None = None, **settings: Any) -> Tiers:
        opened.append(Tiers(twin, primary, url, cache or {}, settings))
        return opened[-1].connect() if connected else opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def tiers(open_tiers: Open, redis_url: str) -> Tiers:
    return open_tiers(redis_url)


def claim(number: int = 1, nonce: int = 1, **changes: Any) -> Claim:
    given = {"fingerprint": b"f" * 16, "lease": 30.0, "ttl": 3600.0, "takeover": Takeover.RETRY, **changes}
    return Claim(b"%016d" % number, nonce, tenant="acme", operation="pay", key=str(number), **given)


class Redis:
    """The server, asked directly: what stands in a key, and which commands were sent by others."""

    def __init__(self, server: RedisServer, url: str) -> None:
        import redis as redis_py

        self.server = server
        self.client = redis_py.Redis.from_url(url)

    def found(self) -> list[bytes]:
        return sorted(self.client.keys("semel-tier:*"))

    def only(self) -> bytes:
        (key,) = self.found()
        return key

    def forget_commands(self) -> None:
        self.client.config_resetstat()

    def commands(self) -> dict[str, int]:
        found = {
            name.removeprefix("cmdstat_"): each["calls"] for name, each in self.client.info("commandstats").items()
        }
        for own in ("info", "config|resetstat", "keys", "select", "client|setinfo", "hello"):
            found.pop(own, None)
        return found


@pytest.fixture
def raw(redis: RedisServer, redis_url: str) -> Iterator[Redis]:
    found = Redis(redis, redis_url)
    yield found
    found.client.close()


# What it may say, by the table


def test_a_finished_record_expires_or_is_freed_and_nothing_else() -> None:
    """Why copies need not follow their record, but for these two: see ``stores/tiered/rules.py``."""
    moves = {move: to for (state, move), to in TRANSITIONS.items() if state is State.DONE}
    assert moves == {Move.EXPIRE: State.ABSENT, Move.FREE: State.ABSENT}


# What it costs


def test_the_name_of_the_primary_is_asked_for_once(tiers: Tiers, open_tiers: Open, redis_url: str) -> None:
    for key in "abc":
        tiers.run(key, lambda: 1)
    assert [type(op) for op in tiers.primary.named] == [Claim, Complete]
    other = open_tiers(redis_url)  # another process
    for key in "abc":
        other.run(key, lambda: 1)
    assert [type(op) for op in tiers.primary.named] == [Claim, Complete, Claim]


def test_a_replay_is_one_redis_command_and_asks_the_truth_nothing(tiers: Tiers, raw: Redis) -> None:
    assert tiers.run("k", lambda: {"paid": 12}) == {"paid": 12}
    tiers.written(1)
    tiers.primary.asked.clear()
    raw.forget_commands()
    for _ in range(10):
        assert tiers.run("k", lambda: "never") == {"paid": 12}
    assert tiers.primary.asked == []
    assert raw.commands() == {"mget": 10}
    assert tiers.tally.replayed == 10


def test_a_first_execution_is_two_ops_of_the_truth_and_one_write(tiers: Tiers, raw: Redis) -> None:
    raw.forget_commands()
    tiers.run("k", lambda: 1)
    tiers.written(1)
    assert tiers.primary.kinds == ["Claim", "Complete"]
    assert {name: n for name, n in raw.commands().items() if name != "time"} == {"mget": 1, "set": 1}


def test_what_the_truth_has_shown_is_answered_by_the_cache_from_then_on(
    tiers: Tiers, open_tiers: Open, redis_url: str
) -> None:
    """Finished while the cache was away, or before there was one."""
    tiers.primary.execute(claim())
    tiers.primary.execute(Complete(claim().id, tiers.primary.execute(Lookup(claim().id)).token, b"answer", 3600.0))
    before = tiers.execute(claim(nonce=2)).record
    tiers.written(1)
    tiers.primary.asked.clear()
    after = open_tiers(redis_url).execute(claim(nonce=3)).record
    assert tiers.primary.asked == []
    for name in ("id", "state", "token", "attempt", "fingerprint", "snapshot", "tenant", "operation", "key"):
        assert getattr(after, name) == getattr(before, name), name
    assert before.expires_in - 60 < after.expires_in <= before.expires_in
    assert before.age <= after.age


def test_a_quick_attempt_is_not_marked(tiers: Tiers, raw: Redis) -> None:
    raw.forget_commands()
    for i in range(5):
        claimed = tiers.execute(claim(i, nonce=i))
        tiers.execute(Release(claim(i).id, claimed.token))
    time.sleep(0.1)  # past mark_after: nothing is to come, so there is nothing to wait for
    assert raw.commands().keys() <= {"mget", "time"}
    assert raw.found() == []


# Marks


def test_a_duplicate_of_a_running_attempt_is_turned_away_without_the_truth(
    open_tiers: Open, redis_url: str, raw: Redis
) -> None:
    owner, other = open_tiers(redis_url, mark_after=0), open_tiers(redis_url)
    claimed = owner.execute(claim())
    owner.written(1)
    owner.primary.asked.clear()
    found = other.execute(claim(nonce=2))
    assert owner.primary.asked == []
    assert (found.record.state, found.record.token, found.record.attempt) == (State.RUNNING, claimed.token, 1)
    assert 0 < found.record.lease_left <= 30
    assert other.tally.turned_away == 1


def test_the_mark_is_gone_before_the_owner_is_told_that_it_is_over(open_tiers: Open, redis_url: str) -> None:
    owner, other = open_tiers(redis_url, mark_after=0), open_tiers(redis_url)
    for number, end in enumerate([Complete, Release]):
        claimed = owner.execute(claim(number))
        owner.written(2 * number + 1)
        id = claim(number).id
        owner.execute(Complete(id, claimed.token, b"answer", 3600.0) if end is Complete else Release(id, claimed.token))
        found = other.execute(claim(number, nonce=2))
        if end is Complete:
            assert found.record.snapshot == b"answer"
        else:
            assert type(found) is Claimed


def test_the_claim_that_a_mark_stands_for_is_asked_of_the_truth_when_sent_again(
    open_tiers: Open, redis_url: str
) -> None:
    """Its answer was lost: the owner must not be shut out by its own mark."""
    owner = open_tiers(redis_url, mark_after=0)
    claimed = owner.execute(claim())
    owner.written(1)
    assert owner.execute(claim()) == claimed


def test_a_mark_answers_a_call_once_and_then_the_truth_is_asked(open_tiers: Open, redis_url: str) -> None:
    """A policy that waits asks again: what it waits for, only the truth can say."""
    owner, other = open_tiers(redis_url, mark_after=0), open_tiers(redis_url)
    owner.execute(claim())
    owner.written(1)
    owner.primary.asked.clear()
    for _ in range(3):
        assert other.execute(claim(nonce=2)).record.state is State.RUNNING
    assert owner.primary.kinds == ["Claim", "Claim"]


def test_a_mark_ends_before_the_lease_does(open_tiers: Open, redis_url: str, raw: Redis) -> None:
    owner, other = open_tiers(redis_url, mark_after=0), open_tiers(redis_url)
    owner.execute(claim(lease=0.4))  # and its owner is never heard of again
    owner.written(1)
    assert 0 < raw.client.pttl(raw.only()) <= 0.8 * 400
    owner.until(lambda: owner.primary.execute(Lookup(claim().id)).state is State.ABANDONED)
    assert other.execute(claim(nonce=2)).attempt == 2


def test_a_mark_is_short_however_long_the_lease_and_renewals_write_it_anew(
    open_tiers: Open, redis_url: str, raw: Redis
) -> None:
    owner = open_tiers(redis_url, mark_after=0, in_progress_ttl="60s")
    claimed = owner.execute(claim(lease=1000.0))
    owner.written(1)
    assert raw.client.pttl(raw.only()) <= 60_000
    raw.client.delete(raw.only())
    assert owner.execute(Renew(claim().id, claimed.token, 1000.0)) is True
    owner.written(2)
    assert 0 < raw.client.pttl(raw.only()) <= 60_000


def test_a_forced_release_takes_the_mark_away(open_tiers: Open, redis_url: str) -> None:
    owner, person = open_tiers(redis_url, mark_after=0), open_tiers(redis_url)
    claimed = owner.execute(claim())
    owner.written(1)
    assert person.execute(Resolve(claim().id, None, 3600.0, force=True)) is State.RUNNING
    new = person.execute(claim(nonce=2))
    assert type(new) is Claimed
    assert owner.execute(Renew(claim().id, claimed.token, 30.0)) is False
    assert owner.execute(Complete(claim().id, claimed.token, b"stale", 3600.0)) is False
    assert person.execute(Complete(claim().id, new.token, b"answer", 3600.0)) is True
    assert owner.execute(claim(nonce=3)).record.snapshot == b"answer"


@pytest.mark.parametrize("snapshot", [None, b"resolved"])
def test_an_attempt_that_is_overruled_is_not_marked_any_more(
    open_tiers: Open, redis_url: str, raw: Redis, snapshot: bytes | None
) -> None:
    tiers = open_tiers(redis_url, mark_after="30ms")
    tiers.execute(claim())
    assert tiers.execute(Resolve(claim().id, snapshot, 3600.0, force=True)) is State.RUNNING
    other = tiers.execute(claim(2))
    tiers.until(lambda: len(raw.found()) == 1)  # the mark of an attempt that was claimed later: its turn would be over
    assert type(other) is Claimed
    found = tiers.execute(claim(nonce=2))
    assert type(found) is Claimed if snapshot is None else found.record.snapshot == snapshot


def test_a_mark_whose_removal_was_lost_turns_away_for_its_short_life_only_and_never_one_that_waits(
    open_tiers: Open, redis_url: str, raw: Redis
) -> None:
    owner, other = open_tiers(redis_url, mark_after=0, in_progress_ttl="1s"), open_tiers(redis_url)
    begun = time.monotonic()
    marks: list[bytes] = []

    def handler() -> str:
        end = time.monotonic() + BOUND
        while not raw.found() and time.monotonic() < end:
            time.sleep(0.005)
        marks.append(raw.client.get(raw.only()))
        return "answer"

    owner.guard._policy = owner.guard._policy.replace(lease=30)
    if isinstance(owner.guard, Semel):
        assert owner.run("k", handler) == "answer"
    else:
        assert owner.do(_in_thread(owner.guard, handler)) == "answer"
    (mark,) = marks
    raw.client.set(raw.only(), mark, px=60_000)  # as if the removal had never arrived, nor Redis' own clock moved on
    if time.monotonic() < begun + 0.5:  # on a slow machine the mark may be over by now
        with pytest.raises(InProgress):
            other.run("k", lambda: "never")
        assert other.run("k", lambda: "never", on_duplicate=Wait("10s")) == "answer"
        assert other.tally.turned_away == 2
        raw.client.set(raw.only(), mark, px=60_000)
    end = time.monotonic() + BOUND
    while True:
        try:
            assert other.run("k", lambda: "never") == "answer"
            return
        except InProgress:
            assert time.monotonic() < end, "a mark that is over still turns callers away"
            time.sleep(0.05)


def _in_thread(guard: AsyncSemel, handler: Callable[[], str]) -> Coroutine[Any, Any, str]:
    return guard.run("pay", key="k", call=lambda: asyncio.to_thread(handler))


def test_another_request_under_the_key_is_refused_by_the_cache_as_by_the_truth(
    open_tiers: Open, redis_url: str
) -> None:
    tiers = open_tiers(redis_url)
    tiers.run("k", lambda: 1, fingerprint={"amount": 1})
    tiers.written(1)
    tiers.primary.asked.clear()
    with pytest.raises(KeyReused):
        tiers.run("k", lambda: 1, fingerprint={"amount": 2})
    assert tiers.primary.asked == []


# Time


def test_a_copy_ends_before_its_record_and_after_keep_at_the_latest(
    open_tiers: Open, redis_url: str, raw: Redis
) -> None:
    tiers = open_tiers(redis_url, keep="10m")
    for number, ttl in enumerate((30.0, 86_400.0)):
        claimed = tiers.execute(claim(number))
        tiers.execute(Complete(claim(number).id, claimed.token, b"answer", ttl))
        tiers.written(number + 1)
    lives = sorted(raw.client.pttl(key) / 1000 for key in raw.found())
    assert lives[0] <= 30 - MARGIN
    assert 500 < lives[1] <= 600


def test_of_a_record_that_ends_soon_no_copy_is_made(tiers: Tiers, raw: Redis) -> None:
    claimed = tiers.execute(claim())
    tiers.execute(Complete(claim().id, claimed.token, b"answer", MARGIN))
    other = tiers.execute(claim(2))
    tiers.execute(Complete(claim(2).id, other.token, b"answer", 3600.0))
    tiers.written(1)
    assert len(raw.found()) == 1


def test_a_write_that_is_late_leaves_nothing_behind(tiers: Tiers, raw: Redis) -> None:
    """An instant travels with it, not a duration: a command that was stuck somewhere gives its key no life."""
    now = time.monotonic()
    record = tiers.primary.execute(claim(3)) and tiers.primary.execute(Lookup(claim(3).id))

    async def write() -> None:
        tiers.store.cache.write(Write(record.id, record, now - 10, now - 5))

    if isinstance(tiers.store, TieredStore):
        tiers.store.cache.write(Write(record.id, record, now - 10, now - 5))
    else:
        tiers.do(write())
    tiers.written(1)
    assert raw.found() == []


# When someone frees a finished record


def freed(tiers: Tiers, record: Record) -> State:
    found: State = tiers.execute(Resolve(record.id, None, 60.0, False, record.token))
    return found


def write_copy(tiers: Tiers, record: Record) -> None:
    """Write the copy of a finished record, as a process does that was paused meanwhile."""
    now, before = time.monotonic(), tiers.tally.written

    async def write() -> None:
        tiers.store.cache.write(Write(record.id, record, now, now + 3000))

    if isinstance(tiers.store, TieredStore):
        tiers.store.cache.write(Write(record.id, record, now, now + 3000))
    else:
        tiers.do(write())
    tiers.written(before + 1)


def test_an_outcome_that_was_released_is_not_replayed_by_any_process(
    tiers: Tiers, open_tiers: Open, redis_url: str
) -> None:
    other = open_tiers(redis_url)
    assert tiers.run("k", lambda: "failed") == "failed"
    tiers.written(1)
    assert other.run("k", lambda: "never") == "failed"
    record = tiers.primary.execute(Lookup(tiers.primary.asked[0].id))
    assert freed(tiers, record) is State.DONE
    assert freed(other, record) is State.ABSENT
    assert other.run("k", lambda: "paid") == "paid"
    other.written(1)
    replayed = tiers.tally.replayed + other.tally.replayed
    assert (tiers.run("k", lambda: "never"), other.run("k", lambda: "never")) == ("paid", "paid")
    assert tiers.tally.replayed + other.tally.replayed == replayed + 2, "the new outcome is replayed from the cache"


def test_a_copy_that_comes_late_is_not_replayed(tiers: Tiers, open_tiers: Open, redis_url: str, raw: Redis) -> None:
    """A process was paused between the answer of the primary and its write."""
    tiers.run("k", lambda: "failed")
    tiers.written(1)
    record = tiers.primary.execute(Lookup(tiers.primary.asked[0].id))
    assert freed(tiers, record) is State.DONE

    write_copy(tiers, record)
    assert open_tiers(redis_url).run("k", lambda: "paid") == "paid"
    tiers.until(lambda: tiers.run("k", lambda: "never") == "paid" and tiers.tally.replayed)
    write_copy(tiers, record)  # over the copy of the new outcome
    assert tiers.run("k", lambda: "never") == "paid"
    (note,) = (key for key in raw.found() if key.endswith(b"}"))
    assert 3500_000 < raw.client.pttl(note) <= 24 * 3600_000, "as long as the record would have lived"


def test_a_record_is_freed_only_if_the_cache_is_told(open_tiers: Open, private_redis: RedisServer) -> None:
    tiers = open_tiers(private_redis.url)
    tiers.run("k", lambda: "failed")
    tiers.written(1)
    record = tiers.primary.execute(Lookup(tiers.primary.asked[0].id))
    private_redis.crash()
    with pytest.raises(StoreUnavailable, match="is not released"):
        freed(tiers, record)
    (answer,) = tiers.do(tiers.store.execute_many([Resolve(record.id, None, 60.0, False, record.token)]))
    assert isinstance(answer, StoreUnavailable)
    assert tiers.run("k", lambda: "never") == "failed"
    private_redis.return_()
    assert freed(tiers, record) is State.DONE
    assert tiers.run("k", lambda: "paid") == "paid"


def test_a_record_is_freed_only_if_the_cache_has_the_name_of_the_primary(
    open_tiers: Open, redis_url: str, primary: Truth
) -> None:
    claimed = primary.execute(claim(4))
    primary.execute(Complete(claim(4).id, claimed.token, b"failed", 3600.0))
    record = primary.execute(Lookup(claim(4).id))
    tiers = open_tiers(redis_url)
    primary.fails = Claim
    with pytest.raises(StoreUnavailable, match="is not released"):
        freed(tiers, record)
    assert primary.execute(Lookup(record.id)) is not None
    primary.fails = None
    assert freed(tiers, record) is State.DONE


def test_ops_before_it_in_a_batch_may_finish_the_record_that_is_freed(tiers: Tiers) -> None:
    claimed = tiers.execute(claim(5))
    ops = [
        Complete(claim(5).id, claimed.token, b"failed", 3600.0),
        Resolve(claim(5).id, None, 60.0, False, claimed.token),
    ]
    assert tiers.do(tiers.store.execute_many(ops)) == [True, State.DONE]
    assert isinstance(tiers.execute(claim(5, nonce=2)), Claimed)


@pytest.mark.parametrize("states", [(), (State.DONE,), (State.RUNNING, State.DONE)])
def test_an_outcome_that_comes_between_the_look_and_the_release_is_not_replayed(
    tiers: Tiers, primary: Truth, states: tuple[State, ...]
) -> None:
    """The owner completes, and a process that is slow writes its copy when the record has been freed."""
    claimed = primary.execute(claim(6))
    found: list[Record] = []

    def complete() -> None:
        assert primary.execute(Complete(claim(6).id, claimed.token, b"failed", 3600.0))
        found.append(primary.execute(Lookup(claim(6).id)))

    primary.after_lookup = complete
    assert tiers.execute(Resolve(claim(6).id, None, 60.0, False, claimed.token, states)) is State.DONE
    assert primary.execute(Lookup(claim(6).id)) is None
    write_copy(tiers, found[0])
    assert isinstance(tiers.execute(claim(6, nonce=2)), Claimed)


def test_an_outcome_that_may_not_be_freed_is_still_replayed_by_the_cache(tiers: Tiers) -> None:
    tiers.run("k", lambda: "paid")
    tiers.written(1)
    record = tiers.primary.execute(Lookup(tiers.primary.asked[0].id))
    in_doubt = (State.UNKNOWN, State.ABANDONED)
    assert tiers.execute(Resolve(record.id, None, 60.0, False, record.token, in_doubt)) is State.DONE
    assert tiers.execute(Resolve(record.id, b"other", 60.0, False, record.token)) is State.DONE
    replayed = tiers.tally.replayed
    assert tiers.run("k", lambda: "never") == "paid"
    assert tiers.tally.replayed == replayed + 1


def test_an_attempt_that_is_not_released_keeps_its_mark(tiers: Tiers) -> None:
    """The resolution names another state, so the attempt goes on, and the cache goes on turning duplicates away."""
    claimed = tiers.execute(claim(7))
    assert tiers.execute(Renew(claim(7).id, claimed.token, 30.0)) is True
    tiers.written(1)
    assert tiers.execute(Resolve(claim(7).id, None, 60.0, True, claimed.token, (State.UNKNOWN,))) is State.RUNNING
    turned_away = tiers.tally.turned_away
    assert tiers.execute(claim(7, nonce=2)).record.state is State.RUNNING
    assert tiers.tally.turned_away == turned_away + 1


@pytest.mark.parametrize("prefix", [b"semel-tier:", b"{shop}:", b"shop:{a}{b}:"])
def test_both_keys_of_an_entry_are_in_one_slot_and_have_the_prefix(prefix: bytes) -> None:
    from redis.crc import key_slot

    copy, invalid = entry_keys(prefix, os.urandom(16))
    assert key_slot(copy) == key_slot(invalid)
    assert copy != invalid
    assert copy.startswith(prefix)
    assert invalid.startswith(prefix)


def test_a_redis_cluster_is_told_what_was_freed(open_tiers: Open, redis_cluster: RedisClusterServers) -> None:
    redis_cluster.flush()
    tiers = open_tiers(redis_cluster.url)
    for i in range(6):
        tiers.run(f"k{i}", lambda: "failed")
    tiers.written(6)
    for op in [op for op in tiers.primary.asked if isinstance(op, Claim)]:
        assert freed(tiers, tiers.primary.execute(Lookup(op.id))) is State.DONE
    for i in range(6):
        assert tiers.run(f"k{i}", lambda: "paid") == "paid"


def test_an_expired_key_is_refused_by_the_cache_when_the_truth_would(tiers: Tiers) -> None:
    settings = {"ttl": "700ms", "reject_expired_for": "1h"}
    assert tiers.run("k", lambda: 1, **settings) == 1
    tiers.written(1)
    tiers.primary.asked.clear()
    replays = 0
    end = time.monotonic() + BOUND
    while True:
        try:
            assert tiers.run("k", lambda: "never", **settings) == 1
            replays += 1
        except KeyExpired:
            break
        assert time.monotonic() < end
        time.sleep(0.02)
    assert tiers.primary.asked == []
    assert tiers.tally.replayed == replays + 1


def test_a_servers_clock_is_an_interval_and_every_reckoning_errs_to_the_early_side() -> None:
    clock = ServerTime(100.0, 100.2, (b"5000", b"0"))  # somewhere in these 0.2 s it was 5000
    for at in (100.2, 130.0, 3700.0):
        true = [5000 + at - answered for answered in (100.0, 100.1, 100.2)]
        assert clock.earliest(at) / 1e6 <= min(true)
        assert clock.latest(at) / 1e6 >= max(true)
    assert not clock.is_old(120.0)
    assert clock.is_old(140.0)
    clock.learn(200.0, 200.1, (b"4000", b"0"))
    assert clock.latest(200.1) / 1e6 == pytest.approx(4000.1, abs=0.001)


def test_a_copy_is_read_as_it_was_written_and_not_after_its_end() -> None:
    primary = Truth()
    primary.execute(claim(ttl=100.0))
    record = primary.execute(Lookup(claim().id))
    clock = ServerTime(10.0, 10.0, (b"1000", b"0"))
    packed, until = pack(Write(record.id, record, 10.0, 15.0, nonce=7), record, clock)
    found = unpack(record.id, (packed, None), clock.latest(11.0))
    assert found is not None
    assert found.nonce == 7
    assert found.record.expires_in == pytest.approx(99.0, abs=0.1)
    assert unpack(record.id, (packed, None), clock.latest(15.0)) is None
    assert until <= 1_005_000
    for garbage in (b"", b"\x01", packed[:70], b"\x02" + packed[1:], b"\xff" * 200):
        assert unpack(record.id, (garbage, garbage), 0) is None
    dice = random.Random(7)
    for _ in range(2000):  # whatever stands there, reading it raises nothing
        broken = bytearray(packed)
        for _ in range(dice.randrange(1, 30)):
            broken[dice.randrange(1, len(broken))] = dice.randrange(256)
        unpack(record.id, (bytes(broken), dice.randbytes(dice.randrange(12))), 0)


# When the cache is wrong, slow or gone


def test_values_that_are_none_of_ours_are_misses(tiers: Tiers, raw: Redis) -> None:
    tiers.run("k", lambda: 1)
    tiers.written(1)
    raw.client.set(raw.only(), b"something else")
    assert tiers.run("k", lambda: "never") == 1
    assert tiers.primary.kinds == ["Claim", "Complete", "Claim"]


def test_answers_that_are_errors_are_misses_and_after_some_the_cache_is_left_alone(
    open_tiers: Open, redis_url: str, raw: Redis
) -> None:
    told: list[events.Event] = []
    user = os.urandom(4).hex()
    raw.client.execute_command("ACL", "SETUSER", user, "on", "nopass", "~*", "&*", "+@all")
    tiers = open_tiers(redis_url.replace("//", f"//{user}:any@"), on_event=told.append)
    tiers.run("k", lambda: 1)
    tiers.written(1)
    raw.client.execute_command("ACL", "SETUSER", user, "-mget")
    for failures in range(1, MAX_REFUSALS + 1):
        assert told == []
        assert tiers.run("k", lambda: "never") == 1
        assert tiers.tally.failed == failures
    assert tiers.primary.kinds == ["Claim", "Complete", *["Claim"] * MAX_REFUSALS]
    assert type(told[0]) is events.CacheLost
    raw.client.execute_command("ACL", "SETUSER", user, "+mget")
    tiers.connect()
    tiers.until(lambda: tiers.run("k", lambda: "never") == 1 and tiers.tally.replayed)
    assert [type(event) for event in told] == [events.CacheLost, events.CacheBack]
    raw.client.execute_command("ACL", "DELUSER", user)


def test_a_server_that_is_full_costs_copies_and_nothing_else(open_tiers: Open, private_redis: RedisServer) -> None:
    tiers = open_tiers(private_redis.url)
    private_redis.cli("CONFIG", "SET", "maxmemory", "1")
    assert tiers.run("k", lambda: 1) == 1
    tiers.until(lambda: tiers.tally.failed)
    assert tiers.run("k", lambda: "never") == 1
    private_redis.cli("CONFIG", "SET", "maxmemory", "0")
    tiers.until(lambda: tiers.run("k", lambda: "never") == 1 and tiers.tally.replayed)


def test_what_is_too_large_is_not_copied(open_tiers: Open, redis_url: str, raw: Redis) -> None:
    tiers = open_tiers(redis_url, max_copy_bytes=100, mark_after=0)
    claimed = tiers.execute(claim())
    tiers.written(1)
    tiers.execute(Complete(claim().id, claimed.token, b"x" * 101, 3600.0))
    assert raw.found() == [], "and its mark is gone"
    assert tiers.execute(claim(nonce=2)).record.snapshot == b"x" * 101


def test_a_server_that_hangs_is_waited_for_once(open_tiers: Open, private_redis: RedisServer) -> None:
    """And no caller waits for the connections that are sought afterwards, although the kernel still takes them."""
    told: list[events.Event] = []
    tiers = open_tiers(private_redis.url, cache={"timeout": "500ms"}, on_event=told.append)
    tiers.run("k", lambda: 1)
    tiers.until(lambda: tiers.run("k", lambda: "never") == 1 and tiers.tally.replayed)
    told.clear()
    failed, skipped = tiers.tally.failed, tiers.tally.skipped
    assert private_redis.pid is not None
    freeze(private_redis.pid)
    try:
        for _ in range(20):
            assert tiers.run("k", lambda: "never") == 1
        assert (tiers.tally.failed, tiers.tally.skipped) == (failed + 1, skipped + 19)
        assert [type(event) for event in told] == [events.CacheLost]
    finally:
        os.kill(private_redis.pid, signal.SIGCONT)
    tiers.connect()
    replayed = tiers.tally.replayed
    tiers.until(lambda: tiers.run("k", lambda: "never") == 1 and tiers.tally.replayed > replayed)
    assert [type(event) for event in told[:2]] == [events.CacheLost, events.CacheBack]


def test_a_server_that_is_killed_flushed_and_started_again_is_found_again(
    open_tiers: Open, private_redis: RedisServer
) -> None:
    tiers = open_tiers(private_redis.url)
    for way in ("flush", "kill"):
        assert tiers.run(way, lambda: 1) == 1
        tiers.until(lambda way=way: tiers.run(way, lambda: "never") == 1 and tiers.tally.replayed)  # type: ignore[misc]
        if way == "flush":
            private_redis.cli("FLUSHALL")
        else:
            private_redis.crash()
        assert tiers.run(way, lambda: "never") == 1
        assert tiers.run(way, lambda: "never") == 1
        if way == "kill":
            private_redis.return_()
            tiers.connect()
        tiers.tally.replayed = 0
        tiers.until(lambda way=way: tiers.run(way, lambda: "never") == 1 and tiers.tally.replayed)  # type: ignore[misc]


def test_a_truth_that_fails_fails_the_call_and_leaves_no_mark(open_tiers: Open, redis_url: str, raw: Redis) -> None:
    tiers = open_tiers(redis_url, mark_after=0, in_progress_ttl="1h")
    claimed = tiers.execute(claim(lease=3600.0))
    tiers.written(1)
    tiers.primary.fails = Complete
    with pytest.raises(StoreUnavailable, match="broken on purpose"):
        tiers.execute(Complete(claim().id, claimed.token, b"one", 3600.0))
    tiers.until(lambda: raw.found() == [])
    tiers.primary.fails = None
    assert tiers.execute(Complete(claim().id, claimed.token, b"two", 3600.0)) is True
    assert tiers.execute(claim(nonce=2)).record.snapshot == b"two"


def test_replays_go_on_while_the_truth_is_down(tiers: Tiers) -> None:
    tiers.run("k", lambda: 1)
    tiers.written(1)
    tiers.primary.fails = Op
    assert tiers.run("k", lambda: "never") == 1
    with pytest.raises(StoreUnavailable):
        tiers.run("other", lambda: "never")
    tiers.primary.fails = None


def test_a_call_that_is_interrupted_while_it_reads_harms_no_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is given up: the next caller must neither be given its answer nor open the line again and wait."""
    store = TieredStore(Truth(), RedisCache(redis_url, timeout=PATIENT))
    assert store.cache.connect(BOUND)
    with Semel(store, sweep_every=None) as guard:
        guard.run("pay", key="k", call=lambda: 1)
        store.cache.settle(b"")
        (link,) = store.cache._reading.open.values()  # type: ignore[attr-defined]

        def interrupted(**settings: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(link._raw, "read_response", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guard.run("pay", key="k", call=lambda: "never")
        monkeypatch.setattr(link._raw, "connect", lambda: pytest.fail("a caller opens a line"))
        skipped = store.tally.skipped
        assert guard.run("pay", key="k", call=lambda: "never") == 1
        assert store.tally.skipped == skipped + 1
        assert store.cache.connect(BOUND)
        assert guard.run("pay", key="k", call=lambda: "never") == 1
        assert store.tally.replayed == 1


def test_an_async_store_may_be_used_in_one_loop_after_another(redis_url: str) -> None:
    store = AsyncTieredStore(AwaitedTruth(Truth()), AsyncRedisCache(redis_url, timeout=PATIENT), mark_after=0)

    async def answer() -> int:
        return 1

    async def ask(last: bool) -> None:
        guard = AsyncSemel(store, sweep_every=None)
        assert await store.cache.connect(BOUND)
        assert await guard.run("pay", key="k", call=answer) == 1
        if last:
            await guard.close()
        else:  # as a program that goes on without closing, but for the warning of an open socket
            for link in store.cache._servers._connections.values():  # type: ignore[attr-defined]
                link.close()
            await asyncio.sleep(0)

    for last in (False, False, True):
        asyncio.run(ask(last))


def test_a_redis_cluster_answers_replays(open_tiers: Open, redis_cluster: RedisClusterServers) -> None:
    redis_cluster.flush()
    tiers = open_tiers(redis_cluster.url)
    for i in range(12):
        tiers.run(f"k{i}", lambda: 1)
    tiers.written(12)
    tiers.primary.asked.clear()
    for i in range(12):
        assert tiers.run(f"k{i}", lambda: "never") == 1
    assert tiers.primary.asked == []


def test_settings_that_cannot_be_meant_are_refused(redis_url: str) -> None:
    with pytest.raises(ConfigurationError, match="max_copy_bytes is a number of bytes"):
        TieredStore(MemoryStore(), RedisCache(redis_url), max_copy_bytes=-1)
    with pytest.raises(ConfigurationError, match="keep: 'soon' is not a duration"):
        TieredStore(MemoryStore(), RedisCache(redis_url), keep="soon")


def test_a_truth_outside_of_sql_has_no_units_of_work(redis_url: str) -> None:
    store = TieredStore(MemoryStore(), RedisCache(redis_url))
    assert store.adopt is None
    with (
        Semel(store, sweep_every=None) as guard,
        pytest.raises(ConfigurationError, match="a transaction needs a guard whose store is in the same database"),
    ):
        guard.run_in_transaction(object(), "op", key="k", call=lambda: None)


def test_many_threads_share_one_line(redis_url: str) -> None:
    store = TieredStore(Truth(), RedisCache(redis_url, timeout=PATIENT))
    assert store.cache.connect(BOUND)
    with Semel(store, sweep_every=None) as guard:
        for i in range(10):
            guard.run("pay", key=i, call=lambda i=i: i)
        store.cache.settle(b"")
        wrong: list[object] = []

        def ask() -> None:
            for i in range(10):
                if guard.run("pay", key=i, call=lambda: "never") != i:
                    wrong.append(i)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert wrong == []
        assert store.tally.failed == 0
        assert store.tally.replayed > 0
