"""What can be decorated, what is refused when decorating, and what a decorated function still is."""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, PolicyError, ResultNotStored, Semel, State, Wait
from tests.engine.driving import Engine

GUARDS = {
    "sync": lambda: Semel(MemoryStore(), sweep_every=None),
    "async": lambda: AsyncSemel(AsyncMemoryStore(), sweep_every=None),
}


@pytest.fixture(params=GUARDS)
def guard(request: pytest.FixtureRequest) -> Any:
    return GUARDS[request.param]()


def finish(value: Any) -> Any:
    """The result of a call on either guard."""
    if inspect.isawaitable(value):

        async def wait_for_it() -> Any:
            return await value

        return asyncio.run(wait_for_it())
    return value


def generator(key: str) -> Iterator[int]:
    yield 1


async def async_generator(key: str) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    "function", [generator, async_generator, functools.partial(generator)], ids=["sync", "async", "partial"]
)
def test_generators_are_refused_when_decorating(guard: Any, function: Any) -> None:
    with pytest.raises(PolicyError, match="generator"):
        guard.once(key="key")(function)
    with pytest.raises(PolicyError, match="generator"):
        finish(guard.run("op", key="k", call=functools.partial(function, "k")))


@pytest.mark.parametrize(
    "thing", [None, 7, "ship", classmethod(lambda cls: None)], ids=["None", "7", "text", "classmethod"]
)
def test_what_is_no_function_is_refused(guard: Any, thing: Any) -> None:
    with pytest.raises(PolicyError, match="function"):
        guard.once(key="key")(thing)
    if not callable(thing):
        with pytest.raises((PolicyError, TypeError)):
            finish(guard.run("op", key="k", call=thing))
        assert finish(guard.lookup("op", "k")) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lease": "soon"}, "lease"),
        ({"lease": 0}, "lease"),
        ({"ttl": -1}, "ttl"),
        ({"guarantee": "exactly_once"}, "effectively_once"),
        ({"on_duplicate": "wait"}, "wait"),
        ({"on_abandoned": "ignore"}, "retry"),
        ({"guarantee": "at_most_once", "on_abandoned": "retry"}, "at_most_once"),
        ({"guarantee": "at_most_once", "on_store_error": "open"}, "at_most_once"),
        ({"guarantee": "at_most_once", "remember_errors": KeyError}, "at_most_once"),
        ({"remember_errors": "some"}, "remember"),
        ({"remember_errors": KeyboardInterrupt}, "remember"),
        ({"recover": "later"}, "recover"),
        ({"recover": lambda: None, "on_abandoned": "retry"}, "recover"),
        ({"recover": lambda key, nope: None}, "nope"),
        ({"patience": 3}, "there are: completion_timeout, guarantee"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:40],
)
def test_a_policy_that_cannot_be_meant_is_refused_when_decorating(guard: Any, changes: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        guard.once(key="key", operation="op", **changes)(lambda key: None)


def test_a_policy_that_cannot_be_meant_is_refused_before_a_run(engine: Engine) -> None:
    for changes in ({"lease": 0}, {"guarantee": "never"}, {"remember_errors": [KeyError]}, {"nope": 1}):
        for _ in range(2):
            with pytest.raises(PolicyError):
                engine.run(lambda: None, **changes)
    assert engine.script.ops == []


def test_a_decorated_function_keeps_its_name_doc_and_signature(guard: Any) -> None:
    def ship(key: str, *, carrier: str = "mail") -> int:
        """Send it."""
        return 1

    shipped = guard.once(key="key")(ship)
    assert shipped.__name__ == "ship"
    assert shipped.__doc__ == "Send it."
    assert shipped.__module__ == __name__
    assert shipped.__wrapped__ is ship
    assert inspect.signature(shipped) == inspect.signature(ship)


def test_the_operation_is_named_after_the_function(engine: Engine) -> None:
    def body(key: str) -> int:
        return 1

    engine.do(engine.once(body, operation=None), "k")
    assert engine.record(operation=f"{__name__}.{body.__qualname__}") is not None


class Shop:
    """Something that methods belong to."""


def test_methods_class_methods_and_static_methods(quick_engine: Engine) -> None:
    engine = quick_engine
    ran: list[Any] = []

    def method(self: Any, order_id: str, amount: int = 1) -> str:
        ran.append(self)
        return order_id

    def of_class(cls: Any, order_id: str) -> str:
        ran.append(cls)
        return order_id

    def static(order_id: str) -> str:
        ran.append("static")
        return order_id

    class Till:
        sell = engine.once(method, key="order_id", operation="sell")
        by_position = engine.once(method, key=lambda o: o, operation="by_position")
        open = classmethod(engine.once(of_class, key="order_id", operation="open"))  # type: ignore[type-var]
        shut = staticmethod(engine.once(static, key=lambda o: o, operation="shut"))

    till = Till()
    for _ in range(2):
        assert engine.do(till.sell, "a") == "a"
        assert engine.do(till.by_position, "a", amount=2) == "a"
        assert engine.do(Till.open, "a") == "a"
        assert engine.do(till.shut, "a") == "a"
    assert ran == [till, till, Till, "static"]


def test_two_objects_share_a_key(quick_engine: Engine) -> None:
    """The object that a method belongs to is no part of the request."""

    def method(self: Any, order_id: str) -> str:
        return order_id

    ship = quick_engine.once(method, key="order_id")
    assert quick_engine.do(ship, Shop(), "a") == "a"
    assert quick_engine.do(ship, Shop(), "a") == "a"
    assert quick_engine.script.kinds == ["Claim", "Complete", "Claim"]


def test_a_partial_and_a_callable_object_can_be_decorated(quick_engine: Engine) -> None:
    engine = quick_engine

    def ship(carrier: str, key: str) -> str:
        return f"{carrier} {key}"

    decorated = engine.guard.once(key="key", operation="op")(functools.partial(engine.function(ship), "mail"))
    assert engine.do(decorated, "k") == "mail k"
    assert engine.do(decorated, "k") == "mail k"
    assert engine.record() is not None


def test_a_partial_without_an_operations_name_is_refused_in_plain_words(guard: Any) -> None:
    """It has no qualified name of its own to be called by."""

    def ship(carrier: str, key: str) -> str:
        return key

    with pytest.raises(PolicyError, match="operation="):
        guard.once(key="key")(functools.partial(ship, "mail"))


def test_a_callable_object_without_an_operations_name_is_refused_in_plain_words(guard: Any) -> None:
    class Ship:
        def __call__(self, key: str) -> str:
            return key

    with pytest.raises(PolicyError, match="operation="):
        guard.once(key="key")(Ship())


# -- sync and async, crosswise


def test_a_sync_guard_protects_an_async_function(tmp_path: Any) -> None:
    from semel import SQLiteStore

    with Semel(SQLiteStore(tmp_path / "records.db", synchronous="normal"), sweep_every=None) as guard:
        ran: list[int] = []

        @guard.once(key="key", operation="op")
        async def ship(key: str) -> str:
            ran.append(1)
            await asyncio.sleep(0)
            return key

        assert inspect.iscoroutinefunction(ship)

        async def both() -> list[str]:
            return [await ship("k"), await ship("k")]

        assert asyncio.run(both()) == ["k", "k"]
        assert ran == [1]
        record = guard.lookup("op", "k")
        assert record is not None
        assert record.state is State.DONE


def test_a_sync_guard_protects_async_functions_in_two_loops_at_once() -> None:
    """A thread with its own loop each, as sync frameworks run async views."""
    import threading

    guard = Semel(MemoryStore(), sweep_every=None)
    ran: list[int] = []

    @guard.once(key="key", operation="op", on_duplicate=Wait("10s"))
    async def ship(key: str) -> str:
        ran.append(1)
        await asyncio.sleep(0.05)
        return key

    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(asyncio.run(asyncio.wait_for(ship("k"), 60)))
        except BaseException as error:
            answers.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == ["k"] * 4
    assert ran == [1]
    guard.close()


def test_a_sync_guard_keeps_its_settings_for_async_functions() -> None:
    guard = Semel(MemoryStore(), sweep_every="1m", tenant="acme", readable_keys=False)

    async def twin() -> Any:
        assert guard.in_this_loop() is guard.in_this_loop(), "one for each event loop"
        return guard.in_this_loop()

    made = asyncio.run(twin())
    assert (made.sweep_every, made.tenant, made.readable_keys) == (None, "acme", False), "its sync guard sweeps"


def test_an_async_guard_protects_a_plain_function() -> None:
    import threading

    async def scenario() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
        ran: list[str] = []

        def work(key: str) -> str:
            ran.append(threading.current_thread().name)
            return key

        ship: Any = guard.once(key="key", operation="op")(work)  # type: ignore[type-var]
        assert [await ship("k"), await ship("k")] == ["k", "k"]
        assert len(ran) == 1
        assert ran[0] != threading.main_thread().name, "the event loop is not blocked"
        await guard.close()

    asyncio.run(scenario())


def test_a_sync_function_that_returns_a_coroutine_is_refused_and_the_key_is_free() -> None:
    guard = Semel(MemoryStore(), sweep_every=None)

    async def ship() -> None:
        raise AssertionError("it ran")

    for _ in range(2):
        with pytest.raises(PolicyError, match="async"):
            guard.run("op", key="k", call=ship)
    assert guard.lookup("op", "k") is None
    guard.close()


def behind_a_function(function: Any) -> Any:
    def plain(key: str) -> Any:
        return function(key)

    return plain


class Behind:
    """An object with an async ``__call__``."""

    def __init__(self, function: Any) -> None:
        self.function = function

    async def __call__(self, key: str) -> Any:
        return await self.function(key)


AWAITED = {
    "a coroutine function": lambda function: function,
    "a function that returns a coroutine": behind_a_function,
    "an object with an async __call__": Behind,
    "a wrapped coroutine function": lambda function: functools.wraps(function)(behind_a_function(function)),
    "a partial": functools.partial,
}


@pytest.mark.parametrize("made", AWAITED.values(), ids=AWAITED)
def test_an_async_guard_awaits_whatever_is_awaitable(made: Any) -> None:
    """A coroutine that is never awaited and a record that says done: the worst of both."""

    async def scenario() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
        ran: list[str] = []

        async def ship(key: str) -> str:
            ran.append(key)
            return key

        shipped: Any = guard.once(key=lambda key: key, operation="op")(made(ship))
        assert await shipped("k") == "k"
        assert await shipped("k") == "k"
        assert ran == ["k"]
        await guard.close()

    asyncio.run(scenario())


def test_a_wrapper_of_an_async_function_that_is_itself_sync_runs_once() -> None:
    """functools.wraps makes it look async; what it returns is the result."""

    async def scenario() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
        ran: list[str] = []

        async def ship(key: str) -> str:
            return key

        @functools.wraps(ship)
        def blocking(key: str) -> str:
            ran.append(key)
            return key

        shipped: Any = guard.once(key="key", operation="op")(blocking)  # type: ignore[type-var]
        assert [await shipped("k"), await shipped("k")] == ["k", "k"]
        assert ran == ["k"]
        await guard.close()

    asyncio.run(scenario())


def test_an_async_run_with_a_plain_function_runs_it_once() -> None:
    """Run, then an error, then run again: a result that needs no awaiting is a result."""

    async def scenario() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
        ran: list[int] = []

        def ship() -> Any:
            ran.append(1)
            return "done"

        for _ in range(2):
            try:
                assert await guard.run("op", key="k", call=ship) == "done"
            except PolicyError:
                assert ran == [], "if it is refused, then before it runs"
        assert len(ran) <= 1
        await guard.close()

    asyncio.run(scenario())


def test_a_handler_that_ran_and_returned_a_generator_does_not_run_again(engine: Engine) -> None:
    """It is no generator function: its body has run, effects and all, whatever it returned."""
    ran: list[int] = []

    def body() -> Any:
        ran.append(1)
        return (line for line in ["a", "b"])

    for _ in range(2):
        with pytest.raises(ResultNotStored):
            engine.run(body)
    assert ran == [1]
