"""A PostgreSQL database full of finished records: copies of one that the store itself wrote, under ids of their own.

They are inserted in the order of their making, so the ids, which are hashes, come in no order: the indexes look as they
do in a service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.large_store import KEY, LIFE, Full, sample
from semel import AsyncPostgresStore
from semel.stores.postgres import migrate

__all__ = ["full_postgres"]

_COPY: Final = """
INSERT INTO semel_record (
    id, state, takeover, awaited, attempt, steps, token, origin, nonce, lease_end, created, expires, sweep_after,
    fingerprint, tenant, operation, key, snapshot
)
SELECT substr(sha256(int8send(number)), 1, 16), state, takeover, awaited, attempt, steps, token + number,
       token + number, nonce, lease_end, created, ends, ends, fingerprint, tenant, operation,
       lpad(number::text, %(width)s, '0'), snapshot
FROM semel_record, generate_series(%(start)s::bigint, %(last)s::bigint) AS number,
     LATERAL (SELECT clock_timestamp() + make_interval(secs => %(delay)s + (number - %(start)s) * %(pace)s)) AS t (ends)
WHERE id = %(id)s
"""
_LEFT: Final = "SELECT count(*) FROM semel_record WHERE sweep_after <= clock_timestamp() - interval '2 seconds'"
AT_ONCE: Final = 250_000
"""Records of one transaction."""


@contextmanager
def full_postgres() -> Iterator[FullPostgres]:
    """An empty server of our own, as it comes: its settings are the defaults."""
    from tests.servers import PostgresServer

    with PostgresServer() as server:
        yield FullPostgres(server, server.url)


class FullPostgres(Full):
    name = "PostgreSQL"

    def __init__(self, server: Any, url: str) -> None:
        super().__init__(server.pid)
        self._url = url
        migrate(url)

    def store(self) -> AsyncPostgresStore:
        return AsyncPostgresStore(self._url)

    def fill(self, start: int, count: int) -> None:
        self._execute("ALTER SYSTEM SET max_wal_size = '8GB'")  # else it is checkpoints that take the time
        self._execute("SELECT pg_reload_conf()")
        self._insert(start, count, LIFE, 0.0)
        self._execute("VACUUM (ANALYZE) semel_record")
        self._execute("CHECKPOINT")
        self._execute("ALTER SYSTEM RESET max_wal_size")
        self._execute("SELECT pg_reload_conf()")

    def expire(self, start: int, count: int, rate: float, delay: float) -> None:
        self._insert(start, count, delay, 1 / rate)

    def left(self) -> int:
        found: int = self._execute(_LEFT)
        return found

    def _insert(self, start: int, count: int, delay: float, pace: float) -> None:
        id = asyncio.run(self._sampled())
        for first in range(start, start + count, AT_ONCE):
            last = min(first + AT_ONCE, start + count) - 1
            settled = delay + (first - start) * pace
            self._execute(
                _COPY, {"delay": settled, "pace": pace, "start": first, "last": last, "width": len(KEY), "id": id}
            )

    async def _sampled(self) -> bytes:
        store = self.store()
        try:
            return await sample(store)
        finally:
            await store.close()

    def _execute(self, statement: str, values: dict[str, Any] | None = None) -> Any:
        import psycopg

        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values)
            return cursor.fetchone()[0] if cursor.description else None  # type: ignore[index]
