"""A store that fails at one Op: before it is done, or after, when nobody knows. For ``break_everywhere``."""

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
        self.tell: Callable[[str], None] = lambda point: None

    def here(self, op: Any) -> bool:
        """Whether this is the one."""
        if not self.target:
            return False
        self.passed += 1
        if self.passed != self.target:
            return False
        self.tell(f"the store failed {self.how} {type(op).__name__} (Op {self.target})")
        return True


_fault = _Fault()


def break_at(target: int, how: Literal["before", "after"], tell: Callable[[str], None]) -> None:
    """Arm this process."""
    _fault.target, _fault.how, _fault.tell, _fault.passed = target, how, tell, 0


def broken() -> bool:
    """Whether the failure has come."""
    return bool(_fault.target) and _fault.passed >= _fault.target


def store(inner: Store) -> Store:
    """The store, failing where this process was told to; as it is, in every other."""
    return _Faulty(inner)


def async_store(inner: AsyncStore) -> AsyncStore:
    """The same, awaited."""
    return _AsyncFaulty(inner)


def _raise() -> None:
    if _fault.how == "before":
        raise StoreUnavailable("broken on purpose: not done")
    raise StoreUncertain("broken on purpose: done, and the answer is lost")


class _Faulty:
    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.wakes = inner.wakes
        self.counts = inner.counts
        self.resumes = inner.resumes
        self.adopt = inner.adopt
        self.accept = inner.accept

    def execute(self, op: Any) -> Any:
        fails = _fault.here(op)
        if fails and _fault.how == "before":
            _raise()
        answer = self._inner.execute(op)
        if fails:
            _raise()
        return answer

    def execute_many(self, ops: Sequence[Any]) -> list[Any]:
        return self._inner.execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        self._inner.wait(id, seconds)

    def close(self) -> None:
        self._inner.close()


class _AsyncFaulty:
    def __init__(self, inner: AsyncStore) -> None:
        self._inner = inner
        self.wakes = inner.wakes
        self.counts = inner.counts
        self.resumes = inner.resumes
        self.adopt = inner.adopt
        self.accept = inner.accept

    async def execute(self, op: Any) -> Any:
        fails = _fault.here(op)
        if fails and _fault.how == "before":
            _raise()
        answer = await self._inner.execute(op)
        if fails:
            _raise()
        return answer

    async def execute_many(self, ops: Sequence[Any]) -> list[Any]:
        return await self._inner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await self._inner.wait(id, seconds)

    async def close(self) -> None:
        await self._inner.close()
