"""One scenario, two engines: drivers that let a test be written once and run on ``Semel`` and on ``AsyncSemel``.

A test's handler is a *body*: a generator function that yields what it waits for (a ``Gate``, or what an async method
returned) and returns its result; a plain function will do where nothing is waited for. ``engine.function(body)`` makes
a ``def`` or an ``async def`` of it. Calls are made through ``engine.do`` (to the end) and ``engine.start`` (a future).
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import semel.engine.drive.aio_keeper
import semel.engine.drive.leases
import semel.stores.sqlite
from semel import AsyncMemoryStore, AsyncSemel, AsyncSQLiteStore, MemoryStore, Record, Semel, SQLiteStore
from semel.core.keys import identity
from semel.core.ops import Claim, Claimed, Lookup
from semel.core.states import Takeover
from semel.observe.events import Event
from tests.engine.scripted import PATIENCE, AsyncScriptedStore, Clock, Gate, Script, ScriptedStore

__all__ = ["AsyncEngine", "Engine", "SyncEngine", "engine_of", "renew_early"]

ENGINES = ("sync-memory", "async-sqlite")
"""Both engines and both stores."""
EVERY_ENGINE = ("sync-memory", "async-memory", "sync-sqlite", "async-sqlite")
"""For what the store has a part in: who wins a claim, and who takes over."""


class Engine:
    """What both drivers share."""

    is_async: bool
    renew_early: Callable[[], None]
    """Renew leases after a thousandth of their span, until the test ends."""

    def __init__(self, store_kind: str, tmp_path: Path) -> None:
        self.store_kind = store_kind
        self.path = tmp_path / "records.db"
        if store_kind == "sqlite":
            self.path.write_bytes(_migrated_file(tmp_path / "template.db"))
        self.clock = Clock()
        self.script = Script()
        self.events: list[Event] = []
        self.guards: list[Any] = []
        self.store: Any = self.wrapped(self.open_store())
        self.guard: Any = self.new_guard()

    # -- what a driver fills in

    def open_store(self) -> Any:
        raise NotImplementedError

    def wrapped(self, store: Any) -> Any:
        raise NotImplementedError

    def new_guard(self, store: Any = None, **settings: Any) -> Any:
        """A guard of its own, as of another process: it shares the store and nothing else."""
        raise NotImplementedError

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    # -- what tests say

    def once(self, body: Callable[..., Any], *, guard: Any = None, **settings: Any) -> Callable[..., Any]:
        settings.setdefault("key", "key")
        settings.setdefault("operation", "op")
        decorated: Callable[..., Any] = (guard or self.guard).once(**settings)(self.function(body))
        return decorated

    def run(self, body: Callable[..., Any], *, key: object = "k", guard: Any = None, **settings: Any) -> Any:
        return self.do((guard or self.guard).run, "op", key=key, call=self.function(body), **settings)

    def run_outcome(self, body: Callable[..., Any], *, key: object = "k", guard: Any = None, **settings: Any) -> Any:
        return self.do((guard or self.guard).run_outcome, "op", key=key, call=self.function(body), **settings)

    def start_run(
        self, body: Callable[..., Any], *, key: object = "k", guard: Any = None, **settings: Any
    ) -> "Future[Any]":
        return self.start((guard or self.guard).run, "op", key=key, call=self.function(body), **settings)

    def execute(self, op: Any) -> Any:
        """Straight to the real store, past script and engine, as another process would."""
        return self.do(self.store.inner.execute, op)

    def record(self, key: str = "k", operation: str = "op", tenant: str = "") -> Record | None:
        found: Record | None = self.execute(Lookup(identity(tenant, operation, key)))
        return found

    def claim_elsewhere(
        self,
        key: str = "k",
        *,
        operation: str = "op",
        tenant: str = "",
        lease: float = 30.0,
        ttl: float = 86400.0,
        fingerprint: bytes = b"",
        takeover: Takeover = Takeover.RETRY,
        nonce: int = 1,
    ) -> Claimed:
        """Another process claims the key."""
        id = identity(tenant, operation, key)
        claimed = self.execute(Claim(id, nonce, fingerprint, lease, ttl, takeover, tenant, operation, key))
        assert isinstance(claimed, Claimed), f"the key is not free: {claimed}"
        return claimed

    def take_over(self, key: str = "k", **claim: Any) -> Claimed:
        """Another process claims the key once its lease has ended; again where a renewal came in between."""
        for _ in range(1000):
            self.clock.advance(31)
            with suppress(AssertionError):
                return self.claim_elsewhere(key, **claim)
        raise AssertionError("the lease was renewed each time")

    def abandon(self, key: str = "k", **claim: Any) -> Claimed:
        """Another process claims the key, and dies."""
        claimed = self.claim_elsewhere(key, **claim)
        self.clock.advance(claim.get("lease", 30.0) + 1.0)
        return claimed

    def end_leases(self) -> None:
        """Let the spans of all held leases have passed, as if nobody had renewed them for that long."""
        for lease in list(self.guard.driver.keeper.leases.held.values()):
            lease.ends = 0.0

    def names(self) -> list[str]:
        """The names of the events so far."""
        return [event.name for event in self.events]


class SyncEngine(Engine):
    """Drives ``Semel``; what runs at the same time runs in threads."""

    is_async = False

    def open_store(self) -> Any:
        if self.store_kind == "memory":
            return MemoryStore(clock=self.clock)
        return SQLiteStore(self.path, synchronous="normal")

    def wrapped(self, store: Any) -> Any:
        return ScriptedStore(store, self.script)

    def new_guard(self, store: Any = None, **settings: Any) -> Any:
        settings.setdefault("on_event", self.events.append)
        guard = Semel(store or self.store, **settings)
        self.guards.append(guard)
        return guard

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isgeneratorfunction(body):
            return body

        def function(*args: Any, **kwargs: Any) -> Any:
            steps = body(*args, **kwargs)
            answer, error = None, None
            while True:
                try:
                    wanted = steps.send(answer) if error is None else steps.throw(error)
                except StopIteration as stop:
                    return stop.value
                answer, error = wanted, None
                if isinstance(wanted, Gate):
                    try:
                        wanted.wait()
                    except BaseException as raised:
                        error = raised

        return _like(body, function)

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def close(self) -> None:
        for guard in self.guards:
            guard.driver.keeper.close()
        self.store.close()


class AsyncEngine(Engine):
    """Drives ``AsyncSemel`` in an event loop of its own thread."""

    is_async = True

    def __init__(self, store_kind: str, tmp_path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        super().__init__(store_kind, tmp_path)

    def open_store(self) -> Any:
        if self.store_kind == "memory":
            return AsyncMemoryStore(clock=self.clock)
        return AsyncSQLiteStore(self.path, synchronous="normal")

    def wrapped(self, store: Any) -> Any:
        return AsyncScriptedStore(store, self.script)

    def new_guard(self, store: Any = None, **settings: Any) -> Any:
        settings.setdefault("on_event", self.events.append)
        guard = AsyncSemel(store or self.store, **settings)
        self.guards.append(guard)
        return guard

    def function(self, body: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isgeneratorfunction(body):

            async def simple(*args: Any, **kwargs: Any) -> Any:
                return body(*args, **kwargs)

            return _like(body, simple)

        async def function(*args: Any, **kwargs: Any) -> Any:
            steps = body(*args, **kwargs)
            answer, error = None, None
            while True:
                try:
                    wanted = steps.send(answer) if error is None else steps.throw(error)
                except StopIteration as stop:
                    return stop.value
                answer, error = wanted, None
                try:
                    if isinstance(wanted, Gate):
                        await wanted.passed()
                    elif inspect.isawaitable(wanted):
                        answer = await wanted
                except BaseException as raised:
                    error = raised

        return _like(body, function)

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.start(function, *args, **kwargs).result(PATIENCE)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        async def call() -> Any:
            return await function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(call(), self.loop)

    def close(self) -> None:
        async def shut() -> None:
            for guard in self.guards:
                await guard.driver.keeper.close()
            await self.store.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(shut(), self.loop).result(PATIENCE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


_MIGRATED: list[bytes] = []


def _migrated_file(path: Path) -> bytes:
    """A SQLite file with its tables, made once: the migration takes longer than most tests."""
    if not _MIGRATED:
        SQLiteStore(path).close()
        _MIGRATED.append(path.read_bytes())
    return _MIGRATED[0]


def _like(body: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Looks like the body to those who ask; not by ``functools.wraps``, which would show the generator behind it."""
    function.__name__, function.__qualname__, function.__module__ = body.__name__, body.__qualname__, body.__module__
    function.__annotations__ = dict(body.__annotations__)
    function.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
    return function


def renew_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew a lease of 30 s after 30 ms, and try again that soon, until the test ends.

    A test that waits for renewals needs no short lease then, which a busy machine lets end.
    """
    monkeypatch.setattr(semel.engine.drive.leases, "RENEW_AFTER", 0.001)
    for module in (semel.engine.drive.leases, semel.engine.drive.aio_keeper):
        monkeypatch.setattr(module, "RETRY_AFTER", 0.001)


def engine_of(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine over a store of this kind, with the store's clock in the test's hands."""
    sort, _, store = kind.partition("-")
    made = (SyncEngine if sort == "sync" else AsyncEngine)(store, tmp_path)
    made.renew_early = lambda: renew_early(monkeypatch)
    monkeypatch.setattr(semel.stores.sqlite, "_now", lambda: int(made.clock() * 1_000_000))
    yield made
    made.close()
