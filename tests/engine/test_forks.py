"""A forked child: it gets its own keeper, and does not believe in the calls of its parent."""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel import InProgress, PostgresStore, Semel, SQLiteStore
from semel.core.ops import Lookup, Renew
from semel.engine.threaded import ThreadedStore
from tests.engine.scripted import Gate, Script, ScriptedStore

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def in_child(work: Callable[[], None]) -> None:
    """Run it in a forked child; its failure is ours."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            threading.Timer(60, os._exit, (9,)).start()
            work()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.usefixtures("renews_early")
def test_a_forked_child_keeps_its_own_leases(tmp_path: Path) -> None:
    script = Script()
    guard = Semel(ScriptedStore(SQLiteStore(tmp_path / "r.db", synchronous="normal"), script), sweep_every=None)
    renewed = script.on(Renew)
    guard.run("op", key="parent", call=renewed.took_effect.wait)

    def child() -> None:
        mine = script.on(Renew)
        guard.run("op", key="child", call=mine.took_effect.wait)
        assert sum(thread.name == "semel-keeper" for thread in threading.enumerate()) == 1

    in_child(child)
    again = script.on(Renew)
    guard.run("op", key="parent again", call=again.took_effect.wait)
    guard.close()


def test_a_child_forked_in_a_handler_asks_the_store_about_its_parents_call(tmp_path: Path) -> None:
    """What was in the air at the fork never lands in the child: it must not be believed there."""
    guard = Semel(SQLiteStore(tmp_path / "r.db", synchronous="normal"), sweep_every=None)
    inside, finish = Gate(), Gate()

    def body() -> str:
        inside.open()
        finish.wait()
        return "parent's"

    owner = threading.Thread(target=lambda: guard.run("op", key="k", call=body))
    owner.start()
    inside.wait()
    read, write = os.pipe()
    refused, refuse = os.pipe()

    def child() -> None:
        with pytest.raises(InProgress):
            guard.run("op", key="k", call=lambda: "child's")
        os.write(refuse, b"x")
        os.read(read, 1)  # the parent has finished
        assert guard.run("op", key="k", call=lambda: "child's") == "parent's"

    def let_finish() -> None:
        os.read(refused, 1)
        finish.open()
        owner.join()
        os.write(write, b"x")

    finishing = threading.Thread(target=let_finish)
    finishing.start()
    try:
        in_child(child)
    finally:
        os.write(refuse, b"x")  # whatever became of the child
        finishing.join()
        guard.close()


def test_a_store_is_closed_in_a_child_whatever_its_parents_threads_held() -> None:
    """A thread of the parent that looks at its stop sign at the moment of the fork holds the sign's lock for ever."""
    store = PostgresStore("postgresql://nobody@127.0.0.1:1/nothing")
    watched, heard = store._watchdog._stop, store._listener._stop
    with watched._cond, heard._cond:
        in_child(store.close)
    assert not watched.is_set()
    assert not heard.is_set()
    store.close()
    in_child(lambda: _closed_too(store))


def _closed_too(store: PostgresStore) -> None:
    assert store._watchdog._stop.is_set()
    assert store._listener._stop.is_set()


def test_a_child_does_not_break_its_connections_for_a_trip_of_its_parents() -> None:
    store = PostgresStore("postgresql://nobody@127.0.0.1:1/nothing")
    connection: Any = object()
    store._watchdog.deadlines[connection] = 1.0

    def child() -> None:
        assert store._watchdog.deadlines == {}

    in_child(child)
    store.close()


def test_threads_of_an_async_def_under_a_sync_guard_are_made_anew_in_a_child(tmp_path: Path) -> None:
    store = ThreadedStore(SQLiteStore(tmp_path / "r.db", synchronous="normal"))
    assert asyncio.run(store.execute(Lookup(b"x" * 16))) is None
    assert store._threads._idle_semaphore.acquire(timeout=10)  # type: ignore[attr-defined]
    store._threads._idle_semaphore.release()  # type: ignore[attr-defined] # a thread is idle, as far as anyone knows

    def child() -> None:
        assert asyncio.run(store.execute(Lookup(b"x" * 16))) is None

    in_child(child)
    asyncio.run(store.close())


def test_a_child_never_repeats_its_parents_nonces(tmp_path: Path) -> None:
    guard = Semel(SQLiteStore(tmp_path / "r.db", synchronous="normal"), sweep_every=None)
    guard.run("op", key="warm", call=lambda: 1)
    read, write = os.pipe()

    def nonce() -> int:
        return guard._plain_call("op", "k", None, None, None, {}).nonce

    in_child(lambda: os.write(write, str(nonce()).encode()) and None)
    assert int(os.read(read, 100)) != nonce()
    guard.close()
