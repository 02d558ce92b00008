"""What an application does after its answer: by then that is stored and sent, whatever it does, and whoever cancels."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest

from semel import AsyncMemoryStore, AsyncSemel, State
from semel.core.ops import Complete, Op
from tests.http.asking import ask, at_the_edge, body_of, header, scope_of

R = TypeVar("R")
START = {"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]}
BODY = {"type": "http.response.body", "body": b"paid", "more_body": False}


class Held(AsyncMemoryStore):
    """A store that takes a completion when its gate is opened, and says when one has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()
        self.gate = asyncio.Event()

    async def execute(self, op: Op[R]) -> R:
        if isinstance(op, Complete):
            self.came.set()
            await self.gate.wait()
        return await super().execute(op)


class Service:
    """Answers, and then goes on: waits until it is let, and ends, or raises."""

    def __init__(self, *, waits_before: bool = False, raises: Exception | None = None) -> None:
        self.runs = 0
        self.answered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.over = asyncio.Event()
        self._waits_before = waits_before
        self._raises = raises

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        try:
            if self._waits_before:
                await asyncio.sleep(0)
            await send(START)
            await send(BODY)
            self.answered.set()
            await self.go_on.wait()
            if self._raises is not None:
                raise self._raises
        finally:
            self.over.set()


@pytest.fixture(params=[False, True], ids=["never-waits", "waits"])
def waits(request: pytest.FixtureRequest) -> bool:
    """Whether the application has waited for something before it answers: then its task is in the loop's hands."""
    return bool(request.param)


def test_what_follows_the_answer_finds_it_stored_and_sent(waits: bool) -> None:
    """It may take longer than the lease without ever waiting, or end the process: then a retry must find the answer."""

    async def run() -> None:
        found: list[Any] = []
        guard = AsyncSemel(AsyncMemoryStore())

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if waits:
                await asyncio.sleep(0)
            await send(START)
            await send(BODY)
            record = await guard.lookup("POST /pay", "k", tenant="alice")
            found.append((record and record.state, [message["type"] for message in sent]))

        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await at_the_edge(app, guard)(scope_of(), receive, send)
        assert found == [(State.DONE, ["http.response.start", "http.response.body"])]

    asyncio.run(run())


def test_a_hook_hears_of_the_completion_in_the_context_of_the_request(waits: bool) -> None:
    request_id: ContextVar[str] = ContextVar("request_id", default="-")
    heard: list[tuple[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request_id.set("req-1")
        if waits:
            await asyncio.sleep(0)
        await send(START)
        await send(BODY)

    guard = AsyncSemel(AsyncMemoryStore(), on_event=lambda event: heard.append((event.name, request_id.get())))
    asyncio.run(ask(at_the_edge(app, guard)))
    assert heard == [("started", "-"), ("completed", "req-1")]


def test_what_the_application_does_after_its_answer_keeps_nobody_waiting(waits: bool) -> None:
    async def run() -> None:
        app, sent = Service(waits_before=waits), []
        whole = asyncio.Event()

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                whole.set()

        guarded = at_the_edge(app)
        request = asyncio.ensure_future(guarded(scope_of(), receive, send))
        await asyncio.wait_for(whole.wait(), 10)
        assert not request.done(), "the server was told that the request is over, and the application still runs"
        again = await ask(guarded)
        assert header(again, b"idempotent-replayed") == [b"true"]
        app.go_on.set()
        await request
        assert app.runs == 1

    asyncio.run(run())


def test_an_error_after_the_answer_is_the_servers_to_log_and_the_answer_stands(waits: bool) -> None:
    async def run() -> None:
        app, sent = Service(waits_before=waits, raises=KeyError("a mail could not be sent")), []
        app.go_on.set()

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        guarded = at_the_edge(app)
        with pytest.raises(KeyError, match="a mail could not be sent"):
            await guarded(scope_of(), receive, send)
        assert body_of(sent) == b"paid"
        assert header(await ask(guarded), b"idempotent-replayed") == [b"true"]
        assert app.runs == 1

    asyncio.run(run())


def test_a_cancellation_after_the_answer_reaches_the_application(waits: bool) -> None:
    async def run() -> None:
        app = Service(waits_before=waits)
        guarded = at_the_edge(app)
        request = asyncio.ensure_future(ask(guarded))
        await asyncio.wait_for(app.answered.wait(), 10)
        for _ in range(10):
            await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.wait_for(app.over.wait(), 10)
        assert header(await ask(guarded), b"idempotent-replayed") == [b"true"]

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(8))
def test_whenever_the_server_cancels_an_answer_that_is_whole_is_stored(turns: int, waits: bool) -> None:
    """Also in the turn in which it becomes whole."""

    async def run() -> None:
        store, app = Held(), Service(waits_before=waits)
        app.go_on.set()
        guard = AsyncSemel(store)
        guarded = at_the_edge(app, guard)
        request = asyncio.ensure_future(ask(guarded))
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.sleep(0)
        store.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.gather(*guarded._left, return_exceptions=True)
        record = await guard.lookup("POST /pay", "k", tenant="alice")
        assert app.runs <= 1
        if app.runs:
            assert record is not None
            assert record.state is State.DONE
        else:
            assert record is None, "a key is held, and nobody runs"

    asyncio.run(run())


def test_what_is_said_after_an_answer_that_is_whole_comes_after_it(waits: bool) -> None:
    trailers = {"type": "http.response.trailers", "headers": [(b"x-sum", b"1")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if waits:
            await asyncio.sleep(0)
        await send({**START, "trailers": True})
        await send(BODY)
        await send(trailers)

    async def run() -> None:
        store = Held()
        request = asyncio.ensure_future(ask(at_the_edge(app, AsyncSemel(store))))
        await asyncio.wait_for(store.came.wait(), 10)
        store.gate.set()
        assert [message["type"] for message in await request] == [
            "http.response.start", "http.response.body", "http.response.trailers",
        ]  # fmt: skip

    asyncio.run(run())
