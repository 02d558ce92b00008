"""A connection that is lost on the way: before the commit was sent nothing is stored, and that is what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg
import psycopg
import pytest

from semel import AsyncPostgresStore, AsyncSemel, StoreUnavailable, StoreUncertain, TransactionConflict
from tests.transactional.kinds import ASYNC_POSTGRES, POSTGRES, AsyncTill, Till, till

pytestmark = pytest.mark.server


@pytest.fixture(params=[*POSTGRES, *ASYNC_POSTGRES])
def desk(request: pytest.FixtureRequest, database: str) -> Any:
    desk: Till | AsyncTill = till(request.param, database)
    yield desk
    with suppress(Exception):  # it was broken on purpose, and some kinds complain when closed
        desk.close()


def severed(database: str) -> Callable[[Any], str]:
    """A handler that ends every other session of this database, its own among them."""

    def work(op: Any) -> str:
        with psycopg.connect(database, autocommit=True) as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'semel'"
            )
        return "paid"

    return work


def stored(database: str) -> tuple[int, int]:
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT (SELECT count(*) FROM payment), (SELECT count(*) FROM semel_record)").fetchone()
        assert row is not None
        return int(row[0]), int(row[1])


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("own_transaction", [False, True])
def test_a_connection_that_is_closed_is_no_mistake_of_the_programs(
    database: str, autocommit: bool, own_transaction: bool
) -> None:
    desk = till("psycopg-autocommit" if autocommit else "psycopg", database)
    assert isinstance(desk, Till)
    ran: list[int] = []
    desk.conn.close()
    with pytest.raises(StoreUnavailable, match="nothing was stored"):
        desk.guard.run_in_transaction(
            desk.conn, "pay", key="k1", call=lambda: ran.append(1), own_transaction=own_transaction
        )
    desk.close()
    asyncio.run(_closed(database, autocommit, own_transaction))
    assert ran == []


async def paid() -> str:
    return "paid"


async def _closed(database: str, autocommit: bool, own_transaction: bool) -> None:
    conn = await psycopg.AsyncConnection.connect(database, autocommit=autocommit)
    await conn.close()
    async with AsyncSemel(AsyncPostgresStore(database, connections=1), sweep_every=None) as guard:
        with pytest.raises(StoreUnavailable, match="nothing was stored"):
            await guard.run_in_transaction(conn, "pay", key="k1", call=paid, own_transaction=own_transaction)


def test_a_call_of_asyncpg_that_is_cancelled_on_its_way_leaves_no_transaction_open(database: str) -> None:
    """Cancelled while BEGIN travels: asyncpg has not heard of it, and rolled back it must be all the same."""

    async def main() -> None:
        other = await asyncpg.connect(database)
        async with AsyncSemel(AsyncPostgresStore(database, connections=1), sweep_every=None) as guard:
            for turns in range(6):
                conn = await asyncpg.connect(database)
                call = asyncio.ensure_future(
                    guard.run_in_transaction(conn, "pay", key=str(turns), call=paid, own_transaction=True)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                with suppress(asyncio.CancelledError):
                    await call
                await conn.execute("INSERT INTO payment (key) VALUES ($1)", str(turns))
                seen = await other.fetchval("SELECT count(*) FROM payment WHERE key = $1", str(turns))
                assert seen == 1, f"after {turns} turns of the loop the connection was left in a transaction"
                async with conn.transaction():  # and asyncpg knows it
                    assert conn.is_in_transaction()
                await conn.close()
        await other.close()

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_replay_that_is_cancelled_on_its_way_leaves_no_transaction_open(database: str, driver: str) -> None:
    """Cancelled in each turn of the loop, also while its rollback travels."""

    async def main() -> int:
        other = await asyncpg.connect(database)
        cancelled = 0
        async with AsyncSemel(AsyncPostgresStore(database, connections=1), sweep_every=None) as guard:
            conn: Any = await (
                asyncpg.connect(database)
                if driver == "asyncpg"
                else psycopg.AsyncConnection.connect(database, autocommit=True)
            )
            await guard.run_in_transaction(conn, "pay", key="k1", call=paid, own_transaction=True)
            for turns in range(40):
                call = asyncio.ensure_future(
                    guard.run_in_transaction(conn, "pay", key="k1", call=paid, own_transaction=True)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                with suppress(asyncio.CancelledError):
                    await call
                cancelled += call.cancelled()
                await conn.execute(f"INSERT INTO payment (key) VALUES ('{turns}')")
                seen = await other.fetchval("SELECT count(*) FROM payment WHERE key = $1", str(turns))
                assert seen == 1, f"after {turns} turns of the loop the connection was left in a transaction"
            await conn.close()
        await other.close()
        return cancelled

    assert asyncio.run(main()) > 3


def test_in_the_callers_transaction_nothing_is_stored_for_certain(desk: Any, database: str) -> None:
    with pytest.raises(Exception) as lost:  # what the kind's own transaction makes of it, or ours
        desk.pay("k1", call=severed(database))
    chain: list[BaseException] = [lost.value]
    for error in chain:  # a driver's error may have a cause of its own, and ours as its context
        chain += [e for e in (error.__cause__, error.__context__) if e is not None and all(e is not k for k in chain)]
    ours = [error for error in chain if isinstance(error, (StoreUnavailable, StoreUncertain))]
    assert ours
    assert isinstance(ours[0], StoreUnavailable)
    assert not isinstance(ours[0], TransactionConflict)
    assert stored(database) == (0, 0)


def test_during_a_commit_of_ours_nobody_can_say(desk: Any, database: str) -> None:
    with pytest.raises(StoreUncertain) as lost:
        desk.pay("k1", call=severed(database), own_transaction=True)
    assert lost.value.result == "paid"
    assert stored(database) == (0, 0)
