"""The middleware as an ASGI application: which messages pass, which are held, and what it costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
    Policy,
)
from semel.errors import StoreUnavailable
from semel.http.asgi import ASGIMiddleware
from semel.http.fastapi import idempotent
from tests.http.asking import Counting, ask, at_the_edge, body_of, header, scope_of, whose


def test_trailers_pass_with_the_first_answer() -> None:
    trailers = {"type": "http.response.trailers", "headers": [(b"x-sum", b"1")]}
    app = at_the_edge(Counting(trailers, start={"trailers": True}))

    async def run() -> None:
        sent = await ask(app)
        assert sent[0]["trailers"] is True
        assert [message["type"] for message in sent][1:] == ["http.response.body", "http.response.trailers"]
        again = await ask(app)
        assert body_of(again) == b"run 1"
        assert "trailers" not in again[0]

    asyncio.run(run())


def test_other_messages_of_an_extension_pass() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.debug", "info": {}})
        await Counting()(scope, receive, send)

    sent = asyncio.run(ask(at_the_edge(app)))
    assert [message["type"] for message in sent] == [
        "http.response.debug",
        "http.response.start",
        "http.response.body",
    ]


def test_files_are_captured_although_the_server_could_send_them_itself(tmp_path: Any) -> None:
    file = tmp_path / "receipt.txt"
    file.write_text("receipt")

    @idempotent()
    async def pay(request: Request) -> Response:
        return FileResponse(file)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    guarded = ASGIMiddleware(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    async def run() -> None:
        for _ in range(2):
            scope = scope_of(extensions={"http.response.pathsend": {}, "http.response.debug": {}})
            sent = await ask(guarded, scope)
            assert body_of(sent) == b"receipt"
            assert scope["extensions"] == {"http.response.debug": {}}
        assert header(sent, b"idempotent-replayed") == [b"true"]

    asyncio.run(run())


def test_a_file_sent_by_the_server_all_the_same_is_remembered_without_its_body() -> None:
    runs = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/receipt"})

    guarded = at_the_edge(app)

    async def run() -> None:
        first = await ask(guarded)
        assert [message["type"] for message in first] == ["http.response.start", "http.response.pathsend"]
        assert header(await ask(guarded), b"idempotent-replayed") == [b"omitted"]

    asyncio.run(run())
    assert len(runs) == 1


@pytest.mark.parametrize("kind", ["websocket", "lifespan", "of the future"])
def test_what_is_not_http_passes_as_it_is(kind: str) -> None:
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    given = ({"type": kind, "path": "/pay"}, object(), object())
    asyncio.run(at_the_edge(app)(*given))
    assert seen == list(given)


def test_names_of_headers_may_come_in_any_case() -> None:
    app = Counting()
    guarded = at_the_edge(app)

    async def run() -> None:
        for name in (b"Idempotency-Key", b"IDEMPOTENCY-KEY"):
            await ask(guarded, {**scope_of(), "headers": [(name, b"k")]})

    asyncio.run(run())
    assert app.runs == 1


def test_an_application_that_ends_without_an_answer_releases_the_key() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = AsyncSemel(AsyncMemoryStore())

    async def run() -> None:
        with pytest.raises(RuntimeError, match="without an answer"):
            await ask(at_the_edge(app, guard))
        assert await guard.lookup("POST /pay", "k", tenant="alice") is None

    asyncio.run(run())


def test_an_application_that_raises_half_way_through_its_answer_has_not_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise KeyError("half way")

    async def run() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        with pytest.raises(KeyError, match="half way"):
            await at_the_edge(app)(scope_of(), receive, send)
        assert sent == []  # so whoever is outside can still say 500

    asyncio.run(run())


@pytest.mark.parametrize("on_unstored", ["deliver", "withhold"])
def test_an_answer_let_through_that_cannot_be_stored_is_cut_short_where_it_is_withheld(on_unstored: Any) -> None:
    class Refusing(AsyncMemoryStore):
        down = False

        async def execute(self, op: Any) -> Any:
            if self.down:
                raise StoreUnavailable("down")
            return await super().execute(op)

    store = Refusing()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 20, "more_body": True})
        store.down = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    async def run() -> None:
        policy = Policy(completion_timeout=0, on_unstored=on_unstored)
        async with AsyncSemel(store) as guard:
            guarded = at_the_edge(app, guard, idempotent(max_stored_body=10, policy=policy))
            if on_unstored == "deliver":
                await guarded(scope_of(), receive, send)
            else:
                with pytest.raises(ConnectionError):
                    await guarded(scope_of(), receive, send)

    asyncio.run(run())
    assert sent[-1]["more_body"] is (on_unstored == "withhold")


@pytest.mark.parametrize("sends", [0, 1, 2])
def test_a_server_that_says_that_the_client_has_gone_does_not_stop_a_large_answer(sends: int) -> None:
    """ASGI lets ``send`` raise OSError then. The handler has done its work, and must not do it again."""
    finished: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            await send({"type": "http.response.body", "body": b"x" * 400, "more_body": True})
        finished.append(1)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run() -> None:
        served = at_the_edge(app, rule=idempotent(max_stored_body=500))
        left = sends

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal left
            if left == 0:
                raise BrokenPipeError("the client has gone")
            left -= 1

        with pytest.raises(BrokenPipeError):  # once all is stored, the server hears of it as it would without us
            await served(scope_of(), receive, send)
        again = await ask(served)
        assert header(again, b"idempotent-replayed") == [b"omitted"]

    asyncio.run(run())
    assert finished == [1]


def test_requests_without_a_key_make_no_task_and_no_copy() -> None:
    tasks = []
    given: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        given.append(receive)
        await Counting()(scope, receive, send)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        guarded = ASGIMiddleware(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

        def factory(loop: Any, coro: Any, **more: Any) -> Any:
            tasks.append(coro)
            return asyncio.Task(coro, loop=loop, **more)

        loop.set_task_factory(factory)

        async def receive() -> Any: ...

        async def send(message: Any) -> None: ...

        for scope in (scope_of(key=None), scope_of(method="GET"), scope_of(method="HEAD")):
            await guarded(scope, receive, send)
        assert given == [receive] * 3
        assert tasks == []

    asyncio.run(run())


def test_the_beginning_of_a_body_does_not_pass_for_all_of_it_when_the_client_leaves() -> None:
    seen: list[Any] = []

    @idempotent()
    async def pay() -> None:
        seen.append("run")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await pay()
        seen.append(await receive())

    left: dict[str, Any] = {"type": "http.disconnect"}
    messages = iter([{"type": "http.request", "body": b"half", "more_body": True}, left])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        seen.append(message)

    guarded = ASGIMiddleware(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    asyncio.run(guarded(scope_of(), receive, send))
    assert seen == [left]
