"""Servers that cancel a request, and event loops that end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, Policy, State
from semel.http.asgi import ASGIMiddleware
from semel.http.asgi.endpoints import protect
from semel.http.contract.endpoint import Framework, RunAgain
from semel.http.contract.rules import Idempotent
from semel.http.fastapi import idempotent
from tests.http.asking import Counting, ask, at_the_edge, header, whose


class Cancelled:
    """A request whose handler waits, and whose server has cancelled it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.came = asyncio.Event()
        self.finished = asyncio.Event()
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.came.set()
        await self.open.wait()
        if self.fails:
            self.finished.set()
            raise KeyError("nobody hears")
        await Counting()(scope, receive, send)
        self.finished.set()


def test_a_server_that_cancels_does_not_stop_the_handler() -> None:
    async def run() -> None:
        app = Cancelled()
        guarded = at_the_edge(app)
        request = asyncio.ensure_future(ask(guarded))
        await app.came.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        app.open.set()
        await app.finished.wait()
        sent = await ask(guarded)
        assert header(sent, b"idempotent-replayed") == [b"true"]
        await asyncio.gather(*guarded._left)
        await asyncio.sleep(0)  # who asked to be told of a task's end is told in the turn after it
        assert not guarded._left

    asyncio.run(run())


def test_a_handler_that_fails_without_its_client_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        app = Cancelled()
        app.fails = True
        request = asyncio.ensure_future(ask(at_the_edge(app)))
        await app.came.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        app.open.set()
        await app.finished.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert "after its client had gone" in caplog.text


def test_a_server_that_cancels_stops_what_is_not_claimed() -> None:
    async def run() -> None:
        app = Cancelled()
        guarded = ASGIMiddleware(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
        request = asyncio.ensure_future(ask(guarded))
        await app.came.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        app.open.set()
        await asyncio.gather(*guarded._left, return_exceptions=True)
        assert not app.finished.is_set()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (idempotent(), None),
        (idempotent(external_effects=True), State.ABANDONED),
        (idempotent(policy=Policy(), external_effects=True), State.ABANDONED),
        (idempotent(on_abandoned="reject"), State.UNKNOWN),
        (idempotent(guarantee="at_most_once"), State.UNKNOWN),
    ],
    ids=["plain", "external", "external-own-policy", "reject", "at-most-once"],
)
def test_a_loop_that_shuts_down_frees_the_key_only_where_nothing_can_have_happened(
    rule: Idempotent, state: State | None
) -> None:
    store = AsyncMemoryStore()

    async def begin() -> None:
        app = Cancelled()
        task = asyncio.ensure_future(ask(at_the_edge(app, AsyncSemel(store), rule)))
        await app.came.wait()
        assert not task.done()

    asyncio.run(begin())  # which cancels all that still runs

    async def later() -> None:
        record = await AsyncSemel(store).lookup("POST /pay", "k", tenant="alice")
        assert (record and record.state) == state

    asyncio.run(later())


class Held(AsyncMemoryStore):
    """Answers a claim once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.came, self.open = asyncio.Event(), asyncio.Event()

    async def execute(self, op: Any) -> Any:
        self.came.set()
        await self.open.wait()
        return await super().execute(op)


@pytest.mark.parametrize("claiming", [False, True], ids=["before the claim", "while it is made"])
def test_a_thread_whose_request_was_cancelled_before_its_claim_runs_no_handler(claiming: bool) -> None:
    """A thread cannot be cancelled, and nobody would store its answer: the key would be in use, and then run again."""
    runs: list[str] = []
    ended = threading.Event()

    async def run() -> None:
        store, came, gate = Held(), asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def pay() -> None:
            runs.append("ran")

        handler = protect(pay, Idempotent(), Framework(lambda: None, KeyError, RunAgain))

        def view() -> None:
            loop.call_soon_threadsafe(came.set)
            assert gate.wait(10)
            try:
                handler()
            finally:
                ended.set()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.to_thread(view)
            await Counting()(scope, receive, send)

        guarded = ASGIMiddleware(app, guard=AsyncSemel(store), tenant=whose)
        request = asyncio.ensure_future(ask(guarded))
        await came.wait()
        if claiming:
            gate.set()
            await store.came.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        gate.set()
        store.open.set()
        assert await asyncio.to_thread(ended.wait, 10)
        assert runs == []
        sent = await ask(guarded)
        assert sent[0]["status"] == 200
        assert header(sent, b"idempotent-replayed") == []
        assert runs == ["ran"]

    asyncio.run(run())
