"""A recover hook is asked what an attempt did whose process died, in each framework; and what it says is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.http.django_project import Project  # first: REST framework wants settings when it is imported

from rest_framework.response import Response as RESTResponse  # isort: skip
from rest_framework.views import APIView  # isort: skip

import flask
import httpx
from django.http import HttpResponse
from django.urls import path
from fastapi import FastAPI
from litestar import Litestar, post

from semel import CANNOT_TELL, NOT_DONE, AsyncMemoryStore, AsyncSemel, MemoryStore, Policy, Recovered, Semel
from semel.core.encoding.snapshot import StoredResponse
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http.contract.responses import RESPONSES
from tests.http.asking import whose

RAN = b'"ran"'
Answer = tuple[int, bytes]


class World:
    """A clock, and what the hook was asked."""

    def __init__(self, verdict: Any) -> None:
        self.now = 1000.0
        self.verdict = verdict
        self.asked = 0
        self.runs = 0

    def clock(self) -> float:
        return self.now

    def recover(self) -> Any:
        self.asked += 1
        return self.verdict

    async def recover_soon(self) -> Any:
        return self.recover()

    def ran(self) -> str:
        self.runs += 1
        return "ran"

    def died(self, store: MemoryStore) -> None:
        """Leave behind what a process leaves that dies in the middle."""
        dead = Semel(store, sweep_every=None)
        dead.begin(dead.make_call("POST /pay", "k", "alice", b"", self.policy(self.recover), serializer=RESPONSES))
        self.now += 60

    async def died_soon(self, store: AsyncMemoryStore) -> None:
        dead = AsyncSemel(store, sweep_every=None)
        await dead.begin(
            dead.make_call("POST /pay", "k", "alice", b"", self.policy(self.recover), serializer=RESPONSES)
        )
        await dead.close()
        self.now += 60

    @staticmethod
    def policy(recover: Any) -> Policy:
        return Policy(recover=recover, lease="5s")


def over_asgi(world: World, made: Callable[[AsyncSemel], Any]) -> list[Answer]:
    async def main() -> list[Answer]:
        store = AsyncMemoryStore(clock=world.clock)
        async with AsyncSemel(store, sweep_every=None) as guard:
            app = made(guard)
            await world.died_soon(store)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                answers = [await client.post("/pay", headers={"Idempotency-Key": "k"}) for _ in range(2)]
        return [(answer.status_code, answer.content) for answer in answers]

    return asyncio.run(main())


def fastapi(world: World) -> list[Answer]:
    def made(guard: AsyncSemel) -> Any:
        app = FastAPI()
        for_fastapi.install(app, guard=guard, tenant=whose)

        @app.post("/pay")
        @for_fastapi.idempotent(recover=world.recover_soon, lease="5s")
        async def pay() -> str:
            return world.ran()

        return app

    return over_asgi(world, made)


def litestar(world: World) -> list[Answer]:
    def made(guard: AsyncSemel) -> Any:
        @post("/pay", status_code=200, media_type="application/json")
        @for_litestar.idempotent(recover=world.recover_soon, lease="5s")
        async def pay() -> str:
            return f'"{world.ran()}"'

        return Litestar([pay], plugins=[for_litestar.SemelPlugin(guard=guard, tenant=whose)], openapi_config=None)

    return over_asgi(world, made)


def of_flask(world: World) -> list[Answer]:
    store = MemoryStore(clock=world.clock)
    app = flask.Flask("shop")
    with Semel(store, sweep_every=None) as guard:
        for_flask.install(app, guard=guard, tenant=whose)
        app.post("/pay")(for_flask.idempotent(recover=world.recover, lease="5s")(lambda: f'"{world.ran()}"'))
        world.died(store)
        answers = [app.test_client().post("/pay", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    return [(answer.status_code, answer.data) for answer in answers]


def over_django(world: World, view: Any, *, in_loop: bool = False) -> list[Answer]:
    store = MemoryStore(clock=world.clock)
    with Semel(store, sweep_every=None) as guard, Project(guard) as project:
        project.serve(path("pay", view))
        world.died(store)
        client: Any = project.async_client() if in_loop else project.client()
        sent = [lambda: client.post("/pay", headers={"Idempotency-Key": "k"})] * 2

        async def all() -> list[Any]:
            return [await send() for send in sent]

        answers = asyncio.run(all()) if in_loop else [send() for send in sent]
    return [(answer.status_code, answer.content) for answer in answers]


def django(world: World) -> list[Answer]:
    view = for_django.idempotent(recover=world.recover, lease="5s")(lambda request: HttpResponse(f'"{world.ran()}"'))
    return over_django(world, view)


def django_async_on_asgi(world: World) -> list[Answer]:
    @for_django.idempotent(recover=world.recover, lease="5s")
    async def pay(request: Any) -> HttpResponse:
        return HttpResponse(f'"{world.ran()}"')

    return over_django(world, pay, in_loop=True)


def rest(world: World) -> list[Answer]:
    class Pay(APIView):  # type: ignore[misc]
        @for_django.idempotent(recover=world.recover, lease="5s")
        def post(self, request: Any) -> RESTResponse:
            return RESTResponse(world.ran())

    return over_django(world, Pay.as_view())


@pytest.mark.parametrize("service", [fastapi, litestar, of_flask, django, django_async_on_asgi, rest])
@pytest.mark.parametrize(
    ("verdict", "answer", "runs"),
    [
        (Recovered({"paid": True}), (200, b'{"paid": true}'), 0),
        (Recovered(StoredResponse(201, [(b"content-type", b"text/plain")], b"paid")), (201, b"paid"), 0),
        (NOT_DONE, (200, RAN), 1),
    ],
    ids=["plain data", "an answer", "not done"],
)
def test_what_the_hook_says_is_answered_and_remembered(
    service: Callable[[World], list[Answer]], verdict: Any, answer: Answer, runs: int
) -> None:
    world = World(verdict)
    assert service(world) == [answer, answer]
    assert (world.asked, world.runs) == (1, runs)


@pytest.mark.parametrize("service", [fastapi, litestar, of_flask, django, django_async_on_asgi, rest])
def test_a_hook_that_cannot_tell_leaves_the_outcome_unknown(service: Callable[[World], list[Answer]]) -> None:
    world = World(CANNOT_TELL)
    for status, body in service(world):
        assert status == 500
        assert b"idempotency_outcome_unknown" in body
    assert world.runs == 0
