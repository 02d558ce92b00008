"""Resumers: what a process left half-done is finished without its caller, once, and not for ever."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from semel import (
    NOT_DONE,
    AsyncResumer,
    AsyncSemel,
    Codec,
    ConfigurationError,
    KeyRing,
    MemoryStore,
    Policy,
    PolicyError,
    Recovered,
    Resumer,
    ResumeReport,
    Semel,
    SnapshotUnreadable,
    State,
    StoreUnavailable,
    StoreUncertain,
    current_operation,
    outgoing_call,
)
from semel.core.call import Outcome
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.snapshot import Kind
from semel.core.keys import identity
from semel.core.ops import INPUT, Abandoned, Claim, Claimed, Page, Record, Resumable, SaveStep
from semel.core.resume import ResumePlan
from semel.core.states import Takeover
from tests.engine.driving import Engine
from tests.engine.scripted import PATIENCE, Gate


class Boom(Exception):
    pass


def resumer(engine: Engine, functions: Any = (), guard: Any = None, **settings: Any) -> Any:
    kind = AsyncResumer if engine.is_async else Resumer
    return kind(guard or engine.guard, functions, **settings)


def recover(engine: Engine, *args: Any, **settings: Any) -> ResumeReport:
    found: ResumeReport = engine.do(resumer(engine, *args, **settings).resume)
    return found


def begun_elsewhere(engine: Engine, *args: Any, key: str = "k", lease: float = 30.0, **kwargs: Any) -> None:
    """Another process has begun it, kept its input, and died."""
    claimed = engine.claim_elsewhere(key, lease=lease)
    payload = engine.guard.resumable["op"].input(args, kwargs)
    blob = Codec().seal(Kind.VALUE, PLAIN.name, payload, identity("", "op", key))
    assert engine.execute(SaveStep(identity("", "op", key), claimed.token, INPUT, blob, 0))
    engine.clock.advance(lease + 1)


def test_a_resumed_operation_keeps_its_lineage(engine: Engine) -> None:
    sent: list[Any] = []

    def body(key: str) -> None:
        call = outgoing_call("POST", "https://pay.example", hosts=["pay.example"])
        assert call is not None
        sent.append((call.headers["Idempotency-Root"], call.headers["Idempotency-Parent"]))
        if len(sent) == 1:
            raise Boom

    engine.once(body, resumable=True)
    id = identity("", "op", "k")
    claimed = engine.execute(Claim(id, 1, b"", 30.0, 86400.0, Takeover.RETRY, "", "op", "k\nroot\nparent"))
    payload = engine.guard.resumable["op"].input(("k",), {})
    engine.execute(SaveStep(id, claimed.token, INPUT, Codec().seal(Kind.VALUE, PLAIN.name, payload, id), 0))
    engine.clock.advance(31)
    assert recover(engine).failed == 1
    assert [event.key for event in engine.events if event.name == "recovery_failed"] == ["k"]
    engine.clock.advance(3600)
    assert recover(engine).resumed == 1
    record = engine.do(engine.guard.lookup, "op", "k")
    assert (record.key, record.root, record.parent) == ("k", "root", "parent")
    assert sent == [("root", "k")] * 2


def noting(ran: list[str]) -> Callable[[str], None]:
    def body(key: str) -> None:
        ran.append(key)

    return body


@contextlib.contextmanager
def between_look_and_claim(engine: Engine) -> Iterator["concurrent.futures.Future[ResumeReport]"]:
    """The resumer has found what there is, and has claimed nothing yet."""
    gate = Gate()
    rule = engine.script.on(Resumable, hold_after=gate)
    one = resumer(engine)
    round_from = one._plan.round
    one._plan.round = lambda operations, start, stopping: round_from(operations, b"", stopping)
    future = engine.start(one.resume)
    rule.took_effect.wait()
    yield future
    gate.open()


# What is kept


def test_the_input_is_kept_before_the_handler_runs(engine: Engine) -> None:
    kinds: list[str] = []
    ship = engine.once(lambda key: kinds.extend(engine.script.kinds), resumable=True)
    engine.do(ship, "k")
    assert kinds == ["Claim", "SaveStep"]
    assert engine.script.kinds == ["Claim", "SaveStep", "Complete"]
    engine.do(ship, "k")
    assert engine.script.kinds[3:] == ["Claim"]


def test_a_function_that_is_not_resumable_keeps_nothing(engine: Engine) -> None:
    engine.do(engine.once(lambda key: None), "k")
    assert engine.script.kinds == ["Claim", "Complete"]


def test_a_handler_that_raises_leaves_nothing_behind(engine: Engine) -> None:
    """Its caller was told. An input alone is no step: the next try is a first try, and resumers find nothing."""
    fails = [True]

    def body(key: str) -> str:
        if fails.pop():
            raise Boom
        return "done"

    ship = engine.once(body, resumable=True)
    with pytest.raises(Boom):
        engine.do(ship, "k")
    assert engine.record() is None
    assert recover(engine) == ResumeReport()
    fails.append(False)
    assert engine.do(ship, "k") == "done"


@pytest.mark.parametrize("when", ["before", "after"])
def test_without_its_input_nothing_is_run(engine: Engine, when: str) -> None:
    ran: list[str] = []
    error = StoreUnavailable("down") if when == "before" else StoreUncertain("cut")
    engine.script.on(SaveStep, **{when: error})
    ship = engine.once(noting(ran), resumable=True, remember_errors="all")
    with pytest.raises(type(error)):
        engine.do(ship, "k")
    assert ran == []
    assert engine.record() is None
    engine.do(ship, "k")
    assert ran == ["k"]


def test_an_open_policy_runs_without_it(quick_engine: Engine) -> None:
    ran: list[str] = []
    quick_engine.script.on(SaveStep, before=StoreUnavailable("down"))
    quick_engine.do(quick_engine.once(noting(ran), resumable=True, guarantee="at_least_once"), "k")
    assert ran == ["k"]


def test_an_argument_that_cannot_be_kept_is_refused_before_anything_is_claimed(quick_engine: Engine) -> None:
    ship = quick_engine.once(lambda key, session: None, resumable=True, exclude=("session",))
    with pytest.raises(PolicyError, match=r"op is resumable, so its arguments are stored, and session \(object\)"):
        quick_engine.do(ship, "k", object())
    assert quick_engine.script.kinds == []


@pytest.mark.parametrize("settings", [{"guarantee": "at_most_once"}, {"on_abandoned": "reject"}])
def test_what_may_not_be_run_again_cannot_be_resumable(settings: Any) -> None:
    with pytest.raises(PolicyError, match="resumable= runs an abandoned attempt again"):
        Policy(resumable=True, **settings)
    Policy(resumable=True, guarantee="at_most_once", recover=lambda: NOT_DONE)


def in_transaction(conn: Any, key: str) -> None: ...


def test_only_a_function_is_resumable(quick_engine: Engine) -> None:
    for _ in range(2):
        with pytest.raises(PolicyError, match="resumable= is for functions"):
            quick_engine.run(lambda: None, resumable=True)
    with pytest.raises(PolicyError, match="a transaction that died leaves nothing to resume"):
        quick_engine.guard.once_in_transaction(connection="conn", key="key", resumable=True)(
            quick_engine.function(in_transaction)
        )
    with pytest.raises(PolicyError, match=r"resumable= is a setting of @guard\.once"):
        quick_engine.new_guard(policy=Policy(resumable=True))


# What is resumed


def test_what_another_process_began_is_finished(engine: Engine) -> None:
    ran: list[Any] = []

    def body(key: str, amount: int, *more: int, note: str = "") -> Any:
        ran.append((key, amount, more, note, current_operation().attempt))  # type: ignore[union-attr]
        return amount

    ship = engine.once(body, resumable=True)
    begun_elsewhere(engine, "k", 5, 6, 7, note="quick")
    assert recover(engine) == ResumeReport(resumed=1)
    assert ran == [("k", 5, (6, 7), "quick", 2)]
    assert engine.do(ship, "k", 5, 6, 7, note="quick") == 5
    assert len(ran) == 1
    assert recover(engine) == ResumeReport()


@dataclass
class Order:
    id: str
    lines: tuple[str, ...]


def test_typed_arguments_come_back_as_their_types(engine: Engine) -> None:
    ran: list[Any] = []

    def body(order: Order, express: bool = False) -> None:
        ran.append((order, express))

    engine.once(body, key="order.id", resumable=True)
    begun_elsewhere(engine, Order("k", ("pen", "ink")), express=True)
    assert recover(engine) == ResumeReport(resumed=1)
    assert ran == [(Order("k", ("pen", "ink")), True)]


def test_it_goes_on_after_the_last_finished_step(engine: Engine) -> None:
    did: list[str] = []
    fails = {"book"}

    def work(name: str) -> str:
        if name in fails:
            raise Boom(name)
        did.append(name)
        return name

    def body(key: str) -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", work, "charge")
        yield op.step("book", work, "book")

    ship = engine.once(body, resumable=True)
    with pytest.raises(Boom):
        engine.do(ship, "k")
    fails.clear()
    assert recover(engine) == ResumeReport(resumed=1)
    assert did == ["charge", "book"]


def test_what_still_runs_is_left_alone(engine: Engine) -> None:
    engine.once(lambda key: pytest.fail("it ran twice"), resumable=True)
    claimed = engine.claim_elsewhere()
    payload = engine.guard.resumable["op"].input(("k",), {})
    blob = Codec().seal(Kind.VALUE, PLAIN.name, payload, identity("", "op", "k"))
    assert engine.execute(SaveStep(identity("", "op", "k"), claimed.token, INPUT, blob, 0))
    assert recover(engine) == ResumeReport()


def test_the_recover_hook_is_asked_first(engine: Engine) -> None:
    ran: list[str] = []
    words: list[Any] = [Recovered("found"), NOT_DONE]
    ship = engine.once(lambda key: ran.append(key) or "ran", resumable=True, recover=lambda key: words.pop(0))
    for key in ("a", "b"):
        begun_elsewhere(engine, key, key=key)
        assert recover(engine) == ResumeReport(resumed=1)
    assert [engine.do(ship, "a"), engine.do(ship, "b")] == ["found", "ran"]
    assert ran == ["b"]


def test_a_resumer_begins_nothing(engine: Engine) -> None:
    """Between its look and its claim the operation failed and was let go: what its caller was told must stay true."""
    ran: list[str] = []
    engine.once(noting(ran), resumable=True)
    begun_elsewhere(engine, "k")
    with between_look_and_claim(engine) as recovery:
        engine.do(engine.guard.release, "op", "k")
    assert recovery.result(PATIENCE) == ResumeReport(elsewhere=1)
    assert ran == []
    assert engine.record() is None


def test_other_functions_are_not_resumed(engine: Engine) -> None:
    ran: list[str] = []
    ship = engine.once(noting(ran), resumable=True)
    other = engine.once(lambda key: None, operation="other", resumable=True)
    begun_elsewhere(engine, "k")
    assert recover(engine, [other]) == ResumeReport()
    assert recover(engine, [ship, other]) == ResumeReport(resumed=1)
    with pytest.raises(PolicyError, match="is not resumable: decorate it"):
        resumer(engine, [engine.once(lambda key: None, operation="third")])


def test_what_is_done_is_cleared_away_and_small_pages_find_all(engine: Engine) -> None:
    ran: list[str] = []
    ship = engine.once(noting(ran), resumable=True)
    for at in range(6):
        begun_elsewhere(engine, f"k{at}", key=f"k{at}")
        engine.do(ship, f"done{at}")
    ran.clear()
    assert recover(engine, limit=2) == ResumeReport(resumed=6)
    assert sorted(ran) == [f"k{at}" for at in range(6)]
    assert recover(engine, limit=2) == ResumeReport()
    engine.script.ops.clear()
    assert recover(engine, limit=2) == ResumeReport()
    assert engine.script.kinds == ["Resumable", "Resumable"], "inputs of what is done are still looked through"


# What fails


def failing(engine: Engine, **settings: Any) -> list[int]:
    attempts: list[int] = []

    def body(key: str) -> None:
        attempts.append(current_operation().attempt)  # type: ignore[union-attr]
        raise Boom("again")

    engine.once(body, resumable=True, **settings)
    begun_elsewhere(engine, "k")
    return attempts


def test_one_that_fails_rests_longer_and_longer_and_is_given_up(engine: Engine) -> None:
    attempts = failing(engine)
    rounds = []
    for _ in range(40):
        rounds.append(recover(engine, tries=4, pause=10))
        engine.clock.advance(5)
    assert attempts == [2, 3, 4]
    assert sum(each.failed for each in rounds) == 3
    assert rounds[0].failed == 1
    assert [each.resting for each in rounds[1:8]] == [1, 0, 1, 1, 1, 1, 1], (
        "10 s after the second, 30 s after the third"
    )
    assert rounds[-1] == ResumeReport(given_up=1)
    record = engine.record()
    assert record is not None
    assert (record.state, record.attempt) == (State.ABANDONED, 4)
    failures = [event for event in engine.events if event.name == "recovery_failed"]
    assert [event.attempt for event in failures] == [2, 3, 4]  # type: ignore[attr-defined]
    assert "Boom('again')" in str(failures[0])


def test_giving_up_is_told_once_by_each_resumer(engine: Engine) -> None:
    failing(engine)
    one = resumer(engine, tries=1)
    for _ in range(3):
        assert engine.do(one.resume) == ResumeReport(given_up=1)
    assert engine.names().count("recovery_given_up") == 1
    recover(engine, tries=1)
    assert engine.names().count("recovery_given_up") == 2


def test_a_poisoned_one_does_not_keep_the_others_from_it(engine: Engine) -> None:
    ran: list[str] = []

    def body(key: str) -> None:
        if key == "poison":
            raise StoreUnavailable("not our store")
        ran.append(key)

    engine.once(body, resumable=True)
    for key in ("a", "poison", "b"):
        begun_elsewhere(engine, key, key=key)
    assert recover(engine) == ResumeReport(resumed=2, failed=1)
    assert sorted(ran) == ["a", "b"]


def test_a_failure_that_is_an_answer_ends_it(engine: Engine) -> None:
    attempts = failing(engine, remember_errors=Boom)
    assert recover(engine) == ResumeReport(failed=1)
    assert recover(engine) == ResumeReport()
    assert attempts == [2]
    record = engine.record()
    assert record is not None
    assert record.state is State.DONE


def test_an_input_of_an_older_program_is_not_guessed_at(engine: Engine) -> None:
    engine.once(lambda key, colour: None, resumable=True)
    begun_elsewhere(engine, "k", "red")
    engine.once(lambda key: pytest.fail("it ran without its argument"), resumable=True)
    assert recover(engine) == ResumeReport(failed=1)
    assert "called with colour, which it no longer takes" in str(engine.events[-1])
    engine.once(lambda key, colour, size: pytest.fail("it ran with too few"), resumable=True)
    assert recover(engine) == ResumeReport(failed=1)
    assert "takes other arguments now" in str(engine.events[-1])


def test_a_key_that_does_not_follow_from_the_arguments_is_not_run_under_another(engine: Engine) -> None:
    keys = iter(["k", "elsewhere"])
    engine.once(lambda order: pytest.fail("it ran under another key"), key=lambda order: next(keys), resumable=True)
    next(keys)
    begun_elsewhere(engine, "o")
    assert recover(engine) == ResumeReport(failed=1)
    assert "make another key or tenant" in str(engine.events[-1])


def test_a_quota_does_not_stand_in_the_way(quick_engine: Engine) -> None:
    from semel import Quota

    guard = quick_engine.new_guard(quota=Quota(live_keys=1))
    ran: list[str] = []
    quick_engine.once(noting(ran), resumable=True)
    begun_elsewhere(quick_engine, "k")
    quick_engine.once(noting(ran), guard=guard, resumable=True)
    quick_engine.script.ops.clear()
    assert recover(quick_engine, guard=guard) == ResumeReport(resumed=1)
    assert "Count" not in quick_engine.script.kinds, "its key was counted when it was new"


def test_a_resumer_does_not_wait_for_one_that_runs(engine: Engine) -> None:
    """It came between the look and the claim: the next one is more useful than waiting."""
    from semel import Wait

    engine.once(lambda key: pytest.fail("it ran twice"), resumable=True, on_duplicate=Wait("1h"))
    begun_elsewhere(engine, "k")
    with between_look_and_claim(engine) as recovery:
        engine.claim_elsewhere(nonce=7)
    assert recovery.result(PATIENCE) == ResumeReport(elsewhere=1)


# In the background


def test_it_works_in_the_background_until_it_is_stopped(engine: Engine) -> None:
    ran = threading.Semaphore(0)
    engine.once(lambda key: ran.release(), resumable=True)
    begun_elsewhere(engine, "a", key="a")
    one = resumer(engine, every=0.02)

    async def start() -> None:
        one.start()
        one.start()

    engine.do(start) if engine.is_async else (one.start(), one.start())
    assert ran.acquire(timeout=PATIENCE)
    begun_elsewhere(engine, "b", key="b")
    assert ran.acquire(timeout=PATIENCE), "a later one was not found"
    engine.do(one.stop)
    engine.do(one.stop)
    begun_elsewhere(engine, "c", key="c")
    assert not ran.acquire(timeout=0.1)


def test_a_store_that_fails_does_not_end_it(engine: Engine) -> None:
    ran = threading.Semaphore(0)
    engine.once(lambda key: ran.release(), resumable=True)
    begun_elsewhere(engine, "k")
    engine.script.on(Resumable, before=StoreUnavailable("down"))
    one = resumer(engine, every=0.02)

    async def start() -> None:
        one.start()

    engine.do(start) if engine.is_async else one.start()
    assert ran.acquire(timeout=PATIENCE)
    engine.do(one.stop)
    assert "store_failed" in engine.names()


def test_stopping_waits_for_the_one_in_hand_and_begins_no_other(quick_engine: Engine) -> None:
    if quick_engine.is_async:
        pytest.skip("below")
    begun, go_on, ran = threading.Event(), threading.Event(), []

    def body(key: str) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        ran.append(key)

    quick_engine.once(body, resumable=True)
    for key in ("a", "b"):
        begun_elsewhere(quick_engine, key, key=key)
    with Resumer(quick_engine.guard, every=0.02) as one:
        assert begun.wait(PATIENCE)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(one.stop)
            while not one._background.stopping.is_set():
                time.sleep(0.001)
            go_on.set()
            stopping.result(PATIENCE)
    assert len(ran) == 1


def test_an_async_resumer_is_a_context_and_stops_what_takes_too_long() -> None:
    from semel import AsyncMemoryStore

    async def main() -> None:
        now = [0.0]
        guard = AsyncSemel(AsyncMemoryStore(clock=lambda: now[0]), sweep_every=None)
        begun = asyncio.Event()

        @guard.once(key="key", operation="op", resumable=True)
        async def ship(key: str) -> None:
            begun.set()
            await asyncio.sleep(PATIENCE)

        first = asyncio.create_task(ship("k"))
        await begun.wait()
        begun.clear()
        now[0] += 31  # its lease ends without a renewal
        async with AsyncResumer(guard, every=0.02) as one:
            other = AsyncSemel(guard.store, sweep_every=None)
            other.resumable = guard.resumable
            second = AsyncResumer(other, every=0.02)
            second.start()
            await asyncio.wait_for(begun.wait(), PATIENCE)
            await second.stop(timeout=0.01)
            assert one is not None
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(main())


def test_several_resumers_share_the_work() -> None:
    """Each begins at a place of its own, and the claim decides: everything is done once."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    ran: list[str] = []
    together = threading.Barrier(4)

    def made() -> Semel:
        guard = Semel(store, sweep_every=None)
        guard.once(key="key", operation="op", resumable=True)(noting(ran))
        return guard

    first = made()
    for at in range(40):
        id = identity("", "op", f"k{at}")
        claimed = store.execute(Claim(id, at, b"", 1.0, 1e6, Takeover.RETRY, "", "op", f"k{at}"))
        assert isinstance(claimed, Claimed)
        payload = first.resumable["op"].input((f"k{at}",), {}) or b""
        store.execute(SaveStep(id, claimed.token, INPUT, Codec().seal(Kind.VALUE, PLAIN.name, payload, id), 0))
    now[0] = 10.0

    def work() -> ResumeReport:
        together.wait(PATIENCE)
        return Resumer(made(), limit=5).resume()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rounds = [each.result(PATIENCE) for each in [pool.submit(work) for _ in range(4)]]
    assert sorted(ran) == sorted(f"k{at}" for at in range(40))
    assert sum(each.resumed for each in rounds) == 40


# Set-up


def test_a_store_that_cannot_list_is_refused() -> None:
    class Plain:
        wakes = counts = resumes = lists = trails = False
        adopt = accept = None

        def execute(self, op: Any) -> Any: ...

        execute_many = wait = open = close = execute

    with pytest.raises(ConfigurationError, match="Plain does not: use MemoryStore"):
        Resumer(Semel(Plain(), sweep_every=None))  # type: ignore[arg-type]


def test_async_functions_of_a_sync_guard_are_refused() -> None:
    guard = Semel(MemoryStore(), sweep_every=None)

    @guard.once(key="key", operation="op", resumable=True)
    async def ship(key: str) -> None: ...

    with pytest.raises(PolicyError, match="op is async: use an AsyncSemel"):
        Resumer(guard).resume()


@pytest.mark.parametrize("settings", [{"every": 0}, {"limit": 0}, {"tries": 0}, {"every": "soon"}, {"pause": -1}])
def test_settings_are_checked(settings: Any) -> None:
    with pytest.raises(PolicyError):
        Resumer(Semel(MemoryStore(), sweep_every=None), **settings)


def test_an_unreadable_input_is_an_error_of_that_one_alone(quick_engine: Engine) -> None:
    quick_engine.once(lambda key: None, resumable=True)
    claimed = quick_engine.claim_elsewhere()
    id = identity("", "op", "k")
    assert quick_engine.execute(SaveStep(id, claimed.token, INPUT, b"\xff garbage", 0))
    quick_engine.clock.advance(31)
    assert recover(quick_engine) == ResumeReport(failed=1)
    assert SnapshotUnreadable.__name__ in str(quick_engine.events[-1])


# One round


def rounds_over(ids: list[bytes], start: bytes, limit: int) -> list[bytes]:
    """Which ids a round resumes, in which order."""
    steps = ResumePlan(limit, 10, 1.0, lambda event: None).round(("op",), start, lambda: False)
    seen: list[bytes] = []
    answer: Any = None
    try:
        while True:
            request = steps.send(answer)
            if isinstance(request, Resumable):
                page = sorted(id for id in ids if id > request.after)[: request.limit]
                records = [Record(id, State.ABANDONED, 1, 1, b"", None, -1.0, 1.0, 1.0) for id in page]
                last = page[-1] if len(page) == request.limit else None
                answer = Page(tuple(Abandoned(record, b"") for record in records), last)
            else:
                assert isinstance(request, Abandoned)
                seen.append(request.record.id)
                answer = Outcome(None, False, 2)
    except StopIteration as stop:
        recovery: ResumeReport = stop.value
    assert recovery.resumed == len(seen)
    return seen


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("start", [b"", b"\x00", b"b", b"bb", b"d", b"zz"])
def test_a_round_sees_each_once_from_its_own_place_on(start: bytes, limit: int) -> None:
    ids = [b"a", b"b", b"c", b"d"]
    seen = rounds_over(ids, start, limit)
    assert sorted(seen) == ids
    assert seen == [id for id in ids if id > start] + [id for id in ids if id <= start]


@pytest.mark.parametrize("how", ["sealed", "clear", "other entry"])
def test_with_a_cipher_only_arguments_that_were_sealed_as_such_are_resumed(quick_engine: Engine, how: str) -> None:
    pytest.importorskip("cryptography")
    sealing = Codec(KeyRing({"k1": bytes(32)}))
    guard = quick_engine.new_guard(codec=sealing)
    ran: list[str] = []
    quick_engine.once(noting(ran), guard=guard, resumable=True)
    claimed = quick_engine.claim_elsewhere()
    payload = guard.resumable["op"].input(("k",), {})
    codec = Codec() if how == "clear" else sealing
    entry = "~step:charge" if how == "other entry" else INPUT
    blob = codec.seal(Kind.VALUE, PLAIN.name, payload, identity("", "op", "k"), entry)
    assert quick_engine.execute(SaveStep(identity("", "op", "k"), claimed.token, INPUT, blob, 0))
    quick_engine.clock.advance(31)
    report = recover(quick_engine, guard=guard)
    assert (report.resumed, report.failed, ran) == ((1, 0, ["k"]) if how == "sealed" else (0, 1, []))
