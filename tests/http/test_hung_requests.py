"""A request whose handler hangs in a thread: once its lease is lost, its process answers what the store knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import fastapi
import flask
import httpx
import pytest

from semel import AsyncMemoryStore, AsyncSemel, AsyncSQLiteStore, Semel, SQLiteStore, Wait, current_operation
from semel.http import fastapi as on_fastapi
from semel.http import flask as on_flask
from semel.testing.faults import until
from tests.engine.driving import renew_early
from tests.http.asking import ask, at_the_edge

KEY = {"Idempotency-Key": "k1"}
Post = Callable[[], tuple[int, str, str | None]]
"""Sends the request: its status, its text, and whether it is a replay."""


class Till:
    """One process of a service: its handler, which may hang, and how to send it a request."""

    def __init__(self, hangs: bool) -> None:
        self.runs = 0
        self.hangs = hangs
        self.inside, self.free, self.lost = threading.Event(), threading.Event(), threading.Event()

    def pay(self) -> str:
        self.runs += 1
        if self.hangs:
            operation = current_operation()
            assert operation is not None
            self.inside.set()
            while not self.free.wait(0.005):
                if operation.lease_lost:
                    self.lost.set()
        return "hung" if self.hangs else "paid"


def flask_service(till: Till, path: Path, settings: Any, on_exit: Any) -> Post:
    app, guard = flask.Flask("shop"), Semel(SQLiteStore(path), sweep_every=None)
    on_exit(guard.close)
    on_flask.install(app, guard=guard, tenant=lambda request: "alice")
    app.post("/pay")(on_flask.idempotent(**settings)(till.pay))

    def post() -> tuple[int, str, str | None]:
        answer = app.test_client().post("/pay", headers=KEY)
        return answer.status_code, answer.get_data(as_text=True), answer.headers.get("Idempotent-Replayed")

    return post


def fastapi_service(till: Till, path: Path, settings: Any, on_exit: Any) -> Post:
    app, guard = fastapi.FastAPI(), AsyncSemel(AsyncSQLiteStore(path), sweep_every=None)
    on_fastapi.install(app, guard=guard, tenant=lambda request: "alice")
    app.post("/pay", response_class=fastapi.responses.PlainTextResponse)(on_fastapi.idempotent(**settings)(till.pay))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def in_loop(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    def stop() -> None:
        in_loop(guard.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

    on_exit(stop)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return await client.post("/pay", headers=KEY, timeout=30)

    def post() -> tuple[int, str, str | None]:
        answer = in_loop(send())
        return answer.status_code, answer.text, answer.headers.get("Idempotent-Replayed")

    return post


@pytest.mark.parametrize("service", [flask_service, fastapi_service])
@pytest.mark.parametrize("settings", [{}, {"on_duplicate": Wait("20s")}], ids=["at once", "waiting"])
def test_once_the_lease_is_lost_the_store_is_asked(
    service: Callable[..., Post],
    settings: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renew_early(monkeypatch)
    path = tmp_path / "records.db"
    hung, well = Till(hangs=True), Till(hangs=False)
    post_here = service(hung, path, settings, request.addfinalizer)
    post_elsewhere = service(well, path, settings, request.addfinalizer)
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(post_here()))
    thread.start()
    try:
        assert hung.inside.wait(60)
        with Semel(SQLiteStore(path), tenant="alice", sweep_every=None) as person:
            person.release("POST /pay", "k1", force=True)
        assert post_elsewhere() == (200, "paid", None)
        until(hung.lost.is_set, 60, "the lease is lost")
        assert post_here() == (200, "paid", "true")
    finally:
        hung.free.set()
        thread.join(60)
    assert first == [(200, "paid", "true")], "the late answer is refused"
    assert (hung.runs, well.runs) == (1, 1)


def test_an_answer_that_never_ends_holds_its_key_no_longer_than_it_may() -> None:
    """Its client has gone, and nobody reads it: it is cancelled, and the next request is as after a crash."""
    ended: list[str] = []
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 100, "more_body": True})
                begun.set()
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def run() -> None:
        async with AsyncSemel(AsyncMemoryStore(), sweep_every=None) as guard:
            served = at_the_edge(app, guard, on_fastapi.idempotent(max_run_time="1h", max_stored_body=50))
            client = asyncio.ensure_future(ask(served))
            await begun.wait()
            client.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client
            (lease,) = guard.driver.keeper.leases.held.values()
            lease.due = lease.latest = 0.0  # the hour is over
            guard.driver.keeper._set(0.0)
            async with asyncio.timeout(60):
                while not ended or guard.driver.flights.by_id:  # noqa: ASYNC110 - the handler has nobody to tell
                    await asyncio.sleep(0.01)
            assert len(guard.driver.keeper.leases) == 0

    asyncio.run(run())
