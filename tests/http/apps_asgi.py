"""The test services in plain ASGI, Starlette and FastAPI: the same routes, the same behaviour, each in its own way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from fastapi import Body, Depends, FastAPI, HTTPException
from fastapi import Request as FastAPIRequest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from semel import AsyncOperation, Operation, current_operation
from semel.http.asgi import ASGIMiddleware
from semel.http.fastapi import idempotent, install
from tests.http.behaviour import RULES, UNPARSED, Admin, Reply, Service, table

DOCS = "https://docs.example/idempotency"
TURNED_AWAY = {"": 401, "nobody": 401, "forbidden": 403, "hasty": 429}


def bearer(scope: Any) -> str:
    value: bytes = dict(scope["headers"]).get(b"authorization", b"")
    return value.decode().removeprefix("Bearer").strip()


def tenant(request: Any) -> str:
    found: str = request["tenant"]  # of the scope, or of a Request, which is a mapping of it
    return found


class Authentication:
    """In front of the guard: who it is, or a refusal."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["tenant"] = bearer(scope)
            status = TURNED_AWAY.get(scope["tenant"])
            if status is not None:
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await self.app(scope, receive, send)


class Stamp(BaseHTTPMiddleware):
    """One of those that make every answer look streamed; it gives each its own id."""

    count = 0

    async def dispatch(self, request: Request, call_next: Callable[[Request], Any]) -> Response:
        Stamp.count += 1
        response: Response = await call_next(request)
        response.headers["X-Request-Id"] = f"r{Stamp.count}"
        return response


# -- plain ASGI


def plain(service: Service) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            service.write("lifespan startup")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": "hello"})
            await send({"type": "websocket.close"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        path = scope["path"]
        if path == "/undeclared":
            service.write("/undeclared ")
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"u")]})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"data: 2\n\n"})
            return
        if path in UNPARSED:
            reply = await service.act(path, {"text": str(len(body))})
        else:
            reply = await service.act(path, json.loads(body or b"{}"))
        headers = [(name.lower().encode(), value.encode()) for name, value in reply.headers]
        if len(reply.chunks) == 1 and reply.status != 204:
            headers.append((b"content-length", str(len(reply.chunks[0])).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        for chunk in reply.chunks[:-1]:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": reply.chunks[-1]})
        if reply.background:
            service.write(f"background {reply.background}")
        if reply.error_after:
            raise RuntimeError("after the answer")

    guarded = ASGIMiddleware(app, guard=service.guard, tenant=tenant, routes=table(), docs=DOCS)
    return Authentication(guarded)


# -- Starlette


def response_of(service: Service, reply: Reply) -> Response:
    task = None
    if reply.background or reply.error_after:
        task = BackgroundTask(_after, service, reply)
    response: Response
    if len(reply.chunks) == 1:
        response = Response(reply.chunks[0], reply.status, background=task)
    else:

        async def stream() -> Any:
            for chunk in reply.chunks:
                yield chunk

        response = StreamingResponse(stream(), reply.status, background=task)
    for name, value in reply.headers:
        response.headers.append(name, value)
    return response


def _after(service: Service, reply: Reply) -> None:
    if reply.background:
        service.write(f"background {reply.background}")
    if reply.error_after:
        raise RuntimeError("after the answer")


async def undeclared(request: Request) -> Response:
    request.app.state.service.write("/undeclared ")

    async def stream() -> Any:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    return StreamingResponse(stream(), headers={"X-Request-Id": "u"})


async def greet(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def starlette(service: Service, *middleware: Middleware, outer: tuple[Middleware, ...] = ()) -> Any:
    def endpoint(path: str) -> Any:
        async def handler(request: Request) -> Response:
            if path in UNPARSED:
                assert current_operation() is not None
                body = await request.body()
                return response_of(service, await service.act(path, {"text": str(len(body))}))
            return response_of(service, await service.act(path, json.loads(await request.body() or b"{}")))

        return idempotent(**RULES[path])(handler)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> Any:
        service.write("lifespan startup")
        yield

    def methods(path: str) -> list[str]:
        return ["POST", "PUT", "DELETE", "GET"] if path == "/plain" else ["POST"]

    app = Starlette(
        routes=[
            *(Route(path, endpoint(path), methods=methods(path)) for path in RULES),
            Route("/undeclared", undeclared, methods=["POST", "GET"]),
            WebSocketRoute("/socket", greet),
        ],
        middleware=[
            *outer,
            Middleware(Authentication),
            Middleware(ASGIMiddleware, guard=service.guard, tenant=tenant, docs=DOCS),
            *middleware,
        ],
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def wrapped(service: Service) -> Any:
    """With middlewares between ours and the endpoint: each answer streamed, CORS spoken, bodies compressed."""
    return starlette(
        service,
        Middleware(CORSMiddleware, allow_origins=["https://shop.example"], expose_headers=["X-Request-Id"]),
        Middleware(Stamp),
        Middleware(GZipMiddleware, minimum_size=500),
    )


def nested(service: Service) -> Any:
    """With the same middlewares around ours."""
    return starlette(
        service,
        outer=(Middleware(CORSMiddleware, allow_origins=["*"]), Middleware(Stamp), Middleware(GZipMiddleware)),
    )


# -- FastAPI


async def authenticated(request: FastAPIRequest) -> str:
    """Authentication as a dependency: inside of the guard, and before the claim all the same."""
    user = bearer(request.scope)
    if user in TURNED_AWAY:
        raise HTTPException(TURNED_AWAY[user])
    request.scope["tenant"] = user
    return user


def fastapi(service: Service, *, threads: bool = False) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> Any:
        service.write("lifespan startup")
        yield

    app = FastAPI(lifespan=lifespan)
    app.state.service = service
    install(app, guard=service.guard, tenant=tenant, docs=DOCS)

    def endpoint(path: str) -> Any:
        async def handler(op: AsyncOperation, do: dict[str, Any] = Body()) -> Response:  # noqa: B008
            assert op is None or op.key
            return response_of(service, await service.act(path, do))

        def threaded(op: Operation, do: dict[str, Any] = Body()) -> Response:  # noqa: B008
            assert op is None or op.key
            return response_of(service, service.act_in_thread(path, do))

        async def raw(request: FastAPIRequest) -> Response:
            body = await request.body()
            return response_of(service, await service.act(path, {"text": str(len(body))}))

        chosen = raw if path in UNPARSED else threaded if threads else handler
        chosen.__annotations__ = {
            name: {"AsyncOperation": AsyncOperation, "Operation": Operation}.get(hint, hint)
            for name, hint in chosen.__annotations__.items()
        }
        return idempotent(**RULES[path])(chosen)

    for path in RULES:
        methods = ["POST", "PUT", "DELETE"] if path == "/plain" else ["POST"]
        app.api_route(path, methods=methods, dependencies=[Depends(authenticated)], response_model=None)(endpoint(path))
    app.add_route("/undeclared", undeclared, methods=["POST", "GET"])
    app.add_api_websocket_route("/socket", greet)
    return app


def fastapi_sync(service: Service) -> Any:
    return fastapi(service, threads=True)


# -- Litestar, imported when it is served


def litestar(service: Service) -> Any:
    from tests.http import apps_litestar

    return apps_litestar.litestar(service)


def litestar_sync(service: Service) -> Any:
    from tests.http import apps_litestar

    return apps_litestar.litestar_sync(service)


KINDS = {
    "asgi": plain,
    "starlette": starlette,
    "fastapi": fastapi,
    "fastapi_sync": fastapi_sync,
    "litestar": litestar,
    "litestar_sync": litestar_sync,
    "wrapped": wrapped,
    "nested": nested,
}


def make(kind: str) -> Any:
    service = Service()
    return Admin(KINDS[kind](service), service)


def main() -> None:
    """Serve one kind on the socket that the test has opened."""
    import socket
    import sys

    import uvicorn

    from semel.engine.drive import leases

    leases.RENEW_AFTER = 0.1  # type: ignore[misc]  # a busy machine may miss some renewals of a short lease
    kind, descriptor = sys.argv[1], int(sys.argv[2])
    config = uvicorn.Config(make(kind), log_level="warning", timeout_graceful_shutdown=2, ws="auto")
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as loop:  # uvloop, where it is installed
        loop.run(uvicorn.Server(config).serve(sockets=[socket.socket(fileno=descriptor)]))


if __name__ == "__main__":
    main()
