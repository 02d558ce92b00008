"""What a handler does to its own transaction: its error, and no conflict. Nothing is stored, and the key is free."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import ConfigurationError, Quota, RememberedFailure, TransactionConflict
from semel.core.keys import identity
from semel.observe import events
from semel.sql.connections.errors import causes, sqlstate
from tests.transactional.kinds import ASYNC_POSTGRES, POSTGRES, AsyncTill, Till, till

OpenTill = Callable[..., Any]


# A constraint of the handler's own tables that is checked at the commit.

CONSTRAINTS = {
    "unique": "CREATE TABLE seat (number text, CONSTRAINT one UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)",
    "foreign key": (
        "CREATE TABLE room (number text PRIMARY KEY);"
        "CREATE TABLE seat (number text REFERENCES room DEFERRABLE INITIALLY DEFERRED)"
    ),
}
VIOLATIONS = (psycopg.errors.UniqueViolation, psycopg.errors.ForeignKeyViolation)
CODES = {"unique": "23505", "foreign key": "23503"}


@pytest.fixture(params=list(CONSTRAINTS))
def constraint(request: pytest.FixtureRequest, database: str) -> Iterator[str]:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(CONSTRAINTS[request.param].encode())
        yield str(request.param)
        conn.execute("DROP TABLE IF EXISTS seat, room")


def twice(desk: Till | AsyncTill, runs: list[int], **how: Any) -> Any:
    """Run a handler that takes the same seat twice, in a room that there is not."""
    sql = "INSERT INTO seat VALUES ('7'), ('7')"
    if isinstance(desk, AsyncTill):

        async def work() -> str:
            runs.append(1)
            await desk.send(sql)
            return "taken"
    else:

        def work() -> str:  # type: ignore[misc]
            runs.append(1)
            desk.send(sql)
            return "taken"

    return desk.run(
        lambda: desk.guard.run_in_transaction(desk.conn, "pay", key="k1", call=work, own_transaction=True, **how)
    )


def code_of(error: BaseException) -> str | None:
    return next((code for code in map(sqlstate, causes(error)) if code), None)


@pytest.mark.postgres
@pytest.mark.server
@pytest.mark.parametrize("kind", [*POSTGRES, *ASYNC_POSTGRES])
def test_a_constraint_that_fails_at_the_commit_is_the_handlers_own_error(
    kind: str, database: str, constraint: str
) -> None:
    told: list[Any] = []
    desk = till(kind, database, on_event=told.append, quota=Quota(live_keys=1))
    runs: list[int] = []
    for attempt in (1, 2):
        with pytest.raises(Exception) as refused:  # of the driver, or of the layer above it
            twice(desk, runs)
        assert not type(refused.value).__module__.startswith("semel"), refused.value
        assert code_of(refused.value) == CODES[constraint]
        assert len(runs) == attempt, "it was run again, and cannot do better"
        assert desk.lent.begun() is False
        assert desk.lookup("k1") is None
    assert [type(event) for event in told] == [events.Started, events.Released] * 2
    assert desk.pay("k1", own_transaction=True).replayed is False, "the key is free, and so is its place in the quota"
    desk.close()


def test_on_sqlite_too(tmp_path: Path) -> None:
    desk = till("sqlite3", str(tmp_path / "shop.db"))
    desk.conn.execute("PRAGMA foreign_keys = ON")
    desk.conn.executescript(CONSTRAINTS["foreign key"])
    runs: list[int] = []
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        twice(desk, runs)
    assert (len(runs), desk.lent.begun(), desk.lookup("k1")) == (1, False, None)
    desk.close()


@pytest.mark.postgres
@pytest.mark.server
def test_such_an_error_is_remembered_where_the_policy_says_so(database: str, constraint: str) -> None:
    desk = till("psycopg", database)
    runs: list[int] = []
    with pytest.raises(VIOLATIONS):
        twice(desk, runs, remember_errors=VIOLATIONS)
    with pytest.raises(RememberedFailure, match=r'"seat"|"one"'):
        twice(desk, runs, remember_errors=VIOLATIONS)
    assert runs == [1]
    desk.close()


@pytest.mark.postgres
@pytest.mark.server
@pytest.mark.parametrize("kind", [*POSTGRES, *ASYNC_POSTGRES])
def test_a_record_that_stands_there_by_then_is_a_conflict_still(kind: str, database: str) -> None:
    """The primary key is the judge: here of one who wrote without asking the guard."""
    desk = till(kind, database)
    record = (
        "INSERT INTO semel_record (id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires,"
        " sweep_after, fingerprint, tenant, operation, snapshot)"
        " SELECT %s, 2, 0, 1, 0, 0, 0, now(), now(), now() + interval '1 h', now() + interval '1 h', '', '', 'pay', ''"
    )

    def come_between(op: Any) -> str:
        with psycopg.connect(database, autocommit=True) as conn:
            conn.execute(record, (identity("", "pay", "k1"),))
        return "paid"

    with pytest.raises(TransactionConflict, match="stood in the way of the record"):
        desk.pay("k1", own_transaction=True, tries=1, call=come_between)
    assert desk.rows() == []
    desk.close()


# A handler that ends the transaction it was given.


def ended(desk: Any, word: str, then: str | None = None) -> Any:
    sql = "INSERT INTO payment (key) VALUES ('k1')"
    if desk.lent.awaited:

        async def work() -> str:
            await desk.send(sql)
            await (getattr(desk.conn, word)() if hasattr(desk.conn, word) else desk.conn.execute(word.upper()))
            if then is not None:
                await desk.send(then)
            return "paid"
    else:

        def work() -> str:  # type: ignore[misc]
            desk.send(sql)
            getattr(desk.conn, word)()
            if then is not None:
                desk.send(then)
            return "paid"

    return desk.run(
        lambda: desk.guard.run_in_transaction(
            desk.conn, "pay", key="k1", call=work, own_transaction=True, remember_errors=Exception
        )
    )


NOTICED_LATE = ("sqlite3", "asyncpg", "asyncpg-pool")
"""Their commit cannot be refused: sqlite3's connection takes no attributes, and asyncpg's COMMIT is a statement."""
REFUSED = "the handler called commit"
ENDED = "the handler ended the transaction that Semel opened"


@pytest.mark.parametrize("word", ["commit", "rollback"])
def test_a_handler_that_ends_its_transaction_is_told_so_and_nothing_is_remembered(
    open_till: OpenTill, kind: str, word: str
) -> None:
    if kind in ("pymysql", "asyncmy") and word == "rollback":
        pytest.skip("the driver does not say")
    late = word == "rollback" or kind in NOTICED_LATE
    told: list[Any] = []
    desk = open_till(on_event=told.append, quota=Quota(live_keys=1))
    if kind.startswith("django"):
        from django.db.transaction import TransactionManagementError

        expected: Any = pytest.raises(TransactionManagementError)  # Django notices by itself
    else:
        expected = pytest.raises(ConfigurationError, match=ENDED if late else REFUSED)
    with expected:
        ended(desk, word)
    if not kind.startswith("django"):
        assert desk.lookup("k1") is None
        assert [type(event) for event in told] == [events.Started, events.Released]
        assert desk.rows() == (["k1"] if word == "commit" and late else [])
        assert desk.pay("k2", own_transaction=True).replayed is False
    assert desk.lent.begun() is False


@pytest.mark.parametrize("word", ["commit", "rollback"])
def test_sqlalchemy_tells_also_where_the_handler_has_begun_another(open_till: OpenTill, kind: str, word: str) -> None:
    if not kind.startswith(("sqlalchemy", "session", "scoped")):
        pytest.skip("only SQLAlchemy has a transaction that can be known again")
    desk = open_till()
    with pytest.raises(ConfigurationError, match=ENDED if word == "rollback" else REFUSED):
        ended(desk, word, "INSERT INTO payment (key) VALUES ('more')")
    assert desk.lookup("k1") is None
    assert "more" not in desk.rows()


def committing(desk: Any, calls: list[str]) -> Any:
    sql = "INSERT INTO payment (key) VALUES ('k1')"
    if desk.lent.awaited:

        async def work() -> str:
            await desk.send(sql)
            try:
                await desk.conn.commit()
            except ConfigurationError:
                calls.append("refused")
            return "paid"
    else:

        def work() -> str:  # type: ignore[misc]
            desk.send(sql)
            try:
                desk.conn.commit()
            except ConfigurationError:
                calls.append("refused")
            return "paid"

    return work


@pytest.mark.parametrize("own", [True, False], ids=["own", "caller's"])
def test_a_refused_commit_leaves_the_transaction_usable_and_commits_with_the_record(
    open_till: OpenTill, kind: str, own: bool
) -> None:
    """Also if the handler goes on as if nothing had happened: it is all or nothing still."""
    if kind in NOTICED_LATE or kind.startswith("django"):
        pytest.skip("its commit cannot be refused, or is by the framework")
    if kind.endswith("-autocommit") and not own:
        pytest.skip("nothing would commit together")
    desk, other = open_till(), open_till()
    calls: list[str] = []

    def attempt() -> Any:
        work = committing(desk, calls)
        return desk.run(
            lambda: desk.guard.run_in_transaction(desk.conn, "pay", key="k1", call=work, own_transaction=own)
        )

    assert attempt() == "paid"
    assert calls == ["refused"]
    if not own:
        if "sqlite" not in kind:  # whose readers wait for the writer
            assert other.rows() == []
        desk.run(desk.conn.commit)  # the caller's own
    assert (other.rows(), attempt()) == (["k1"], "paid")
    assert calls == ["refused"]


def test_two_requests_with_one_key_leave_one_row_although_the_handler_commits(open_till: OpenTill, kind: str) -> None:
    if kind in NOTICED_LATE or kind.startswith("django"):
        pytest.skip("its commit cannot be refused, or is by the framework")
    desk = open_till()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=REFUSED):
            ended(desk, "commit")
    assert desk.rows() == []
    assert desk.pay("k1", own_transaction=True).replayed is False
    assert desk.rows() == ["k1"]
