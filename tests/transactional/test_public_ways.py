"""The same tests with a version of psycopg or asyncpg whose private parts we do not know: only public ones are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from semel.sql.connections import aio_psycopg, asyncpg, psycopg
from semel.sql.connections.adopt import is_known_version
from tests.transactional import test_every_connection, test_execute_once, test_lost_connections
from tests.transactional.kinds import AsyncTill, Till, till

pytestmark = [pytest.mark.server, pytest.mark.postgres]

KINDS = ["psycopg", "psycopg-autocommit", "async-psycopg", "async-psycopg-autocommit", "asyncpg", "asyncpg-pool"]
HERE = [
    *(test for name, test in vars(test_every_connection).items() if name.startswith("test_")),
    test_execute_once.test_threads_pay_each_key_once,
    test_execute_once.test_tasks_pay_each_key_once,
    test_execute_once.test_a_snapshot_older_than_the_winner_ends_in_a_conflict,
    test_lost_connections.test_a_connection_that_is_closed_is_no_mistake_of_the_programs,
    test_lost_connections.test_a_call_of_asyncpg_that_is_cancelled_on_its_way_leaves_no_transaction_open,
    test_lost_connections.test_a_replay_that_is_cancelled_on_its_way_leaves_no_transaction_open,
    test_lost_connections.test_in_the_callers_transaction_nothing_is_stored_for_certain,
    test_lost_connections.test_during_a_commit_of_ours_nobody_can_say,
]
globals().update({test.__name__: test for test in HERE})
guard, conn = test_execute_once.guard, test_execute_once.conn


@pytest.fixture(autouse=True)
def unknown_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (psycopg, aio_psycopg, asyncpg):
        monkeypatch.setattr(module, "_INTERNALS_KNOWN", False)
    for module in (psycopg, aio_psycopg):
        monkeypatch.setattr(module, "_generators", None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def desk(kind: str, database: str) -> Iterator[Any]:
    desk: Till | AsyncTill = till(kind, database)
    yield desk
    with suppress(Exception):  # it was broken on purpose
        desk.close()


@pytest.mark.parametrize("version", ["3.1.20", "3.4", "3.4.0.dev1", "4.0.0", "2.9"])
def test_a_version_before_or_after_the_known_ones_is_unknown(version: str) -> None:
    assert not is_known_version(version, (3, 2), (3, 4))
    assert is_known_version("3.2", (3, 2), (3, 4))
    assert is_known_version("3.3.8", (3, 2), (3, 4))
