"""Results that are larger than a store can hold: what has happened is remembered, and never happens again."""

from __future__ import annotations

import asyncio
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from semel import AsyncOperation, AsyncSemel, Operation, Semel
from semel.errors import RecordTooLarge, ResultNotStored, StepMismatch
from semel.http.fastapi import idempotent, install
from semel.stores import dynamodb, mysql
from tests.servers import MariaDBServer

pytestmark = pytest.mark.server

PACKET = 1 << 20
LARGE = {"dynamodb": 500_000, "mysql": PACKET + 1000}
"""Above the 400 KB of an item, and above the packet that the server takes: a small one here, to be quick."""


@pytest.fixture(
    params=[pytest.param("dynamodb", marks=pytest.mark.dynamodb), pytest.param("mysql", marks=pytest.mark.mariadb)]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if kind == "mysql":
        server: MariaDBServer = request.getfixturevalue("mariadb")
        made: str = request.getfixturevalue("mariadb_url")
        mysql.migrate(made)
        ((usual,),) = server.execute("SELECT @@max_allowed_packet")
        server.execute(f"SET GLOBAL max_allowed_packet = {PACKET}")
        yield made
        server.execute(f"SET GLOBAL max_allowed_packet = {usual}")
    else:
        made = request.getfixturevalue("dynamodb").table()
        dynamodb.migrate(made)
        yield made


def runs_of(runs: list[int], size: int) -> Callable[[], bytes]:
    def report() -> bytes:
        runs.append(1)
        return os.urandom(size)

    return report


def test_a_result_that_is_too_large_is_done_once_and_told_so(url: str, kind: str) -> None:
    runs: list[int] = []
    with Semel(url) as guard:
        with pytest.raises(ResultNotStored, match="will not run again") as raised:
            guard.run("report", key="1", call=runs_of(runs, LARGE[kind]))
        assert len(raised.value.result) == LARGE[kind]
        for _ in range(2):
            with pytest.raises(ResultNotStored, match="too large"):
                guard.run("report", key="1", call=runs_of(runs, 1))
    assert runs == [1]


def test_the_same_for_an_event_loop_and_smaller_neighbours_are_kept(url: str, kind: str) -> None:
    """Those that travelled in the same trip as well."""
    runs: list[int] = []

    async def run() -> None:
        async with AsyncSemel(url) as guard:

            async def ask(key: str, size: int) -> Any:
                async def report() -> bytes:
                    return runs_of(runs, size)()

                return await guard.run("report", key=key, call=report)

            sizes = [1, 2, LARGE[kind], 3]
            answers = await asyncio.gather(
                *(ask(str(at), size) for at, size in enumerate(sizes)), return_exceptions=True
            )
            again = await asyncio.gather(*(ask(str(at), 9) for at in range(4)), return_exceptions=True)
            assert [type(answer) for answer in answers] == [bytes, bytes, ResultNotStored, bytes]
            assert again[:2] + again[3:] == answers[:2] + answers[3:]
            assert isinstance(again[2], ResultNotStored)

    asyncio.run(run())
    assert runs == [1] * 4


def test_over_http_the_client_gets_its_answer_and_a_replay_says_that_the_body_is_left_out(url: str, kind: str) -> None:
    runs: list[int] = []

    async def run() -> None:
        async with AsyncSemel(url) as guard:
            app = FastAPI()
            install(app, guard=guard, tenant=lambda request: "acme")

            @app.post("/reports", status_code=201)
            @idempotent(max_stored_body=LARGE[kind])
            async def report() -> Response:
                return Response(runs_of(runs, LARGE[kind])(), status_code=201, media_type="application/pdf")

            @app.post("/links", status_code=201)
            @idempotent()
            async def links() -> Response:
                runs_of(runs, 0)()
                return Response(
                    b"linked", status_code=201, headers={"Link": b64encode(os.urandom(LARGE[kind])).decode()}
                )

            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                first, *again = [
                    await client.post("/reports", headers={"Idempotency-Key": "k"}, timeout=30) for _ in range(3)
                ]
                linked = [await client.post("/links", headers={"Idempotency-Key": "k"}, timeout=30) for _ in range(2)]
            assert (first.status_code, len(first.content)) == (201, LARGE[kind])
            for replay in again:
                assert (replay.status_code, replay.content) == (201, b"")
                assert replay.headers["idempotent-replayed"] == "omitted"
                assert replay.headers["content-type"] == "application/pdf"
            for each in linked:  # not even its lines fit
                assert each.status_code == 500
                assert each.json()["code"] == "idempotency_result_not_stored"

    asyncio.run(run())
    assert runs == [1, 1]


def test_a_step_whose_result_is_too_large_is_not_done_again(url: str, kind: str) -> None:
    """The attempt that did it goes on; one that takes over cannot, and says so, and undoes nothing by halves."""
    done: list[str] = []

    def charge() -> bytes:
        done.append("charge")
        return os.urandom(LARGE[kind])

    def job(op: Operation, fails: bool) -> str:
        op.step("reserve", lambda: done.append("reserve"), undo=lambda _: done.append("undo reserve"))
        assert len(op.step("charge", charge)) == LARGE[kind]
        if fails:
            raise KeyboardInterrupt  # says nothing about the work: what is done stays, for the attempt that goes on
        return "paid"

    with Semel(url) as guard:
        assert guard.run("pay", key="1", call=lambda op: job(op, False)) == "paid"
        assert guard.run("pay", key="1", call=lambda op: job(op, False)) == "paid"
        assert done == ["reserve", "charge"]
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            guard.run("pay", key="2", call=lambda op: job(op, True))
        for _ in range(2):
            with pytest.raises(StepMismatch, match=r"its result was not stored.* resolve\(\)"):
                guard.run("pay", key="2", call=lambda op: job(op, False))
    assert done == ["reserve", "charge"]


def test_the_same_for_steps_of_an_event_loop(url: str, kind: str) -> None:
    done: list[str] = []

    async def charge() -> bytes:
        done.append("charge")
        return os.urandom(LARGE[kind])

    async def job(op: AsyncOperation, fails: bool) -> str:
        await op.step("charge", charge)
        if fails:
            raise asyncio.CancelledError
        return "paid"

    async def run() -> None:
        async with AsyncSemel(url) as guard:
            with pytest.raises(asyncio.CancelledError):
                await guard.run("pay", key="1", call=lambda op: job(op, True))
            with pytest.raises(StepMismatch, match="its result was not stored"):
                await guard.run("pay", key="1", call=lambda op: job(op, False))

    asyncio.run(run())
    assert done == ["charge"]


def test_a_captured_value_that_is_too_large_is_refused(url: str, kind: str) -> None:
    with Semel(url) as guard, pytest.raises(RecordTooLarge, match="too large"):
        guard.run("pay", key="1", call=lambda op: op.capture("nonce", lambda: os.urandom(LARGE[kind])))
