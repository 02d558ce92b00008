"""Django under ASGI: async and sync views, guards and tenants of both kinds; and ``async def`` under WSGI."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.sync import markcoroutinefunction
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views import View

from semel import AsyncMemoryStore, AsyncOperation, AsyncSemel, MemoryStore, Operation, Semel, current_operation
from semel.errors import ConfigurationError
from semel.http.django import check_match, conditional, etag, idempotent
from tests.http.asking import ask, body_of, scope_of
from tests.http.django_project import MIDDLEWARE, Project, whose

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def guard() -> Iterator[Semel]:
    with Semel(MemoryStore()) as guard:
        yield guard


@pytest.fixture
def runs() -> list[Any]:
    return []


async def twice(where: str = "/pay", **headers: str) -> list[Any]:
    client = AsyncClient()
    return [await client.post(where, b"{}", "application/json", headers=KEY | headers) for _ in range(2)]


def views(runs: list[Any]) -> list[Any]:
    @idempotent()
    async def pay(request: Any, op: AsyncOperation) -> JsonResponse:
        assert current_operation() is op
        runs.append("async")
        return JsonResponse({"key": op.key, "tenant": op.tenant, "n": await op.capture("n", lambda: 5)})

    @idempotent()
    def pay_in_thread(request: Any, op: Operation) -> JsonResponse:
        assert current_operation() is op
        runs.append("sync")
        return JsonResponse({"key": op.key, "tenant": op.tenant, "n": op.capture("n", lambda: 5)})

    class Pay(View):
        async def get(self, request: Any) -> HttpResponse:
            runs.append("get")
            return HttpResponse()

        @idempotent()
        async def post(self, request: Any, op: AsyncOperation) -> JsonResponse:
            runs.append("class")
            return JsonResponse({"key": op.key, "tenant": op.tenant, "n": 5})

    return [path("async", pay), path("sync", pay_in_thread), path("class", Pay.as_view())]


async def whose_async(request: Any) -> str:
    await asyncio.sleep(0)
    return whose(request)


def whose_in_thread(request: Any) -> str:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    return whose(request)


@pytest.mark.parametrize("tenant", [whose_async, whose_in_thread])
@pytest.mark.parametrize("awaited", [True, False], ids=["AsyncSemel", "Semel"])
def test_async_and_sync_views_under_asgi(guard: Semel, runs: list[Any], awaited: bool, tenant: Any) -> None:
    async def asked() -> None:
        kind = AsyncSemel(AsyncMemoryStore()) if awaited else guard
        with Project(kind) as project:
            project.serve(*views(runs), tenant=tenant)
            for where in ("async", "sync", "class"):
                first, again = await twice(f"/{where}", **{"X-User": "bob"})
                assert first.json() == again.json() == {"key": "k", "tenant": "bob", "n": 5}
                assert "Idempotent-Replayed" not in first.headers
                assert again.headers["Idempotent-Replayed"] == "true"
                assert (
                    await AsyncClient().post(f"/{where}", b"[]", "application/json", headers=KEY | {"X-User": "bob"})
                ).status_code == 422
            assert (await AsyncClient().get("/class", headers=KEY)).status_code == 200
        if awaited:
            await kind.close()

    asyncio.run(asked())
    assert runs == ["async", "sync", "class", "get"]


@pytest.mark.parametrize("tenant", [whose_async, whose_in_thread])
def test_async_views_under_wsgi(guard: Semel, runs: list[Any], tenant: Any) -> None:
    with Project(guard) as project:
        project.serve(*views(runs), tenant=tenant)
        for where in ("async", "sync", "class"):
            answers = [project.client().post(f"/{where}", headers=KEY | {"X-User": "bob"}) for _ in range(2)]
            assert [answer.json() for answer in answers] == [{"key": "k", "tenant": "bob", "n": 5}] * 2
    assert runs == ["async", "sync", "class"]


@pytest.mark.parametrize("in_loop", [True, False], ids=["ASGI", "WSGI"])
@pytest.mark.parametrize("awaits", [True, False], ids=["async", "sync"])
def test_a_view_that_fails_takes_its_steps_back_wherever_it_is_served(
    guard: Semel, runs: list[Any], awaits: bool, in_loop: bool
) -> None:
    def undo(charge: str) -> None:
        if runs.count(charge) > 1:
            raise RuntimeError("no way back")
        runs.append(f"{charge} undone")

    def charge() -> str:
        runs.append("charge")
        return "charge"

    @idempotent(completion_timeout=0.01)
    async def pay_async(request: Any, op: AsyncOperation) -> HttpResponse:
        await op.step("charge", charge, undo=undo)
        raise ValueError("the rest failed")

    @idempotent(completion_timeout=0.01)
    def pay(request: Any, op: Operation) -> HttpResponse:
        op.step("charge", charge, undo=undo)
        raise ValueError("the rest failed")

    async def in_turn() -> list[Any]:
        client = AsyncClient(raise_request_exception=False)
        return [await client.post("/pay", headers=KEY) for _ in range(3)]

    with Project(guard) as project:
        project.serve(path("pay", pay_async if awaits else pay))
        if in_loop:
            answers = asyncio.run(in_turn())
        else:
            client = Client(raise_request_exception=False)
            answers = [client.post("/pay", headers=KEY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 500, 500]
    assert answers[1].json()["code"] == "idempotency_not_undone"
    assert answers[2].json()["code"].startswith("idempotency_"), "and nobody runs it again"
    assert runs == ["charge", "charge undone", "charge"]


def test_an_async_guard_under_wsgi_is_an_error_when_django_starts(runs: list[Any]) -> None:
    with Project(AsyncSemel(AsyncMemoryStore())) as project:
        project.serve(*views(runs))
        with pytest.raises(ConfigurationError, match="WSGI is sync"):
            project.client().post("/sync", headers=KEY)
    assert runs == []


FORM = b'--cut\r\nContent-Disposition: form-data; name="a"\r\n\r\n%b\r\n--cut--\r\n'
KINDS = {
    "form": (b"application/x-www-form-urlencoded", b"a=%b"),
    "upload": (b"multipart/form-data; boundary=cut", FORM),
    "body": (b"text/plain", b"%b"),
    "part": (b"text/x-part", b"%b"),
    "stream": (b"text/x-stream", b"%b"),
}


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("how", KINDS)
def test_a_body_counts_whatever_has_read_it_before(guard: Semel, runs: list[Any], how: str, outside: bool) -> None:
    def read(request: Any) -> None:
        if how in ("form", "upload"):
            runs.append(request.POST["a"].encode())
        elif how == "body":
            runs.append(request.body)
        elif how == "part":
            runs.append(request.read(2))

    def reading(get_response: Any) -> Any:
        async def middleware(request: Any) -> Any:
            read(request)
            return await get_response(request)

        return markcoroutinefunction(middleware)

    reading.async_capable = True  # type: ignore[attr-defined]

    @idempotent()
    async def pay(request: Any) -> HttpResponse:
        if how in ("form", "upload"):
            return HttpResponse(request.POST["a"])
        return HttpResponse(request.body if how == "body" else request.read())

    async def asked(app: Any, text: bytes) -> tuple[int, bytes, bool]:
        kind, form = KINDS[how]
        data = form % text
        headers = [(b"idempotency-key", b"k"), (b"content-type", kind), (b"content-length", b"%d" % len(data))]
        sent = await ask(app, scope_of(headers=headers), data)
        return sent[0]["status"], body_of(sent), b"Idempotent-Replayed" in dict(sent[0]["headers"])

    async def ask_twice(app: Any) -> None:
        answer = b"111" if how == "part" else b"00111"
        assert await asked(app, b"00111") == (200, answer, False)
        assert await asked(app, b"00111") == (200, answer, True)
        assert (await asked(app, b"00112"))[0] == 422

    with Project(guard) as project:
        project.serve(path("pay", pay), middleware=[reading, MIDDLEWARE] if outside else [MIDDLEWARE, reading])
        asyncio.run(ask_twice(ASGIHandler()))
    assert runs == {"part": [b"00"] * 3, "stream": []}.get(how, [b"00111"] * 2 + [b"00112"])


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a sync middleware"])
@pytest.mark.parametrize("awaits", [True, False], ids=["async", "sync"])
def test_a_view_whose_client_has_gone_can_still_read_its_request_and_is_stored(
    guard: Semel, runs: list[Any], awaits: bool, behind: bool
) -> None:
    came, go = threading.Event(), threading.Event()

    def work(request: Any) -> HttpResponse:
        came.set()
        assert go.wait(20)
        runs.append(request.read())
        return HttpResponse("paid")

    async def pay_async(request: Any) -> HttpResponse:
        return await asyncio.to_thread(work, request)

    async def asked(app: Any) -> None:
        gone = asyncio.Event()
        bodies = iter([{"type": "http.request", "body": b"abc", "more_body": False}])

        async def receive() -> Any:
            message = next(bodies, None)
            if message is None:
                await gone.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        request = asyncio.create_task(app(scope_of(), receive, send))
        await asyncio.to_thread(came.wait, 20)
        gone.set()
        for _ in range(100):  # Django hears of it, and cancels the request
            await asyncio.sleep(0)
        assert not request.done()
        go.set()
        await asyncio.wait_for(request, 20)
        sent = await ask(app, scope_of(), b"abc")
        assert body_of(sent) == b"paid"
        assert b"Idempotent-Replayed" in dict(sent[0]["headers"])

    def sync_only(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            return get_response(request)

        return middleware

    view = idempotent()(pay_async if awaits else work)
    with Project(guard) as project:
        project.serve(path("pay", view), middleware=[*([sync_only] if behind else []), MIDDLEWARE])
        asyncio.run(asked(ASGIHandler()))
    assert runs == [b"abc"]


def test_streams_are_captured_or_let_through(guard: Semel, runs: list[Any]) -> None:
    @idempotent(max_stored_body=10)
    async def large(request: Any, count: int) -> StreamingHttpResponse:
        runs.append(count)

        async def chunks() -> AsyncIterator[bytes]:
            for number in range(count):
                yield b"%d" % number * 4

        return StreamingHttpResponse(chunks())

    async def asked(count: int) -> list[tuple[Any, bytes]]:
        answers = []
        for _ in range(2):
            answer: Any = await AsyncClient().post(f"/{count}", headers=KEY)
            if answer.streaming:
                body = b"".join([chunk async for chunk in answer])
            else:
                body = answer.content
            answers.append((answer.headers.get("Idempotent-Replayed"), body))
        return answers

    with Project(guard) as project:
        project.serve(path("<int:count>", large))
        assert asyncio.run(asked(2)) == [(None, b"00001111"), ("true", b"00001111")]
        assert asyncio.run(asked(4)) == [(None, b"0000111122223333"), ("omitted", b"")]
    assert runs == [2, 4]


def test_a_large_answer_that_another_middleware_throws_away_is_stored_all_the_same(
    guard: Semel, runs: list[Any]
) -> None:
    thrown: list[Any] = []

    def replacing(get_response: Any) -> Any:
        async def middleware(request: Any) -> Any:
            response = await get_response(request)
            if not response.streaming:
                return response
            thrown.append(response.status_code)
            return HttpResponse(status=418)

        return markcoroutinefunction(middleware)

    replacing.async_capable = True  # type: ignore[attr-defined]

    @idempotent(max_stored_body=1)
    async def large(request: Any) -> StreamingHttpResponse:
        runs.append(1)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b"many"

        return StreamingHttpResponse(chunks())

    async def asked() -> None:
        assert (await AsyncClient().post("/pay", headers=KEY)).status_code == 418
        for _ in range(1000):
            again = await AsyncClient().post("/pay", headers=KEY)
            if again.status_code != 409:
                break
            await asyncio.sleep(0.01)
        assert (again.status_code, again.headers["Idempotent-Replayed"]) == (200, "omitted")

    with Project(guard) as project:
        project.serve(path("pay", large), middleware=[replacing, MIDDLEWARE])
        asyncio.run(asked())
    assert (runs, thrown) == ([1], [200])


def test_a_view_that_raises_leaves_the_key_free_and_a_failed_precondition_is_412(guard: Semel, runs: list[Any]) -> None:
    @idempotent()
    async def broken(request: Any) -> HttpResponse:
        runs.append(1)
        raise RuntimeError("broke")

    @conditional()
    async def change(request: Any) -> HttpResponse:
        check_match(etag(7))
        return HttpResponse("changed")

    @conditional()
    def change_in_thread(request: Any) -> HttpResponse:
        check_match(etag(7))
        return HttpResponse("changed")

    async def asked() -> None:
        client = AsyncClient(raise_request_exception=False)
        for _ in range(2):
            assert (await client.post("/broken", headers=KEY)).status_code == 500
        for where in ("/change", "/change-in-thread"):
            for tag, status in (('"6"', 412), ('"7"', 200)):
                answer = await client.put(where, headers=KEY | {"If-Match": tag})
                assert answer.status_code == status, answer.content
                if status == 412:
                    assert answer.headers["Content-Type"] == "application/problem+json"

    with Project(guard) as project:
        project.serve(path("broken", broken), path("change", change), path("change-in-thread", change_in_thread))
        asyncio.run(asked())
    assert len(runs) == 2


def test_a_sync_middleware_may_stand_before_ours_and_not_after(guard: Semel, runs: list[Any]) -> None:
    def sync_only(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            return get_response(request)

        return middleware

    with Project(guard) as project:
        project.serve(*views(runs), middleware=[sync_only, MIDDLEWARE])
        for where in ("/async", "/sync"):
            assert [answer.status_code for answer in asyncio.run(twice(where))] == [200, 200]
        project.serve(*views(runs), middleware=[MIDDLEWARE, sync_only])
        with pytest.raises(ConfigurationError, match="put it last"):
            asyncio.run(twice("/async"))
    assert runs == ["async", "sync"]


def test_no_tenant_is_a_loud_warning_in_both_worlds(guard: Semel, runs: list[Any]) -> None:
    with Project(guard) as project:
        project.serve(*views(runs), tenant=None)
        with pytest.warns(UserWarning, match="no TENANT"):
            asyncio.run(twice("/async"))
        with pytest.warns(UserWarning, match="no TENANT"):
            project.client().post("/sync", headers=KEY)
    with Semel(MemoryStore(), tenant="all") as scoped, Project(scoped) as project, warnings.catch_warnings():
        warnings.simplefilter("error")
        project.serve(*views(runs), tenant=None)
        assert project.client().post("/sync", headers=KEY).json()["tenant"] == "all"


def test_what_is_not_declared_is_left_alone(guard: Semel) -> None:
    made: list[Any] = []

    async def stream(request: Any) -> StreamingHttpResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"a"

        made.append(StreamingHttpResponse(chunks()))
        return made[-1]

    async def asked() -> None:
        for method in ("get", "post"):
            answer = await getattr(AsyncClient(), method)("/stream", headers=KEY)
            assert answer is made[-1]

    with Project(guard) as project:
        project.serve(path("stream", stream))
        asyncio.run(asked())
    assert len(made) == 2
