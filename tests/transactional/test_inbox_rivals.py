"""Two consumers of one message. Beside each guarantee stands the technique that looks right and loses messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from semel.errors import TransactionConflict
from semel.messaging.inbox import Inbox
from tests.transactional.kinds import Till
from tests.transactional.marked import marked

pytestmark = pytest.mark.parametrize("kind", [marked(kind) for kind in ("sqlite3", "psycopg", "pymysql")])


class Rolled(Exception):
    """The first consumer's transaction is rolled back."""


@pytest.fixture
def tills(open_till: Callable[..., Till], kind: str) -> tuple[Till, Till]:
    return open_till(), open_till()


def consume(till: Till, effect: Callable[[], None] = lambda: None) -> bool:
    """One delivery, as the inbox handles it. True: acknowledge it."""

    def apply() -> None:
        till.send("INSERT INTO payment (key) VALUES ('m-1')")
        effect()

    with till.transaction():
        Inbox(till.guard.store).process(till.conn, "ledger", "m-1", apply)
    return True


def consume_marked_first(till: Till, effect: Callable[[], None] = lambda: None) -> bool:
    """The naive technique: write down that the message was seen, commit, and run the handler then."""
    with till.transaction():
        new = Inbox(till.guard.store).process(till.conn, "naive", "m-1", lambda: None)
    if new:
        with till.transaction():
            till.send("INSERT INTO payment (key) VALUES ('m-1')")
            effect()
    return True


def wait_briefly(till: Till) -> None:
    """A short lock timeout, in the manner of each database."""
    if till.kind == "sqlite3":
        till.conn.execute("PRAGMA busy_timeout = 50")
    else:
        setting = "lock_timeout = '50ms'" if till.kind == "psycopg" else "innodb_lock_wait_timeout = 1"
        till.send(f"SET SESSION {setting}")
        till.conn.commit()


def fail() -> None:
    raise Rolled


def test_a_handler_that_fails_runs_again(tills: tuple[Till, Till]) -> None:
    till = tills[0]
    with pytest.raises(Rolled):
        consume(till, fail)
    assert consume(till)
    assert consume(till)
    assert till.rows() == ["m-1"]


def test_marking_a_message_as_seen_before_the_handler_commits_loses_it(tills: tuple[Till, Till]) -> None:
    till = tills[0]
    with pytest.raises(Rolled):
        consume_marked_first(till, fail)
    assert consume_marked_first(till)  # it is acknowledged, and nobody will apply it
    assert till.rows() == []


def test_a_rival_that_does_not_wait_is_told_to_come_again(tills: tuple[Till, Till]) -> None:
    """ "The lock is busy, so it is a duplicate" would acknowledge here, and the message would be lost."""
    first, second = tills
    wait_briefly(second)

    def meanwhile() -> None:
        with pytest.raises(TransactionConflict, match="the row of the inbox"):
            consume(second)
        raise Rolled

    with pytest.raises(Rolled):
        consume(first, meanwhile)
    assert first.rows() == []
    assert consume(second)  # delivered again
    assert first.rows() == ["m-1"]


@pytest.mark.parametrize("commits", [True, False])
def test_a_rival_waits_and_runs_if_the_first_is_rolled_back(
    open_till: Callable[..., Till], kind: str, commits: bool
) -> None:
    first = open_till()
    started, ready = threading.Event(), threading.Event()
    ran: list[str] = []

    def rival() -> None:
        second = open_till()  # a connection of SQLite belongs to its thread
        ready.set()
        started.wait(30)
        consume(second, lambda: ran.append("second"))
        ran.append("acknowledged")
        second.close()

    def meanwhile() -> None:
        started.set()
        thread.join(0.2)  # whether it has come to its insert or not: the outcome is the same
        if not commits:
            raise Rolled

    thread = threading.Thread(target=rival)
    thread.start()
    assert ready.wait(30)
    with nullcontext() if commits else pytest.raises(Rolled):
        consume(first, meanwhile)
    thread.join(30)
    assert ran == (["acknowledged"] if commits else ["second", "acknowledged"])
    assert first.rows() == ["m-1"]
