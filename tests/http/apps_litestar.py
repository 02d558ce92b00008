"""The test service in Litestar: the routes and the behaviour of the others, with guards that authenticate."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, Request, Response, WebSocket, route, websocket
from litestar.background_tasks import BackgroundTask
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.params import JSONBody
from litestar.response import Stream

from semel import AsyncOperation, Operation, current_operation
from semel.http.litestar import SemelPlugin, idempotent
from tests.http.behaviour import RULES, UNPARSED, Reply, Service

DOCS = "https://docs.example/idempotency"
TURNED_AWAY = {"": 401, "nobody": 401, "forbidden": 403, "hasty": 429}


class _Lines:
    """Adds header lines, of which some have the same name."""

    lines: list[tuple[str, str]] = []  # noqa: RUF012

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> Any:
        response = super().to_asgi_response(*args, **kwargs)  # type: ignore[misc]
        for name, value in self.lines:
            response.headers.add(name, value)
        return response


class Whole(_Lines, Response[bytes]): ...


class Chunked(_Lines, Stream): ...


def response_of(service: Service, reply: Reply) -> Response[Any]:
    lines = [(name, value) for name, value in reply.headers if name != "Content-Type"]
    media = next((value.partition(";")[0] for name, value in reply.headers if name == "Content-Type"), "text/plain")
    task = BackgroundTask(_after, service, reply) if reply.background or reply.error_after else None
    settings: dict[str, Any] = {"status_code": reply.status, "media_type": media, "background": task}

    async def stream() -> AsyncIterator[bytes]:
        for chunk in reply.chunks:
            yield chunk

    response: Any = Whole(reply.chunks[0], **settings) if len(reply.chunks) == 1 else Chunked(stream(), **settings)
    response.lines = lines
    return response  # type: ignore[no-any-return]


async def _after(service: Service, reply: Reply) -> None:
    if reply.background:
        service.write(f"background {reply.background}")
    if reply.error_after:
        raise RuntimeError("after the answer")


async def authenticated(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Litestar's own place for authorisation: inside of the middleware, and before the claim all the same."""
    user = connection.headers.get("Authorization", "").removeprefix("Bearer").strip()
    if user in TURNED_AWAY:
        raise HTTPException(status_code=TURNED_AWAY[user])
    connection.state.tenant = user


async def logged(exception: Exception, scope: Any) -> None:
    traceback.print_exception(exception)


@websocket("/socket")
async def greet(socket: WebSocket[Any, Any, Any]) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def litestar(service: Service, *, threads: bool = False) -> Any:
    def endpoint(path: str) -> Any:
        async def handler(data: JSONBody[dict[str, Any]], op: AsyncOperation) -> Response[Any]:
            assert op is None or op.key
            return response_of(service, await service.act(path, data))

        def threaded(data: JSONBody[dict[str, Any]], op: Operation) -> Response[Any]:
            assert op is None or op.key
            return response_of(service, service.act_in_thread(path, data))

        async def raw(request: Request[Any, Any, Any]) -> Response[Any]:
            assert current_operation() is not None
            body = await request.body()
            return response_of(service, await service.act(path, {"text": str(len(body))}))

        chosen = raw if path in UNPARSED else threaded if threads else handler
        methods = ["POST", "PUT", "DELETE"] if path == "/plain" else ["POST"]
        in_thread = {"sync_to_thread": True} if chosen is threaded else {}
        return route(path, http_method=methods, guards=[authenticated], **in_thread)(idempotent(**RULES[path])(chosen))

    @route("/undeclared", http_method=["POST", "GET"], status_code=200)
    async def undeclared() -> Stream:
        service.write("/undeclared ")
        return Stream(iter([b"data: 1\n\n", b"data: 2\n\n"]), headers={"X-Request-Id": "u"})

    return Litestar(
        [*(endpoint(path) for path in RULES), undeclared, greet],
        plugins=[SemelPlugin(guard=service.guard, tenant=lambda request: request.state.tenant, docs=DOCS)],
        on_startup=[lambda: service.write("lifespan startup")],
        after_exception=[logged],
        logging_config=None,  # Litestar's own writes in another thread, so a test could look too early
        openapi_config=None,
    )


def litestar_sync(service: Service) -> Any:
    return litestar(service, threads=True)
