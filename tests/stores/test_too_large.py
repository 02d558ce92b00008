"""Results that are larger than a store can hold: what has happened is remembered, and never happens again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from semel import AsyncSemel, Semel
from semel.errors import ResultNotStored
from semel.http.fastapi import action, install
from semel.stores import dynamodb, mysql
from tests.servers import DynamoDBServer

LARGE = {"dynamodb": 500_000, "mysql": 17_000_000}
"""Above the 400 KB of an item, and above the packet that a server takes."""


@pytest.fixture(params=["dynamodb", "mysql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    if kind == "mysql":
        made: str = request.getfixturevalue("mariadb_url")
        mysql.migrate(made)
    else:
        server: DynamoDBServer = request.getfixturevalue("dynamodb")
        made = server.table()
        dynamodb.migrate(made)
    return made


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
            install(app, guard=guard, tenant=lambda scope: "acme")

            @app.post("/reports", status_code=201)
            @action(body_limit=LARGE[kind])
            async def report() -> Response:
                return Response(runs_of(runs, LARGE[kind])(), status_code=201, media_type="application/pdf")

            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                first, *again = [
                    await client.post("/reports", headers={"Idempotency-Key": "k"}, timeout=30) for _ in range(3)
                ]
            assert (first.status_code, len(first.content)) == (201, LARGE[kind])
            for replay in again:
                assert (replay.status_code, replay.content) == (201, b"")
                assert replay.headers["idempotent-replayed"] == "omitted"
                assert replay.headers["content-type"] == "application/pdf"

    asyncio.run(run())
    assert runs == [1]
