# ruff: noqa: ASYNC110, E501
"""Hard cases of the engines: what a reviewer broke once."""

import asyncio
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, AsyncSQLiteStore, MemoryStore, Semel, Wait
from semel.codec import Codec
from semel.core.ops import Claim, Lookup, Renew, Sweep
from semel.errors import InProgress, StoreUncertain
from semel.testing.faults import until


class Watched:
    """A sync store that counts Ops by kind and may do something first."""

    def __init__(self, inner: Any, before: Any = None, after: Any = None) -> None:
        self.inner, self.before, self.after, self.ops = inner, before, after, []
        self.wakes, self.counts, self.resumes, self.lists = inner.wakes, inner.counts, inner.resumes, inner.lists
        self.trails = inner.trails
        self.adopt, self.accept = inner.adopt, inner.accept

    def execute(self, op: Any) -> Any:
        self.ops.append(op)
        if self.before:
            self.before(op)
        answer = self.inner.execute(op)
        if self.after:
            self.after(op)
        return answer

    def execute_many(self, ops: Any) -> Any:
        return [self.execute(op) for op in ops]

    def wait(self, id: bytes, seconds: float) -> None:
        self.inner.wait(id, seconds)

    def open(self) -> None: ...

    def close(self) -> None: ...


class AsyncWatched:
    def __init__(self, inner: Any, before: Any = None, after: Any = None) -> None:
        self.inner, self.before, self.after, self.ops = inner, before, after, []
        self.wakes, self.counts, self.resumes, self.lists = inner.wakes, inner.counts, inner.resumes, inner.lists
        self.trails = inner.trails
        self.adopt, self.accept = inner.adopt, inner.accept

    async def execute(self, op: Any) -> Any:
        self.ops.append(op)
        if self.before:
            await self.before(op)
        answer = await self.inner.execute(op)
        if self.after:
            await self.after(op)
        return answer

    async def execute_many(self, ops: Any) -> Any:
        return [await self.execute(op) for op in ops]

    async def wait(self, id: bytes, seconds: float) -> None:
        await self.inner.wait(id, seconds)

    def open(self) -> None: ...

    async def close(self) -> None: ...


def kinds(store: Any, kind: type) -> int:
    return sum(type(op) is kind for op in store.ops)


@pytest.mark.usefixtures("renews_early")
def test_leases_are_renewed_in_the_second_event_loop_too() -> None:
    """asyncio.run twice with one guard: _adopt() leaves _rings_at of the dead loop, so no timer is ever set again."""
    store = AsyncWatched(AsyncMemoryStore())
    guard = AsyncSemel(store, sweep_every=None)

    async def quick() -> int:
        return 1

    async def slow() -> int:
        async with asyncio.timeout(30):
            while not kinds(store, Renew):
                await asyncio.sleep(0.01)
        return 2

    asyncio.run(guard.run("op", key="a", call=quick))
    assert asyncio.run(guard.run("op", key="b", call=slow)) == 2


def test_the_lease_of_a_claim_found_by_its_nonce_counts_from_its_first_send() -> None:
    """The first send made the claim; its answer came late and was lost. Others may take over a lease after that send."""
    sent: list[float] = []

    def lose(op: Any) -> None:
        if type(op) is Claim and not sent:
            sent.append(time.monotonic())
            time.sleep(0.01)
            raise StoreUncertain("no answer")

    guard = Semel(Watched(MemoryStore(), after=lose), sweep_every=None)

    def handler() -> float:
        (lease,) = guard.driver.keeper.leases.held.values()
        return lease.ends

    assert guard.run("op", key="k", call=handler, lease=30) < sent[0] + 30


@pytest.mark.usefixtures("renews_early")
def test_a_slow_sweep_does_not_keep_the_leases_waiting() -> None:
    async def scenario() -> None:
        sweeping, over = asyncio.Event(), asyncio.Event()

        async def slow_sweep(op: Any) -> None:
            if type(op) is Sweep:
                sweeping.set()
                await over.wait()

        store = AsyncWatched(AsyncMemoryStore(), before=slow_sweep)
        guard = AsyncSemel(store, sweep_every=0.01)

        async def handler() -> str:
            await sweeping.wait()
            before = kinds(store, Renew)
            while kinds(store, Renew) < before + 2:
                await asyncio.sleep(0.01)
            over.set()
            return "done"

        async with asyncio.timeout(60):
            assert await guard.run("op", key="k", call=handler) == "done"
        await guard.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("renews_early")
def test_a_slow_sweep_does_not_keep_the_leases_of_threads_waiting() -> None:
    sweeping, over = threading.Event(), threading.Event()

    def slow_sweep(op: Any) -> None:
        if type(op) is Sweep:
            sweeping.set()
            over.wait(60)

    store = Watched(MemoryStore(), before=slow_sweep)

    def handler() -> str:
        assert sweeping.wait(60)
        before = kinds(store, Renew)
        until(lambda: kinds(store, Renew) >= before + 2, 50, "the lease is renewed twice")
        over.set()
        return "done"

    with Semel(store, sweep_every=0.01) as guard:
        assert guard.run("op", key="k", call=handler) == "done"


class Broken:
    """A cipher whose key service is down when the effect has happened."""

    def __init__(self) -> None:
        self.down = True

    def encrypt(self, plaintext: bytes, context: bytes) -> bytes:
        if self.down:
            raise ConnectionError("KMS is down")
        return plaintext

    def decrypt(self, ciphertext: bytes, context: bytes) -> bytes:
        return ciphertext


def test_a_cipher_that_fails_does_not_make_a_finished_operation_run_again() -> None:
    now = [1000.0]
    cipher = Broken()
    guard = Semel(MemoryStore(clock=lambda: now[0]), codec=Codec(cipher), sweep_every=None)
    ran: list[int] = []
    for _ in range(2):
        try:
            guard.run("op", key="k", call=lambda: ran.append(1))
        except Exception as error:
            print(repr(error))
        now[0] += 31
        cipher.down = False
    assert ran == [1]


class Mute(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Fussy:
    name = "fussy"

    def encode(self, value: Any) -> bytes:
        raise Mute

    def decode(self, payload: bytes) -> Any:
        return None


def test_a_serializer_whose_error_cannot_be_shown_does_not_make_it_run_again() -> None:
    now = [1000.0]
    guard = Semel(MemoryStore(clock=lambda: now[0]), sweep_every=None)
    ran: list[int] = []

    @guard.once(key="k", serializer=Fussy())
    def function(k: str) -> None:
        ran.append(1)

    for _ in range(2):
        try:
            function("k")
        except Exception as error:
            print(type(error), error)
        now[0] += 31
    assert ran == [1]


@pytest.mark.parametrize("remember", [None, "all"])
def test_the_handlers_error_is_raised_though_it_cannot_be_shown(remember: Any) -> None:
    guard = Semel(MemoryStore(), sweep_every=None)

    def handler() -> None:
        raise Mute

    with pytest.raises(Mute):
        guard.run("op", key="k", call=handler, remember_errors=remember)


def test_a_dead_event_loop_is_forgotten() -> None:
    guard = Semel(MemoryStore(), sweep_every=None)

    @guard.once(key="k")
    async def function(k: str) -> int:
        return 1

    loops: list[Any] = []

    async def main(k: str) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await function(k)

    for i in range(3):
        asyncio.run(main(str(i)))
    gc.collect()
    assert [loop() for loop in loops if loop() is not None][1:] == []


@pytest.mark.usefixtures("renews_early")
def test_a_full_default_executor_does_not_keep_the_leases_waiting() -> None:
    """async def under a sync guard: renewals share asyncio's default threads with whatever the program does there."""
    store = Watched(MemoryStore())
    guard = Semel(store, sweep_every=None)

    def renewed() -> None:
        until(lambda: kinds(store, Renew) >= 2, 50, "the lease is renewed twice")

    @guard.once(key="k")
    async def function(k: str) -> str:
        await asyncio.to_thread(renewed)
        return "done"

    async def main() -> str:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await function("k")

    assert asyncio.run(main()) == "done"


def test_waiters_that_gave_up_are_forgotten() -> None:
    guard = Semel(MemoryStore(), sweep_every=None)
    left: list[Any] = []

    def handler() -> None:
        for _ in range(20):
            with pytest.raises(InProgress):
                guard.run("op", key="k", call=lambda: None, on_duplicate=Wait(0.001))
        (flight,) = guard.driver.flights.by_id.values()
        left.append(len(flight.waiters or ()))

    guard.run("op", key="k", call=handler)
    assert left[0] <= 1


@pytest.mark.usefixtures("renews_early")
def test_both_a_lost_lease_and_a_cancellation_end_in_the_cancellation() -> None:
    async def scenario() -> None:
        store = AsyncMemoryStore()
        guard = AsyncSemel(store, sweep_every=None)
        go = threading.Event()
        began = threading.Event()

        @guard.once(key="k", operation="op")
        def function(k: str) -> str:
            began.set()
            go.wait(60)
            return "x"

        task = asyncio.ensure_future(function("k"))  # type: ignore[arg-type]
        while not began.is_set():
            await asyncio.sleep(0.01)
        await guard.release("op", "k", force=True)
        while len(guard.driver.keeper.leases):  # until it is found lost
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_forked_child_can_use_an_async_sqlite_store(tmp_path: Any) -> None:
    store = AsyncSQLiteStore(tmp_path / "a.db")
    asyncio.run(_look(store))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(asyncio.wait_for(_look(store), 30))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    asyncio.run(store.close())


async def _look(store: Any) -> None:
    await store.execute(Lookup(b"x" * 16))


def test_a_store_whose_loop_was_closed_in_mid_air_works_in_the_next(tmp_path: Any) -> None:
    store = AsyncSQLiteStore(tmp_path / "a.db")
    loop = asyncio.new_event_loop()
    task = loop.create_task(_look(store))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert not task.done()
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    asyncio.run(asyncio.wait_for(_look(store), 30))
    asyncio.run(store.close())


def test_one_async_guard_in_two_living_loops_says_so() -> None:
    guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
    errors: list[Any] = []
    began, over = threading.Event(), threading.Event()

    async def first() -> None:
        async def handler() -> int:
            began.set()
            while not over.is_set():
                await asyncio.sleep(0.01)
            return 1

        await guard.run("op", key="k", call=handler)

    async def second() -> int:
        return 2

    thread = threading.Thread(target=lambda: asyncio.run(first()))
    thread.start()
    began.wait(60)
    try:
        asyncio.run(guard.run("op", key="other", call=second))
    except Exception as error:
        errors.append(error)
    over.set()
    thread.join()
    assert [type(e).__name__ for e in errors] == ["ConfigurationError"]
