"""A store that can be told to misbehave, over a real one: it records the Ops, and fails, delays or loses chosen ones.

A *script* is a list of rules, shared by the sync and the async store. A rule meets an Op on its way in (``before`` the
real store has seen it) and on its way out (``after`` it has taken effect, so that only the answer is lost).
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from semel.core.ops import Op
from semel.errors import StoreError

__all__ = ["AsyncScriptedStore", "Clock", "Gate", "Rule", "Script", "ScriptedStore"]

PATIENCE = 60.0


class Clock:
    """A store's idea of now, moved by hand."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Gate:
    """An event that threads and tasks alike can wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        with self._lock:
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    @property
    def is_open(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        assert self._event.wait(PATIENCE), "nobody opened the gate"

    async def passed(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        async with asyncio.timeout(PATIENCE):
            await event.wait()


class Rule:
    """What happens to the next ``times`` Ops of a kind. ``seen`` opens when the first of them has come."""

    def __init__(
        self,
        kind: type[Op[Any]],
        *,
        before: BaseException | type[BaseException] | None = None,
        after: BaseException | type[BaseException] | None = None,
        hold_before: Gate | None = None,
        hold_after: Gate | None = None,
        do: Callable[[], object] | None = None,
        times: int = 1,
        when: Callable[[Any], bool] | None = None,
    ) -> None:
        self.kind = kind
        self.before = before
        self.after = after
        self.hold_before = hold_before
        self.hold_after = hold_after
        self.do = do
        self.times = times
        self.when = when
        self.seen = Gate()
        self.took_effect = Gate()


class Script:
    """The rules, and what was asked: ``ops`` as they came, ``batches`` those of execute_many."""

    def __init__(self) -> None:
        self.ops: list[Op[Any]] = []
        self.batches: list[list[Op[Any]]] = []
        self.waits: list[bytes] = []
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    @property
    def kinds(self) -> list[str]:
        """The names of the Ops that were sent, in order."""
        return [type(op).__name__ for op in self.ops]

    def count(self, kind: type[Op[Any]]) -> int:
        return sum(type(op) is kind for op in self.ops)

    def on(self, kind: type[Op[Any]], **settings: Any) -> Rule:
        rule = Rule(kind, **settings)
        with self._lock:
            self._rules.append(rule)
        return rule

    def forget(self) -> None:
        """Drop what was recorded so far, and all rules."""
        with self._lock:
            self.ops.clear()
            self.batches.clear()
            self._rules.clear()

    def came(self, op: Op[Any]) -> Rule | None:
        with self._lock:
            self.ops.append(op)
            for rule in self._rules:
                if rule.kind is type(op) and rule.times > 0 and (rule.when is None or rule.when(op)):
                    rule.times -= 1
                    rule.seen.open()
                    return rule
        return None


class ScriptedStore:
    """For threads."""

    def __init__(self, inner: Any, script: Script) -> None:
        self.inner = inner
        self.script = script
        self.wakes: bool = inner.wakes
        self.counts: bool = inner.counts
        self.resumes: bool = inner.resumes
        self.lists: bool = inner.lists
        self.trails: bool = inner.trails
        self.adopt = inner.adopt
        self.accept = inner.accept

    def execute(self, op: Any) -> Any:
        rule = self.script.came(op)
        if rule is None:
            return self.inner.execute(op)
        if rule.hold_before is not None:
            rule.hold_before.wait()
        if rule.before is not None:
            raise rule.before
        if rule.do is not None:
            rule.do()
        answer = self.inner.execute(op)
        rule.took_effect.open()
        if rule.hold_after is not None:
            rule.hold_after.wait()
        if rule.after is not None:
            raise rule.after
        return answer

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        self.script.batches.append(list(ops))
        answers: list[Any] = []
        for op in ops:
            try:
                answers.append(self.execute(op))
            except StoreError as error:
                answers.append(error)
        return answers

    def wait(self, id: bytes, seconds: float) -> None:
        self.script.waits.append(id)
        self.inner.wait(id, seconds)

    def open(self) -> None: ...

    def close(self) -> None:
        self.inner.close()


class AsyncScriptedStore:
    """For one event loop."""

    def __init__(self, inner: Any, script: Script) -> None:
        self.inner = inner
        self.script = script
        self.wakes: bool = inner.wakes
        self.counts: bool = inner.counts
        self.resumes: bool = inner.resumes
        self.lists: bool = inner.lists
        self.trails: bool = inner.trails
        self.adopt = inner.adopt
        self.accept = inner.accept

    async def execute(self, op: Any) -> Any:
        rule = self.script.came(op)
        if rule is None:
            return await self.inner.execute(op)
        if rule.hold_before is not None:
            await rule.hold_before.passed()
        if rule.before is not None:
            raise rule.before
        if rule.do is not None:
            rule.do()
        answer = await self.inner.execute(op)
        rule.took_effect.open()
        if rule.hold_after is not None:
            await rule.hold_after.passed()
        if rule.after is not None:
            raise rule.after
        return answer

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        self.script.batches.append(list(ops))
        answers: list[Any] = []
        for op in ops:
            try:
                answers.append(await self.execute(op))
            except StoreError as error:
                answers.append(error)
        return answers

    async def wait(self, id: bytes, seconds: float) -> None:
        self.script.waits.append(id)
        await self.inner.wait(id, seconds)

    def open(self) -> None: ...

    async def close(self) -> None:
        await self.inner.close()
