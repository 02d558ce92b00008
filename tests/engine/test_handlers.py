"""``call=`` takes the operation's handle, or nothing: found out by looking, before anything is claimed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from semel import INJECTED, AsyncOperation, Operation, PolicyError, current_operation
from semel.engine.declare import handlers
from semel.engine.declare.handlers import with_handle
from tests.engine.driving import Engine


def key_of(op: Any) -> str:
    assert op is current_operation()
    return f"handle of {op.key}"


def plain() -> str:
    return "nothing"


def other(order: int, carrier: str | None = None) -> str:
    return f"{order} by {carrier}"


def shipping(order: int, op: Operation) -> str:
    return f"{order} with {op}"


def injected(order: int = 7, op: Operation = INJECTED) -> str:
    return f"{order} with {op}"


def by_name(order: int = 7, *, op: Operation = INJECTED) -> str:
    return f"{order} with {op}"


def only_by_name(*, op: Operation, order: int = 7) -> str:
    return f"{order} with {op}"


def after_anything(*args: Any, op: Operation = INJECTED) -> str:
    return f"{len(args)} with {op}"


def anything(*args: Any, **kwargs: Any) -> str:
    return f"{len(args)} and {len(kwargs)}"


@functools.wraps(injected)
def with_its_own(*args: Any, **kwargs: Any) -> str:
    """As a decorated function is: its handle is its own guard's to give."""
    return injected(*args, **kwargs)


@functools.wraps(shipping)
def wrapped(*args: Any, **kwargs: Any) -> str:
    return shipping(*args, **kwargs)


class Desk:
    def __init__(self, name: str = "desk") -> None:
        self.name = name

    def bare(self) -> str:
        return self.name

    def handed(self, op: Any) -> str:
        return f"{self.name} with {op}"

    @classmethod
    def of_class(cls, op: Any) -> str:
        return f"{cls.__name__} with {op}"

    def by_name(self, *, op: Operation = INJECTED) -> str:
        return f"{self.name} with {op}"

    @staticmethod
    def static() -> str:
        return "static"


class Caller:
    __hash__ = None  # type: ignore[assignment]
    __slots__ = ()

    def __call__(self, op: Any) -> str:
        return f"caller with {op}"


class Needy:
    def __init__(self, op: Any) -> None:
        self.op = op

    def __eq__(self, other: object) -> bool:
        return f"Needy with {self.op}" == other

    __hash__ = None  # type: ignore[assignment]


FORMS: list[tuple[str, Callable[..., Any], Any]] = [
    ("lambda", lambda: "nothing", "nothing"),
    ("lambda of the handle", lambda op: f"with {op}", "with op"),
    ("any name", lambda _: f"with {_}", "with op"),
    ("default", lambda order=7: f"order {order}", "order 7"),
    ("handle, then a default", lambda op, order=7: f"{order} with {op}", "7 with op"),
    ("def", plain, "nothing"),
    ("partial", functools.partial(other, 7), "7 by None"),
    ("partial by name", functools.partial(other, order=7), "7 by None"),
    ("partial and the handle", functools.partial(shipping, 7), "7 with op"),
    ("partial with the handle given", functools.partial(shipping, op=1, order=2), "2 with 1"),
    ("injected", injected, "7 with op"),
    ("partial of an injected", functools.partial(injected, 8), "8 with op"),
    ("injected and given", functools.partial(injected, 8, 9), "8 with 9"),
    ("injected and given by name", functools.partial(injected, op=9), "7 with 9"),
    ("injected by name", by_name, "7 with op"),
    ("injected by name and required", only_by_name, "7 with op"),
    ("injected by name, after anything", after_anything, "0 with op"),
    ("partial of one injected by name", functools.partial(by_name, 8), "8 with op"),
    ("injected by name and given", functools.partial(by_name, op=9), "7 with 9"),
    ("method that is injected by name", Desk().by_name, "desk with op"),
    ("by name, with defaults", lambda *, order=7: f"order {order}", "order 7"),
    ("partial, the rest by name", functools.partial(lambda *, order: f"order {order}", order=7), "order 7"),
    ("handle, and a default by name", lambda op, *, order=7: f"{order} with {op}", "7 with op"),
    ("injected by whom it wraps", with_its_own, "7 with None"),
    ("method", Desk().bare, "desk"),
    ("method of the handle", Desk().handed, "desk with op"),
    ("partial of a method", functools.partial(Desk().handed), "desk with op"),
    ("class method", Desk.of_class, "Desk with op"),
    ("static method", Desk.static, "static"),
    ("object", Caller(), "caller with op"),
    ("class", Needy, "Needy with op"),
    ("class of nothing", dict, {}),
    ("built in", int, 0),
    ("anything", anything, "0 and 0"),
    ("wrapped", functools.partial(wrapped, 7), "7 with op"),
]


@pytest.mark.parametrize(("call", "answer"), [pytest.param(c, a, id=name) for name, c, a in FORMS])
def test_a_call_is_given_the_handle_where_it_asks_for_it(call: Callable[..., Any], answer: Any) -> None:
    for _ in range(2):
        assert with_handle(call)("op") == answer


def test_a_function_may_take_the_handle_or_nothing(engine: Engine) -> None:
    assert engine.run(lambda: "bare", key="a") == "bare"
    assert engine.run(key_of, key="b") == "handle of b"
    assert engine.run(key_of, key="b") == "handle of b"
    assert engine.run_outcome(key_of, key="b").replayed is True
    assert engine.run_outcome(key_of, key="c").value == "handle of c"


def test_the_handle_of_a_call_has_steps_and_captured_values(engine: Engine) -> None:
    def body(op: Any) -> Any:
        number = yield op.capture("number", lambda: 5)
        return (yield op.step("double", lambda: 2 * number))

    assert engine.run(body) == 10
    assert engine.script.kinds == ["Claim", "SaveStep", "SaveStep", "Complete"]


@pytest.mark.parametrize(
    "call",
    [
        lambda order, op: None,
        functools.partial(lambda a, b, c: None, 1),
        functools.partial(lambda a, b: None, a=1),
        lambda *, b: None,
        lambda op, *, b: None,
        lambda *args, b: None,
        functools.partial(lambda *, a, b: None, a=1),
    ],
    ids=["two", "partial", "out of place", "by name", "one by name", "after anything", "partial by name"],
)
def test_a_call_that_asks_for_more_is_refused_before_anything_is_claimed(
    quick_engine: Engine, call: Callable[..., Any]
) -> None:
    for method in (quick_engine.guard.run, quick_engine.guard.run_outcome):
        with pytest.raises(PolicyError, match=r"needs .*b|needs order, op"):
            quick_engine.do(method, "op", key="k", call=call)
    with pytest.raises(PolicyError, match=r"such as lambda: ship\(order\), not 7"):
        quick_engine.do(quick_engine.guard.run, "op", key="k", call=7)
    assert quick_engine.script.ops == []


def test_a_type_error_of_the_functions_own_is_not_taken_for_a_wrong_guess(quick_engine: Engine) -> None:
    ran: list[int] = []

    def body() -> None:
        ran.append(1)
        raise TypeError("takes 0 positional arguments but 1 was given")

    with pytest.raises(TypeError, match="takes 0"):
        quick_engine.run(body)
    assert ran == [1]


def test_a_signature_is_looked_at_once_and_for_plain_functions_never(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    real = inspect.signature

    def signature(call: Any) -> inspect.Signature:
        looked.append(call)
        return real(call)

    monkeypatch.setattr(handlers.inspect, "signature", signature)
    for _ in range(3):
        for call in (lambda: 1, lambda op: 1, plain, Desk().bare, functools.partial(other, 7), injected, Caller()):
            with_handle(call)
    assert looked == []

    def takes_anything(*args: Any) -> None: ...

    class Order: ...

    for _ in range(3):
        with_handle(takes_anything)
        with_handle(Order)
    assert looked == [takes_anything, Order]


def test_what_was_looked_at_goes_with_the_function() -> None:
    def make() -> Callable[..., Any]:
        return lambda *args: None

    before = len(handlers._seen)
    with_handle(make())
    assert len(handlers._seen) == before


# -- a decorated function's handle


@pytest.mark.parametrize("annotation", [Operation, AsyncOperation], ids=["Operation", "AsyncOperation"])
def test_the_handle_is_annotated_with_the_class_that_it_has(quick_engine: Engine, annotation: type) -> None:
    """Under the other's name a type checker would let ``op.step()`` go unawaited, and it would do nothing."""

    def body(key: str, op: Any = None) -> bool:
        return isinstance(op, annotation)

    body.__annotations__["op"] = annotation
    wanted = AsyncOperation if quick_engine.is_async else Operation
    if annotation is wanted:
        assert quick_engine.do(quick_engine.once(body), "k") is True
        return
    with pytest.raises(PolicyError, match=f"op: annotate op with {wanted.__name__}: "):
        quick_engine.once(body)
    body.__annotations__["op"] = annotation | wanted
    assert quick_engine.do(quick_engine.once(body), "k") is False


def test_a_plain_function_under_an_async_guard_has_the_guards_handle() -> None:
    from semel import AsyncMemoryStore, AsyncSemel

    guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)

    def ship(order: int, op: Operation = INJECTED) -> None: ...

    with pytest.raises(PolicyError, match=r"annotate op with AsyncOperation: .* make the function an async def"):
        guard.once(key="order")(ship)


def test_an_async_function_under_a_sync_guard_has_an_async_handle() -> None:
    from semel import MemoryStore, Semel

    guard = Semel(MemoryStore(), sweep_every=None)

    async def ship(order: int, op: Operation = INJECTED) -> None: ...

    with pytest.raises(PolicyError, match="annotate op with AsyncOperation: in an async def"):
        guard.once(key="order")(ship)


# -- decorators without their brackets


def test_a_decorator_without_brackets_says_what_to_write(quick_engine: Engine) -> None:
    guard = quick_engine.guard

    def ship(order_number: int, carrier: str) -> None: ...

    with pytest.raises(PolicyError, match=r'write @guard\.once\(key="order_number"\)$'):
        guard.once(ship)
    with pytest.raises(PolicyError, match=r'write @guard\.once\(key="order_id"\)$'):
        guard.once()
    with pytest.raises(
        PolicyError, match=r'write @guard\.once_in_transaction\(connection="session", key="order_number"\)$'
    ):
        guard.once_in_transaction(ship)
    with pytest.raises(PolicyError, match=r"write @guard\.once_in_transaction\("):
        guard.once_in_transaction(connection="session")
