"""Replay: what came out the first time comes out again, whatever it was; and nothing runs again for its result."""

import dataclasses
import datetime
import decimal
import enum
import json
import pickle
import threading
import uuid
from typing import Any

import pytest

from semel import Codec, KeyReused, PolicyError, RememberedFailure, ResultNotStored, State
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.snapshot import Kind
from semel.core.keys import identity
from semel.core.ops import Complete
from semel.errors import SnapshotUnreadable
from tests.engine.driving import Engine


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Receipt:
    id: uuid.UUID
    total: decimal.Decimal
    at: datetime.datetime


FALSY = [None, False, 0, 0.0, "", b"", [], {}, ()]
PLAIN_DATA = [
    {"b": 1, "a": [1, 2, {"c": None}]}, (1, "two"), b"\x00\xff", 10**40, -0.0, {1: "one"}, {"s"}, "\ud800 \U0001f600",
    uuid.UUID(int=7), decimal.Decimal("1.10"), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
]  # fmt: skip


@pytest.mark.parametrize("result", FALSY + PLAIN_DATA, ids=repr)
def test_a_result_replays_as_it_was_and_does_not_run_again(quick_engine: Engine, result: Any) -> None:
    ran: list[int] = []

    def body() -> Any:
        ran.append(1)
        return result

    first, second = quick_engine.run_outcome(body), quick_engine.run_outcome(body)
    assert first.value == second.value == result
    assert type(second.value) is type(result)
    assert (first.replayed, second.replayed) == (False, True)
    assert ran == [1]


def test_falsy_results_survive_sqlite(engine: Engine) -> None:
    for i, result in enumerate(FALSY):
        assert engine.run(lambda result=result: result, key=f"k{i}") == result
        again = engine.run_outcome(lambda: "ran again", key=f"k{i}")
        assert (again.value, again.replayed) == (result, True)


def test_a_result_is_rebuilt_from_the_return_annotation(engine: Engine) -> None:
    receipt = Receipt(uuid.uuid4(), decimal.Decimal("9.90"), datetime.datetime.now(datetime.UTC))

    def body(key: str) -> dict[Colour, Receipt]:
        return {Colour.RED: receipt}

    ship = engine.once(body)
    assert engine.do(ship, "k") == {Colour.RED: receipt}
    assert engine.do(ship, "k") == {Colour.RED: receipt}
    assert engine.run(lambda: receipt, key="plain", returns=Receipt) == receipt
    assert engine.run(lambda: None, key="plain", returns=Receipt) == receipt


class Bomb:
    """Goes off when it is unpickled."""

    exploded: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return (Bomb.exploded.append, (1,))


def test_a_pickle_in_the_store_is_not_read(engine: Engine) -> None:
    id = identity("", "op", "k")
    poison = Codec().seal(Kind.VALUE, "pickle", pickle.dumps(Bomb()), id)
    claimed = engine.claim_elsewhere()
    assert engine.execute(Complete(id, claimed.token, poison, 60.0)) is True
    with pytest.raises(SnapshotUnreadable):
        engine.run(lambda: "ran again")
    assert Bomb.exploded == []


UNKEPT = [object(), threading.Lock(), lambda: None]


@pytest.mark.parametrize("result", UNKEPT, ids=["object", "lock", "function"])
def test_a_result_that_cannot_be_kept_is_done_and_never_runs_again(engine: Engine, result: Any) -> None:
    ran: list[int] = []

    def body() -> Any:
        ran.append(1)
        return result

    with pytest.raises(ResultNotStored) as first:
        engine.run(body)
    assert first.value.result is result
    record = engine.record()
    assert record is not None
    assert record.state is State.DONE
    for guard in (engine.guard, engine.new_guard()):
        with pytest.raises(ResultNotStored) as replayed:
            engine.run(body, guard=guard)
        assert replayed.value.result is None
    assert ran == [1]
    assert "result_dropped" in engine.names()


def test_a_result_over_the_size_limit_is_done_and_never_runs_again(engine: Engine) -> None:
    guard = engine.new_guard(codec=Codec(limit=1000))
    with pytest.raises(ResultNotStored) as first:
        engine.run(lambda: "x" * 2000, guard=guard)
    assert first.value.result == "x" * 2000
    with pytest.raises(ResultNotStored):
        engine.run(lambda: "again", guard=guard)


class Careless:
    """A user's serializer that raises what json.dumps raises."""

    name = "careless"

    def encode(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def decode(self, payload: bytes) -> Any:
        return json.loads(payload)


def test_a_serializer_that_fails_in_its_own_way_leaves_the_operation_done(engine: Engine) -> None:
    """Run, then an error, then run again: the effect has happened, whatever the serializer says."""
    ran: list[int] = []

    def body(key: str) -> Any:
        ran.append(1)
        return object()

    ship = engine.once(body, serializer=Careless())
    with pytest.raises(ResultNotStored):
        engine.do(ship, "k")
    with pytest.raises(ResultNotStored):
        engine.do(ship, "k")
    assert ran == [1]


def test_a_serializer_that_is_none_is_refused_when_decorating(engine: Engine) -> None:
    def body(key: str) -> None:
        return None

    with pytest.raises(PolicyError, match="serializer"):
        engine.once(body, serializer=object())


def test_a_users_serializer_is_used(engine: Engine) -> None:
    def body(key: str) -> Any:
        return {"a": 1}

    ship = engine.once(body, serializer=Careless())
    assert engine.do(ship, "k") == {"a": 1}
    assert engine.do(ship, "k") == {"a": 1}
    record = engine.record()
    assert record is not None
    assert b"careless" in (record.snapshot or b"")


def test_an_honest_replay_passes_the_fingerprint_check_for_ever(engine: Engine) -> None:
    """The stored fingerprint must outlive the completion."""
    for _ in range(3):
        assert engine.run(lambda: "answer", fingerprint={"a": 1, "b": [1, 2]}) == "answer"
        assert engine.run(lambda: "answer", fingerprint={"b": [1, 2], "a": 1}) == "answer"
    with pytest.raises(KeyReused):
        engine.run(lambda: "answer", fingerprint={"a": 2, "b": [1, 2]})


def test_two_functions_on_one_guard_keep_their_own_settings(engine: Engine) -> None:
    """The first one's configuration must not win for both."""

    def short(key: str) -> str:
        return "short"

    def long(key: str) -> str:
        return "long"

    first = engine.once(short, operation="first", ttl="1h")
    second = engine.once(long, operation="second", ttl="7d")
    assert engine.do(first, "k") == "short"
    assert engine.do(second, "k") == "long"
    engine.clock.advance(3601)
    assert engine.record(operation="first") is None
    record = engine.record(operation="second")
    assert record is not None
    assert record.expires_in == pytest.approx(7 * 86400 - 3601)


def test_the_answer_is_forgotten_when_its_time_is_over(engine: Engine) -> None:
    assert engine.run(lambda: 1, ttl="1h") == 1
    engine.clock.advance(3599)
    assert engine.run(lambda: 2, ttl="1h") == 1
    engine.clock.advance(2)
    assert engine.run(lambda: 3, ttl="1h") == 3


class Declined(Exception):
    def __init__(self, code: str, amount: int) -> None:
        super().__init__(f"declined {code}")
        self.code = code
        self.amount = amount


def test_a_remembered_failure_is_replayed_as_its_own_class(engine: Engine) -> None:
    ran: list[int] = []

    def body() -> None:
        ran.append(1)
        raise Declined("51", 7)

    for guard in (engine.guard, engine.guard, engine.new_guard()):
        with pytest.raises(Declined) as raised:
            engine.run(body, guard=guard, remember_errors=Declined)
        assert (raised.value.code, raised.value.amount, str(raised.value)) == ("51", 7, "declined 51")
    assert ran == [1]
    assert engine.names() == ["started", "failure_remembered", "replayed", "replayed"]


def test_a_remembered_failure_that_is_not_allowed_is_not_rebuilt(engine: Engine) -> None:
    def body() -> None:
        raise Declined("51", 7)

    with pytest.raises(Declined):
        engine.run(body, remember_errors=Declined)
    with pytest.raises(RememberedFailure) as replayed:
        engine.run(body, remember_errors=KeyError)
    assert replayed.value.type_name.endswith("Declined")
    assert replayed.value.message == "declined 51"


def test_a_failure_too_big_to_keep_still_reaches_the_caller(engine: Engine) -> None:
    """What cannot be kept of a failure is left out; the failure itself is remembered."""
    guard = engine.new_guard(codec=Codec(limit=500))
    ran: list[int] = []

    def body() -> None:
        ran.append(1)
        raise Declined("x" * 1000, 7)

    with pytest.raises(Declined):
        engine.run(body, guard=guard, remember_errors=Declined)
    with pytest.raises((RememberedFailure, ResultNotStored, Declined)):
        engine.run(body, guard=guard, remember_errors=Declined)
    assert ran == [1]


def test_a_hit_answers_and_does_not_run_the_handler_as_well(engine: Engine) -> None:
    engine.run(lambda: "first")

    def body() -> None:
        raise AssertionError("it ran")

    assert engine.run(body) == "first"
    assert engine.script.kinds == ["Claim", "Complete", "Claim"]


def test_what_is_stored_is_the_result_as_it_was_when_the_handler_returned(engine: Engine) -> None:
    kept: list[int] = [1]
    first = engine.run(lambda: kept)
    first.append(2)
    assert engine.run(lambda: None) == [1]
    engine.run(lambda: None).append(3)
    assert engine.run(lambda: None) == [1]


def test_the_size_that_is_told_is_what_is_stored(engine: Engine) -> None:
    engine.run(lambda: "x" * 100)
    completed = [op for op in engine.script.ops if isinstance(op, Complete)]
    event = next(event for event in engine.events if event.name == "completed")
    assert event.size == len(completed[0].snapshot)  # type: ignore[attr-defined]
    assert PLAIN.encode("x" * 100) in completed[0].snapshot
