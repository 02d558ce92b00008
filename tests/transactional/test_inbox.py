"""``Inbox.process`` and ``process_many`` on every kind of connection: the id of a message commits with its effect."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import orm

from semel.core.messaging.messages import Message
from semel.errors import ConfigurationError
from semel.messaging.aio_inbox import AsyncInbox
from semel.messaging.aio_outbox import AsyncOutbox
from semel.messaging.inbox import Inbox
from semel.messaging.outbox import Outbox
from tests.transactional.kinds import AsyncTill, Till
from tests.transactional.marked import marked, on_some


class Base(orm.DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payment"
    key: orm.Mapped[str] = orm.mapped_column(sqlalchemy.Text, primary_key=True)
    worker: orm.Mapped[int | None] = orm.mapped_column(sqlalchemy.Integer)


class Counter:
    """Consumes messages on one connection, whatever its kind is. The effect of a message is a payment."""

    def __init__(self, till: Till | AsyncTill) -> None:
        self.till = till
        self.inbox: Any = (Inbox if isinstance(till, Till) else AsyncInbox)(till.guard.store)  # type: ignore[arg-type]

    def process(self, id: str, consumer: str = "ledger", fail: bool = False, **how: Any) -> bool:
        """Apply one message, in a transaction of the caller's unless ``how`` says otherwise."""
        return bool(
            self._transact(lambda call: self.inbox.process(self.till.conn, consumer, id, call, **how), id, fail)
        )

    def process_many(self, ids: list[str], fail: bool = False, **how: Any) -> int:
        messages = [Message(id, "paid", b"") for id in ids]
        return int(
            self._transact(
                lambda call: self.inbox.process_many(
                    self.till.conn, "ledger", messages, lambda new: call(*[message.id for message in new]), **how
                ),
                None,
                fail,
                **how,
            )
        )

    def _transact(self, work: Callable[[Any], Any], id: str | None, fail: bool, own_transaction: bool = False) -> Any:
        till = self.till

        def insert(*ids: str) -> str:
            return "INSERT INTO payment (key) VALUES " + ", ".join(f"('{each[:3]}')" for each in ids or (id or "",))

        if isinstance(till, Till):

            def call(*ids: str) -> None:
                till.send(insert(*ids))
                if fail:
                    raise ValueError("the handler failed")

            if own_transaction:
                return work(call)
            with till.transaction():
                return work(call)

        async def call_async(*ids: str) -> None:
            await till.send(insert(*ids))
            if fail:
                raise ValueError("the handler failed")

        async def run() -> Any:
            if own_transaction:
                return await work(call_async)
            async with till.transaction():
                return await work(call_async)

        return till.run(run)


@pytest.fixture
def counter(open_till: Callable[..., Till | AsyncTill]) -> Counter:
    return Counter(open_till())


def test_a_message_is_applied_once_by_each_consumer(counter: Counter) -> None:
    assert counter.process("m-1") is True
    assert counter.process("m-1") is False
    assert counter.till.rows() == ["m-1"]
    # The id alone would drop the message for everybody but the first.
    assert counter.process("m-1", "mail") is True
    assert counter.till.rows() == ["m-1", "m-1"]
    # What was rolled back was not applied.
    with pytest.raises(ValueError, match="failed"):
        counter.process("m-2", fail=True)
    assert counter.process("m-2") is True
    assert counter.till.rows() == ["m-1", "m-1", "m-2"]
    # Whatever an id holds, nothing of it is read as SQL.
    strange = 'm-3 ünïcode " \\ %s :id $1'
    assert [counter.process(strange), counter.process(strange)] == [True, False]


@on_some
def test_a_batch_is_applied_with_one_statement(counter: Counter) -> None:
    assert counter.process("b-2") is True
    assert counter.process_many(["b-1", "b-2", "b-3", "b-1"]) == 2
    assert counter.till.rows() == ["b-1", "b-2", "b-3"]
    assert counter.process_many(["b-1", "b-2"]) == 0
    with pytest.raises(ValueError, match="failed"):
        counter.process_many(["b-3", "b-4"], fail=True)
    assert counter.process_many(["b-3", "b-4"]) == 1
    assert counter.till.rows() == ["b-1", "b-2", "b-3", "b-4"]


@on_some
def test_the_inbox_opens_and_commits_a_transaction_of_its_own(counter: Counter) -> None:
    till = counter.till

    def own(id: str, fail: bool = False) -> bool:
        return bool(
            counter._transact(
                lambda call: counter.inbox.process(till.conn, "own", id, call, own_transaction=True), id, fail, True
            )
        )

    assert own("o-1") is True
    assert own("o-1") is False
    with pytest.raises(ValueError, match="failed"):
        own("o-2", fail=True)
    assert own("o-2") is True
    assert till.rows() == ["o-1", "o-2"]


@pytest.mark.parametrize(
    "kind", [marked(kind) for kind in ("psycopg-autocommit", "asyncpg", "pymysql-autocommit", "asyncmy-autocommit")]
)
def test_without_a_transaction_nothing_runs(counter: Counter) -> None:
    till = counter.till
    with pytest.raises(ConfigurationError, match="Open one: "):
        till.run(lambda: counter.inbox.process(till.conn, "ledger", "n-1", lambda: None))


@pytest.mark.parametrize("kind", ["sqlite3"])
def test_an_engine_that_commits_each_statement_loses_no_message(counter: Counter, tmp_path: Path) -> None:
    # SQLAlchemy shows a transaction here, too. The row of the inbox would commit, and the message would be a repeat.
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="nothing was run"):
        counter.inbox.process(connection, "ledger", "n-1", lambda: None, own_transaction=True)
    engine.dispose()
    assert counter.process("n-1") is True


@pytest.mark.parametrize("kind", ["sqlite3"])
@pytest.mark.parametrize("id", ["", "x" * 256, " x", "a\nb", "\ud800", None])
def test_an_id_that_cannot_be_recognised_again_is_refused(counter: Counter, id: Any) -> None:
    with pytest.raises(ConfigurationError, match="id of a message"):
        counter.process(id)


@pytest.mark.parametrize("kind", ["sqlite3", "aiosqlite"])
def test_a_call_adds_messages_whose_ids_are_made_of_its_own(counter: Counter, tmp_path: Path) -> None:
    till = counter.till
    outbox: Any = (Outbox if isinstance(till, Till) else AsyncOutbox)(till.guard.store)  # type: ignore[arg-type]

    def process() -> Any:
        def call() -> Any:
            return outbox.add(till.conn, "booked", {})

        return counter.inbox.process(till.conn, "ledger", "m-1", call, own_transaction=True)

    found = []
    for _ in range(2):
        assert till.run(process) is True
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as plain, plain:
            found.append(plain.execute("SELECT id, headers FROM semel_outbox").fetchall())
            plain.execute("DELETE FROM semel_inbox")  # as if the first run had not committed
            plain.execute("DELETE FROM semel_outbox")
    assert found[0] == found[1]
    assert '"causation-id": "m-1"' in found[0][0][1].replace('":"', '": "')


def test_a_call_that_raises_leaves_nothing_even_if_the_caller_commits(counter: Counter) -> None:
    # A loop may catch the error inside its transaction, to go on with the next message. The message must come again.
    assert _caught(counter, "c-1") == ["failed"]
    assert counter.till.rows() == []
    assert counter.process("c-1") is True
    assert counter.till.rows() == ["c-1"]


@pytest.mark.parametrize("kind", [marked(kind) for kind in ("sqlite3", "psycopg", "pymysql")])
def test_a_call_that_ends_the_transaction_was_not_applied(counter: Counter) -> None:
    till = counter.till
    with pytest.raises(ConfigurationError, match="ended the transaction"):
        counter.inbox.process(till.conn, "ledger", "e-1", till.conn.rollback)
    till.conn.rollback()
    assert counter.process("e-1") is True


@pytest.mark.parametrize("kind", [marked(f"session-{each}") for each in ("pysqlite", "psycopg", "pymysql")])
@pytest.mark.parametrize("flush", [False, True])
def test_a_call_that_ends_the_savepoint_of_a_session_was_not_applied(counter: Counter, flush: bool) -> None:
    session = counter.till.conn

    def call() -> None:
        if not flush:
            session.rollback()
            return
        session.add(Payment(key="refused", worker=None))
        with contextlib.suppress(sqlalchemy.exc.DatabaseError):
            session.flush()

    with pytest.raises(ConfigurationError, match="ended the transaction"):
        counter.inbox.process(session, "ledger", "e-1", call)
    session.rollback()
    assert counter.process("e-1") is True


@pytest.mark.parametrize("kind", [marked("psycopg")])
def test_a_call_that_catches_an_error_of_postgres_was_not_applied(counter: Counter) -> None:
    # PostgreSQL answers the COMMIT of a failed transaction with a rollback, and psycopg reports no error.
    till = counter.till

    def call() -> None:
        with contextlib.suppress(Exception):
            till.conn.execute("SELECT * FROM nowhere")

    with pytest.raises(ConfigurationError, match="only a rollback"):
        counter.inbox.process(till.conn, "ledger", "e-2", call)
    till.conn.commit()
    assert counter.process("e-2") is True


@pytest.mark.parametrize("kind", [marked(kind) for kind in ("sqlite3", "psycopg", "pymysql")])
def test_a_call_may_process_messages_itself(counter: Counter) -> None:
    till, inbox = counter.till, counter.inbox

    def fail() -> None:
        raise ValueError("failed")

    def call() -> None:
        assert inbox.process(till.conn, "inner", "n-1", lambda: None)
        with pytest.raises(ValueError, match="failed"):
            inbox.process(till.conn, "inner", "n-2", fail)

    assert inbox.process(till.conn, "outer", "n-1", call)
    till.conn.commit()
    again = [inbox.process(till.conn, *each, lambda: None) for each in (("inner", "n-1"), ("inner", "n-2"))]
    assert [*again, inbox.process(till.conn, "outer", "n-1", fail)] == [False, True, False]


@pytest.mark.parametrize("kind", [marked(f"session-{each}") for each in ("pysqlite", "psycopg", "pymysql")])
def test_a_session_forgets_what_a_call_has_changed_that_raises(counter: Counter) -> None:
    # Otherwise its next flush writes a part of what was undone. The message is not recorded, so it would happen twice.
    till, inbox = counter.till, counter.inbox
    session = till.conn

    def add(count: int, error: Exception | None = None) -> None:
        paid.worker += count
        session.add(Payment(key=f"new-{count}", worker=0))
        if error:
            raise error

    assert isinstance(till, Till)
    with till.transaction():
        paid = Payment(key="kept", worker=100)
        session.add(paid)
        with pytest.raises(ValueError, match="failed"):
            inbox.process(session, "ledger", "m-1", lambda: add(1, ValueError("failed")))
        with pytest.raises(sqlalchemy.exc.DatabaseError):  # worker is NOT NULL, which the flush notices
            inbox.process(session, "ledger", "m-2", lambda: session.add(Payment(key="refused", worker=None)))
        assert inbox.process(session, "ledger", "m-3", lambda: add(10))
    assert till.rows() == ["kept", "new-10"]
    assert _workers(till) == [110, 0]
    assert [counter.process(id) for id in ("m-1", "m-2", "m-3")] == [True, True, False]


@pytest.mark.parametrize("kind", [marked(f"session-{each}") for each in ("aiosqlite", "asyncpg", "asyncmy")])
def test_an_async_session_forgets_what_a_call_has_changed_that_raises(counter: Counter) -> None:
    till, inbox = counter.till, counter.inbox
    session = till.conn

    async def add(count: int, error: Exception | None = None) -> None:
        paid = await session.get(Payment, "kept")
        paid.worker += count
        session.add(Payment(key=f"new-{count}", worker=0))
        if error:
            raise error

    async def main() -> None:
        async with till.transaction():
            paid = Payment(key="kept", worker=100)
            session.add(paid)
            with pytest.raises(ValueError, match="failed"):
                await inbox.process(session, "ledger", "m-1", lambda: add(1, ValueError("failed")))
            with pytest.raises(sqlalchemy.exc.DatabaseError):
                await inbox.process(session, "ledger", "m-2", lambda: session.add(Payment(key="refused", worker=None)))
            assert await inbox.process(session, "ledger", "m-3", lambda: add(10))

    till.run(main)
    assert till.rows() == ["kept", "new-10"]
    assert _workers(till) == [110, 0]
    assert [counter.process(id) for id in ("m-1", "m-2", "m-3")] == [True, True, False]


@pytest.mark.parametrize("kind", [marked(f"django-{each}") for each in ("sqlite", "postgres", "mysql")])
@pytest.mark.parametrize("caught", [False, True])
def test_an_error_of_the_orm_of_django_undoes_one_message_alone(counter: Counter, caught: bool) -> None:
    # Django marks the atomic() around such an error, and rolls it back at its end without a word. The messages before
    # it were lost, if they were acknowledged.
    from django.db import transaction

    till, inbox = counter.till, counter.inbox
    assert isinstance(till, Till)
    alias, ran = till.conn.alias, list[str]()

    def call(id: str, fail: bool = False) -> None:
        till.send(f"INSERT INTO payment (key) VALUES ('{id}')")
        transaction.on_commit(lambda: ran.append(id), using=alias)
        if fail:
            with contextlib.suppress(ValueError if caught else ()), transaction.mark_for_rollback_on_error(using=alias):
                raise ValueError("refused")  # as Model.save() does

    with till.transaction():
        assert inbox.process(till.conn, "ledger", "m-1", lambda: call("m-1"))
        with pytest.raises(ConfigurationError if caught else ValueError):
            inbox.process(till.conn, "ledger", "m-2", lambda: call("m-2", fail=True))
        assert inbox.process(till.conn, "ledger", "m-3", lambda: call("m-3"))
    assert till.rows() == ran == ["m-1", "m-3"]
    assert [counter.process(id) for id in ("m-1", "m-2", "m-3")] == [False, True, False]


def _workers(till: Till | AsyncTill) -> list[int]:
    query = "SELECT worker FROM payment ORDER BY key"
    if isinstance(till, Till):
        with till.transaction():
            return [row[0] for row in till.send(query)]

    async def read() -> list[int]:
        async with till.transaction():
            return [row[0] for row in await till.send(query)]

    return list(till.run(read))


def _caught(counter: Counter, id: str) -> list[str]:
    """Apply a message with a function that raises, catch the error, and commit."""
    till, errors = counter.till, list[str]()
    insert = f"INSERT INTO payment (key) VALUES ('{id}')"
    if isinstance(till, Till):

        def call() -> None:
            till.send(insert)
            raise ValueError("failed")

        with till.transaction():
            try:
                counter.inbox.process(till.conn, "ledger", id, call)
            except ValueError as error:
                errors.append(str(error))
        return errors

    async def call_async() -> None:
        await till.send(insert)
        raise ValueError("failed")

    async def run() -> None:
        async with till.transaction():
            try:
                await counter.inbox.process(till.conn, "ledger", id, call_async)
            except ValueError as error:
                errors.append(str(error))

    till.run(run)
    return errors
