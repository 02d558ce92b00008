"""What a hook is told of requests that make no claim, and of answers that are not stored whole: in each framework."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import flask
import pytest
from django.http import HttpResponse
from django.urls import path
from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from semel import AsyncMemoryStore, AsyncSemel, Codec, MemoryStore, Semel
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.conditional import check_match
from semel.http.contract.rules import conditional, idempotent
from semel.http.wsgi import WSGIMiddleware
from semel.observe.events import Event
from tests.http.asking import ask, scope_of, whose
from tests.http.django_project import Project

LIMITS: dict[str, Any] = {"max_request_body": 100, "max_stored_body": 10}
Post = Callable[..., int]
"""Sends a body to a path with these headers, and returns the status."""


def body(name: str) -> bytes:
    """What an endpoint answers. The one of ``/match/…`` has the version 7."""
    if name == "match":
        check_match('"7"')
    return b"x" * (11 if name == "long" else 3)


def over_asgi(app: Any) -> Post:
    def post(where: str, sent: bytes = b"", **headers: str) -> int:
        lines = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
        scope = scope_of(where, None, raw_path=where.encode(), root_path="", scheme="http", http_version="1.1",
                         server=("test", 80), client=("test", 1))  # fmt: skip
        return int(asyncio.run(ask(app, {**scope, "headers": lines}, sent))[0]["status"])

    return post


def over_wsgi(app: Any) -> Post:
    client = flask.Flask("client")
    client.wsgi_app = app  # type: ignore[method-assign]

    def post(where: str, sent: bytes = b"", **headers: str) -> int:
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.test_client().post(where, data=sent, headers=lines).status_code

    return post


def asgi(seen: Callable[[Event], None] | None) -> Post:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = body(scope["path"].split("/")[1])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    routes = {f"POST /{name}/{{id}}": idempotent(**LIMITS) for name in ("short", "long")}
    routes["POST /match/{id}"] = conditional(**LIMITS)
    guard = AsyncSemel(AsyncMemoryStore(), on_event=seen)
    return over_asgi(ASGIMiddleware(app, guard=guard, tenant=whose, routes=routes))


def fastapi(seen: Callable[[Event], None] | None) -> Post:
    app = FastAPI()
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore(), on_event=seen), tenant=whose)
    for name in ("short", "long", "match"):

        async def pay(id: int, name: str = name) -> Response:
            return PlainTextResponse(body(name))

        declare = for_fastapi.conditional if name == "match" else for_fastapi.idempotent
        app.post(f"/{name}/{{id}}")(declare(**LIMITS)(pay))
    return over_asgi(app)


def wsgi(seen: Callable[[Event], None] | None) -> Post:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        answer = body(environ["PATH_INFO"].split("/")[1])
        start_response("200 OK", [])
        return [answer]

    routes = {f"POST /{name}/{{id}}": idempotent(**LIMITS) for name in ("short", "long")}
    routes["POST /match/{id}"] = conditional(**LIMITS)
    return over_wsgi(WSGIMiddleware(app, guard=Semel(MemoryStore(), on_event=seen), tenant=whose, routes=routes))


def of_flask(seen: Callable[[Event], None] | None) -> Post:
    app = flask.Flask("shop")
    for_flask.install(app, guard=Semel(MemoryStore(), on_event=seen), tenant=whose)
    for name in ("short", "long", "match"):
        declare = for_flask.conditional if name == "match" else for_flask.idempotent
        view = declare(**LIMITS)(lambda id, name=name: flask.Response(body(name)))
        app.add_url_rule(f"/{name}/<int:id>", name, view, methods=["POST"])
    return over_wsgi(app)


def django(seen: Callable[[Event], None] | None) -> Post:
    guard = Semel(MemoryStore(), on_event=seen)
    views = []
    for name in ("short", "long", "match"):
        declare = for_django.conditional if name == "match" else for_django.idempotent
        view = declare(**LIMITS)(lambda request, id, name=name: HttpResponse(body(name)))
        views.append(path(f"{name}/<int:id>", view))

    def post(where: str, sent: bytes = b"", **headers: str) -> int:
        with Project(guard) as project:
            project.serve(*views)
            lines = {name.replace("_", "-"): value for name, value in headers.items()}
            found = project.client().post(where, sent, content_type="text/plain", headers=lines)
            return int(found.status_code)

    return post


@pytest.fixture(params=[asgi, fastapi, wsgi, of_flask, django], ids=lambda made: str(made.__name__))
def service(request: pytest.FixtureRequest) -> Any:
    return request.param


REFUSALS: dict[str, tuple[int, bytes, dict[str, str], str, dict[str, Any]]] = {
    "key_missing": (400, b"", {}, "short", {"key": ""}),
    "key_invalid": (400, b"", {"Idempotency_Key": "a,b"}, "short", {"key": ""}),
    "body_too_large": (413, b"x" * 101, {"Idempotency_Key": "k"}, "short", {"key": "k", "tenant": "alice"}),
    "precondition_refused": (428, b"", {"Idempotency_Key": "k"}, "match", {"key": "k", "status": 428}),
}
"""The status, the body and the headers of the request, its route, and fields of the event."""


@pytest.mark.parametrize("name", REFUSALS)
def test_a_request_that_is_refused_before_its_claim_is_told_once(service: Any, name: str) -> None:
    status, sent, headers, route, fields = REFUSALS[name]
    seen: list[Event] = []
    assert service(seen.append)(f"/{route}/7", sent, **headers) == status
    (event,) = seen
    assert (event.name, event.operation, event.route) == (name, f"POST /{route}/7", f"POST /{route}/{{id}}")
    assert {field: getattr(event, field) for field in fields} == fields
    assert event.id == b"", "it is about no record"


@pytest.mark.parametrize("key", [{}, {"Idempotency_Key": "k"}], ids=["unkeyed", "keyed"])
def test_a_precondition_that_does_not_hold_is_told(service: Any, key: dict[str, str]) -> None:
    seen: list[Event] = []
    assert service(seen.append)("/match/7", If_Match='"6"', **key) == 412
    assert [event.name for event in seen] == (
        ["started", "precondition_refused", "released"] if key else ["precondition_refused"]
    )
    (event,) = [event for event in seen if event.name == "precondition_refused"]
    assert (event.route, event.status) == ("POST /match/{id}", 412)  # type: ignore[attr-defined]


def test_an_answer_that_is_stored_without_its_body_is_told_and_logged_once(
    service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Event] = []
    post = service(seen.append)
    assert [post(f"/long/{number}", Idempotency_Key="k") for number in (1, 2, 2)] == [200, 200, 200]
    once = ["started", "body_omitted", "completed"]
    assert [event.name for event in seen] == [*once, *once, "replayed"]
    assert seen[1].route == "POST /long/{id}"
    assert seen[1].id == seen[0].id
    logged = [record for record in caplog.records if record.name == "semel.guard"]
    assert [record.levelno for record in logged] == [logging.WARNING]
    assert "longer than max_stored_body (10 bytes), so replays of it have no body" in logged[0].getMessage()


def test_an_ordinary_request_is_told_as_before(service: Any) -> None:
    seen: list[Event] = []
    post = service(seen.append)
    assert [post("/short/7", b"x" * 100, Idempotency_Key="k") for _ in range(2)] == [200, 200]
    assert [event.name for event in seen] == ["started", "completed", "replayed"]


def test_a_refusal_without_a_hook_makes_no_event(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("semel.core.call.Call.tell", lambda self, event, *details: made.append(event.name))
    assert service(None)("/short/7") == 400
    assert made == []


def test_an_answer_that_the_codec_refuses_is_told(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    app = flask.Flask("shop")
    guard = Semel(MemoryStore(), on_event=seen.append, codec=Codec(limit=1000, compression=None))
    for_flask.install(app, guard=guard, tenant=whose)
    app.post("/pay")(for_flask.idempotent()(lambda: flask.Response(b"x" * 2000)))
    assert over_wsgi(app)("/pay", Idempotency_Key="k") == 200
    assert [event.name for event in seen] == ["started", "result_dropped", "completed"]
    assert "its result could not be stored" in caplog.text
