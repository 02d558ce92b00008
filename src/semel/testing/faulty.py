"""A store that fails at one Op, before or after it is stored. For ``break_everywhere``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from semel.engine.ports import AsyncStore, Store
from semel.errors import StoreUnavailable, StoreUncertain

__all__ = ["async_store", "broken", "store"]


class _Fault:
    """Which Op of this process fails, and how."""

    def __init__(self) -> None:
        self.target = 0
        self.how: Literal["before", "after"] = "before"
        self.passed = 0
        self.report: Callable[[str], None] = lambda point: None

    @contextmanager
    def around(self, op: Any) -> Iterator[None]:
        """Raise before or after the block if this is the Op that fails."""
        self.passed += 1
        if self.passed != self.target:
            yield
            return
        self.report(f"the store failed {self.how} {type(op).__name__} (Op {self.target})")
        if self.how == "before":
            raise StoreUnavailable("broken on purpose: not stored")
        yield
        raise StoreUncertain("broken on purpose: stored, but the answer is lost")


_fault = _Fault()


def break_at(target: int, how: Literal["before", "after"], report: Callable[[str], None]) -> None:
    """Let the Op number ``target`` of this process fail. ``report`` is called with a description when it does."""
    _fault.target, _fault.how, _fault.report, _fault.passed = target, how, report, 0


def broken() -> bool:
    """Whether the failure has happened."""
    return bool(_fault.target) and _fault.passed >= _fault.target


def store(inner: Store) -> Store:
    """Wrap a store so that it fails where ``break_at`` says. Without ``break_at`` it works as usual."""
    return _Faulty(inner)


def async_store(inner: AsyncStore) -> AsyncStore:
    """Async version of ``store``."""
    return _AsyncFaulty(inner)


class _Wrapper:
    """What the wrapped store declares and does, but for ``execute``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.wakes: bool = inner.wakes
        self.counts: bool = inner.counts
        self.resumes: bool = inner.resumes
        self.lists: bool = inner.lists
        self.trails: bool = inner.trails
        self.adopt = inner.adopt
        self.accept = inner.accept
        self.execute_many = inner.execute_many
        self.wait = inner.wait
        self.open = inner.open
        self.close = inner.close


class _Faulty(_Wrapper):
    def execute(self, op: Any) -> Any:
        with _fault.around(op):
            return self._inner.execute(op)


class _AsyncFaulty(_Wrapper):
    async def execute(self, op: Any) -> Any:
        with _fault.around(op):
            return await self._inner.execute(op)
