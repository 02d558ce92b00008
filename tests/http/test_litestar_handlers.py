"""Litestar's own ways of saying what a handler takes and gives: none of them turns protection off."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import msgspec
import pytest
from litestar import Controller, Litestar, MediaType, Request, Response, Router, WebSocket, delete, patch, post, route
from litestar.background_tasks import BackgroundTask
from litestar.config.compression import CompressionConfig
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie, UploadFile
from litestar.di import NamedDependency, Provide
from litestar.dto import DataclassDTO, DTOConfig
from litestar.exceptions import HTTPException, NotFoundException, PermissionDeniedException
from litestar.handlers import BaseRouteHandler, websocket
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult
from litestar.params import FromPath, JSONBody, MultipartBody
from litestar.response import Redirect, ServerSentEvent, Stream
from litestar.types import ASGIApp

from semel import AsyncMemoryStore, AsyncOperation, AsyncSemel, Operation, current_operation
from semel.http.litestar import SemelPlugin, check_match, conditional, etag, idempotent, natural
from tests.http.asking import ask, body_of, header, scope_of

FOR_THE_TYPE_CHECKER = """
from __future__ import annotations
from typing import TYPE_CHECKING
from litestar import post
from semel.http.litestar import idempotent

if TYPE_CHECKING:
    from semel import AsyncOperation

@post("/pay")
@idempotent(required=False)
async def pay(op: AsyncOperation | None) -> str:
    return op.key if op else ""
"""


@dataclasses.dataclass
class Payment:
    amount: int
    secret: str = ""


class Receipt(msgspec.Struct):
    number: int
    amount: int = 0


class Shown(DataclassDTO[Payment]):
    config = DTOConfig(exclude={"secret"})


class App:
    """An app with the plugin, and what went wrong in it."""

    def __init__(self, *handlers: Any, **settings: Any) -> None:
        self.guard = AsyncSemel(AsyncMemoryStore())
        self.errors: list[Exception] = []
        tenant = settings.pop("tenant", lambda request: "alice")
        self.app = Litestar(
            list(handlers),
            plugins=[SemelPlugin(guard=self.guard, tenant=tenant)],
            after_exception=[self._failed],
            logging_config=None,
            **settings,
        )

    async def _failed(self, error: Exception, scope: Any) -> None:
        self.errors.append(error)

    def ask(
        self,
        *bodies: bytes,
        times: int = 2,
        path: str = "/pay",
        method: str = "POST",
        key: str | None = "k",
        **lines: str,
    ) -> list[Any]:
        """A request and its retries, in one event loop."""

        async def run() -> list[Any]:
            headers = {"content_type": "application/json", **lines}
            sent = []
            for _ in range(times):
                scope = scope_of(path, key, method, raw_path=path.encode())
                for name, text in headers.items():
                    scope["headers"].append((name.replace("_", "-").encode(), text.encode()))
                sent.append(await answered(self.app, scope, *bodies))
            return sent

        return asyncio.run(run())

    def claimed(self, operation: str = "POST /pay", key: str = "k") -> bool:
        return asyncio.run(self.guard.lookup(operation, key, tenant="alice")) is not None


async def answered(app: Any, scope: dict[str, Any], *bodies: bytes) -> list[Any]:
    """As a server does it: the connection ends when the answer is through, and streams of Litestar's wait for that."""
    ended = asyncio.Event()

    async def served(scope: Any, receive: Any, send: Any) -> None:
        async def receiving() -> Any:
            coming = asyncio.ensure_future(receive())
            end = asyncio.ensure_future(ended.wait())
            await asyncio.wait([coming, end], return_when=asyncio.FIRST_COMPLETED)
            end.cancel()
            return coming.result() if coming.done() else coming.cancel() and {"type": "http.disconnect"}

        async def sending(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ended.set()

        await app(scope, receiving, sending)

    return await ask(served, scope, *bodies)


def same(sent: list[Any], status: int = 201) -> bytes:
    """That all answers but the first are replays of it; its body."""
    assert [each[0]["status"] for each in sent] == [status] * len(sent), body_of(sent[0])
    assert len({body_of(each) for each in sent}) == 1
    assert [header(each, b"idempotent-replayed") for each in sent] == [[], *[[b"true"]] * (len(sent) - 1)]
    return body_of(sent[0])


@pytest.mark.parametrize("value", [{"a": 1}, {}, [], 0, False, "", None, "text", 1.5])
@pytest.mark.parametrize("threads", [False, True])
def test_whatever_a_handler_returns_is_stored_and_replayed(value: Any, threads: bool) -> None:
    runs = []

    @post("/pay")
    @idempotent()
    async def pay(op: AsyncOperation) -> Any:
        runs.append(op.key)
        return value

    @post("/pay", sync_to_thread=True)
    @idempotent()
    def pay_in_thread(op: Operation) -> Any:
        runs.append(op.key)
        return value

    app = App(pay_in_thread if threads else pay)
    same(app.ask(times=3))
    assert runs == ["k"]
    assert app.errors == []


def test_models_statuses_dependencies_and_captures_work_as_without_us() -> None:
    made: list[int] = []

    async def account_of() -> str:
        return "a-1"

    @post("/pay", status_code=202, dependencies={"account": Provide(account_of)})
    @idempotent()
    async def pay(data: JSONBody[Payment], account: NamedDependency[str], op: AsyncOperation) -> Receipt:
        number = await op.capture("number", lambda: made.append(1) or 7)
        assert current_operation() is op
        assert account == "a-1"
        return Receipt(number, data.amount)

    app = App(pay)
    assert same(app.ask(b'{"amount":', b" 5}"), 202) == b'{"number":7,"amount":5}'
    assert made == [1]
    schema = app.app.openapi_schema.to_schema()["paths"]["/pay"]["post"]
    assert [parameter["name"] for parameter in schema["parameters"]] == ["Idempotency-Key"]
    assert schema["requestBody"]


def test_a_sync_handler_captures_through_the_event_loop() -> None:
    threads = []

    @post("/pay", sync_to_thread=True)
    @idempotent()
    def pay(data: JSONBody[Payment], op: Operation) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"number": op.capture("number", lambda: 7), "same": current_operation() is op}

    assert same(App(pay).ask(b'{"amount": 5}')) == b'{"number":7,"same":true}'
    assert len(threads) == 1
    assert threads != [threading.main_thread()]


def test_a_handle_that_only_the_type_checker_imports_is_still_no_query_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("handlers")
    monkeypatch.setitem(sys.modules, "handlers", module)
    exec(FOR_THE_TYPE_CHECKER, vars(module))
    app = App(module.pay)
    assert same(app.ask()) == b"k"
    [parameter] = app.app.openapi_schema.to_schema()["paths"]["/pay"]["post"]["parameters"]
    assert parameter["name"] == "Idempotency-Key"


def test_types_that_litestar_is_told_of_are_found() -> None:
    @dataclasses.dataclass
    class Local:
        amount: int

    @post("/pay", signature_types=[Local])
    @idempotent()
    async def pay(data: JSONBody[Local], op: AsyncOperation) -> Local:
        return data

    assert same(App(pay).ask(b'{"amount": 5}')) == b'{"amount":5}'


@pytest.mark.parametrize("settings", [{"return_dto": Shown}, {"dto": Shown}])
def test_a_replay_passes_by_a_return_dto(settings: dict[str, Any]) -> None:
    """What stands for the answer is no model: the DTO would fail on it, and every replay would be an error in a log."""

    @post("/pay", **settings)
    @idempotent()
    async def pay(data: JSONBody[Payment]) -> Payment:
        return dataclasses.replace(data, secret="hunter2")

    @post("/wrapped", **settings)
    @idempotent()
    async def wrapped(data: JSONBody[Payment]) -> Response[Payment]:
        return Response(dataclasses.replace(data, secret="hunter2"), status_code=202)

    app = App(pay, wrapped)
    assert same(app.ask(b'{"amount": 5}')) == b'{"amount":5}'
    assert same(app.ask(b'{"amount": 5}', path="/wrapped"), 202) == b'{"amount":5}'
    assert app.errors == []


def test_guards_dependencies_and_validation_come_before_the_claim() -> None:
    refused: set[str] = set()
    runs = []

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if "guard" in refused:
            raise PermissionDeniedException

    async def account_of() -> str:
        if "dependency" in refused:
            raise NotFoundException
        return "a-1"

    @post("/pay", guards=[guard], dependencies={"account": Provide(account_of)})
    @idempotent()
    async def pay(data: JSONBody[Payment], account: NamedDependency[str]) -> int:
        runs.append(1)
        return len(runs)

    app = App(pay)
    for part, status in (("guard", 403), ("dependency", 404)):
        refused.add(part)
        assert app.ask(b'{"amount": 5}', times=1)[0][0]["status"] == status
        assert not app.claimed()
        refused.clear()
    assert app.ask(b'{"amount": "five"}', times=1)[0][0]["status"] == 400
    assert not app.claimed()
    same(app.ask(b'{"amount": 5}'))
    refused.add("guard")  # a replay is authorised anew
    assert app.ask(b'{"amount": 5}', times=1)[0][0]["status"] == 403
    assert runs == [1]


def test_a_before_request_hook_that_answers_makes_no_claim() -> None:
    async def away(request: Request[Any, Any, Any]) -> Response[str] | None:
        return Response("away", status_code=503)

    @post("/pay", before_request=away)
    @idempotent()
    async def pay() -> None: ...

    app = App(pay)
    assert body_of(app.ask(times=1)[0]) == b"away"
    assert not app.claimed()


def test_controllers_and_routers_are_protected_with_all_their_layers() -> None:
    seen = []

    async def layer(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        seen.append("guard")

    class Payments(Controller):
        path = "/payments"
        guards = [layer]  # noqa: RUF012

        @post("/{number:int}")
        @idempotent()
        async def pay(self, number: FromPath[int], op: AsyncOperation) -> dict[str, Any]:
            seen.append(f"pay {number}")
            return {"path": self.path, "key": op.key}

        @post("/{number:int}/refund", sync_to_thread=True)
        @idempotent()
        def refund(self, number: FromPath[int], op: Operation) -> str:
            seen.append(f"refund {number}")
            return op.key

    app = App(Router("/v1", route_handlers=[Router("/shop", route_handlers=[Payments])]))
    assert same(app.ask(path="/v1/shop/payments/7")) == b'{"path":"/payments","key":"k"}'
    assert same(app.ask(path="/v1/shop/payments/7/refund")) == b"k"
    assert seen == ["guard", "pay 7", "guard", "guard", "refund 7", "guard"]


def test_exceptions_and_their_handlers_at_each_layer_are_answers() -> None:
    runs = []

    class Broke(Exception): ...

    def explained(request: Request[Any, Any, Any], error: Exception) -> Response[str]:
        return Response("no money", status_code=402, media_type=MediaType.TEXT)

    @post("/pay")
    @idempotent()
    async def pay() -> None:
        runs.append(1)
        raise HTTPException(status_code=404, detail="no such account")

    @post("/broke", exception_handlers={Broke: explained})
    @idempotent()
    async def broke() -> None:
        runs.append(2)
        raise Broke

    app = App(pay, broke)
    assert b"no such account" in same(app.ask(), 404)
    assert same(app.ask(path="/broke"), 402) == b"no money"
    assert runs == [1, 2]
    assert len(app.errors) == 2


def test_an_error_frees_the_key() -> None:
    runs = []

    @post("/pay")
    @idempotent()
    async def pay() -> int:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("hunter2")
        return 7

    app = App(pay)
    broken, first, again = app.ask(times=3)
    assert broken[0]["status"] == 500
    assert b"hunter2" not in body_of(broken)
    assert same([first, again]) == b"7"


def test_hooks_after_the_request_see_each_answer_and_cannot_change_a_replay() -> None:
    seen = []

    async def stamped(response: Response[Any]) -> Response[Any]:
        seen.append(response.status_code)
        response.headers["X-Stamp"] = str(len(seen))
        response.content = response.content and f"{response.content} {len(seen)}"
        return response

    @post("/pay", after_request=stamped)
    @idempotent()
    async def pay() -> Response[str]:
        return Response("paid", status_code=201, headers={"ETag": '"v1"'}, cookies=[Cookie("session", "hunter2")])

    sent = App(pay).ask()
    assert same(sent) == b"paid 1"
    assert [header(each, b"x-stamp") for each in sent] == [[b"1"], [b"2"]]
    assert [header(each, b"etag") for each in sent] == [[b'"v1"']] * 2
    assert len(header(sent[0], b"set-cookie")) == 1
    assert header(sent[1], b"set-cookie") == []


def test_background_tasks_of_the_route_and_of_the_answer_run_once() -> None:
    done = []

    async def work(what: str) -> None:
        done.append(what)

    @post("/pay", background=BackgroundTask(work, "route"))
    @idempotent()
    async def pay() -> str:
        return "paid"

    @post("/other")
    @idempotent()
    async def other() -> Response[str]:
        return Response("paid", status_code=202, background=BackgroundTask(work, "answer"))

    app = App(pay, other)
    same(app.ask(times=3))
    same(app.ask(path="/other", times=3), 202)
    assert done == ["route", "answer"]


def test_a_refusal_runs_no_background_task_either() -> None:
    done = []

    async def work() -> None:
        done.append(1)

    @post("/pay", background=BackgroundTask(work))
    @idempotent()
    async def pay() -> str:
        return "paid"

    app = App(pay)
    assert [sent[0]["status"] for sent in (app.ask(key=None, times=1)[0], app.ask(key="a,b", times=1)[0])] == [400, 400]
    assert done == []
    assert app.errors == []


def test_generator_dependencies_end_with_the_handler() -> None:
    ends = []

    async def session() -> AsyncIterator[str]:
        try:
            yield "s"
        except Exception as error:
            ends.append(f"rolled back: {type(error).__name__}")
            raise
        else:
            ends.append("committed")

    @route("/pay", http_method=["PATCH"], dependencies={"session": Provide(session)})
    @conditional()
    async def change(session: NamedDependency[str]) -> None:
        check_match(etag(7))

    app = App(change)
    assert app.ask(method="PATCH", if_match='"7"', times=1)[0][0]["status"] == 200
    assert app.ask(method="PATCH", if_match='"6"', times=1, key="k2")[0][0]["status"] == 412
    assert ends[0] == "committed"
    assert ends[1].startswith("rolled back")


def test_a_dependency_that_cannot_commit_frees_the_key() -> None:
    runs = []

    async def session() -> AsyncIterator[str]:
        yield "s"
        if len(runs) == 1:
            raise RuntimeError("the commit failed")

    @post("/pay", dependencies={"session": Provide(session)})
    @idempotent()
    async def pay(session: NamedDependency[str]) -> int:
        runs.append(1)
        return len(runs)

    failed, first, again = App(pay).ask(times=3)
    assert failed[0]["status"] == 500
    assert same([first, again]) == b"2"


@pytest.mark.parametrize("declared", [True, False])
def test_streams_are_captured_where_declared_and_untouched_where_not(declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async def events() -> Stream:
        return Stream(chunks(), media_type=MediaType.TEXT)

    async def sse() -> ServerSentEvent:
        return ServerSentEvent(chunks())

    app = App(*(post(path)(idempotent()(f) if declared else f) for path, f in (("/pay", events), ("/sse", sse))))
    for path in ("/pay", "/sse"):
        sent = app.ask(path=path)
        bodies = [message for message in sent[0] if message["type"] == "http.response.body"]
        if declared:
            assert b"one" in same(sent)
            assert len(bodies) == 1
        else:
            assert len(bodies) >= 3
            assert header(sent[1], b"idempotent-replayed") == header(sent[1], b"idempotency-key") == []


def test_redirects_asgi_answers_and_uploads_are_protected() -> None:
    seen = []

    @post("/redirect")
    @idempotent()
    async def redirect() -> Redirect:
        return Redirect("/payments/7", status_code=303)

    @post("/app")
    @idempotent()
    async def application() -> ASGIApp:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            seen.append("app")
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"made"})

        return answer

    @post("/upload")
    @idempotent()
    async def upload(data: MultipartBody[UploadFile]) -> int:
        seen.append(data.filename)
        return len(await data.read())

    app = App(redirect, application, upload)
    sent = app.ask(path="/redirect")
    same(sent, 303)
    assert [header(each, b"location") for each in sent] == [[b"/payments/7"]] * 2
    assert same(app.ask(path="/app")) == b"made"
    form = b'--b\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\nabcde\r\n--b--\r\n'
    assert same(app.ask(form, path="/upload", content_type="multipart/form-data; boundary=b")) == b"5"
    assert seen == ["app", "f"]


def test_a_compressed_answer_replays() -> None:
    @post("/pay")
    @idempotent()
    async def pay() -> str:
        return "a" * 3000

    app = App(pay, compression_config=CompressionConfig(backend="gzip", minimum_size=500))
    sent = app.ask(accept_encoding="gzip")
    assert gzip.decompress(same(sent)) == b"a" * 3000
    assert header(sent[1], b"content-encoding") == [b"gzip"]


def test_a_body_that_is_too_large_is_refused_without_a_claim() -> None:
    @post("/pay", request_max_body_size=10)
    @idempotent()
    async def pay(data: JSONBody[Payment]) -> None: ...

    app = App(pay)
    assert app.ask(b'{"amount": 5, "secret": "long"}', times=1)[0][0]["status"] == 413
    assert not app.claimed()


def test_the_tenant_is_taken_from_the_request_that_was_authenticated() -> None:
    class Authentication(AbstractAuthenticationMiddleware):
        async def authenticate_request(self, connection: ASGIConnection[Any, Any, Any, Any]) -> AuthenticationResult:
            return AuthenticationResult(user=connection.headers["x-user"], auth=None)

    async def tenant(request: Request[Any, Any, Any]) -> str:
        user: str = request.user
        return user

    runs = []

    @post("/pay")
    @idempotent()
    async def pay() -> int:
        runs.append(1)
        return len(runs)

    app = App(pay, tenant=tenant, middleware=[Authentication])
    assert same(app.ask(x_user="alice")) == b"1"
    assert same(app.ask(x_user="bob")) == b"2"


def test_natural_and_conditional_handlers() -> None:
    @delete("/pay", status_code=204)
    @natural()
    async def gone() -> None:
        raise NotFoundException

    @patch("/pay", sync_to_thread=True)
    @conditional()
    def change(op: Operation | None) -> Annotated[str, "the handle's key"]:
        check_match(etag(7))
        return op.key if op else "no key"

    app = App(gone, change)
    assert [sent[0]["status"] for sent in app.ask(method="DELETE", key=None)] == [204, 204]
    assert app.ask(method="PATCH", times=1)[0][0]["status"] == 428
    assert app.ask(method="PATCH", times=1, if_match='"6"')[0][0]["status"] == 412
    assert same(app.ask(method="PATCH", if_match='"7"'), 200) == b"k"
    assert body_of(app.ask(method="PATCH", times=1, key=None, if_match='"7"')[0]) == b"no key"


def test_below_two_mounts_the_same_path_is_two_operations() -> None:
    """Litestar cuts the mount's path off: by what is left, the first application's answer would be the second's."""
    from litestar import asgi

    def mounted(name: str, inner: Callable[..., Any]) -> Any:
        @asgi(f"/{name}", is_mount=True, copy_scope=True)
        async def mount(scope: Any, receive: Any, send: Any) -> None:
            await inner(scope, receive, send)

        return mount

    def answering(text: str) -> Callable[..., Any]:
        @idempotent()
        async def pay() -> None: ...

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"] == "/pay/"
            await pay()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": text.encode()})

        return inner

    def whole(text: str) -> Litestar:
        @post("/pay")
        @idempotent()
        async def pay() -> str:
            return text

        return Litestar([pay], plugins=[SemelPlugin(guard=outer.guard, tenant=lambda _: "alice")], logging_config=None)

    outer = App(mounted("a", answering("a")), mounted("b", answering("b")))
    assert same(outer.ask(path="/a/pay")) == b"a"
    assert same(outer.ask(path="/b/pay")) == b"b"
    assert outer.claimed("POST /a/pay")
    for name in "cd":
        outer.app.register(mounted(name, whole(name)))
        assert same(outer.ask(path=f"/{name}/pay")) == name.encode()


def test_sockets_pass_untouched() -> None:
    @websocket("/pay")
    async def talk(socket: WebSocket[Any, Any, Any]) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    scope = {**scope_of(key="k"), "type": "websocket"}
    del scope["method"]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(App(talk).app(scope, receive, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.send", "websocket.close"]
