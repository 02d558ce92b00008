"""The service of ``apps_wsgi.py`` in Django: function views, class-based views, ``async def`` views, REST framework.

Served by gunicorn from ``tests.http.apps_django:wsgi("function")`` and the like, and by uvicorn from this module run
with the kind and a socket's number.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import django
from asgiref.sync import markcoroutinefunction
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path
from django.views import View

from semel import AsyncOperation, Operation, current_operation
from semel.http.contract.rules import Idempotent
from semel.http.django import exempt, idempotent
from tests.http import apps_wsgi
from tests.http.apps_wsgi import DOCS, OPEN, ROUTES, Answer, Asked, folder, log, tenant_of, turned_away

MIDDLEWARE = "semel.http.django.IdempotencyMiddleware"


def configure(kind: str) -> None:
    settings.configure(
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="not a secret",
        MIDDLEWARE=["django.middleware.common.CommonMiddleware", *(() if kind == "drf" else (f"{__name__}.turn_away",)),
                    MIDDLEWARE],
        SEMEL={"GUARD": apps_wsgi.guard, "TENANT": tenant, "DOCS": DOCS},
        INSTALLED_APPS=["semel.http.django", "django.contrib.contenttypes", "django.contrib.auth"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder() / "django.db",
                               "ATOMIC_REQUESTS": kind in ("function", "class")}},
        REST_FRAMEWORK={"UNAUTHENTICATED_USER": None},
        APPEND_SLASH=False,
        LOGGING={"version": 1, "disable_existing_loggers": False},
    )  # fmt: skip
    django.setup()
    settings.ROOT_URLCONF = tuple(patterns(kind))


def wsgi(kind: str) -> Any:
    configure(kind)
    return get_wsgi_application()


def tenant(request: Any) -> str:
    assert not running_in_a_loop(), "a plain function may ask the database, so it is never called in an event loop"
    return tenant_of(request.META)


def running_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class turn_away:
    """What authentication, rate limits and validation refuse; sync and async."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response
        if asyncio.iscoroutinefunction(get_response) or hasattr(get_response, "_is_coroutine_mark"):
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        refused = turned_away(request.META)
        if not refused:
            return self.get_response(request)
        response = HttpResponse(status=refused)
        return _soon(response) if asyncio.iscoroutinefunction(self) else response


async def _soon(response: HttpResponse) -> HttpResponse:
    return response


# -- views


def asked_of(request: Any, op: Any) -> Asked:
    return Asked(
        request.GET.dict(), request.META.get("HTTP_X_TAG", "-"), request.read, op, request.META.get("HTTP_IF_MATCH", "")
    )


def response_of(answer: Answer, *, streamed: Callable[[Any], Any] = iter) -> Any:
    code, lines, body = answer
    response: Any
    if isinstance(body, list):
        response = HttpResponse(b"".join(body), status=code, reason="Said So")
    else:
        response = StreamingHttpResponse(streamed(body), status=code)
    del response["Content-Type"]
    for name, value in lines:
        if name == "Set-Cookie":
            response.set_cookie(*value.split("="))
        else:
            response[name] = f"{response[name]}, {value}" if name in response else value
    return response


async def one_by_one(chunks: Iterator[bytes]) -> Any:
    for chunk in chunks:
        yield chunk


def sync_view(handler: Callable[[Asked], Answer]) -> Any:
    def view(request: Any, op: Operation | None = None) -> Any:
        return response_of(handler(asked_of(request, op)))

    return view


def method_view(handler: Callable[[Asked], Answer]) -> Any:
    def method(self: Any, request: Any, op: Operation | None = None) -> Any:
        return response_of(handler(asked_of(request, op)))

    return method


def rest_view(handler: Callable[[Asked], Answer]) -> Any:
    """A JSON answer is REST framework's own, which is rendered when the view is done."""
    from rest_framework.response import Response

    def method(self: Any, request: Any, op: Operation | None = None) -> Any:
        code, lines, body = handler(asked_of(request, op))
        plain = response_of((code, lines, body))
        if plain.streaming or plain.get("Content-Type") != "application/json" or "Content-Encoding" in plain:
            return plain
        try:
            data = json.loads(plain.content)
        except ValueError:
            return plain
        if data is None:  # which REST framework makes nothing of
            return plain
        response = Response(data, status=code, headers={n: v for n, v in plain.items() if n != "Content-Type"})
        response.cookies = plain.cookies
        return response

    return method


def async_view(handler: Callable[[Asked], Answer], in_loop: bool) -> Any:
    async def view(request: Any, op: AsyncOperation | None = None) -> Any:
        asked = asked_of(request, op)
        if handler is apps_wsgi.handle:
            answer = await shown(asked)
        else:
            answer = await asyncio.to_thread(handler, asked)
        return response_of(answer, streamed=one_by_one if in_loop else iter)

    return view


async def shown(asked: Asked) -> Answer:
    """The handle, in an ``async def``."""
    log(asked)
    op: Any = asked.op
    assert current_operation() is op
    said = None if op is None else [op.key, op.tenant, op.attempt, await op.capture("n", lambda: 5)]
    return 200, [apps_wsgi.JSON], [json.dumps(said).encode()]


def patterns(kind: str) -> list[Any]:
    by_path: dict[str, dict[str, Any]] = {}
    for (method, place), (rule, handler) in ROUTES.items():
        by_path.setdefault(place, {})[method] = view_of(kind, handler, rule)
    for (method, place), handler in OPEN.items():
        by_path.setdefault(place, {})[method] = view_of(kind, handler, None)
    together = {"function": functions, "async": async_functions, "async_loop": async_functions}.get(kind, classes)
    listed = [path(place.lstrip("/"), together(kind, views)) for place, views in by_path.items()]
    return [*listed, path("ledger", write_down)]


@idempotent(lease=3)
def write_down(request: Any) -> HttpResponse:
    """A row in the view's transaction (ATOMIC_REQUESTS), and then the gate."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO ledger (tag) VALUES (%s)", [request.headers["X-Tag"]])
    log(asked_of(request, None))
    return HttpResponse("written", status=201)


def view_of(kind: str, handler: Callable[[Asked], Answer], rule: Idempotent | None) -> Any:
    makers: dict[str, Any] = {"function": sync_view, "class": method_view, "drf": rest_view}
    view = async_view(handler, kind == "async_loop") if kind.startswith("async") else makers[kind](handler)
    return view if rule is None else idempotent(rule)(view)


def functions(kind: str, views: dict[str, Any]) -> Any:
    @exempt("of the test's own")
    def view(request: Any) -> Any:
        return views[request.method](request)

    return view


def async_functions(kind: str, views: dict[str, Any]) -> Any:
    @exempt("of the test's own")
    async def view(request: Any) -> Any:
        return await views[request.method](request)

    return view


def classes(kind: str, views: dict[str, Any]) -> Any:
    base = rest_base() if kind == "drf" else View
    return type("Routes", (base,), {method.lower(): view for method, view in views.items()}).as_view()


def rest_base() -> Any:
    """Refuses where REST framework does: in ``initial()``, which authenticates, permits and throttles."""
    from rest_framework.exceptions import APIException
    from rest_framework.views import APIView

    class Base(APIView):  # type: ignore[misc]
        def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super().initial(request, *args, **kwargs)
            refused = turned_away(request.META)
            if refused:
                error = APIException("turned away")
                error.status_code = refused
                raise error

    return Base


# -- ASGI


def serve(kind: str, descriptor: int) -> None:
    """Serve by uvicorn until SIGTERM."""
    import uvicorn

    configure(kind)
    app = get_asgi_application()
    uvicorn.Server(uvicorn.Config(app, fd=descriptor, lifespan="off", log_level="warning")).run()


def serve_in_processes(kind: str, descriptor: int, workers: int) -> None:
    """As many processes as are asked for; one that dies has a successor, as under any process manager."""
    children: set[int] = set()

    def stop(*signal_and_frame: Any) -> None:
        for child in children:
            os.kill(child, signal.SIGTERM)
        for child in children:
            os.waitpid(child, 0)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        while len(children) < workers:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                serve(kind, descriptor)
                os._exit(0)
            children.add(child)
        children.discard(os.wait()[0])


if __name__ == "__main__":
    serve_in_processes(sys.argv[1], int(sys.argv[2]), workers=2)
