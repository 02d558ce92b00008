"""The application (its routes, the guard, the console, documented errors for whatever a client sends) and a process
that serves it.

A process is run as ``python -m semel.demo.payments.app`` on the parent's socket, so the port survives when the process
is killed. It reads its settings from standard input, and ends when a second line arrives or when its parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.routing import Route

from semel import __version__
from semel.console import Access, Console
from semel.console.app import Panel
from semel.console.gate import allow_on_this_machine
from semel.console.serving import make_server
from semel.core.policy import Policy
from semel.demo.payments.data import Books
from semel.demo.payments.routes import router, tenant_of
from semel.demo.processes import end_with_parent, read_settings
from semel.errors import ConfigurationError, StoreError
from semel.http.fastapi import install
from semel.observe.events import EventHook
from semel.observe.prometheus import PrometheusMetrics, StoreMetrics
from semel.stores.aio_guard import AsyncSemel
from semel.stores.urls import open_async_store
from semel.trail import Trail

LEASE: Final = 2.0
"""Seconds until a silent worker is taken over: short, so that it can be watched."""
MISTAKES: Final = ("unprotected", "blind", "silent")
"""Semel bypassed; a payment that does not look for its own row; an answer without a row."""
_PAGE: Final = files("semel.demo.payments") / "page.html"
_PANEL: Final = files("semel.demo.payments") / "panel.html"
_PANEL_SCRIPT: Final = files("semel.demo.payments") / "panel.js"
_MODULE: Final = files("semel") / "client/browser/semel.js"
"""The browser's half of Semel: the form and the buttons use it."""


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of a worker process."""

    store: str
    """Where Semel keeps its records."""
    books: str
    """Where the business rows are: in the same database, if it has SQL tables."""
    mistake: str = ""
    """One of ``MISTAKES``, to show that the verdict finds it."""
    beside: str = ""
    """The store of the service that is under a storm. The console shows it as well."""
    metrics: str = ""
    """The folder in which the processes count for Prometheus; empty if there is only one process."""


def make_app(settings: ServiceSettings) -> FastAPI:
    """Make the application. Call it in the event loop that serves it, after the tables exist."""
    if settings.mistake and settings.mistake not in MISTAKES:
        raise ConfigurationError(f"no mistake is called {settings.mistake!r}; there are: {', '.join(MISTAKES)}")
    books = Books(settings.books)
    store = open_async_store(settings.store)
    metrics, store_metrics, registry = _open_metrics(settings)
    trail = Trail(settings.store, service="payments", interval=0.5) if store.trails else None
    hooks: list[EventHook] = [metrics] if trail is None else [metrics, trail]
    guard = AsyncSemel(store, policy=Policy(lease=LEASE), on_event=hooks)
    console = _console(guard, settings.beside)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await console.close()
        await guard.close()
        if trail is not None:
            await asyncio.to_thread(trail.close)
        books.close()
        store_metrics.close()
        metrics.write()

    app = FastAPI(
        title="Semel demo: payments",
        version=__version__,
        description="Payments that happen once. Keys of two tenants: `sk_alice`, `sk_bob`.",
        lifespan=lifespan,
    )
    app.state.books = books
    app.state.mistake = settings.mistake
    app.include_router(router)
    app.state.console = console
    app.add_api_route("/try", _try, include_in_schema=False)
    app.add_api_route("/semel.js", lambda: _script(_MODULE), include_in_schema=False)
    app.add_api_route("/demo.js", lambda: _script(_PANEL_SCRIPT), include_in_schema=False)
    for path in console.paths:  # one by one: what is mounted at "/" would answer for every mistyped address
        app.router.routes.append(Route(path, console))
    app.add_api_route("/metrics", lambda: _metrics(registry), include_in_schema=False)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StoreError, _away)
    install(app, guard=guard, tenant=tenant_of)
    if settings.mistake == "unprotected":
        app.add_middleware(NewKeys)
    return app


def _console(guard: AsyncSemel, beside: str) -> Console:
    """The console, which is open to this machine: the demo has no secrets."""
    watched: dict[str, AsyncSemel | str] = {"payments": guard}
    if beside:
        watched["storm"] = beside
    everything = Access(who="demo", act=True, show_keys=True, show_bodies=True)
    panel = Panel(_PANEL.read_text("utf-8"), "/demo.js")
    return Console(watched, allow=allow_on_this_machine(everything), running_too_long="30s", panel=panel)


def _open_metrics(settings: ServiceSettings) -> tuple[PrometheusMetrics, StoreMetrics, Any]:
    """Return the hook that counts, the gauges of the store, and the registry that ``/metrics`` shows."""
    if settings.metrics:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = settings.metrics  # prometheus-client reads it when it is imported
    from prometheus_client import CollectorRegistry, multiprocess

    counted = shown = CollectorRegistry()
    if settings.metrics:
        shown = CollectorRegistry()
        multiprocess.MultiProcessCollector(shown)  # type: ignore[no-untyped-call]
    return PrometheusMetrics(counted), StoreMetrics(settings.store, shown, every="5s"), shown


class NewKeys:
    """The mistake "unprotected": a middleware that gives every request a new key."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            kept = [line for line in scope["headers"] if line[0].lower() != b"idempotency-key"]
            scope = {**scope, "headers": [*kept, (b"idempotency-key", secrets.token_hex(8).encode())]}
        await self._app(scope, receive, send)


async def _try(request: Request) -> HTMLResponse:
    """A page that needs nothing from the internet."""
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    rows = "".join(
        f"<tr><td><code>{method} {route.path}</code><td>{escape((route.description or '').partition(chr(10))[0])}"
        for route in routes
        for method in sorted(route.methods or ())
    )
    page = _PAGE.read_text("utf-8")
    about = re.sub("`(.+?)`", r"<code>\1</code>", request.app.description)
    for name, text in (("title", request.app.title), ("description", about), ("rows", rows)):
        page = page.replace(f"{{{name}}}", text)
    return HTMLResponse(page)


def _metrics(registry: Any) -> Response:
    """What all processes have counted, for Prometheus."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _script(file: Any) -> Response:
    return Response(file.read_bytes(), media_type="text/javascript")


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's own 422, without the input: NaN and lone surrogates, which JSON lets in, cannot be sent back."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": [_plain(each) for each in error.errors()]}, 422)


def _plain(each: dict[str, Any]) -> dict[str, Any]:
    place = [part if isinstance(part, int) else _sendable(part) for part in each["loc"]]
    return {"loc": place, "msg": _sendable(each["msg"]), "type": each["type"]}


def _sendable(text: str) -> str:
    return str(text).encode("utf-8", "replace").decode()


async def _away(request: Request, error: Exception) -> JSONResponse:
    """The business database cannot be reached. The key is released, so the same request may be sent again."""
    return JSONResponse({"detail": "the database is away; send the same request again"}, 503, {"Retry-After": "1"})


async def serve(settings: ServiceSettings, descriptor: int) -> None:
    app = make_app(settings)
    server = make_server(app)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True
        loop.call_soon_threadsafe(app.state.console.stop_streams)

    end_with_parent(stop)
    await server.serve(sockets=[socket.socket(fileno=descriptor)])


def main() -> None:
    config = read_settings()
    descriptor: int = config.pop("descriptor")
    asyncio.run(serve(ServiceSettings(**config), descriptor))
    os._exit(0)  # all is closed, and taking the interpreter down takes longer than that


if __name__ == "__main__":
    main()
