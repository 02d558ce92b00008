"""A service of documents with versions, in each framework: PATCH is conditional, PUT and DELETE natural.

``POST /documents`` is not declared, ``POST /search`` is exempt. Run it as ``python -m tests.http.apps_documents KIND
FD``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.rules import Exempt, Rule, conditional, exempt, natural

ROUTES: dict[str, Rule] = {
    "PATCH /documents/{id}": conditional(),
    "PATCH /lenient/{id}": conditional(precondition_required=False),
    "PATCH /keyed/{id}": conditional(required=True),
    "PUT /documents/{id}": natural(),
    "DELETE /documents/{id}": natural(),
    "DELETE /strict/{id}": natural(absent=frozenset()),
    "POST /search": exempt("finds, and changes nothing"),
}

Answer = tuple[int, dict[str, str], bytes]


class Documents:
    """What the handlers do; and what a transaction around them would see."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.failed = 0

    def current(self, id: str) -> str | None:
        return etag(self.versions[id]) if id in self.versions else None

    def answer(self, method: str, path: str) -> Answer:
        kind, _, id = path.strip("/").partition("/")
        if path == "/failed":
            return 200, {}, str(self.failed).encode()
        if method == "GET":
            tag = self.current(id)
            return (404, {}, b"") if tag is None else (200, {"ETag": tag}, tag.encode())
        if method == "PATCH":
            check_match(self.current(id))
            self.versions[id] += 1
            return 200, {"ETag": etag(self.versions[id])}, f"version {self.versions[id]}".encode()
        if method == "PUT":
            new = id not in self.versions
            self.versions[id] = 1
            return 201 if new else 200, {"ETag": etag(1)}, b"put"
        if method == "DELETE":
            if self.versions.pop(id, None) is None:
                return 404, {"X-Why": "gone"}, b"no such document"
            return 204, {}, b""
        return 200, {}, b"posted" if kind == "documents" else b"found"


def routes_by_method() -> Iterator[tuple[tuple[str, str], Rule]]:
    for route, rule in ROUTES.items():
        method, _, path = route.partition(" ")
        yield (method, path), rule


def whose(request: object) -> str:
    return "alice"


def plain_asgi() -> Any:
    from semel.http.asgi import ASGIMiddleware

    documents = Documents()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        status, lines, body = documents.answer(scope["method"], scope["path"])
        headers = [(name.lower().encode(), value.encode()) for name, value in lines.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return ASGIMiddleware(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose, routes=ROUTES)


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from semel.http import fastapi as glue

    documents = Documents()

    def view(function: Any = None) -> Any:
        async def endpoint(request: Request) -> Response:
            status, lines, body = documents.answer(request.method, request.url.path)
            return Response(body, status, lines)

        return endpoint

    routes = [
        *(Route(path, getattr(glue, rule.decorator)(rule)(view()), methods=[method])
          for (method, path), rule in routes_by_method() if not isinstance(rule, Exempt)),
        Route("/search", glue.exempt("finds, and changes nothing")(view()), methods=["POST"]),
        Route("/documents/{id}", view(), methods=["GET"]),
        Route("/documents", view(), methods=["POST"]),
        Route("/failed", view()),
    ]  # fmt: skip
    app = Starlette(routes=routes)
    glue.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return app


def _fastapi(*, threads: bool) -> Any:
    from fastapi import Depends, FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

    from semel.http import fastapi as glue

    documents = Documents()
    app = FastAPI()
    glue.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    async def transaction() -> Any:
        """Like a session that is given back: it must hear of a refusal."""
        try:
            yield
        except Exception:
            documents.failed += 1
            raise

    def respond(request: Request) -> Response:
        status, lines, body = documents.answer(request.method, request.url.path)
        return Response(body, status, lines)

    def view() -> Any:
        async def endpoint(request: Request) -> Response:
            return respond(request)

        def threaded(request: Request) -> Response:
            return respond(request)

        chosen: Callable[..., Any] = threaded if threads else endpoint
        chosen.__annotations__ = {"request": Request, "return": Response}
        return chosen

    decorators = {
        "PATCH /documents/{id}": glue.conditional(),
        "PATCH /lenient/{id}": glue.conditional(precondition_required=False),
        "PATCH /keyed/{id}": glue.conditional(required=True),
        "PUT /documents/{id}": glue.natural(),
        "DELETE /documents/{id}": glue.natural(),
        "DELETE /strict/{id}": glue.natural(absent=frozenset()),
        "POST /search": glue.exempt("finds, and changes nothing"),
    }
    for route, declare in decorators.items():
        method, path = route.split()
        app.api_route(path, methods=[method], dependencies=[Depends(transaction)], response_model=None)(declare(view()))
    for method, path in (("GET", "/documents/{id}"), ("POST", "/documents"), ("GET", "/failed")):
        app.api_route(path, methods=[method], response_model=None)(view())
    return app


def fastapi() -> Any:
    return _fastapi(threads=False)


def fastapi_sync() -> Any:
    return _fastapi(threads=True)


def plain_wsgi() -> Any:
    from semel.http.wsgi import WSGIMiddleware

    documents = Documents()

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        status, lines, body = documents.answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        start_response(f"{status} Said", list(lines.items()))
        return [body]

    return WSGIMiddleware(app, guard=Semel(MemoryStore()), tenant=whose, routes=ROUTES)


def wsgi_endpoint() -> Any:
    """The same without a table: the application itself knows the rule, and asks for the claim."""
    from semel.http.contract.conditional import bind_preconditions, unbind_preconditions
    from semel.http.contract.routes import Routes
    from semel.http.wsgi import WSGIMiddleware
    from semel.http.wsgi.middleware import current_responder

    documents = Documents()
    table = Routes(ROUTES)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        responder, rule = current_responder(), table.find(method, path)
        if responder is not None and rule is not None and not responder.claim(rule):
            start_response("204 No Content", [])
            return []
        preconditions = None if responder is None else responder.life.preconditions
        bound = None if preconditions is None else bind_preconditions(preconditions)
        try:
            status, lines, body = documents.answer(method, path)
        finally:
            if bound is not None:
                unbind_preconditions(bound)
        start_response(f"{status} Said", list(lines.items()))
        return [body]

    return WSGIMiddleware(app, guard=Semel(MemoryStore()), tenant=whose)


def flask() -> Any:
    import flask

    from semel.http import flask as glue

    documents = Documents()
    app = flask.Flask("documents")
    glue.install(app, guard=Semel(MemoryStore()), tenant=whose)

    def view(**parts: str) -> Any:
        status, lines, body = documents.answer(flask.request.method, flask.request.path)
        if status == 404:
            flask.abort(404)
        return flask.Response(body, status, lines)

    for number, ((method, path), rule) in enumerate(routes_by_method()):
        declare = glue.exempt(rule.reason) if isinstance(rule, Exempt) else getattr(glue, rule.decorator)(rule)
        named = declare(functools.partial(view))
        app.add_url_rule(path.replace("{id}", "<string:id>"), f"v{number}", named, methods=[method])
    for number, (method, path) in enumerate((("GET", "/documents/<id>"), ("POST", "/documents"), ("GET", "/failed"))):
        app.add_url_rule(path, f"o{number}", view, methods=[method])
    return app


def litestar() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.litestar()


def litestar_sync() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.litestar(threads=True)


def django_async_on_wsgi() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.django("async")


def django_async() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.django("async", in_loop=True)


def django_class() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.django("class", in_loop=True)


def django_function() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.django("function")


def django_rest() -> Any:
    from tests.http import apps_documents_more

    return apps_documents_more.django("drf")


ASGI: dict[str, Callable[[], Any]] = {
    "asgi": plain_asgi, "starlette": starlette, "fastapi": fastapi, "fastapi_sync": fastapi_sync,
    "litestar": litestar, "litestar_sync": litestar_sync, "django_async": django_async, "django_class": django_class,
}  # fmt: skip
WSGI: dict[str, Callable[[], Any]] = {
    "wsgi": plain_wsgi, "wsgi_endpoint": wsgi_endpoint, "flask": flask, "django_function": django_function,
    "django_rest": django_rest, "django_async_on_wsgi": django_async_on_wsgi,
}  # fmt: skip


def main() -> None:
    """Serve one kind on the socket that the test has opened."""
    import asyncio
    import json
    import os
    import socket

    kind, descriptor = sys.argv[1], int(sys.argv[2])
    if kind in ASGI:
        import uvicorn

        config = uvicorn.Config(ASGI[kind](), log_level="warning", timeout_graceful_shutdown=2)
        asyncio.run(uvicorn.Server(config).serve(sockets=[socket.socket(fileno=descriptor)]))
        return
    app = f"tests.http.apps_documents:{WSGI[kind].__name__}()"
    options = json.loads(os.environ.get("GUNICORN", "[]"))
    arguments = ["-m", "gunicorn", app, "--bind", f"fd://{descriptor}", "--threads=4", *options]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
