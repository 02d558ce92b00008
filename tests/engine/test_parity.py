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
from semel.engine.aio_calls import AsyncCalls
from semel.engine.calls import Calls
from semel.engine.ports import AsyncStore, AsyncUnit, Store, Unit
from semel.engine.transaction.aio import AsyncTransactions
from semel.engine.transaction.sync import Transactions

PAIRS = [
    (Semel, AsyncSemel),
    (Operation, AsyncOperation),
    (MemoryStore, AsyncMemoryStore),
    (SQLiteStore, AsyncSQLiteStore),
    (Store, AsyncStore),
    (Calls, AsyncCalls),
    (Transactions, AsyncTransactions),
    (Unit, AsyncUnit),
]
SAME = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


def methods(cls: type, private: bool = False) -> list[str]:
    names = [name for name, member in vars(cls).items() if inspect.isfunction(member)]
    shown = {"__init__", "__repr__", *SAME, *SAME.values()}
    return [name for name in names if name in shown or not name.startswith("_") or (private and name[1] != "_")]


@pytest.mark.parametrize(("sync", "twin"), PAIRS, ids=lambda cls: cls.__name__)
def test_the_same_public_names_in_the_same_order(sync: type, twin: type) -> None:
    assert [SAME.get(name, name) for name in methods(sync)] == methods(twin)


def test_the_same_private_names_in_the_same_order_too() -> None:
    sync = [SAME.get(name, name) for name in methods(Semel, private=True)]
    twin = methods(AsyncSemel, private=True)
    assert set(sync) - set(twin) == {"_forked", "_async_twin"}, "an event loop does not survive a fork"
    assert set(twin) - set(sync) == {"_send_again"}, "only an async call can be cancelled"
    assert [name for name in sync if name in twin] == [name for name in twin if name in sync]


@pytest.mark.parametrize(("sync", "twin"), PAIRS, ids=lambda cls: cls.__name__)
def test_the_same_parameters_with_the_same_defaults(sync: type, twin: type) -> None:
    def parameters(cls: type, name: str) -> list[tuple[Any, ...]]:
        signature = inspect.signature(getattr(cls, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    for name in methods(sync):
        if name in ("__init__", *[n for n in methods(sync) if not n.startswith("_")]):
            assert parameters(sync, name) == parameters(twin, SAME.get(name, name)), name


@pytest.mark.parametrize(("sync", "twin"), PAIRS, ids=lambda cls: cls.__name__)
def test_what_waits_is_async_in_the_twin(sync: type, twin: type) -> None:
    pure = {"once", "once_in_transaction", "adopt", "require", "conflicts", "__init__", "__repr__"}
    for name in methods(twin):
        function = vars(twin)[name]
        assert inspect.iscoroutinefunction(function) is (name not in pure), name
    for name in methods(sync):
        assert not inspect.iscoroutinefunction(vars(sync)[name])


def test_public_methods_are_documented() -> None:
    for cls in (Semel, AsyncSemel, Operation, AsyncOperation):
        for name, member in inspect.getmembers(cls):
            if not name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{cls.__name__}.{name}"
