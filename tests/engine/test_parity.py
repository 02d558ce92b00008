"""``Semel`` and ``AsyncSemel`` are one thing twice: the same names in the same order, the same settings."""

import inspect
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncOperation,
    AsyncSemel,
    AsyncSQLiteStore,
    MemoryStore,
    Operation,
    Semel,
    SQLiteStore,
)
from semel.engine.aio import AsyncGuard
from semel.engine.drive.aio_driver import AsyncCallDriver, AsyncLeasedAttempt
from semel.engine.drive.attempts import AsyncAttempt, Attempt
from semel.engine.drive.driver import CallDriver, LeasedAttempt
from semel.engine.ports import AsyncStore, AsyncUnit, Store, Unit
from semel.engine.sync import SyncGuard
from semel.engine.transaction.aio import AsyncTransactionAttempt
from semel.engine.transaction.sync import TransactionAttempt

PAIRS = [
    (SyncGuard, AsyncGuard),
    (Operation, AsyncOperation),
    (MemoryStore, AsyncMemoryStore),
    (SQLiteStore, AsyncSQLiteStore),
    (Store, AsyncStore),
    (Unit, AsyncUnit),
    (Attempt, AsyncAttempt),
    (LeasedAttempt, AsyncLeasedAttempt),
    (TransactionAttempt, AsyncTransactionAttempt),
    (CallDriver, AsyncCallDriver),
]
ONLY_SYNC = {"in_this_loop"}
"""How a sync guard protects an ``async def``."""
SAME = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


def methods(cls: type) -> list[str]:
    names = [name for name, member in vars(cls).items() if inspect.isfunction(member)]
    shown = {"__init__", "__repr__", *SAME, *SAME.values()}
    return [name for name in names if name not in ONLY_SYNC and (name in shown or not name.startswith("_"))]


@pytest.mark.parametrize(("sync", "twin"), PAIRS, ids=lambda cls: cls.__name__)
def test_the_same_public_names_in_the_same_order(sync: type, twin: type) -> None:
    assert [SAME.get(name, name) for name in methods(sync)] == methods(twin)


@pytest.mark.parametrize(("sync", "twin"), PAIRS, ids=lambda cls: cls.__name__)
def test_the_same_parameters_with_the_same_defaults(sync: type, twin: type) -> None:
    def parameters(cls: type, name: str) -> list[tuple[Any, ...]]:
        signature = inspect.signature(getattr(cls, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    for name in methods(sync):
        if name in ("__init__", *[n for n in methods(sync) if not n.startswith("_")]):
            expected, found = parameters(sync, name), parameters(twin, SAME.get(name, name))
            assert expected == found, name


@pytest.mark.parametrize(("sync", "twin"), PAIRS, ids=lambda cls: cls.__name__)
def test_what_waits_is_async_in_the_twin(sync: type, twin: type) -> None:
    pure = {
        "once", "once_in_transaction", "adopt", "require", "conflicts", "plan", "watch", "unwatch", "open", "use_store",
        "__init__", "__repr__",
    }  # fmt: skip
    for name in methods(twin):
        function = vars(twin)[name]
        # A method that only passes a coroutine on returns it without one of its own.
        waits = (
            inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
            or "Awaitable[" in str(function.__annotations__.get("return"))
        )
        assert waits is (name not in pure), name
    for name in methods(sync):
        assert not inspect.iscoroutinefunction(vars(sync)[name])


def test_public_methods_are_documented() -> None:
    for cls in (Semel, AsyncSemel, Operation, AsyncOperation):
        for name, member in inspect.getmembers(cls):
            if not name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{cls.__name__}.{name}"
