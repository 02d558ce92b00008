"""Who gets a stored answer, in each framework: decorators above ours decide for a replay too, those below do not."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flask
import pytest

from tests.http.django_project import Project  # first: Django wants settings when it is imported

from django.core.exceptions import PermissionDenied  # isort: skip
from django.http import HttpResponse  # isort: skip
from django.urls import path  # isort: skip
from django.utils.decorators import method_decorator  # isort: skip
from django.views import View  # isort: skip

import httpx
from fastapi import FastAPI, HTTPException
from litestar import Litestar, post
from litestar.exceptions import PermissionDeniedException
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http import quart as for_quart
from tests.http.asking import whose

quart = pytest.importorskip("quart")

Decorate = Callable[[Any], Any]
Post = Callable[[], tuple[int, str]]
KEY = {"Idempotency-Key": "k"}


class Role:
    """The role of the only caller, which may be revoked."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self.granted = True
        self._refusal = refusal

    def needed(self, function: Any) -> Any:
        """A decorator that authorises, written as most are."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def check_async(*args: Any, **kwargs: Any) -> Any:
                self._check()
                return await function(*args, **kwargs)

            return check_async

        @functools.wraps(function)
        def check(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return function(*args, **kwargs)

        return check

    def _check(self) -> None:
        if not self.granted:
            raise self._refusal()


def _send(app: Any, path: str = "/pay", **headers: str) -> tuple[int, str]:
    async def send() -> tuple[int, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            answer = await client.post(path, headers={**KEY, **headers})
            return answer.status_code, answer.text

    return asyncio.run(send())


def _flask_refusal() -> Exception:
    try:
        flask.abort(403)
    except Exception as error:
        return error


def of_fastapi(decorate: Decorate) -> Post:
    async def pay() -> Response:
        return PlainTextResponse("card")

    app = FastAPI()
    app.post("/pay")(decorate(pay))
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return lambda: _send(app)


def of_starlette(decorate: Decorate) -> Post:
    async def pay(request: Any) -> Response:
        return PlainTextResponse("card")

    app = Starlette(routes=[Route("/pay", decorate(pay), methods=["POST"])])
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return lambda: _send(app)


def of_litestar(decorate: Decorate) -> Post:
    async def pay() -> str:
        return "card"

    plugin = for_litestar.SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    app = Litestar([post("/pay")(decorate(pay))], plugins=[plugin])
    return lambda: _send(app)


def of_quart(decorate: Decorate) -> Post:
    async def pay() -> str:
        return "card"

    app = quart.Quart("shop")
    app.post("/pay")(decorate(pay))
    for_quart.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return lambda: _send(app)


def of_flask(decorate: Decorate) -> Post:
    def pay() -> str:
        return "card"

    app = flask.Flask("shop")
    app.post("/pay")(decorate(pay))
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=whose)

    def send() -> tuple[int, str]:
        answer = app.test_client().post("/pay", headers=KEY)
        return answer.status_code, answer.text

    return send


def of_django(decorate: Decorate) -> Post:
    def pay(request: Any) -> HttpResponse:
        return HttpResponse("card")

    return _django_view(decorate(pay))


def of_a_django_class(decorate: Decorate) -> Post:
    class Pay(View):  # type: ignore[misc]
        @method_decorator(decorate)  # type: ignore[untyped-decorator]
        def post(self, request: Any) -> HttpResponse:
            return HttpResponse("card")

    return _django_view(Pay.as_view())


def _django_view(view: Any) -> Post:
    guard = Semel(MemoryStore())

    def send() -> tuple[int, str]:
        with Project(guard) as project:
            project.serve(path("pay", view))
            answer = project.client().post("/pay", headers=KEY)
            return answer.status_code, answer.content.decode()

    return send


SERVICES = [
    pytest.param(of_fastapi, for_fastapi.idempotent, lambda: HTTPException(403), id="fastapi"),
    pytest.param(of_starlette, for_fastapi.idempotent, lambda: HTTPException(403), id="starlette"),
    pytest.param(of_litestar, for_litestar.idempotent, PermissionDeniedException, id="litestar"),
    pytest.param(of_quart, for_quart.idempotent, _flask_refusal, id="quart"),
    pytest.param(of_flask, for_flask.idempotent, _flask_refusal, id="flask"),
    pytest.param(of_django, for_django.idempotent, PermissionDenied, id="django"),
    pytest.param(of_a_django_class, for_django.idempotent, PermissionDenied, id="django-class"),
]


@pytest.mark.parametrize(("service", "idempotent", "refusal"), SERVICES)
def test_a_decorator_above_refuses_a_replay_to_a_revoked_role(service: Any, idempotent: Any, refusal: Any) -> None:
    role = Role(refusal)
    send = service(lambda view: role.needed(idempotent()(view)))

    assert [send()[0] // 100, send()[1]] == [2, "card"]
    role.granted = False
    status, body = send()
    assert (status, "card" in body) == (403, False)


@pytest.mark.parametrize(("service", "idempotent", "refusal"), SERVICES)
def test_a_decorator_below_is_warned_of_when_it_is_declared(service: Any, idempotent: Any, refusal: Any) -> None:
    role = Role(refusal)

    with pytest.warns(UserWarning, match=r"has decorators below @idempotent\(\).*Put them above"):
        service(lambda view: idempotent()(role.needed(view)))()  # Django's method_decorator declares at each call


@pytest.mark.parametrize(("service", "idempotent", "refusal"), SERVICES)
def test_a_harmless_decorator_below_is_declared_so(service: Any, idempotent: Any, refusal: Any) -> None:
    role = Role(refusal)
    send = service(lambda view: idempotent(allow_decorators_below=True)(role.needed(view)))  # a warning is an error

    assert [send(), send()] == [(send()[0], "card")] * 2


def test_the_warning_names_the_line_of_the_declaration() -> None:
    with pytest.warns(UserWarning, match="change has decorators below") as warned:

        @for_fastapi.conditional()
        @functools.cache
        def change() -> None: ...

    assert [each.filename for each in warned] == [__file__]
    assert "conditional(allow_decorators_below=True)" in str(warned[0].message)


def test_natural_and_exempt_endpoints_run_each_time_so_nothing_is_warned_of() -> None:
    role = Role(PermissionError)

    @for_flask.natural()
    @role.needed
    def put() -> str:
        return ""

    @for_flask.exempt("it only reads")
    @role.needed
    def search() -> str:
        return ""
