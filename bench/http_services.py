"""The service that is measured over HTTP: one POST that reads its body and answers a small JSON, in each framework.

Unprotected, under Semel, and under the peers that exist for it: asgi-idempotency-header is an ASGI middleware, idemptx
a decorator for FastAPI, aws-lambda-powertools guards a plain function that the route calls. All contestants of a
framework have the same handler.

Semel stands there twice: declared at the endpoint, where the claim comes after all that the framework does, and in the
middleware's table of routes, where it comes first and a replay never gets to the framework.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from bench import job, peer
from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http.contract.rules import idempotent

__all__ = ["EDGE", "FLOOR", "FRAMEWORKS", "PEERS", "SEMEL", "UNPROTECTED", "contestants", "make"]

UNPROTECTED: Final = "unprotected"
SEMEL: Final = "Semel"
EDGE: Final = "Semel, claimed at the edge"
FLOOR: Final = "two bare commands"
"""The floor: the unprotected route, and the two commands of Semel's store on its connection. No key is checked, no
request compared, no answer made or read."""
HEADER: Final = "asgi-idempotency-header"
IDEMPTX: Final = "idemptx"
PEERS: Final = (HEADER, IDEMPTX, peer.NAME)
FRAMEWORKS: Final = ("ASGI", "Starlette", "FastAPI", "WSGI")
PATH: Final = "/payments"
ANSWER: Final = json.dumps(job.RESULT, separators=(",", ":")).encode()
_MODULES: Final = {HEADER: "idempotency_header_middleware", IDEMPTX: "idemptx", peer.NAME: "aws_lambda_powertools"}
_HEADERS: Final = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
RECORDS: Final = 50_000_000


def contestants(framework: str, redis: str | None = None) -> tuple[list[str], list[str]]:
    """Who can be measured in it, and whose package is missing. What powertools does in memory is measured elsewhere."""
    ours = [SEMEL]
    peers = {"WSGI": (), "FastAPI": (HEADER, IDEMPTX)}.get(framework, (HEADER,))
    if redis is not None and framework in ("Starlette", "FastAPI"):
        ours, peers = [FLOOR, SEMEL, EDGE], (*peers, peer.NAME)
    missing = [name for name in peers if not _installed(name)]
    return [UNPROTECTED, *ours, *(name for name in peers if name not in missing)], missing


def make(framework: str, who: str, redis: str | None = None) -> Any:
    """The application. ``redis``: the URL of the server that keeps the records, instead of this process."""
    return {"ASGI": _asgi, "Starlette": _starlette, "FastAPI": _fastapi, "WSGI": _wsgi}[framework](who, redis)


def _asgi(who: str, redis: str | None) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await send({"type": "http.response.body", "body": ANSWER, "more_body": False})

    if who == SEMEL:
        return _edge(redis)(application)
    return application if who == UNPROTECTED else _middleware(redis)(application)


def _starlette(who: str, redis: str | None) -> Any:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def pay(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(job.RESULT)

    async def pay_by_powertools(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(guarded(request.headers["idempotency-key"]))

    middleware = []
    endpoint: Callable[..., Any] = pay
    if who == SEMEL:
        from semel.http.asgi import ASGIMiddleware
        from semel.http.fastapi import idempotent as declare

        endpoint = declare()(pay)
        middleware = [Middleware(ASGIMiddleware, guard=_guard(redis), tenant=_tenant)]
    elif who == EDGE:
        middleware = [Middleware(_edge(redis))]
    elif who == FLOOR:
        middleware = [Middleware(_bare_commands(redis))]
    elif who == HEADER:
        middleware = [Middleware(_middleware(redis))]
    elif who == peer.NAME:
        guarded, endpoint = _powertools(redis), pay_by_powertools
    return Starlette(routes=[Route(PATH, endpoint, methods=["POST"])], middleware=middleware)


def _fastapi(who: str, redis: str | None) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    async def pay(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(job.RESULT)

    async def pay_by_powertools(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse(guarded(request.headers["idempotency-key"]))

    for function in (pay, pay_by_powertools):
        function.__annotations__ = {"request": Request, "return": JSONResponse}  # by value: they are local names
    app = FastAPI(openapi_url=None)
    endpoint: Callable[..., Any] = pay
    if who == SEMEL:
        from semel.http.fastapi import idempotent as declare
        from semel.http.fastapi import install

        endpoint = declare()(pay)
        install(app, guard=_guard(redis), tenant=_tenant)
    elif who == EDGE:
        app.add_middleware(_edge(redis))
    elif who == FLOOR:
        app.add_middleware(_bare_commands(redis))
    elif who == HEADER:
        app.add_middleware(_middleware(redis))
    elif who == peer.NAME:
        guarded, endpoint = _powertools(redis), pay_by_powertools
    elif who == IDEMPTX:
        from idemptx import idempotent as idemptx  # type: ignore[import-untyped, import-not-found, unused-ignore]

        endpoint = idemptx(storage_backend=_idemptx_backend(redis))(pay)
    app.post(PATH, response_model=None)(endpoint)
    return app


def _wsgi(who: str, redis: str | None) -> Any:
    lines = [(name.decode().title(), value.decode()) for name, value in _HEADERS]

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("200 OK", list(lines))
        return [ANSWER]

    if who == UNPROTECTED:
        return application
    from semel.http.wsgi import WSGIMiddleware

    if redis is None:
        guard = Semel(MemoryStore(max_records=RECORDS), sweep_every=None)
    else:
        from semel import RedisStore

        guard = Semel(RedisStore(redis), sweep_every=None)
    return WSGIMiddleware(application, guard=guard, tenant=_tenant, routes={f"POST {PATH}": idempotent()})


def _guard(redis: str | None) -> AsyncSemel:
    if redis is None:
        return AsyncSemel(AsyncMemoryStore(max_records=RECORDS), sweep_every=None)
    from semel import AsyncRedisStore

    return AsyncSemel(AsyncRedisStore(redis), sweep_every=None)


def _tenant(scope: Any) -> str:
    return "acme"


def _edge(redis: str | None) -> Callable[[Any], Any]:
    """Semel with a table of routes: whoever the tenant is must be known at the edge, and a replay ends there."""
    from semel.http.asgi import ASGIMiddleware

    routes = {f"POST {PATH}": idempotent()}
    return lambda app: ASGIMiddleware(app, guard=_guard(redis), tenant=_tenant, routes=routes)


def _bare_commands(redis: str | None) -> Callable[[Any], Any]:
    """A middleware that claims by the header's bytes, and stores the same record for every request."""
    from semel.core.encoding.snapshot import StoredResponse
    from semel.http.contract.responses import RESPONSES
    from semel.stores.redis.commands import scripts
    from semel.stores.redis.layout import eight_bytes, new_value

    guard, script = _guard(redis), scripts()["complete"]
    store: Any = guard.driver.store
    call = guard.make_call(f"POST {PATH}", "k-known-100", "acme", b"f" * 32, idempotent().policy, RESPONSES)
    value, life = new_value(call.make_claim(), 7, 1)
    snapshot = call.seal_value(StoredResponse(200, list(_HEADERS[:1]), ANSWER))
    token, ends = eight_bytes(7), eight_bytes(2**60)

    def middleware(app: Any) -> Any:
        connection: Any = None

        async def application(scope: Any, receive: Any, send: Any) -> None:
            nonlocal connection
            if connection is None:
                servers = store._servers
                connection = await servers.connection(await servers.address_of(b""))
                await connection.send((b"SCRIPT", b"LOAD", script.text))
            key = b"floor:" + next(text for name, text in scope["headers"] if name == b"idempotency-key")
            if await connection.send((b"SET", key, value, b"NX", b"GET", b"PX", life)) is not None:
                await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                await send({"type": "http.response.body", "body": ANSWER, "more_body": False})
                return
            start: Any = None

            async def hold(message: Any) -> None:
                nonlocal start
                if message["type"] == "http.response.start":
                    start = message
                    return
                parts = (b"EVALSHA", script.sha, 1, key, token, snapshot, life, ends, b"0", b"floor")
                assert await connection.send(parts) == 1
                await send(start)
                await send(message)

            await app(scope, receive, hold)

        return application

    return middleware


def _middleware(redis: str | None) -> Callable[[Any], Any]:
    """asgi-idempotency-header, which compares nothing and knows no tenant: a key is a key."""
    from idempotency_header_middleware import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        IdempotencyHeaderMiddleware,
    )
    from idempotency_header_middleware.backends import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        MemoryBackend,
        RedisBackend,
    )

    if redis is None:
        return lambda app: IdempotencyHeaderMiddleware(app, backend=MemoryBackend())
    from redis.asyncio import Redis

    return lambda app: IdempotencyHeaderMiddleware(app, backend=RedisBackend(Redis.from_url(redis)))


def _idemptx_backend(redis: str | None) -> Any:
    from idemptx.backend import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        AsyncRedisBackend,
        InMemoryBackend,
    )

    if redis is None:
        return InMemoryBackend()
    from redis.asyncio import Redis

    return AsyncRedisBackend(Redis.from_url(redis))


def _powertools(redis: str | None) -> Callable[[str], Any]:
    """It does not await, so it is called in the event loop: a thread for each call would cost it more CPU."""
    assert redis is not None
    found = peer.powertools_on_redis(redis)
    assert found is not None
    return found


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(_MODULES[name]) is not None
