"""Routes with effects outside: what a stored failure means, and how a handler says that nothing happened."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import flask
import httpx
import pytest
from fastapi import FastAPI, Request, Response

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.errors import NotResolvable
from semel.http.contract.rules import RELEASED
from semel.http.fastapi import idempotent as fastapi_idempotent
from semel.http.fastapi import install as fastapi_install
from semel.http.flask import idempotent, install

KEY = {"Idempotency-Key": "secret-key"}


def test_a_handler_that_knows_that_nothing_happened_keeps_its_key_free() -> None:
    app, statuses = flask.Flask("shop"), [503, 500, 200]
    with Semel(MemoryStore(), sweep_every=None) as guard:
        install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/charge")
        @idempotent(external_effects=True, released=RELEASED | {503})
        def charge() -> Any:
            return "said", statuses.pop(0)

        answers = [app.test_client().post("/charge", headers=KEY) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503, 500, 500], "the 503 freed the key, the 500 did not"
        assert "Idempotent-Replayed" in answers[2].headers
        with pytest.raises(NotResolvable, match="To release a stored failure, write"):
            guard.release("POST /charge", "secret-key", tenant="alice", force=True)


def test_a_stored_500_is_released_and_the_retry_runs() -> None:
    app, statuses = flask.Flask("shop"), [500, 201]
    with Semel(MemoryStore(), sweep_every=None) as guard:
        install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/charge")
        @idempotent(external_effects=True)
        def charge() -> Any:
            return "said", statuses.pop(0)

        def post() -> tuple[int, bool]:
            answer = app.test_client().post("/charge", headers=KEY)
            return answer.status_code, "Idempotent-Replayed" in answer.headers

        assert [post(), post()] == [(500, False), (500, True)]
        with pytest.raises(NotResolvable, match="no such record"):
            guard.release("POST /charge", "secret-key", tenant="bob", stored="failure")
        guard.release("POST /charge", "secret-key", tenant="alice", stored="failure")
        assert [post(), post()] == [(201, False), (201, True)]
        with pytest.raises(NotResolvable, match="what is stored is a result"):
            guard.release("POST /charge", "secret-key", tenant="alice", stored="failure")
        assert post() == (201, True)


def test_a_stored_exception_is_released_and_the_retry_runs() -> None:
    calls = []

    @fastapi_idempotent(external_effects=True)
    async def charge(request: Request) -> Response:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("the provider is down")
        return Response("paid", 201)

    guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
    app = FastAPI()
    app.add_api_route("/charge", charge, methods=["POST"])
    fastapi_install(app, guard=guard, tenant=lambda request: "alice")

    async def serve() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with guard, httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            assert [(await client.post("/charge", headers=KEY)).status_code for _ in range(2)] == [500, 500]
            await guard.release("POST /charge", "secret-key", tenant="alice", stored="failure")
            assert [(await client.post("/charge", headers=KEY)).status_code for _ in range(2)] == [201, 201]

    asyncio.run(serve())
    assert len(calls) == 2


@pytest.mark.parametrize("happened", [True, False])
def test_who_settles_an_operation_leaves_a_line_in_the_log(happened: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel.guard")
    now = [0.0]
    with Semel(MemoryStore(clock=lambda: now[0]), sweep_every=None) as guard:
        attempt = guard.begin(guard.make_call("charge", "secret-key", "", b"", guard.policy))
        now[0] += 60
        if happened:
            guard.resolve("charge", "secret-key", "paid")
        else:
            guard.release("charge", "secret-key")
        del attempt
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"resolved or released the operation (it happened: {happened})" in line
    assert "secret-key" not in line
