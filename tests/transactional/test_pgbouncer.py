"""Behind PgBouncer in transaction mode: sessions are shared, so nothing of ours may outlive a transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import psycopg
import pytest

from semel import AsyncPostgresStore, AsyncSemel, PostgresStore, Semel, Wait
from semel.stores.postgres import migrate
from tests.servers import Server
from tests.servers.pgbouncer import IGNORED, PgBouncerServer
from tests.transactional.kinds import TABLE

pytestmark = pytest.mark.server

KEYS = [f"k{number}" for number in range(8)]
CLIENTS = 4


@pytest.fixture
def urls(pgbouncer: PgBouncerServer) -> Iterator[tuple[str, str]]:
    """Through the pooler, and straight to the server."""
    pooled, direct = pgbouncer.create_database()
    migrate(direct)
    with psycopg.connect(direct) as conn:
        conn.execute(TABLE.encode())
    yield pooled, direct
    pgbouncer.postgres.drop_database(direct)


def payments(direct: str) -> list[str]:
    with psycopg.connect(direct) as conn:
        held = conn.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
        assert held == (0,)
        left = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        assert conn.execute(left.encode()).fetchone() == (0,)
        return [row[0] for row in conn.execute("SELECT key FROM payment ORDER BY key")]


@pytest.mark.parametrize("own_transaction", [False, True])
def test_clients_that_share_sessions_pay_each_key_once(urls: tuple[str, str], own_transaction: bool) -> None:
    pooled, direct = urls
    failures: list[BaseException] = []
    with Semel(PostgresStore(direct, listen=False), sweep_every=None) as guard:

        def client() -> None:
            try:
                with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
                    for key in KEYS * 2:
                        opened = nullcontext() if own_transaction else conn.transaction()
                        with opened:
                            guard.run_in_transaction(
                                conn, "pay", key=key, call=lambda op: pay(conn, op.key),
                                own_transaction=own_transaction, on_duplicate=Wait("30s"),
                            )  # fmt: skip
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert payments(direct) == KEYS


def pay(conn: Any, key: str) -> str:
    conn.execute("INSERT INTO payment (key) VALUES (%s)", (key,))
    return key


@pytest.mark.parametrize("own_transaction", [False, True])
def test_asyncpg_without_a_statement_cache(urls: tuple[str, str], own_transaction: bool) -> None:
    import asyncpg

    pooled, direct = urls

    async def main() -> None:
        async with AsyncSemel(AsyncPostgresStore(direct, listen=False), sweep_every=None) as guard:

            async def client() -> None:
                conn = await asyncpg.connect(pooled, statement_cache_size=0)
                try:
                    for key in KEYS:
                        await once(conn, key)
                finally:
                    await conn.close()

            async def once(conn: Any, key: str) -> None:
                async def work() -> str:
                    await conn.execute("INSERT INTO payment (key) VALUES ($1)", key)
                    return key

                how: dict[str, Any] = {"key": key, "call": work, "on_duplicate": Wait("30s")}
                if own_transaction:
                    await guard.run_in_transaction(conn, "pay", own_transaction=True, **how)
                    return
                async with conn.transaction():
                    await guard.run_in_transaction(conn, "pay", **how)

            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    asyncio.run(main())
    assert payments(direct) == KEYS


def test_the_pooler_gives_a_session_for_one_transaction_only(urls: tuple[str, str]) -> None:
    """What the tests above rely on: two clients that take turns are on the same session of the server."""
    pids = set()
    for _ in range(3):
        with psycopg.connect(urls[0], autocommit=True, prepare_threshold=None) as one:
            row = one.execute("SELECT pg_backend_pid()").fetchone()
            assert row is not None
            pids.add(row[0])
    assert len(pids) <= 2


def test_the_store_works_through_a_pooler_in_session_mode(private_server: Callable[[str], Server]) -> None:
    """With the settings that the page tells users to write, and woken by notifications."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "use-postgres.md"
    assert f"ignore_startup_parameters = {IGNORED}\n" in page.read_text("utf-8")
    server = cast(PgBouncerServer, private_server("pgbouncer"))
    server.stop()
    server.pool_mode = "session"
    server.start()
    pooled, direct = server.create_database()
    migrate(direct)
    with Semel(PostgresStore(pooled, connections=1), sweep_every=None) as guard:
        assert [guard.run("sync", key=1, call=lambda: "ran") for _ in range(2)] == ["ran", "ran"]

    async def calls(driver: Literal["asyncpg", "psycopg"]) -> list[str]:
        store = AsyncPostgresStore(pooled, connections=1, driver=driver)
        async with AsyncSemel(store, sweep_every=None) as guard:

            async def call() -> str:
                ran.append(driver)
                return driver

            return await asyncio.gather(
                *(guard.run(driver, key=1, call=call, on_duplicate=Wait("30s")) for _ in range(4))
            )

    ran: list[str] = []
    assert asyncio.run(calls("asyncpg")) == ["asyncpg"] * 4
    assert asyncio.run(calls("psycopg")) == ["psycopg"] * 4
    assert ran == ["asyncpg", "psycopg"]


def test_the_pooler_and_its_server_leave_no_process(private_server: Callable[[str], Server]) -> None:
    server = cast(PgBouncerServer, private_server("pgbouncer"))
    pids = [server.pid, server.postgres.pid]
    assert all(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids)
    server.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
