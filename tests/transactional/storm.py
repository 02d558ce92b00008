"""Processes with tills that are killed: between any two statements, one after the other; or at random, many at once.

A child of a `Nursery` does the forking, in a process without threads, and writes what it did into a file, as JSON.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from semel import InProgress, StoreUnavailable, Wait
from tests.transactional.kinds import Till, till

PACKAGES = (
    "psycopg", "asyncpg", "aiosqlite", "pymysql", "asyncmy", "sqlalchemy.ext.asyncio",
    "sqlalchemy.dialects.postgresql", "sqlalchemy.dialects.sqlite.aiosqlite", "semel.sql.connections.aio_sqlalchemy",
    "semel.sql.connections.sqlalchemy", "semel.sql.connections.sqlite", "semel.sql.connections.aio_sqlite",
    "django.db.backends.postgresql.base", "django.core.management", "django.urls", "semel.sql.connections.django",
)  # fmt: skip


def points(kind: str, url: str, own_transaction: bool) -> dict[str, Any]:
    """Die before the first statement, before the second, … each time with another key, until none is left to die at."""
    deaths: list[str] = []
    for number in itertools.count():
        key = f"k{number}"
        code = _in_a_child(lambda key=key, number=number: _die_at(kind, url, key, own_transaction, number))  # type: ignore[misc]
        if code == 0:
            return {"deaths": deaths}
        assert code == -signal.SIGKILL, f"the child ended with {code}"
        deaths.append(key)
    raise AssertionError("unreachable")


def _die_at(kind: str, url: str, key: str, own_transaction: bool, number: int) -> None:
    """One payment that kills its process at its ``number``-th point: before and after everything that is sent."""
    passed = itertools.count()

    def point() -> None:
        if next(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(send: Callable[..., Any], awaited: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            point()
            answer = send(*args)
            point()
            return answer

        async def call_async(*args: Any) -> Any:
            point()
            answer = await send(*args)
            point()
            return answer

        return call_async if awaited else call

    desk = till(kind, url)
    awaited = desk.lent.awaited
    cls = type(desk.lent)
    for name in ("execute", "begin_with", "commit_with", "_script", "_say"):
        if hasattr(cls, name):
            setattr(cls, name, around(getattr(cls, name), awaited))
    desk.send = around(desk.send, awaited)
    desk.pay(key, own_transaction=own_transaction, then=point)
    point()  # committed, and nobody was told


def rivals(kind: str, url: str, keys: list[str]) -> dict[str, Any]:
    """Two processes that pay the same keys at the same time, each in transactions of its own and of Semel's."""
    children = [_fork(lambda: _pay_all(kind, url, keys)) for _ in range(2)]
    return {"codes": [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]}


def _pay_all(kind: str, url: str, keys: list[str]) -> None:
    desk = till(kind, url)
    for number, key in enumerate(keys):
        while True:
            try:
                outcome = desk.pay(key, own_transaction=bool(number % 2), on_duplicate=Wait("20s"))
            except (InProgress, StoreUnavailable):
                continue
            break
        assert outcome.value == {"paid": key}
    desk.close()


def storm(url: str, operations: int, workers: int, kills: int, seed: int) -> dict[str, Any]:
    """So many workers that each do all operations, some killed at random and replaced; a ledger says what was done."""
    dice = random.Random(seed)
    progress = mmap.mmap(-1, 5 * workers)  # where each slot is, and whether it has connected
    slots = {
        _fork(lambda slot=slot: _work(url, operations, slot, progress, dice.random())): slot for slot in range(workers)
    }  # type: ignore[misc]
    killed = 0
    try:
        while slots:
            time.sleep(0.002)
            done = sum(struct.unpack_from(f"{workers}i", progress))
            # Spread over the work, not over time: a quick run would be over before all were made.
            if killed < kills and done >= (killed + dice.random()) * workers * operations / (kills + 2):
                victim = dice.choice(list(slots))
                os.kill(victim, signal.SIGKILL)
                killed += 1
            while slots:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                slot = slots.pop(pid)
                if status:
                    assert os.WIFSIGNALED(status), f"a worker failed with {status}"
                    slots[_fork(lambda slot=slot: _work(url, operations, slot, progress, dice.random()))] = slot  # type: ignore[misc]
    finally:
        for pid in slots:
            os.kill(pid, signal.SIGKILL)
    return {"killed": killed}


def _work(url: str, operations: int, slot: int, progress: mmap.mmap, luck: float) -> None:
    """All operations in an order of this slot's own, from where its predecessor was killed; some transactions are
    Semel's, some the worker's.
    """
    order = list(range(1, operations + 1))
    random.Random(slot).shuffle(order)
    workers = len(progress) // 5
    theirs = [number for number in order if number <= workers and number != slot + 1]
    order = [slot + 1, *(number for number in order if number > workers), *theirs]  # each slot has one to begin with
    desk = Till("psycopg-autocommit", url)
    desk.conn.execute("SET synchronous_commit = on")
    progress[4 * workers + slot] = 1
    until = time.monotonic() + 60
    while (
        0 in progress[4 * workers :]
    ):  # all begin together: the quick ones would be done before the last has connected
        assert time.monotonic() < until, "a worker does not connect"
        time.sleep(0.001)
    (begin_at,) = struct.unpack_from("i", progress, 4 * slot)
    for at in range(begin_at, operations):
        number = order[at]
        struct.pack_into("i", progress, 4 * slot, at)

        def apply(op: Any, number: int = number) -> int:
            desk.send(f"INSERT INTO ledger (operation, amount, slot) VALUES ({number}, {number}, {slot})")
            return number

        while True:
            try:
                outcome = desk.pay(
                    f"op-{number}", insert=False, call=apply, own_transaction=bool(number % 2), on_duplicate=Wait("20s")
                )
            except (InProgress, StoreUnavailable):  # the conflict of a transaction that is not ours to run again
                continue
            break
        assert outcome.value == number
    desk.close()


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def _in_a_child(work: Callable[[], None]) -> int:
    _, status = os.waitpid(_fork(work), 0)
    return os.waitstatus_to_exitcode(status)


def run(what: tuple[str, dict[str, Any], str]) -> None:
    """In a child: do what is asked for, and write down what came of it."""
    do, asked, report = what
    Path(report).write_text(json.dumps({"points": points, "rivals": rivals, "storm": storm}[do](**asked)))


def prepare() -> None:
    """Import what the children need: once, and not in each."""
    for package in PACKAGES:
        import_module(package)
