"""PostgreSQL that cannot store: each case is a clear error of our tree, and nothing is run."""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from semel import NotMigrated, PostgresStore, Semel, StoreUnavailable, StoreUncertain
from semel.sql.connections.errors import postgres_error
from semel.stores.postgres import migrate


def test_a_read_only_database_is_said_to_be_one_and_the_handler_does_not_run(postgres_url: str) -> None:
    migrate(postgres_url)
    with contextlib.closing(PostgresStore(postgres_url)) as store:
        Semel(store, sweep_every=None).run("ship", key="before", call=lambda: "sent")
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        name = admin.info.dbname
        admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    ran: list[str] = []
    with contextlib.closing(PostgresStore(postgres_url)) as store:
        guard = Semel(store, sweep_every=None)
        with pytest.raises(StoreUnavailable, match="read-only") as refused:
            guard.run("ship", key="after", call=lambda: ran.append("x"))
        assert isinstance(refused.value.__cause__, Exception), "the driver's own error is behind it"
    assert ran == []


@pytest.mark.parametrize(
    ("sqlstate", "kind", "words"),
    [
        ("53100", StoreUnavailable, "disk is full"),
        ("25006", StoreUnavailable, "read-only"),
        ("57P03", StoreUnavailable, "does not accept"),
        ("42P01", NotMigrated, "semel migrate"),
        ("08006", StoreUncertain, "lost"),
        ("57P01", StoreUncertain, "lost"),
        (None, StoreUncertain, "lost"),
        ("40P01", StoreUnavailable, "because of others"),
        ("22021", StoreUnavailable, "refused"),
    ],
)
def test_what_the_server_says_in_our_words(sqlstate: str | None, kind: type[Exception], words: str) -> None:
    error = postgres_error(sqlstate, "whatever it said")
    assert isinstance(error, kind)
    assert words in str(error)
