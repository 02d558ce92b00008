"""What a transactional call costs: Python calls within the library, and messages to the server. Neither may grow."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import semel
from tests.transactional.kinds import AsyncTill, Till
from tests.transactional.test_statements import Wire

INSIDE = str(Path(semel.__file__).parent)
PAY = "INSERT INTO payment (key, worker) VALUES (?, ?) RETURNING key"


class Calls:
    """Counts the calls of Python functions of the library, dataclass constructors among them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and (frame.f_code.co_filename.startswith(INSIDE) or frame.f_code.co_filename == "<string>"):
            self.count += 1

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def first_and_replay(till: Any, work: Any) -> tuple[int, int]:
    """Two calls under a new key, after some that fill the caches."""
    for key in ("w1", "w1", "w2", "w2"):
        work(key, nullcontext())
    first, replay = Calls(), Calls()
    work("k1", first)
    work("k1", replay)
    till.close()
    return first.count, replay.count


@pytest.mark.parametrize(("kind", "first", "replay"), [("session-psycopg", 61, 48), ("psycopg-autocommit", 61, 47)])
def test_calls_in_the_callers_transaction(database: str, kind: str, first: int, replay: int) -> None:
    till = Till(kind, database)

    def work(key: str, calls: Any) -> None:
        with till.transaction():
            till.send("SELECT 1")
            with calls:
                till.guard.run_in_transaction(till.conn, "pay", key=key, call=lambda: {"paid": 1})

    found = first_and_replay(till, work)
    assert (found[0] <= first, found[1] <= replay) == (True, True), found


@pytest.mark.parametrize(("kind", "first", "replay"), [("asyncpg", 65, 49), ("async-psycopg-autocommit", 73, 53)])
def test_calls_in_the_callers_transaction_async(database: str, kind: str, first: int, replay: int) -> None:
    till = AsyncTill(kind, database)

    async def call() -> dict[str, int]:
        return {"paid": 1}

    async def once(key: str, calls: Any) -> None:
        async with till.transaction():
            with calls:
                await till.guard.run_in_transaction(till.conn, "pay", key=key, call=call)

    found = first_and_replay(till, lambda key, calls: till.run(lambda: once(key, calls)))
    assert (found[0] <= first, found[1] <= replay) == (True, True), found


@pytest.mark.parametrize(("kind", "first", "replay"), [("psycopg-autocommit", 54, 83), ("asyncpg", 60, 89)])
def test_calls_of_one_statement(database: str, kind: str, first: int, replay: int) -> None:
    till: Any = AsyncTill(kind, database) if kind == "asyncpg" else Till(kind, database)

    def work(key: str, calls: Any) -> None:
        with calls:
            till.execute_once(key, PAY, [key, 1])

    found = first_and_replay(till, work)
    assert (found[0] <= first, found[1] <= replay) == (True, True), found


def test_messages(database: str, tmp_path: Path) -> None:
    till = Till("psycopg-autocommit", database)
    till.conn.prepare_threshold = None
    wire = Wire(till.conn, tmp_path / "wire")
    counted = []
    for _ in range(2):
        till.pay("k1", own_transaction=True)
        counted.append(len(wire.said()))
        till.pay("k2")
        counted.append(len(wire.said()))
        till.execute_once("k3", PAY, ["k3", 1])
        counted.append(len(wire.said()))
    wire.close()
    till.close()
    assert counted == [3, 5, 1, 2, 3, 2]


def test_messages_of_asyncpg(database: str) -> None:
    till = AsyncTill("asyncpg", database)
    said: list[str] = []
    till.run(lambda: asyncio.sleep(0))
    till.conn.add_query_logger(lambda query: said.append(query.query))
    counted = []
    for _ in range(2):
        for work in (
            lambda: till.pay("k1", own_transaction=True),
            lambda: till.pay("k2"),
            lambda: till.execute_once("k3", PAY, ["k3", 1]),
        ):
            said.clear()
            work()
            counted.append(len(said))
    till.close()
    assert counted == [3, 5, 1, 3, 3, 2]
