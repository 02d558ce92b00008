"""FastAPI's own ways of saying what an endpoint takes and gives: none of them turns protection off."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any

import pytest
from anyio.to_thread import current_default_thread_limiter
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from semel import AsyncMemoryStore, AsyncOperation, AsyncSemel, Operation, Wait, current_operation
from semel.core.ops import SaveStep
from semel.http.asgi import ASGIMiddleware
from semel.http.fastapi import idempotent
from tests.http.asking import ask, body_of, header, scope_of, whose


class Payment(BaseModel):
    amount: int


class Receipt(BaseModel):
    number: int
    amount: int = 0


def account_of() -> str:
    return "a-1"


def guarded(app: Any, store: Any = None) -> ASGIMiddleware:
    return ASGIMiddleware(app, guard=AsyncSemel(store or AsyncMemoryStore()), tenant=whose)


def twice(app: Any, *bodies: bytes, path: str = "/pay") -> list[Any]:
    """A request and its retry, in one event loop."""

    async def run() -> list[Any]:
        scope = scope_of(path)
        scope["headers"].append((b"content-type", b"application/json"))
        return [await ask(app, {**scope, "headers": list(scope["headers"])}, *bodies) for _ in range(2)]

    return asyncio.run(run())


@pytest.mark.parametrize("value", [{"a": 1}, {}, [], 0, False, "", None, "text", 1.5])
@pytest.mark.parametrize("threads", [False, True])
def test_whatever_an_endpoint_returns_is_stored_and_replayed(value: Any, threads: bool) -> None:
    app = FastAPI()
    runs = []

    if threads:

        @app.post("/pay")
        @idempotent()
        def pay_in_thread(op: Operation) -> Any:
            runs.append(op.key)
            return value
    else:

        @app.post("/pay")
        @idempotent()
        async def pay(op: AsyncOperation) -> Any:
            runs.append(op.key)
            return value

    first, again = twice(guarded(app))
    assert first[0]["status"] == again[0]["status"] == 200
    assert body_of(first) == body_of(again)
    assert header(again, b"idempotent-replayed") == [b"true"]
    assert runs == ["k"]


def test_models_statuses_dependencies_and_captures_work_as_without_us() -> None:
    app = FastAPI()
    made: list[int] = []

    @app.post("/pay", status_code=202, response_model=Receipt)
    @idempotent()
    async def pay(payment: Payment, account: Annotated[str, Depends(account_of)], op: AsyncOperation) -> Any:
        number = await op.capture("number", lambda: made.append(1) or 7)
        assert current_operation() is op
        return {"number": number, "amount": payment.amount, "secret": account}

    first, again = twice(guarded(app), b'{"amount":', b" 5}")
    assert first[0]["status"] == again[0]["status"] == 202
    assert body_of(first) == body_of(again) == b'{"number":7,"amount":5}'
    assert made == [1]
    assert "op" not in str(app.openapi()["paths"]["/pay"]["post"].get("parameters", []))


def test_a_sync_endpoint_captures_through_the_event_loop() -> None:
    app = FastAPI()
    threads = []

    @app.post("/pay")
    @idempotent()
    def pay(payment: Payment, op: Operation) -> Any:
        threads.append(threading.current_thread())
        return {"number": op.capture("number", lambda: 7), "same": current_operation() is op}

    first, again = twice(guarded(app), b'{"amount": 5}')
    assert body_of(first) == body_of(again) == b'{"number":7,"same":true}'
    assert len(threads) == 1
    assert threads != [threading.main_thread()]


def test_exceptions_of_the_framework_are_answers() -> None:
    app = FastAPI()
    runs = []

    @app.post("/pay")
    @idempotent()
    async def pay() -> None:
        runs.append(1)
        raise HTTPException(404, "no such account")

    first, again = twice(guarded(app))
    assert first[0]["status"] == again[0]["status"] == 404
    assert body_of(first) == body_of(again) == b'{"detail":"no such account"}'
    assert len(runs) == 1


def test_annotations_that_name_something_local_do_not_stop_the_declaration() -> None:
    class Local(BaseModel):
        amount: int

    @idempotent()
    async def pay(payment: Local, op: AsyncOperation) -> None: ...

    assert pay.__annotations__["payment"] == "Local"
    assert "op" not in pay.__annotations__


def test_methods_of_a_class_and_mounted_applications_are_protected() -> None:
    runs = []

    class Payments(HTTPEndpoint):
        @idempotent()
        async def post(self, request: Request) -> Response:
            runs.append(await request.body())
            return PlainTextResponse("paid")

        async def get(self, request: Request) -> Response:
            return PlainTextResponse("list")

    app = Starlette(routes=[Mount("/v1", routes=[Route("/pay", Payments)])])
    first, again = twice(guarded(app), b"a", b"b", path="/v1/pay")
    assert body_of(first) == body_of(again) == b"paid"
    assert header(again, b"idempotent-replayed") == [b"true"]
    assert runs == [b"ab"]


def test_a_refreshed_token_is_the_same_request() -> None:
    """The token folded into the key or the fingerprint runs the payment again."""
    app = FastAPI()
    runs = []

    @app.post("/pay")
    @idempotent()
    async def pay() -> int:
        runs.append(1)
        return len(runs)

    async def run() -> None:
        protected = guarded(app)
        for token in (b"Bearer old", b"Bearer new"):
            scope = scope_of()
            scope["headers"].append((b"authorization", token))
            assert body_of(await ask(protected, scope)) == b"1"

    asyncio.run(run())


def test_an_event_loop_that_ends_does_not_leave_a_sync_endpoint_waiting() -> None:
    class Hanging(AsyncMemoryStore):
        async def execute(self, op: Any) -> Any:
            if isinstance(op, SaveStep):
                reached.set()
                await asyncio.Event().wait()
            return await super().execute(op)

    @idempotent()
    def pay(op: Operation) -> Response:
        try:
            op.capture("number", lambda: 7)
        finally:
            ended.set()
        return PlainTextResponse("")

    reached, ended = asyncio.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await pay()  # type: ignore[misc]  # it is awaited, and runs in a thread

    async def run() -> None:
        task = asyncio.ensure_future(ask(guarded(app, Hanging())))
        await reached.wait()
        assert not task.done()

    asyncio.run(run())
    assert ended.wait(10)


@pytest.mark.parametrize("threads", [False, True])
def test_a_dependency_that_cannot_commit_frees_the_key_where_it_ends_with_the_endpoint(threads: bool) -> None:
    app, runs = FastAPI(), []

    async def session() -> Any:
        yield
        if len(runs) == 1:
            raise HTTPException(503, "the database is away")

    def pay() -> int:
        runs.append(1)
        return len(runs)

    async def apay() -> int:
        return pay()

    depends = [Depends(session, scope="function")]
    app.post("/pay", dependencies=depends)(idempotent()(pay if threads else apay))
    first, again = twice(guarded(app))
    assert (first[0]["status"], again[0]["status"]) == (503, 200)
    assert header(again, b"idempotent-replayed") == []
    assert body_of(again) == b"2"


@pytest.mark.parametrize("threads", [False, True])
def test_equal_requests_that_wait_leave_the_winner_a_thread_to_finish_in(threads: bool) -> None:
    """FastAPI checks the answer of a plain def in a thread as well. Those who wait must not have taken them all."""
    app = FastAPI()
    open_up = threading.Event()

    def pay() -> Receipt:
        assert open_up.wait(10)
        return Receipt(number=7)

    async def apay() -> Receipt:
        await asyncio.to_thread(open_up.wait, 10)
        return Receipt(number=7)

    app.post("/pay")(idempotent(on_duplicate=Wait("3s"))(pay if threads else apay))
    begun = asyncio.Event()
    guard = AsyncSemel(AsyncMemoryStore(), on_event=lambda event: begun.set())
    served = ASGIMiddleware(app, guard=guard, tenant=whose)

    async def run() -> list[Any]:
        current_default_thread_limiter().total_tokens = 2
        asked = [asyncio.create_task(ask(served)) for _ in range(6)]
        await asyncio.wait_for(begun.wait(), 10)
        for _ in range(50):  # let all of them come to where they wait
            await asyncio.sleep(0)
        open_up.set()
        return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    assert [sent[0]["status"] for sent in answers] == [200] * 6
    assert sum(header(sent, b"idempotent-replayed") == [b"true"] for sent in answers) == 5


def test_a_large_body_is_held_in_a_file_and_read_whole() -> None:
    sizes = []

    @idempotent()
    async def pay(request: Request) -> Response:
        sizes.append([len(chunk) async for chunk in request.stream()])
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    first, again = twice(guarded(app), *[b"x" * 300_000] * 10)
    assert first[0]["status"] == again[0]["status"] == 200
    assert [sum(size) for size in sizes] == [3_000_000]
