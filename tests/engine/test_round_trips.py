"""Round trips: what a call costs, counted in Ops at the store. Nothing here looks at a clock."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from semel import InProgress, StoreUnavailable, Wait
from semel.core.keys import identity
from semel.core.ops import Claim, Complete, Renew
from tests.engine.driving import Engine
from tests.engine.scripted import Gate
from tests.engine.test_claiming import until_waiting

STORM = 50
ID = identity("", "op", "k")


def test_a_first_execution_is_claim_and_complete(engine: Engine) -> None:
    engine.run(lambda: 1)
    assert engine.script.kinds == ["Claim", "Complete"]
    assert engine.script.batches == []


def test_a_replay_is_one_claim(engine: Engine) -> None:
    engine.run(lambda: 1)
    engine.script.forget()
    engine.run(lambda: 1)
    assert engine.script.kinds == ["Claim"]


def test_a_decorated_function_costs_the_same(engine: Engine) -> None:
    def body(key: str, amount: int = 0) -> int:
        return amount

    ship = engine.once(body)
    engine.do(ship, "k", amount=3)
    engine.do(ship, "k", amount=3)
    assert engine.script.kinds == ["Claim", "Complete", "Claim"]


def test_a_failure_is_claim_and_release(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda: 1 // 0)
    assert engine.script.kinds == ["Claim", "Release"]


def test_a_short_handler_sends_no_renewal(engine: Engine) -> None:
    for i in range(20):
        engine.run(lambda: None, key=f"k{i}")
    assert engine.script.count(Renew) == 0


def storm(engine: Engine, count: int, **settings: Any) -> "list[Future[Any]]":
    call = engine.function(settings.pop("body"))
    return [engine.start(engine.guard.run, "op", key="k", call=call, **settings) for _ in range(count)]


def test_a_storm_on_a_new_key_runs_once_and_asks_the_store_once(engine: Engine) -> None:
    """50 calls at once with one key: 1 execution, 2 Ops; the other 49 learn from the first that it runs."""
    ran: list[int] = []
    held, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        ran.append(1)
        yield finish
        return "answer"

    claiming = engine.script.on(Claim, hold_before=held)
    first = engine.start_run(body)
    claiming.seen.wait()
    others = storm(engine, STORM - 1, body=body)
    until_waiting(engine.guard, STORM - 1)
    held.open()
    for other in others:
        with pytest.raises(InProgress):
            other.result(20)
    finish.open()
    assert first.result(20) == "answer"
    assert ran == [1]
    assert engine.script.kinds == ["Claim", "Complete"]


def test_a_storm_that_waits_gets_one_answer_for_three_ops(engine: Engine) -> None:
    """50 calls at once that wait: Claim and Complete of the winner, and one Claim that the 49 others share."""
    ran: list[int] = []
    inside, finish, held = Gate(), Gate(), Gate()

    def body() -> Iterator[Any]:
        ran.append(1)
        inside.open()
        yield finish
        return "answer"

    first = engine.start_run(body)
    inside.wait()
    others = storm(engine, STORM - 1, body=body, on_duplicate=Wait("20s"))
    until_waiting(engine.guard, STORM - 1)
    asking = engine.script.on(Claim, hold_before=held)
    finish.open()
    asking.seen.wait()
    until_waiting(engine.guard, STORM - 2)
    held.open()
    assert [future.result(20) for future in [first, *others]] == ["answer"] * STORM
    assert ran == [1]
    assert engine.script.kinds == ["Claim", "Complete", "Claim"]


def test_replays_that_come_together_share_one_claim(engine: Engine) -> None:
    engine.run(lambda: "answer")
    engine.script.forget()
    held = Gate()
    asking = engine.script.on(Claim, hold_before=held)
    first = engine.start_run(lambda: None)
    asking.seen.wait()
    others = storm(engine, STORM - 1, body=lambda: None)
    until_waiting(engine.guard, STORM - 1)
    held.open()
    assert [future.result(20) for future in [first, *others]] == ["answer"] * STORM
    assert engine.script.kinds == ["Claim"]


def test_a_storm_on_a_dead_store_fails_together(engine: Engine) -> None:
    """If each in turn asked a store that does not answer, the last of 50 would wait 50 time-outs."""
    held = Gate()
    asking = engine.script.on(Claim, hold_before=held, before=StoreUnavailable("down"), times=STORM)
    first = engine.start_run(lambda: None)
    asking.seen.wait()
    others = storm(engine, STORM - 1, body=lambda: None)
    until_waiting(engine.guard, STORM - 1)
    held.open()
    for future in [first, *others]:
        with pytest.raises(StoreUnavailable):
            future.result(20)
    assert engine.script.count(Claim) <= 3


def test_calls_with_different_keys_do_not_wait_for_each_other(engine: Engine) -> None:
    held = Gate()
    asking = engine.script.on(Claim, hold_before=held)
    slow = engine.start_run(lambda: "slow", key="slow")
    asking.seen.wait()
    assert engine.run(lambda: "quick", key="quick") == "quick"
    held.open()
    assert slow.result(20) == "slow"


def test_nothing_is_kept_in_the_process_once_all_calls_are_over(engine: Engine) -> None:
    engine.run(lambda: 1)
    engine.run(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda: 1 // 0, key="other")
    assert engine.guard.driver.flights.by_id == {}
    assert len(engine.guard.driver.keeper.leases) == 0


def test_a_storm_over_many_keys_runs_each_once(engine: Engine) -> None:
    ran: list[int] = []
    lock = threading.Lock()

    def body(key: int) -> int:
        with lock:
            ran.append(key)
        return key

    ship = engine.once(body, on_duplicate=Wait("20s"))
    futures = [engine.start(ship, i % 20) for i in range(60)]
    assert sorted(future.result(20) for future in futures) == sorted(i % 20 for i in range(60))
    assert sorted(ran) == list(range(20))
    assert engine.script.count(Complete) == 20
