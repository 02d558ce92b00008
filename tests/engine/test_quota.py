"""The quota of live keys: new keys are refused beyond it, keys that exist go on; and what it costs to know."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
    ConfigurationError,
    InProgress,
    KeyReused,
    MemoryStore,
    PolicyError,
    Quota,
    Semel,
    StoreUnavailable,
    StoreUncertain,
    TooManyKeys,
)
from semel.core.ops import Claim, Count, Lookup, Sweep
from semel.core.states import Takeover
from tests.engine.driving import Engine
from tests.engine.scripted import Gate

STALE = 3600.0


def limited(engine: Engine, live_keys: int, **settings: Any) -> Any:
    """A guard with a quota, over the engine's store; the meter's clock is the engine's."""
    guard = engine.new_guard(quota=Quota(live_keys=live_keys, **settings))
    guard._meter._clock = engine.clock
    return guard


def fill(engine: Engine, guard: Any, count: int, *, tenant: str = "acme", start: int = 0) -> None:
    for i in range(start, start + count):
        engine.run(lambda: "answer", key=f"k{i}", guard=guard, tenant=tenant)


def forbidden() -> None:
    raise AssertionError("it ran")


def refused(engine: Engine, guard: Any, key: str = "new", tenant: str = "acme") -> TooManyKeys:
    with pytest.raises(TooManyKeys) as raised:
        engine.run(forbidden, key=key, guard=guard, tenant=tenant)
    return raised.value


def test_a_new_key_beyond_the_quota_is_refused_and_not_run(engine: Engine) -> None:
    guard = limited(engine, 3)
    fill(engine, guard, 3)
    error = refused(engine, guard)
    assert (error.status, error.code, error.retryable) == (429, "idempotency_too_many_keys", True)
    assert error.retry_after is not None
    assert 1.0 <= error.retry_after <= 5.0
    assert engine.record("new", tenant="acme") is None
    (told,) = [event for event in engine.events if event.name == "over_quota"]
    assert (told.tenant, told.key, told.live_keys) == ("acme", "new", 3)  # type: ignore[attr-defined]


def test_keys_that_exist_replay_conflict_and_are_taken_over(engine: Engine) -> None:
    engine.abandon("silent", tenant="acme")
    engine.claim_elsewhere("held", tenant="acme")
    guard = limited(engine, 4)
    fill(engine, guard, 1)
    engine.run(lambda: 1, key="printed", guard=guard, tenant="acme", fingerprint="a")
    refused(engine, guard)
    assert engine.run(forbidden, key="k0", guard=guard, tenant="acme") == "answer"
    with pytest.raises(KeyReused):
        engine.run(forbidden, key="printed", guard=guard, tenant="acme", fingerprint="b")
    with pytest.raises(InProgress):
        engine.run(forbidden, key="held", guard=guard, tenant="acme")
    outcome = engine.run_outcome(lambda: "resumed", key="silent", guard=guard, tenant="acme")
    assert (outcome.value, outcome.attempt) == ("resumed", 2)
    refused(engine, guard)


def test_tenants_do_not_share_their_quota(engine: Engine) -> None:
    guard = limited(engine, 2)
    fill(engine, guard, 2)
    refused(engine, guard)
    fill(engine, guard, 2, tenant="other")
    refused(engine, guard, tenant="other")


def test_calls_without_a_tenant_share_one_quota(engine: Engine) -> None:
    guard = limited(engine, 2)
    engine.run(lambda: 1, key="a", guard=guard)
    engine.run(lambda: 1, key="b", guard=guard)
    with pytest.raises(TooManyKeys):
        engine.run(forbidden, key="c", guard=guard)
    assert engine.run(lambda: 1, key="c", guard=guard, tenant="acme") == 1


def test_first_executions_far_below_the_quota_cost_no_extra_round_trip(engine: Engine) -> None:
    guard = limited(engine, 10_000)
    fill(engine, guard, 1)
    assert engine.script.kinds == ["Count", "Claim", "Complete"], "a tenant that is first seen is counted"
    engine.script.forget()
    fill(engine, guard, 200, start=1)
    assert engine.script.kinds == ["Claim", "Complete"] * 200
    engine.script.forget()
    fill(engine, guard, 1)
    assert engine.script.kinds == ["Claim"], "nor does a replay"


def test_a_guard_without_a_quota_never_counts(engine: Engine) -> None:
    for i in range(3):
        engine.run(lambda: 1, key=f"k{i}", tenant="acme")
    assert engine.script.count(Count) == 0


def test_the_store_is_asked_when_the_estimate_reaches_the_quota_and_then_now_and_then(engine: Engine) -> None:
    guard = limited(engine, 3, recount_every="5s")
    fill(engine, guard, 3)
    assert engine.script.count(Count) == 1
    for _ in range(4):
        refused(engine, guard)
    assert engine.script.count(Count) == 2, "once when the quota is reached"
    engine.clock.advance(5.1)
    for _ in range(4):
        refused(engine, guard)
    assert engine.script.count(Count) == 3, "and again only after a while"


def test_keys_that_expire_or_are_swept_make_room(engine: Engine) -> None:
    guard = limited(engine, 2, recount_every="5s")
    engine.run(lambda: 1, key="brief", guard=guard, tenant="acme", ttl=60)
    engine.run(lambda: 1, key="long", guard=guard, tenant="acme", ttl=STALE)
    refused(engine, guard)
    engine.clock.advance(61)
    engine.execute(Sweep(100))
    assert engine.run(lambda: 2, key="new", guard=guard, tenant="acme") == 2
    refused(engine, guard, key="one more")


def test_a_call_that_failed_gives_its_place_back(engine: Engine) -> None:
    guard = limited(engine, 1)

    def fail() -> None:
        raise ZeroDivisionError

    for i in range(3):
        with pytest.raises(ZeroDivisionError):
            engine.run(fail, key=f"k{i}", guard=guard, tenant="acme")
    assert engine.run(lambda: 1, guard=guard, tenant="acme") == 1


def test_a_guard_sees_the_keys_of_others_when_it_counts(engine: Engine) -> None:
    """Two processes fill one tenant: together they exceed the quota by no more than each uses between two counts."""
    quota = 100
    guards = [limited(engine, quota), limited(engine, quota)]
    made = [0, 0]
    for i in range(quota):
        for at, guard in enumerate(guards):
            try:
                engine.run(lambda: 1, key=f"{at}-{i}", guard=guard, tenant="acme")
                made[at] += 1
            except TooManyKeys:
                pass
    assert quota <= sum(made) <= quota + 2 * 16
    for guard in guards:
        refused(engine, guard)


@pytest.mark.parametrize("error", [StoreUnavailable, StoreUncertain])
def test_a_store_that_fails_at_the_count_is_followed_as_the_policy_says(engine: Engine, error: Any) -> None:
    guard = limited(engine, 3)
    engine.script.on(Count, before=error("down"))
    with pytest.raises(error, match="down"):
        engine.run(forbidden, guard=guard, tenant="acme")
    assert engine.script.kinds == ["Count"]
    engine.script.forget()
    engine.script.on(Count, before=error("down"))
    assert engine.run(lambda: "ran", guard=guard, tenant="acme", on_store_error="open") == "ran"
    assert engine.script.kinds == ["Count", "Claim", "Complete"], "open: it goes uncounted, but not unclaimed"
    assert [event.name for event in engine.events].count("unprotected") == 0
    engine.script.forget()
    fill(engine, guard, 1, start=5)
    assert engine.script.kinds[0] == "Count", "what was not learned is asked again"


@pytest.mark.parametrize("policy", ["closed", "open"])
def test_a_store_that_fails_at_the_look_up_of_a_key_is_followed_too(engine: Engine, policy: Any) -> None:
    guard = limited(engine, 1)
    fill(engine, guard, 1)
    engine.script.on(Lookup, before=StoreUnavailable("down"))
    if policy == "closed":
        with pytest.raises(StoreUnavailable):
            engine.run(forbidden, key="new", guard=guard, tenant="acme")
    else:
        assert engine.run(lambda: 1, key="new", guard=guard, tenant="acme", on_store_error=policy) == 1


def test_while_one_call_counts_the_others_do_not_wait(engine: Engine) -> None:
    guard = limited(engine, 100)
    held = Gate()
    counting = engine.script.on(Count, hold_before=held)
    first = engine.start_run(lambda: "first", key="a", guard=guard, tenant="acme")
    counting.seen.wait()
    assert engine.run(lambda: "second", key="b", guard=guard, tenant="acme") == "second"
    held.open()
    assert first.result(20) == "first"
    assert engine.script.count(Count) == 1


def test_a_count_that_was_given_up_does_not_stop_later_ones(engine: Engine) -> None:
    class Stop(BaseException):
        pass

    guard = limited(engine, 100)
    engine.script.on(Count, before=Stop())
    with pytest.raises(Stop):
        engine.run(forbidden, guard=guard, tenant="acme")
    engine.clock.advance(5.1)
    fill(engine, guard, 1)
    assert engine.script.count(Count) == 2


def test_an_async_def_under_a_sync_guard_has_the_quota_too() -> None:
    guard = Semel(MemoryStore(), quota=Quota(live_keys=1), sweep_every=None)

    @guard.once(key="key")
    async def ship(key: str) -> str:
        return key

    async def main() -> None:
        assert await ship("a") == "a"
        with pytest.raises(TooManyKeys):
            await ship("b")

    asyncio.run(main())
    guard.close()


class Uncounting:
    wakes = counts = resumes = lists = trails = False
    adopt = accept = None

    def execute(self, op: Any) -> Any:
        raise NotImplementedError

    execute_many = wait = open = close = execute


class AsyncUncounting(Uncounting):
    async def execute(self, op: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("guard", "store"), [(Semel, Uncounting), (AsyncSemel, AsyncUncounting)])
def test_a_store_that_cannot_count_is_refused_at_once(guard: Callable[..., Any], store: Callable[[], Any]) -> None:
    guard(store(), sweep_every=None)
    with pytest.raises(ConfigurationError, match="counts keys"):
        guard(store(), quota=Quota())


@pytest.mark.parametrize(
    "settings", [{"live_keys": 0}, {"live_keys": 1.5}, {"tenants": 0}, {"recount_every": "soon"}, {"live_keys": True}]
)
def test_a_quota_that_cannot_be_meant_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Quota(**settings)


def test_many_threads_keep_the_quota_of_one_guard() -> None:
    """Not exact, but no further off than the calls that were under way at once."""
    store = MemoryStore()
    guard = Semel(store, quota=Quota(live_keys=50), sweep_every=None)
    threads, each = 8, 20

    def work(number: int) -> None:
        for i in range(each):
            with contextlib.suppress(TooManyKeys):
                guard.run("op", key=f"{number}-{i}", call=lambda: 1, tenant="acme")

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(20)
    assert 50 <= store.execute(Count("acme", 1000)) <= 50 + threads
    guard.close()


def test_the_async_store_says_that_it_counts() -> None:
    AsyncSemel(AsyncMemoryStore(), quota=Quota())


def test_a_key_claimed_elsewhere_while_the_tenant_is_full_is_known(engine: Engine) -> None:
    guard = limited(engine, 1)
    fill(engine, guard, 1)
    refused(engine, guard)
    claim = Claim(b"x" * 16, 1, b"", 30.0, 60.0, Takeover.RETRY, "acme", "op", "other")
    engine.execute(claim)
    refused(engine, guard)
