"""A store that fails at one Op, before or after it is stored. For ``break_everywhere``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def here(self, op: Any) -> bool:
        """Whether this is the Op that fails."""
        if not self.target:
            return False
        self.passed += 1
        if self.passed != self.target:
            return False
        self.report(f"the store failed {self.how} {type(op).__name__} (Op {self.target})")
        return True


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


def _raise() -> None:
    if _fault.how == "before":
        raise StoreUnavailable("broken on purpose: not stored")
    raise StoreUncertain("broken on purpose: stored, but the answer is lost")


class _Wrapper:
    """What the wrapped store declares, and the failure on purpose."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.wakes: bool = inner.wakes
        self.counts: bool = inner.counts
        self.resumes: bool = inner.resumes
        self.adopt = inner.adopt
        self.accept = inner.accept

    def open(self) -> None:
        self._inner.open()


class _Faulty(_Wrapper):
    def execute(self, op: Any) -> Any:
        fails = _fault.here(op)
        if fails and _fault.how == "before":
            _raise()
        answer = self._inner.execute(op)
        if fails:
            _raise()
        return answer

    def execute_many(self, ops: Sequence[Any]) -> Any:
        return self._inner.execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        self._inner.wait(id, seconds)

    def close(self) -> None:
        self._inner.close()


class _AsyncFaulty(_Wrapper):
    async def execute(self, op: Any) -> Any:
        fails = _fault.here(op)
        if fails and _fault.how == "before":
            _raise()
        answer = await self._inner.execute(op)
        if fails:
            _raise()
        return answer

    async def execute_many(self, ops: Sequence[Any]) -> Any:
        return await self._inner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await self._inner.wait(id, seconds)

    async def close(self) -> None:
        await self._inner.close()
