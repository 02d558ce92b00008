"""A first attempt runs without a flow, until something unusual happens. It must end as the flow would end it.

Each history is run by two guards. One of them never takes the short cut: its calls have a flow from the claim on.
What the caller gets, what the store is sent, what it holds, what hooks are told, and what the next caller gets must be
the same.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel, StoreUnavailable
from semel.core.ops import Claim, Complete
from semel.engine.drive import aio_driver, backlog, driver
from semel.errors import StoreUncertain
from semel.observe.events import Event

HANDLERS = ("returns", "raises", "returns what cannot be stored", "is cancelled", "loses its lease")
TROUBLES = (
    "none",
    "fails before",
    "fails for good",
    "its answer is lost",
    "its answer is lost twice",
    "is refused",
    "is cancelled before",
    "is cancelled after",
    "is cancelled, and fails then",
    "is cancelled, and is refused then",
)
NEXT = {"is cancelled, and fails then": "fails for good", "is cancelled, and is refused then": "is refused"}


@pytest.fixture(autouse=True)
def nothing_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a guard does in the background would come between at any time. When it is closed, it tries once."""
    monkeypatch.setattr(backlog, "FIRST_PAUSE", 60.0)


class Error(Exception):
    pass


class Moody:
    """Fails at claims and completions as it is told to."""

    def __init__(self, claim: str, complete: str) -> None:
        self.moods = {Claim: claim, Complete: complete}
        self.sent: list[Any] = []

    def before(self, op: Any) -> None:
        self.sent.append(type(op).__name__)
        mood = self.moods.get(type(op), "none")
        if mood == "fails before":
            self.moods[type(op)] = "none"
        if mood in ("fails before", "fails for good"):
            raise StoreUnavailable("away")
        if mood == "is cancelled before" or mood in NEXT:
            self.moods[type(op)] = NEXT.get(mood, "none")
            raise asyncio.CancelledError

    def after(self, op: Any, answer: Any) -> Any:
        mood = self.moods.get(type(op), "none")
        if mood == "is refused" and isinstance(op, Complete):
            return False
        if mood == "its answer is lost twice":
            self.moods[type(op)] = "its answer is lost"
            raise StoreUncertain("lost")
        if mood == "its answer is lost":
            self.moods[type(op)] = "none"
            raise StoreUncertain("lost")
        if mood == "is cancelled after":
            self.moods[type(op)] = "none"
            raise asyncio.CancelledError
        return answer


class MoodyStore(MemoryStore):
    def __init__(self, mood: Moody) -> None:
        super().__init__(clock=lambda: 1000.0)
        self.mood = mood

    def execute(self, op: Any) -> Any:
        self.mood.before(op)
        return self.mood.after(op, super().execute(op))


class AsyncMoodyStore(AsyncMemoryStore):
    def __init__(self, mood: Moody) -> None:
        super().__init__(clock=lambda: 1000.0)
        self.mood = mood

    async def execute(self, op: Any) -> Any:
        self.mood.before(op)
        return self.mood.after(op, await super().execute(op))


def behave(how: str, handle: Any) -> Any:
    if how == "raises":
        raise Error("no")
    if how == "is cancelled":
        raise asyncio.CancelledError
    if how == "loses its lease":
        handle._lease.lost = True
    return object() if how == "returns what cannot be stored" else {"a": 1}


def histories(*, cancels: bool) -> Iterator[tuple[str, str]]:
    """The moods of the store at the claim and at the completion."""
    moods = [trouble for trouble in TROUBLES if cancels or "cancelled" not in trouble]
    return product((mood for mood in moods if "refused" not in mood), moods)


def run(how: str, claim: str, complete: str, events: bool = False) -> list[Any]:
    """Run a call, and a second one with its key. Return all that can be seen."""
    mood = Moody(claim, complete)
    store = MoodyStore(mood)
    seen: list[Any] = []
    runs: list[int] = []
    told: list[Any] = []
    note = (lambda event: told.append(untimed(event))) if events else None

    def handler(handle: Any) -> Any:
        runs.append(handle.attempt)
        return behave(how, handle)

    with Semel(store, sweep_every=None, on_event=note) as guard:
        for _ in range(2):
            try:
                outcome = guard.run_outcome(
                    "pay", key="k", call=handler, on_store_error="open", completion_timeout="30ms"
                )
                seen.append((type(outcome.value), outcome.replayed, outcome.attempt, outcome.stored))
            except BaseException as error:
                seen.append((type(error), str(error)))
            mood.moods.clear()
            how = "returns"
            seen.append((len(guard.driver.keeper.leases), len(guard.driver.flights.by_id)))
    return [*seen, runs, mood.sent, held(store), told]


async def run_async(how: str, claim: str, complete: str, events: bool = False) -> list[Any]:
    mood = Moody(claim, complete)
    store = AsyncMoodyStore(mood)
    seen: list[Any] = []
    runs: list[int] = []
    told: list[Any] = []
    note = (lambda event: told.append(untimed(event))) if events else None

    async def handler(handle: Any) -> Any:
        runs.append(handle.attempt)
        return behave(how, handle)

    async with AsyncSemel(store, sweep_every=None, on_event=note) as guard:
        for _ in range(2):
            try:
                outcome = await guard.run_outcome(
                    "pay", key="k", call=handler, on_store_error="open", completion_timeout="30ms"
                )
                seen.append((type(outcome.value), outcome.replayed, outcome.attempt, outcome.stored))
            except BaseException as error:
                seen.append((type(error), str(error)))
            mood.moods.clear()
            how = "returns"
            seen.append((len(guard.driver.keeper.leases), len(guard.driver.flights.by_id)))
    return [*seen, runs, mood.sent, held(store), told]


def untimed(event: Event) -> tuple[str, list[Any]]:
    return event.name, [getattr(event, each.name) for each in fields(event) if "seconds" not in each.name]


def held(store: Any) -> list[Any]:
    return [(row.state, row.attempt, row.snapshot) for row in store._records.rows.values()]


@pytest.mark.parametrize("how", [how for how in HANDLERS if how != "is cancelled"])
def test_a_thread_ends_an_attempt_as_the_flow_does(how: str) -> None:
    for (claim, complete), events in product(histories(cancels=False), (False, True)):
        with patch.object(driver, "begins_plainly", return_value=False):
            expected = run(how, claim, complete, events)
        assert run(how, claim, complete, events) == expected, (claim, complete)


@pytest.mark.slow
@pytest.mark.parametrize("how", HANDLERS)
def test_a_task_ends_an_attempt_as_the_flow_does(how: str) -> None:
    for (claim, complete), events in product(histories(cancels=True), (False, True)):
        with patch.object(aio_driver, "begins_plainly", return_value=False):
            expected = asyncio.run(run_async(how, claim, complete, events))
        assert asyncio.run(run_async(how, claim, complete, events)) == expected, (claim, complete)


@pytest.mark.parametrize("made", [driver, aio_driver])
def test_a_plain_call_has_no_flow(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flow(call: Any) -> Any:
        raise AssertionError("a flow was made")

    monkeypatch.setattr("semel.engine.drive.execution.perform", no_flow)
    if made is driver:
        assert run("returns", "none", "none")[0] == (dict, False, 1, True)
    else:
        assert asyncio.run(run_async("returns", "none", "none"))[0] == (dict, False, 1, True)
