"""A step on the caller's connection: its rows and its mark commit together, or neither is there."""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from semel import ConfigurationError, MemoryStore, Policy, PolicyError, Semel, SQLiteStore, State, current_operation
from semel.errors import LeaseLost, StoreUnavailable
from semel.observe.events import Event, Renewed
from semel.testing.crashpoints import crash_everywhere
from tests.transactional import phases
from tests.transactional.kinds import AsyncTill, Till
from tests.transactional.marked import MARKED, SOME

Body = Callable[[Any], Coroutine[Any, Any, Any]]


class Boom(Exception):
    pass


async def answer(given: Any) -> Any:
    """What a call gave, awaited where it has to be: so that a test is written once for both engines."""
    return await given if inspect.isawaitable(given) else given


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Run what waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a sync till made something wait")


@asynccontextmanager
async def transaction(till: Till | AsyncTill) -> AsyncIterator[None]:
    if isinstance(till, AsyncTill):
        async with till.transaction():
            yield
    else:
        with till.transaction():
            yield


def ship(till: Till | AsyncTill, key: str, body: Body, **settings: Any) -> Any:
    """Run the body as the handler of an operation."""
    if isinstance(till, AsyncTill):
        return till.run(lambda: till.guard.run("ship", key=key, call=lambda: body(current_operation()), **settings))
    return till.guard.run("ship", key=key, call=lambda: at_once(body(current_operation())), **settings)


def record(till: Till | AsyncTill, key: str) -> Any:
    return till.run(lambda: till.guard.lookup("ship", key))


def reserving(till: Till | AsyncTill, key: str, runs: list[str]) -> Callable[[], Awaitable[str] | str]:
    def sync() -> str:
        runs.append(key)
        till.send(f"INSERT INTO payment (key) VALUES ('{key}')")
        return f"row of {key}"

    async def awaited() -> str:
        runs.append(key)
        await till.send(f"INSERT INTO payment (key) VALUES ('{key}')")
        return f"row of {key}"

    return awaited if isinstance(till, AsyncTill) else sync


@pytest.fixture(params=SOME)
def kind(request: pytest.FixtureRequest) -> str:
    """The first test is run on every kind of connection, the others on some."""
    return str(request.param)


@pytest.mark.parametrize("kind", MARKED, indirect=True)
def test_rows_and_mark_commit_together_and_a_later_attempt_goes_on_after_them(open_till: Callable[..., Any]) -> None:
    till = open_till()
    runs: list[str] = []
    reserve = reserving(till, "k1", runs)
    failing = [Boom("the carrier is down")]

    async def body(op: Any) -> Any:
        async with transaction(till):
            got = await answer(op.step("reserve", reserve, connection=till.conn))
        if failing:
            raise failing.pop()
        return [got, op.attempt]

    with pytest.raises(Boom):
        ship(till, "k1", body)
    assert ship(till, "k1", body) == ["row of k1", 2]
    assert runs == ["k1"], "what is committed is not done again"
    assert till.rows() == ["k1"]
    assert ship(till, "k1", body) == ["row of k1", 2]


def test_what_is_rolled_back_may_be_asked_for_again_in_the_same_run(open_till: Callable[..., Any]) -> None:
    till = open_till()
    runs: list[str] = []
    reserve = reserving(till, "k1", runs)

    async def body(op: Any) -> Any:
        with contextlib.suppress(Boom):
            async with transaction(till):
                await answer(op.step("reserve", reserve, connection=till.conn))
                raise Boom
        async with transaction(till):
            got = await answer(op.step("reserve", reserve, connection=till.conn))
        with pytest.raises(PolicyError, match="is used twice: each step needs its own name"):  # this time it is done
            async with transaction(till):
                await answer(op.step("reserve", reserve, connection=till.conn))
        return got

    assert ship(till, "k1", body) == "row of k1"
    assert runs == ["k1", "k1"]
    assert till.rows() == ["k1"]


def test_twice_in_one_transaction_is_refused_before_it_runs(open_till: Callable[..., Any]) -> None:
    till = open_till()
    runs: list[str] = []
    reserve = reserving(till, "k1", runs)

    async def body(op: Any) -> None:
        async with transaction(till):
            await answer(op.step("reserve", reserve, connection=till.conn))
            await answer(op.step("book", reserving(till, "k2", runs), connection=till.conn))
            with pytest.raises(PolicyError, match="is used twice: each step needs its own name"):
                await answer(op.step("reserve", reserve, connection=till.conn))

    ship(till, "k1", body)
    assert runs == ["k1", "k2"]
    assert till.rows() == ["k1", "k2"]


def test_after_a_rollback_nothing_is_left_and_the_key_is_free(open_till: Callable[..., Any]) -> None:
    till = open_till(policy=Policy(on_abandoned="reject"))
    undone: list[str] = []
    runs: list[str] = []
    reserve = reserving(till, "k1", runs)
    failing = [Boom()]

    async def body(op: Any) -> int:
        async with transaction(till):
            await answer(op.step("reserve", reserve, connection=till.conn, undo=undone.append))
            if failing:
                raise failing.pop()
        return int(op.attempt)

    with pytest.raises(Boom):
        ship(till, "k1", body)
    assert undone == [], "nothing was done, so there is nothing to undo"
    assert record(till, "k1") is None
    assert till.rows() == []
    assert ship(till, "k1", body) == 1


def test_what_was_committed_is_undone_when_the_operation_fails_later(open_till: Callable[..., Any]) -> None:
    till = open_till()
    undone: list[str] = []
    reserve = reserving(till, "k1", [])

    async def body(op: Any) -> None:
        async with transaction(till):
            await answer(op.step("reserve", reserve, connection=till.conn, undo=undone.append))
        raise Boom

    with pytest.raises(Boom):
        ship(till, "k1", body)
    assert undone == ["row of k1"]
    assert record(till, "k1") is None


def test_an_owner_that_was_replaced_commits_nothing(open_till: Callable[..., Any]) -> None:
    till = open_till()

    async def body(op: Any) -> None:
        await answer(till.guard.release("ship", "k1", force=True))
        async with transaction(till):
            await answer(op.step("reserve", reserving(till, "k1", []), connection=till.conn))

    with pytest.raises(LeaseLost, match="before 'reserve' was saved"):
        ship(till, "k1", body, completion_timeout="20ms")
    assert till.rows() == []


def test_in_the_transactional_mode_a_step_is_part_of_the_transaction_already(open_till: Callable[..., Any]) -> None:
    till = open_till()
    if isinstance(till, AsyncTill):
        return

    def work(op: Any) -> str:
        return str(op.step("reserve", reserving(till, "k1", []), connection=till.conn))

    assert till.pay("k1", call=work, insert=False).value == "row of k1"
    assert till.rows() == ["k1"]


# Where there is no transaction to write it in


def test_without_an_open_transaction_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    runs: list[int] = []
    with Semel(phases.store(str(path)), sweep_every=None) as guard:
        conn = sqlite3.connect(path, isolation_level=None)

        def work() -> None:
            op: Any = current_operation()
            op.step("reserve", lambda: runs.append(1), connection=conn)

        with pytest.raises(ConfigurationError, match="no transaction is open"):
            guard.run("ship", key="k", call=work)
        conn.close()
        assert runs == []
        assert guard.lookup("ship", "k") is None


def test_a_store_without_transactions_says_so() -> None:
    def work() -> None:
        op: Any = current_operation()
        op.step("reserve", lambda: None, connection=object())

    with Semel(MemoryStore()) as guard, pytest.raises(ConfigurationError, match="MemoryStore is in none"):
        guard.run("ship", key="k", call=work)


def test_what_waits_for_the_open_transaction_says_so(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with Semel(SQLiteStore(path, busy_timeout="50ms"), sweep_every=None) as guard:
        conn = sqlite3.connect(path)

        def work() -> str:
            op: Any = current_operation()
            with conn:
                op.step("reserve", lambda: "pen", connection=conn)
                with pytest.raises(StoreUnavailable) as refused:
                    op.capture("id", lambda: "value")
            return str(refused.value.__notes__)

        assert "commit it before you store anything else" in guard.run("ship", key="k", call=work)
        conn.close()


# The lease


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite3", pytest.param("psycopg", marks=pytest.mark.postgres)], indirect=True)
def test_a_renewal_that_waits_for_the_transaction_does_not_lose_the_lease(open_till: Callable[..., Any]) -> None:
    """The renewal falls due while the record is held by the caller's transaction, and gets through after its end."""
    seen: list[Event] = []
    asked: list[Any] = []
    till = open_till(on_event=seen.append)
    through = till.guard.store.execute_many

    def execute_many(ops: Any) -> Any:
        asked.append(ops)
        return through(ops)

    till.guard.store.execute_many = execute_many

    def work() -> int:
        op: Any = current_operation()
        with till.transaction():
            op.step("reserve", reserving(till, "k1", []), connection=till.conn)
            phases.until(lambda: asked, "no renewal was sent")
            assert not [event for event in seen if isinstance(event, Renewed)], "it cannot have got through"
        phases.until(lambda: [event for event in seen if isinstance(event, Renewed)], "the renewal did not get through")
        assert not op.lease_lost
        return int(op.attempt)

    assert till.guard.run("ship", key="k1", call=work, lease="3s") == 1
    assert till.guard.lookup("ship", "k1").state is State.DONE
    assert till.rows() == ["k1"]


@pytest.mark.parametrize("kind", ["sqlite3"], indirect=True)
def test_a_lease_that_may_have_to_wait_is_renewed_after_the_others(open_till: Callable[..., Any]) -> None:
    """In one trip the renewals of all would wait for the transaction of one."""
    trips: list[list[bytes]] = []
    till = open_till()
    through = till.guard.store.execute_many

    def execute_many(ops: Any) -> Any:
        trips.append([op.id for op in ops])
        return through(ops)

    till.guard.store.execute_many = execute_many

    def other(ship: Any) -> bytes:
        mine: Any = current_operation()
        phases.until(lambda: [ship.id] in trips and [mine.id] in trips, "no renewal was sent")
        return bytes(mine.id)

    def work() -> tuple[bytes, bytes]:
        op: Any = current_operation()
        with till.transaction():
            op.step("reserve", reserving(till, "k1", []), connection=till.conn)
        return op.id, till.guard.run("other", key="k2", call=lambda: other(op), lease="1s")

    ship, last = till.guard.run("ship", key="k1", call=work, lease="1s")
    assert trips[:2] == [[last], [ship]]


# Killed


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    "kind",
    [
        "sqlite3",  # in threads
        pytest.param("asyncpg", marks=pytest.mark.postgres),  # in an event loop
    ],
)
def test_killed_at_any_point_each_row_is_there_once(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    where = str(tmp_path / "shop.db") if kind == "sqlite3" else request.getfixturevalue("database")
    worlds = phases.Worlds(kind, where)
    report = crash_everywhere(worlds.make, phases.ship, phases.check)
    assert len(report.points) > 10
