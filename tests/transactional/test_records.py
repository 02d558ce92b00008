"""Records that the leased mode made, met by a transaction: the same rules, whoever wrote them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import (
    CANNOT_TELL,
    NOT_DONE,
    InProgress,
    KeyExpired,
    OutcomeUnknown,
    Quota,
    Recovered,
    ResultNotStored,
    State,
    TooManyKeys,
    TransactionConflict,
)
from semel.core.keys import identity
from semel.core.ops import Claim, Complete, Release, Resolve, SaveStep
from semel.core.states import Takeover
from semel.observe import events
from semel.stores.postgres import check
from tests.transactional.kinds import Till

ID = identity("", "pay", "k1")


@pytest.fixture(
    params=[
        "sqlite3",
        pytest.param("psycopg", marks=[pytest.mark.postgres, pytest.mark.server]),
        pytest.param("pymysql", marks=[pytest.mark.mariadb, pytest.mark.server]),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param == "sqlite3":
        return request.param, str(tmp_path / "shop.db")
    return request.param, request.getfixturevalue("mysql_database" if request.param == "pymysql" else "database")


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def till(url: tuple[str, str], told: list[Any]) -> Iterator[Till]:
    till = Till(*url, on_event=told.append)
    yield till
    till.close()


@pytest.fixture
def postgres_till(database: str, told: list[Any]) -> Iterator[Till]:
    """For what can only happen where there are many writers."""
    till = Till("psycopg", database, on_event=told.append)
    yield till
    till.close()


def claimed(till: Till, *, lease: float = 0.0001, ttl: float = 3600.0, takeover: Takeover = Takeover.RETRY) -> int:
    """A record that an attempt under a lease has left, RUNNING or, with a short lease, ABANDONED."""
    answer = till.guard.store.execute(Claim(ID, 7, b"", lease, ttl, takeover, "", "pay", "k1"))
    if lease < 0.01:
        while till.lookup("k1").state is State.RUNNING:
            pass
    return int(answer.token)  # type: ignore[union-attr]


def test_a_call_under_a_lease_that_runs_turns_a_transaction_away(till: Till) -> None:
    claimed(till, lease=60)
    with pytest.raises(InProgress) as refused:
        till.pay("k1")
    assert refused.value.retry_after == 5.0
    assert till.rows() == []


def test_its_answer_is_replayed_and_ours_is_replayed_by_it(till: Till) -> None:
    assert till.guard.run("pay", key="k1", call=lambda: {"by": "lease"}) == {"by": "lease"}
    assert till.pay("k1").value == {"by": "lease"}
    till.pay("k2")
    assert till.guard.run_outcome("pay", key="k2", call=lambda: {"by": "lease"}).value == {"paid": "k2"}
    assert till.rows() == ["k2"]


def test_an_abandoned_attempt_is_taken_over_with_its_steps(till: Till, told: list[Any]) -> None:
    token = claimed(till, lease=60)
    saved = till.guard.make_call("pay", "k1", "", b"", till.guard._policy)
    from semel.core.encoding.plain import PLAIN
    from semel.core.encoding.snapshot import Kind

    blob = saved.codec.seal(Kind.VALUE, PLAIN.name, PLAIN.encode("made before"), ID)
    till.guard.store.execute(SaveStep(ID, token, "id", blob, 0))
    till.guard.store.execute(Release(ID, token, State.ABANDONED))
    outcome = till.pay("k1", call=lambda op: [op.attempt, op.capture("id", lambda: "made anew")])
    assert outcome.value == [2, "made before"]
    assert outcome.attempt == 2
    record = till.lookup("k1")
    assert (record.state, record.attempt) == (State.DONE, 2)
    assert record.token > token
    assert [type(event) for event in told] == [events.TakenOver, events.Prepared]
    # The lost owner comes back: what it says is refused.
    assert till.guard.store.execute(Complete(ID, token, b"late", 60.0)) is False
    assert till.pay("k1").replayed


def test_an_attempt_that_may_not_be_taken_over_is_unknown(till: Till) -> None:
    claimed(till, takeover=Takeover.REJECT)
    with pytest.raises(OutcomeUnknown):
        till.pay("k1")
    till.guard.release("pay", "k1")
    assert till.pay("k1").replayed is False


@pytest.mark.parametrize("own_transaction", [False, True])
def test_a_recover_hook_is_asked_first(till: Till, own_transaction: bool) -> None:
    claimed(till, takeover=Takeover.REJECT)
    with pytest.raises(OutcomeUnknown, match="could not tell"):
        till.pay("k1", recover=lambda: CANNOT_TELL, own_transaction=own_transaction)
    assert till.pay("k1", recover=lambda: Recovered("found"), own_transaction=own_transaction).value == "found"
    assert till.rows() == []
    assert till.pay("k1", own_transaction=own_transaction).value == "found"


def test_a_recover_hook_may_say_that_nothing_happened(till: Till) -> None:
    claimed(till, takeover=Takeover.RECOVER)
    with pytest.raises(ZeroDivisionError):
        till.pay("k1", recover=lambda: 1 / 0)
    assert till.pay("k1", recover=lambda: NOT_DONE).value == {"paid": "k1"}
    assert till.rows() == ["k1"]


def test_an_expired_record_makes_room(till: Till) -> None:
    token = claimed(till, lease=60, ttl=0.0001)
    till.guard.store.execute(Complete(ID, token, b"old", 0.0001))
    while till.lookup("k1") is not None:
        pass
    outcome = till.pay("k1")
    assert (outcome.replayed, outcome.attempt) == (False, 1)
    assert till.lookup("k1").token > token
    assert till.pay("k1").replayed


@pytest.mark.parametrize("own_transaction", [False, True])
def test_an_outcome_that_was_released_makes_room(till: Till, own_transaction: bool) -> None:
    tokens = []
    for number in range(3):
        outcome = till.pay("k1", call=lambda op, number=number: number, own_transaction=own_transaction)
        assert (outcome.value, outcome.replayed, outcome.attempt) == (number, False, 1)
        tokens.append(till.lookup("k1").token)
        assert till.pay("k1", own_transaction=own_transaction).replayed
        # The record of a transaction may have no token of its own. Still each release frees one record only.
        for token in tokens[:-1]:
            assert till.guard.store.execute(Resolve(ID, None, 60.0, False, token)) is State.ABSENT
        till.guard.release("pay", "k1", stored="any")
    assert tokens == sorted(set(tokens))
    assert till.rows() == ["k1"] * 3


def test_one_statement_runs_again_after_a_release(till: Till) -> None:
    insert = ("INSERT INTO payment (key) VALUES (?)", ["k1"])
    for _ in range(2):
        assert till.execute_within("k1", *insert).replayed is False
        assert till.execute_within("k1", *insert).replayed
        till.guard.release("pay", "k1", stored="any")
    assert till.rows() == ["k1"] * 2


def test_an_operation_that_was_released_by_force_is_run_by_a_transaction(till: Till) -> None:
    token = claimed(till, lease=60)
    till.guard.release("pay", "k1", force=True)
    assert till.pay("k1").attempt == 1
    assert till.lookup("k1").token > token
    assert till.guard.store.execute(Complete(ID, token, b"late", 60.0)) is False


def test_a_key_may_be_refused_after_its_time(till: Till) -> None:
    till.pay("k1", ttl=0.0001, reject_expired_for="1h")
    with pytest.raises(KeyExpired):
        till.pay("k1", ttl=0.0001, reject_expired_for="1h")
    assert till.rows() == ["k1"]


def test_a_record_that_came_meanwhile_stops_us(postgres_till: Till) -> None:
    """Another guard claims the key under a lease while our handler runs. On SQLite nobody can, behind the lock."""
    with pytest.raises(TransactionConflict):
        postgres_till.pay("k1", call=lambda op: claimed(postgres_till, lease=60))
    assert postgres_till.rows() == []
    assert postgres_till.lookup("k1").state is State.RUNNING


def test_a_record_that_changed_meanwhile_stops_us(postgres_till: Till) -> None:
    claimed(postgres_till)
    with pytest.raises(TransactionConflict):
        postgres_till.pay("k1", call=lambda op: postgres_till.guard.store.execute(Resolve(ID, b"done by hand", 60.0)))
    assert postgres_till.rows() == []
    assert postgres_till.lookup("k1").snapshot == b"done by hand"


def test_a_waiter_under_a_lease_is_woken_by_our_record(database: str, postgres_till: Till) -> None:
    import psycopg

    claimed(postgres_till)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("UPDATE semel_record SET awaited = true")
        conn.execute("LISTEN semel")
        postgres_till.pay("k1")
        heard = next(conn.notifies(timeout=30))
        assert heard.payload == ID.hex()


def test_a_failure_is_remembered_if_the_caller_commits_it(till: Till, told: list[Any]) -> None:
    def work(op: Any) -> None:
        raise LookupError("no such account")

    with till.transaction(), pytest.raises(LookupError):
        till.guard.run_in_transaction(till.conn, "pay", key="k1", call=work, remember_errors=LookupError)
    with pytest.raises(LookupError, match="no such account"):
        till.pay("k1", remember_errors=LookupError)
    assert [type(event) for event in told] == [events.Started, events.FailureRemembered, events.Replayed]
    assert till.rows() == []


def test_a_failure_in_a_broken_transaction_is_not_remembered(postgres_till: Till, told: list[Any]) -> None:
    import psycopg

    def work(op: Any) -> None:
        postgres_till.conn.execute("SELECT 1/0")

    with pytest.raises(psycopg.errors.DivisionByZero):
        postgres_till.pay("k1", call=work, guarantee="at_most_once")
    assert postgres_till.lookup("k1") is None
    assert events.StoreFailed in [type(event) for event in told]


@pytest.mark.parametrize("own_transaction", [False, True])
def test_a_result_that_cannot_be_kept_is_done_all_the_same(till: Till, own_transaction: bool) -> None:
    if own_transaction:
        with pytest.raises(ResultNotStored, match="will not run again"):
            till.pay("k1", call=lambda op: object(), own_transaction=True)
    else:
        with till.transaction(), pytest.raises(ResultNotStored, match="is done if you commit"):
            till.guard.run_in_transaction(till.conn, "pay", key="k1", call=object)
    with pytest.raises(ResultNotStored):
        till.pay("k1")


def test_a_quota_is_asked(url: tuple[str, str]) -> None:
    till = Till(*url, quota=Quota(live_keys=1))
    till.pay("k1", own_transaction=True)
    with pytest.raises(TooManyKeys):
        till.pay("k2", own_transaction=True)
    assert till.pay("k1").replayed
    till.close()


class Met(Exception):
    """As a driver's error for a deadlock."""

    sqlstate = "40P01"


def meet(op: Any) -> None:
    raise Met


@pytest.mark.parametrize("own_transaction", [True, False])
def test_a_conflict_gives_its_place_in_the_quota_back(url: tuple[str, str], own_transaction: bool) -> None:
    till = Till(*url, quota=Quota(live_keys=100))
    tries: dict[str, Any] = {"tries": 5} if own_transaction else {}
    with pytest.raises(TransactionConflict if own_transaction else Met):
        till.pay("k1", insert=False, call=meet, own_transaction=own_transaction, **tries)
    meter = till.guard._meter
    assert meter is not None
    assert meter.estimate("") == 0
    till.pay("k1", own_transaction=own_transaction)
    assert meter.estimate("") == 1
    till.close()


def test_a_failure_that_could_not_be_kept_gives_its_place_back(postgres_till: Till) -> None:
    till = Till("psycopg", postgres_till.conn.info.dsn, quota=Quota(live_keys=100))
    meter = till.guard._meter
    assert meter is not None

    def come_between(op: Any) -> None:
        till.conn.rollback()  # the key's lock is gone, so the other one can
        thread = threading.Thread(target=postgres_till.pay, args=("k1",))
        thread.start()
        thread.join(30)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        till.pay("k1", insert=False, call=come_between, own_transaction=True, remember_errors=ZeroDivisionError)
    assert meter.estimate("") == 0
    till.close()


@pytest.mark.parametrize("key", ["it's", "a\\b", "ключ 🗝", "$$; DROP TABLE payment; --", "%s :id"])
def test_any_key_is_only_a_key(till: Till, key: str) -> None:
    for own_transaction in (True, False):
        assert till.pay(
            key, insert=False, tenant=key, own_transaction=own_transaction, call=lambda op: [op.key]
        ).value == [key]
    record = till.guard.lookup("pay", key, tenant=key)
    assert record is not None
    assert (record.tenant, record.key) == (key, key)


def test_large_answers_and_fingerprints_travel_whole(till: Till) -> None:
    answer = {"text": "ü" * 200_000}
    assert till.pay("k1", own_transaction=True, fingerprint=list(range(1000)), call=lambda op: answer).value == answer
    again = till.pay("k1", own_transaction=True, fingerprint=list(range(1000)), call=lambda op: None)
    assert (again.replayed, again.value) == (True, answer)


KEEPS_NOTHING = """
    CREATE OR REPLACE PROCEDURE semel_keep(
        id bytea, takeover integer, nonce bigint, ttl float8, fingerprint bytea, tenant text, operation text, key text,
        snapshot bytea
    ) LANGUAGE plpgsql AS 'BEGIN END'
"""


@pytest.mark.postgres
@pytest.mark.server
def test_the_functions_are_part_of_the_schema_that_is_checked(postgres_url: str) -> None:
    import psycopg

    from semel import NotMigrated, PostgresStore, SchemaDrift, Semel
    from semel.stores.postgres import migrate

    with Semel(PostgresStore(postgres_url), sweep_every=None) as guard, psycopg.connect(postgres_url) as conn:
        with pytest.raises(NotMigrated, match="semel migrate"):
            guard.run_in_transaction(conn, "pay", key="k1", call=lambda: 1)
        conn.rollback()
        migrate(postgres_url)
        check(postgres_url)
        conn.execute("ALTER FUNCTION semel_guard(bytea, bigint) STABLE")
        conn.commit()
        with pytest.raises(SchemaDrift, match="function semel_guard"):
            check(postgres_url)
        conn.execute("ALTER FUNCTION semel_guard(bytea, bigint) VOLATILE")
        conn.commit()
        check(postgres_url)
        conn.execute(KEEPS_NOTHING)
        conn.commit()
        with pytest.raises(SchemaDrift, match="function semel_keep"):
            check(postgres_url)


@pytest.mark.postgres
@pytest.mark.server
def test_a_database_of_the_version_before_is_migrated_and_its_records_are_replayed(postgres_url: str) -> None:
    import psycopg

    from semel import PostgresStore, Semel
    from semel.sql.migrations import POSTGRES
    from semel.stores.postgres import migrate

    with psycopg.connect(postgres_url) as conn:
        conn.execute(POSTGRES.ledger.encode())
        for number, name, statements in POSTGRES.migrations()[:4]:
            for statement in statements:
                conn.execute(statement.encode())
            conn.execute("INSERT INTO semel_migration (version, name) VALUES (%s, %s)", (number, name))
    with Semel(PostgresStore(postgres_url, listen=False), sweep_every=None) as guard:
        assert guard.run("pay", key="k1", call=lambda: "paid") == "paid"
        assert migrate(postgres_url) == [
            "0005_transaction_calls",
            "0006_messages",
            "0007_trail",
            "0008_log",
            "0009_inbox_by_time",
            "0010_fresh_ids",
        ]
        check(postgres_url)
        with psycopg.connect(postgres_url) as conn:
            assert guard.run_in_transaction_outcome(conn, "pay", key="k1", call=lambda: "again").replayed
            assert guard.run_in_transaction(conn, "pay", key="k2", call=lambda: "paid") == "paid"
            # A worker of the version before, which is still at work, meets the new one's record.
            found = conn.execute("SELECT length(semel_lock(%s, 1)) > 8", (identity("", "pay", "k2"),)).fetchall()
            assert found == [(True,)]
