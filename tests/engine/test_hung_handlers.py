"""A handler that hangs in a thread: it cannot be stopped, but it must not hold its key for longer than its lease."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from semel import InProgress, State, Wait, current_operation
from semel.core.ops import Renew
from tests.engine.driving import Engine
from tests.engine.scripted import PATIENCE, Gate

LEASE = 0.2


class Hung:
    """A plain function that hangs under the guard's first call, until it is freed."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        self.inside, self.free, self.lost = Gate(), Gate(), Gate()
        self.runs = 0
        settings = {"key": "key", "operation": "op", "lease": LEASE, **settings}
        self.here = engine.guard.once(**settings)(self.hang)
        """The function under the guard whose handler hangs."""
        self.elsewhere = engine.new_guard().once(**settings)(self.work)
        """The same operation in another process."""
        self.call: Future[Any] = engine.start(self.here, "k")
        self.inside.wait()

    def hang(self, key: str) -> str:
        self.runs += 1
        if self.runs > 1:
            return "second"
        op = current_operation()
        assert op is not None
        self.inside.open()
        pause = threading.Event()
        while not self.free.is_open:
            if op.lease_lost:
                self.lost.open()
            pause.wait(0.002)
        return "too late"

    def work(self, key: str) -> str:
        return "in time"

    def end(self) -> Any:
        self.free.open()
        return self.call.result(PATIENCE)


def test_a_call_after_the_lease_is_lost_asks_the_store(engine: Engine) -> None:
    hung = Hung(engine)
    try:
        with pytest.raises(InProgress):
            engine.do(hung.here, "k")
        release_elsewhere(engine)
        assert engine.do(hung.elsewhere, "k") == "in time"
        hung.lost.wait()
        assert engine.do(hung.here, "k") == "in time"
    finally:
        assert hung.end() == "in time", "the late result is refused, and its caller gets the new owner's"
    assert engine.do(hung.here, "k") == "in time"
    assert hung.runs == 1


def test_a_call_after_the_lease_is_lost_may_take_over(engine: Engine) -> None:
    hung = Hung(engine)
    try:
        release_elsewhere(engine)
        hung.lost.wait()
        assert engine.do(hung.here, "k") == "second"
    finally:
        assert hung.end() == "second"


def test_a_call_that_waits_is_woken_when_the_lease_is_lost(engine: Engine) -> None:
    """It would wait for the hung handler otherwise, and not for what the store knows."""
    hung = Hung(engine, on_duplicate=Wait("60s"), lease="30s")
    try:
        waiting = engine.start(hung.here, "k")
        release_elsewhere(engine)
        assert engine.do(hung.elsewhere, "k") == "in time"
        for lease in list(engine.guard.driver.keeper.leases.held.values()):
            lease.due = 0.0
        look_now(engine)
        assert waiting.result(PATIENCE) == "in time"
    finally:
        hung.end()


def test_a_call_that_comes_while_a_renewal_hangs_asks_the_store(engine: Engine) -> None:
    """The keeper cannot say that the lease is lost while the store does not answer it, but the lease has ended."""
    held = Gate()
    renewing = engine.script.on(Renew, hold_before=held, times=10**6)
    hung = Hung(engine)
    try:
        renewing.seen.wait()
        release_elsewhere(engine)
        assert engine.do(hung.elsewhere, "k") == "in time"
        while True:
            try:
                assert engine.do(hung.here, "k") == "in time"
                break
            except InProgress:  # the lease has not ended yet
                threading.Event().wait(0.01)
    finally:
        held.open()
        hung.end()


def test_many_calls_after_the_lease_is_lost_share_one_claim(quick_engine: Engine) -> None:
    engine = quick_engine
    hung = Hung(engine)
    try:
        release_elsewhere(engine)
        hung.lost.wait()
        calls = [engine.start(hung.here, "k") for _ in range(20)]
        results = {("in progress" if call.exception(PATIENCE) else call.result()) for call in calls}
        assert results <= {"second", "in progress"}
        assert hung.runs == 2
        record = engine.record()
        assert record is not None
        assert record.state is State.DONE
    finally:
        hung.end()


def release_elsewhere(engine: Engine) -> None:
    engine.do(engine.new_guard().release, "op", "k", force=True)
    engine.clock.advance(1)  # the next owner's token is a later one


def look_now(engine: Engine) -> None:
    """Have the keeper look at its leases."""
    keeper = engine.guard.driver.keeper
    if engine.is_async:
        engine.loop.call_soon_threadsafe(keeper._set, 0.0)  # type: ignore[attr-defined]
    else:
        with keeper._condition:
            keeper._condition.notify()
