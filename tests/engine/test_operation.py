"""The operation's handle: how a handler gets it, what it knows, and what it remembers for the next try."""

import asyncio
import contextlib
import contextvars
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from semel import INJECTED, Codec, LeaseLost, Operation, PolicyError, StoreUncertain, current_operation
from semel.core.ops import SaveStep
from semel.engine.operation import AsyncOperation, OperationHandle
from tests.engine.driving import Engine
from tests.engine.scripted import Gate


class Boom(Exception):
    pass


def test_a_handler_gets_its_handle_by_annotation(engine: Engine) -> None:
    def body(key: str, op: OperationHandle = INJECTED) -> dict[str, Any]:
        assert op is current_operation()
        assert isinstance(op, AsyncOperation if engine.is_async else Operation)
        return {
            "name": op.name, "key": op.key, "tenant": op.tenant, "attempt": op.attempt, "token": op.token,
            "lost": op.lease_lost, "id": op.id, "text": repr(op),
        }  # fmt: skip

    seen = engine.do(engine.once(body, tenant=lambda key: "acme"), "k")
    record = engine.record(tenant="acme")
    assert record is not None
    assert seen == {
        "name": "op", "key": "k", "tenant": "acme", "attempt": 1, "token": record.token,
        "lost": False, "id": record.id, "text": f"<{'Async' * engine.is_async}Operation op[k] attempt 1>",
    }  # fmt: skip
    assert current_operation() is None


def test_the_handle_is_no_part_of_the_request(engine: Engine) -> None:
    def body(key: str, op: OperationHandle = INJECTED) -> int:
        return 1

    ship = engine.once(body)
    assert engine.do(ship, "k") == 1
    assert engine.do(ship, "k", op=None) == 1
    assert engine.script.kinds == ["Claim", "Complete", "Claim"]


@pytest.mark.parametrize("annotation", [OperationHandle | None, Operation | AsyncOperation], ids=str)
def test_any_annotation_that_names_a_handle_will_do(quick_engine: Engine, annotation: Any) -> None:
    def body(key: str, op: Any = None) -> bool:
        return op is current_operation() is not None

    body.__annotations__["op"] = annotation
    assert quick_engine.do(quick_engine.once(body), "k") is True


def test_a_handle_that_is_passed_is_left_alone(quick_engine: Engine) -> None:
    mine = object()

    def body(key: str, op: OperationHandle = INJECTED) -> bool:
        return op is mine

    assert quick_engine.do(quick_engine.once(body), "k", op=mine) is True


def test_a_keyword_dict_of_the_caller_is_not_changed(quick_engine: Engine) -> None:
    def body(key: str, op: OperationHandle = INJECTED) -> None:
        return None

    mine = {"key": "k"}
    quick_engine.do(quick_engine.once(body), **mine)
    assert mine == {"key": "k"}


def test_a_key_taken_by_position_does_not_take_the_handle(quick_engine: Engine) -> None:
    def body(op: OperationHandle = INJECTED, order_id: str = "") -> bool:
        return op is current_operation()

    ship = quick_engine.once(body, key=lambda o: o)
    assert quick_engine.do(ship, order_id="k") is True
    assert quick_engine.record("k") is not None


def test_the_current_operation_follows_copied_contexts_threads_and_tasks(engine: Engine) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(current_operation())

    def body() -> Iterator[Any]:
        op = current_operation()
        thread = threading.Thread(target=contextvars.copy_context().run, args=(look,))
        thread.start()
        thread.join()
        if engine.is_async:
            yield asyncio.to_thread(look)

            async def child() -> None:
                look()

            yield asyncio.ensure_future(child())
        yield None
        return seen == [op] * (3 if engine.is_async else 1)

    assert engine.run(body) is True
    assert current_operation() is None


def test_a_nested_operation_is_the_current_one_until_it_ends(engine: Engine) -> None:
    names: list[str] = []

    def name() -> None:
        op = current_operation()
        names.append(op.key if op else "none")

    def inner() -> None:
        name()

    def outer() -> Iterator[Any]:
        name()
        yield engine.guard.run("op", key="inner", call=engine.function(inner))
        name()

    engine.run(outer, key="outer")
    assert names == ["outer", "inner", "outer"]


def test_derived_keys_are_the_same_in_every_attempt_and_differ_by_step_and_key(engine: Engine) -> None:
    def body() -> list[str]:
        op = current_operation()
        assert op is not None
        made.append([op.derive("charge"), op.derive("mail")])
        if len(made) == 1:
            raise Boom
        return made[-1]

    made: list[list[str]] = []
    with pytest.raises(Boom):
        engine.run(body)
    engine.run(body)
    engine.run(body, key="other")
    assert made[0] == made[1]
    assert len({*made[0], *made[2]}) == 4
    assert all(str(uuid.UUID(key)) == key for key in made[0])
    with pytest.raises(PolicyError):
        engine.run(lambda: current_operation().derive(""), key="unnamed")  # type: ignore[union-attr]


def test_the_token_grows_with_every_attempt(engine: Engine) -> None:
    tokens: list[int] = []

    def body() -> None:
        op = current_operation()
        assert op is not None
        tokens.append(op.token)
        raise Boom

    first = engine.abandon()
    for _ in range(3):
        with pytest.raises(Boom):
            engine.run(body)
        engine.clock.advance(0.001)
    assert first.token < tokens[0] < tokens[1] < tokens[2]


# -- captured values


def capturing(made: list[int], fail: bool = False) -> Any:
    def make() -> str:
        made.append(1)
        return f"id-{len(made)}"

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        first = yield op.capture("id", make)
        again = yield op.capture("id", make)
        assert first == again
        if fail:
            raise Boom
        return first

    return body


def test_a_captured_value_is_made_once_and_kept_for_the_retry(engine: Engine) -> None:
    made: list[int] = []
    with pytest.raises(Boom):
        engine.run(capturing(made, fail=True))
    assert engine.script.kinds == ["Claim", "SaveStep", "Release"]
    outcome = engine.run_outcome(capturing(made))
    assert (outcome.value, outcome.attempt) == ("id-1", 2)
    assert made == [1]
    assert engine.run(capturing(made)) == "id-1"
    assert engine.names().count("step_saved") == 1


def test_a_captured_value_survives_a_crash(engine: Engine) -> None:
    """The process dies with the handler half way; another takes over after the lease."""
    made: list[int] = []
    inside, finish = Gate(), Gate()

    def crashing() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.capture("id", lambda: made.append(1) or "made before the crash")
        inside.open()
        yield finish

    dead = engine.start_run(crashing)
    inside.wait()
    engine.clock.advance(31)

    def retry() -> Iterator[Any]:
        op: Any = current_operation()
        return (yield op.capture("id", lambda: made.append(1) or "made again"))

    assert engine.run(retry, guard=engine.new_guard()) == "made before the crash"
    assert made == [1]
    finish.open()
    assert dead.result(20) == "made before the crash"


def test_captures_are_kept_apart_by_name(engine: Engine) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        a = yield op.capture("a", lambda: None)
        b = yield op.capture("b", lambda: [1, {"x": (2,)}])
        return [a, b]

    assert engine.run(body) == [None, [1, {"x": (2,)}]]


def test_a_capture_under_a_lost_lease_is_refused(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        inside.open()
        yield finish
        yield op.capture("id", lambda: "too late")
        raise AssertionError("it went on")

    call = engine.start_run(body)
    inside.wait()
    engine.clock.advance(31)
    claimed = engine.claim_elsewhere(nonce=2)
    finish.open()
    with pytest.raises(LeaseLost):
        call.result(20)
    record = engine.record()
    assert record is not None
    assert record.token == claimed.token


def test_a_value_that_cannot_be_stored_is_not_captured(engine: Engine) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.capture("handle", object)

    with pytest.raises(PolicyError, match="the value of 'handle' cannot be stored"):
        engine.run(body)
    assert engine.record() is None


def test_a_capture_whose_answer_was_lost_gives_the_same_value_when_asked_again(engine: Engine) -> None:
    """The store has the first value: the handler must not go on with a second."""
    engine.script.on(SaveStep, after=StoreUncertain("cut"))
    made: list[int] = []

    def make() -> str:
        made.append(1)
        return f"id-{len(made)}"

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        try:
            value = yield op.capture("id", make)
        except StoreUncertain:
            value = yield op.capture("id", make)
        values.append(value)
        raise Boom

    values: list[str] = []
    for _ in range(2):
        with pytest.raises(Boom):
            engine.run(body)
    assert values[0] == values[1]


def test_two_captures_of_one_name_at_once_agree(engine: Engine) -> None:
    made: list[int] = []
    both = threading.Barrier(2)

    def make() -> str:
        made.append(1)
        if not engine.is_async:
            with contextlib.suppress(threading.BrokenBarrierError):  # only one may ever come here
                both.wait(0.2)
        return f"id-{len(made)}-{uuid.uuid4()}"

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        if engine.is_async:
            found = yield asyncio.gather(op.capture("id", make), op.capture("id", make))
        else:
            found = []
            threads = [threading.Thread(target=lambda: found.append(op.capture("id", make))) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return list(found)

    first, second = engine.run(body)
    assert first == second


def test_what_is_captured_is_sealed_by_the_codec(engine: Engine) -> None:
    guard = engine.new_guard(codec=Codec(compress_above=10))

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        return (yield op.capture("secret", lambda: "s" * 500))

    assert engine.run(body, guard=guard) == "s" * 500
    saved = [op for op in engine.script.ops if isinstance(op, SaveStep)]
    assert b"s" * 100 not in saved[0].value
