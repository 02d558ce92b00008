"""Every kind of connection that a caller may hold, behind one small face, so that each test is written once.

A *till* is a connection of one kind with a guard beside it: it opens a transaction in the manner of that kind, has a
payment made in it by ``guard.transaction``, and commits.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

from semel import (
    AsyncMySQLStore,
    AsyncPostgresStore,
    AsyncSemel,
    AsyncSQLiteStore,
    MySQLStore,
    Outcome,
    PostgresStore,
    Semel,
    SQLiteStore,
)
from semel.sql.connections.adopt import adopt

TABLE = "CREATE TABLE IF NOT EXISTS payment (key text NOT NULL, worker integer NOT NULL DEFAULT 0)"
SQLITE = ("sqlite3", "sqlalchemy-pysqlite", "session-pysqlite", "django-sqlite")
ASYNC_SQLITE = ("aiosqlite", "sqlalchemy-aiosqlite", "session-aiosqlite")
POSTGRES = (
    "psycopg",
    "psycopg-autocommit",
    "sqlalchemy-psycopg",
    "session-psycopg",
    "scoped-psycopg",
    "django-postgres",
)
ASYNC_POSTGRES = (
    "asyncpg", "asyncpg-pool", "async-psycopg", "async-psycopg-autocommit", "sqlalchemy-asyncpg", "session-asyncpg",
    "sqlalchemy-async-psycopg", "session-async-psycopg", "scoped-asyncpg",
)  # fmt: skip
MYSQL = ("pymysql", "pymysql-autocommit", "sqlalchemy-pymysql", "session-pymysql", "django-mysql")
ASYNC_MYSQL = ("asyncmy", "asyncmy-autocommit", "sqlalchemy-asyncmy", "session-asyncmy")
ALL = (*SQLITE, *ASYNC_SQLITE, *POSTGRES, *ASYNC_POSTGRES, *MYSQL, *ASYNC_MYSQL)
AWAITED = (*ASYNC_SQLITE, *ASYNC_POSTGRES, *ASYNC_MYSQL)


def till(kind: str, url: str, **settings: Any) -> Till | AsyncTill:
    """A till of that kind; ``url`` is a file's path, or a PostgreSQL or MySQL URL."""
    return AsyncTill(kind, url, **settings) if kind in AWAITED else Till(kind, url, **settings)


def in_mysql(sql: str) -> str:
    """A statement of these tests as MySQL writes it: ``key`` is quoted, and text that is a key has an end."""
    return re.sub(r"\bkey\b(?! *\()", "`key`", sql.replace(" text", " varchar(100)")).replace(
        "PRIMARY `key`", "PRIMARY KEY"
    )


def own_style(kind: str, sql: str, values: list[Any]) -> tuple[str, Any]:
    """A statement with ``?`` for each value, as that kind of connection wants it."""
    if kind in ("sqlite3", "aiosqlite"):
        return sql, values
    if kind in MYSQL + ASYNC_MYSQL:
        sql = in_mysql(sql)
    texts = sql.split("?")
    names = [f"value_{at}" for at in range(len(values))]
    given: Any = values
    if kind.startswith(("sqlalchemy", "session", "scoped")):
        places, given = [f":{name}" for name in names], dict(zip(names, values, strict=True))
    elif kind.startswith("asyncpg"):
        places = [f"${at + 1}" for at in range(len(values))]
    else:
        places = ["%s"] * len(values)
    return "".join(a + b for a, b in zip(texts, [*places, ""], strict=True)), given


class Till:
    """On a sync connection. Every method is a plain call, whatever the kind is."""

    def __init__(self, kind: str, url: str, **settings: Any) -> None:
        self.kind = kind
        store: Any = (
            SQLiteStore(url) if kind in SQLITE
            else MySQLStore(url, connections=1) if kind in MYSQL
            else PostgresStore(url, connections=1, listen=False)
        )  # fmt: skip
        self.guard = Semel(store, sweep_every=None, **settings)
        self._life = OPEN[kind](url)
        self.conn, self.transaction, self.send = next(self._life)
        self.lent = adopt(self.conn)

    def pay(
        self, key: str, *, then: Callable[[], object] = lambda: None, call: Any = None, insert: bool = True, **how: Any
    ) -> Outcome[Any]:
        """One payment in one transaction; ``then`` runs inside of it, after the guard."""

        def work(op: Any) -> Any:
            if insert:
                self.send(f"INSERT INTO payment (key) VALUES ('{key}')")
            return {"paid": key} if call is None else call(op)

        if how.get("own_transaction"):
            return self.guard.run_in_transaction_outcome(self.conn, "pay", key=key, call=work, **how)
        with self.transaction():
            outcome = self.guard.run_in_transaction_outcome(self.conn, "pay", key=key, call=work, **how)
            then()
        return outcome

    def execute_once(self, key: str, sql: str, values: list[Any], **how: Any) -> Any:
        """One statement, which commits by itself if the connection is in autocommit."""
        statement, parameters = own_style(self.kind, sql, values)
        return self.guard.execute_once(self.conn, "pay", key=key, statement=statement, parameters=parameters, **how)

    def execute_within(self, key: str, sql: str, values: list[Any], **how: Any) -> Any:
        """One statement in a transaction of the caller's."""
        with self.transaction():
            return self.execute_once(key, sql, values, **how)

    def rows(self) -> list[str]:
        """The payments that are committed."""
        with self.transaction():
            return [row[0] for row in self.send("SELECT key FROM payment ORDER BY key")]

    def lookup(self, key: str) -> Any:
        return self.guard.lookup("pay", key)

    def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def close(self) -> None:
        next(self._life, None)
        self.guard.close()


class AsyncTill:
    """On an async connection, in an event loop of its own."""

    def __init__(self, kind: str, url: str, **settings: Any) -> None:
        self.kind = kind
        self.runner = asyncio.Runner()
        store: Any = (
            AsyncSQLiteStore(url) if kind in ASYNC_SQLITE
            else AsyncMySQLStore(url, connections=1) if kind in ASYNC_MYSQL
            else AsyncPostgresStore(url, connections=1, listen=False)
        )  # fmt: skip
        self.guard = AsyncSemel(store, sweep_every=None, **settings)
        self._life = OPEN[kind](url)
        self.conn, self.transaction, self.send = self.run(self._life.__anext__)
        self.lent = adopt(self.conn)

    def pay(self, key: str, **how: Any) -> Outcome[Any]:
        return self.runner.run(self.pay_async(key, **how))  # type: ignore[no-any-return]

    async def pay_async(
        self, key: str, *, then: Callable[[], object] = lambda: None, call: Any = None, insert: bool = True, **how: Any
    ) -> Outcome[Any]:
        async def work(op: Any) -> Any:
            if insert:
                await self.send(f"INSERT INTO payment (key) VALUES ('{key}')")
            return {"paid": key} if call is None else call(op)

        if how.get("own_transaction"):
            return await self.guard.run_in_transaction_outcome(self.conn, "pay", key=key, call=work, **how)
        async with self.transaction():
            outcome = await self.guard.run_in_transaction_outcome(self.conn, "pay", key=key, call=work, **how)
            then()
        return outcome

    def execute_once(self, key: str, sql: str, values: list[Any], **how: Any) -> Any:
        return self.runner.run(self.execute_async(key, sql, values, **how))

    async def execute_async(self, key: str, sql: str, values: list[Any], **how: Any) -> Any:
        statement, parameters = own_style(self.kind, sql, values)
        return await self.guard.execute_once(
            self.conn, "pay", key=key, statement=statement, parameters=parameters, **how
        )

    def execute_within(self, key: str, sql: str, values: list[Any], **how: Any) -> Any:
        async def within() -> Any:
            async with self.transaction():
                return await self.execute_async(key, sql, values, **how)

        return self.runner.run(within())

    def rows(self) -> list[str]:
        async def read() -> list[str]:
            async with self.transaction():
                return [row[0] for row in await self.send("SELECT key FROM payment ORDER BY key")]

        return self.runner.run(read())

    def lookup(self, key: str) -> Any:
        return self.run(lambda: self.guard.lookup("pay", key))

    def run(self, work: Callable[[], Any]) -> Any:
        async def inside() -> Any:
            return await work()

        return self.runner.run(inside())

    def close(self) -> None:
        async def end() -> None:
            async for _ in self._life:
                pass
            await self.guard.close()

        self.runner.run(end())
        self.runner.close()


# How each kind is opened: yields the connection, its transaction, and how it sends a statement of its own.


def _sqlite3(url: str) -> Iterator[Any]:
    conn = sqlite3.connect(url, timeout=20)
    conn.execute(TABLE)

    @contextmanager
    def transaction() -> Iterator[None]:
        with conn:
            yield

    yield conn, transaction, lambda sql: conn.execute(sql).fetchall()
    conn.close()


def _psycopg(url: str, autocommit: bool = False) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(url, autocommit=autocommit) as conn:

        def send(sql: str) -> Any:
            cursor = conn.execute(sql.encode())
            return cursor.fetchall() if cursor.description else ()

        yield conn, conn.transaction, send


def _psycopg_autocommit(url: str) -> Iterator[Any]:
    yield from _psycopg(url, True)


def mysql_parameters(url: str) -> dict[str, Any]:
    """A URL as MySQL's drivers want it."""
    parts = urlsplit(url)
    return {"host": parts.hostname, "port": parts.port, "user": parts.username, "database": parts.path[1:]}


def _pymysql(autocommit: bool) -> Callable[[str], Iterator[Any]]:
    def open(url: str) -> Iterator[Any]:
        import pymysql

        conn = pymysql.connect(**mysql_parameters(url), autocommit=autocommit)

        @contextmanager
        def transaction() -> Iterator[None]:
            conn.begin()
            try:
                yield
            except BaseException:
                conn.rollback()
                raise
            conn.commit()

        def send(sql: str) -> Any:
            with conn.cursor() as cursor:
                cursor.execute(in_mysql(sql))
                return cursor.fetchall()

        yield conn, transaction, send
        conn.close()

    return open


def _engine_url(url: str, driver: str) -> str:
    if "mysql" in url.partition(":")[0]:
        return url.replace("mysql:", f"mysql+{driver}:")
    return f"sqlite+{driver}:///{url}" if "sqlite" in driver else url.replace("postgresql:", f"postgresql+{driver}:")


def _answered(result: Any) -> Any:
    return result.fetchall() if result.returns_rows else ()


def _sqlalchemy(driver: str) -> Callable[[str], Iterator[Any]]:
    def open(url: str) -> Iterator[Any]:
        import sqlalchemy as sa

        engine = sa.create_engine(_engine_url(url, driver), poolclass=sa.NullPool)
        with engine.connect() as conn:
            if driver == "pysqlite":
                conn.execute(sa.text(TABLE))
                conn.commit()
            speak = in_mysql if driver == "pymysql" else str
            yield conn, conn.begin, lambda sql: _answered(conn.execute(sa.text(speak(sql))))
        engine.dispose()

    return open


def _session(driver: str, scoped: bool = False) -> Callable[[str], Iterator[Any]]:
    def open(url: str) -> Iterator[Any]:
        import sqlalchemy as sa
        from sqlalchemy import orm

        engine = sa.create_engine(_engine_url(url, driver), poolclass=sa.NullPool)
        make = orm.sessionmaker(engine)
        session: Any = orm.scoped_session(make) if scoped else make()
        if driver == "pysqlite":
            with session.begin():
                session.execute(sa.text(TABLE))
        speak = in_mysql if driver == "pymysql" else str
        yield session, session.begin, lambda sql: _answered(session.execute(sa.text(speak(sql))))
        session.close()
        engine.dispose()

    return open


_aliases = itertools.count(1)


def _django(vendor: str) -> Callable[[str], Iterator[Any]]:
    def open(url: str) -> Iterator[Any]:
        import django
        from django.apps import apps
        from django.conf import settings
        from django.db import connections, transaction

        if not settings.configured:
            settings.configure(LOGGING_CONFIG=None)
        if not apps.ready:
            django.setup()
        alias = f"till{next(_aliases)}"
        database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": url, "OPTIONS": {"timeout": 20}}
        if vendor == "postgresql":
            parts = urlsplit(url)
            database = {
                "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
                "HOST": parts.hostname, "PORT": parts.port,
            }  # fmt: skip
        if vendor == "mysql":
            import pymysql

            pymysql.install_as_MySQLdb()  # type: ignore[no-untyped-call]
            where = mysql_parameters(url)
            database = {
                "ENGINE": "django.db.backends.mysql", "NAME": where["database"], "USER": where["user"],
                "HOST": where["host"], "PORT": where["port"],
            }  # fmt: skip
        connections.settings[alias] = connections.configure_settings({"default": database})["default"]
        conn = connections[alias]

        def send(sql: str) -> Any:
            with conn.cursor() as cursor:
                cursor.execute(in_mysql(sql) if vendor == "mysql" else sql)
                return cursor.fetchall() if cursor.description else ()

        if vendor == "sqlite":
            send(TABLE)
        yield conn, lambda: transaction.atomic(using=alias), send
        conn.close()
        del connections[alias]

    return open


async def _aiosqlite(url: str) -> AsyncIterator[Any]:
    import aiosqlite

    conn = await aiosqlite.connect(url, timeout=20)
    await conn.execute(TABLE)

    @asynccontextmanager
    async def transaction() -> AsyncIterator[None]:
        await conn.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            await conn.rollback()
            raise
        await conn.commit()

    async def send(sql: str) -> Any:
        async with conn.execute(sql) as cursor:
            return await cursor.fetchall()

    yield conn, transaction, send
    await conn.close()


async def _asyncpg(url: str) -> AsyncIterator[Any]:
    import asyncpg

    conn = await asyncpg.connect(url)
    yield conn, conn.transaction, conn.fetch
    await conn.close()


async def _asyncpg_pool(url: str) -> AsyncIterator[Any]:
    import asyncpg

    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as conn:
        yield conn, conn.transaction, conn.fetch


def _async_psycopg(autocommit: bool) -> Callable[[str], AsyncIterator[Any]]:
    async def open(url: str) -> AsyncIterator[Any]:
        import psycopg

        async with await psycopg.AsyncConnection.connect(url, autocommit=autocommit) as conn:

            async def send(sql: str) -> Any:
                cursor = await conn.execute(sql.encode())
                return await cursor.fetchall() if cursor.description else ()

            yield conn, conn.transaction, send

    return open


def _asyncmy(autocommit: bool) -> Callable[[str], AsyncIterator[Any]]:
    async def open(url: str) -> AsyncIterator[Any]:
        import asyncmy

        conn = await asyncmy.connect(**mysql_parameters(url), autocommit=autocommit)

        @asynccontextmanager
        async def transaction() -> AsyncIterator[None]:
            await conn.begin()
            try:
                yield
            except BaseException:
                await conn.rollback()
                raise
            await conn.commit()

        async def send(sql: str) -> Any:
            async with conn.cursor() as cursor:
                await cursor.execute(in_mysql(sql))
                return await cursor.fetchall()

        yield conn, transaction, send
        await conn.ensure_closed()

    return open


def _async_sqlalchemy(driver: str) -> Callable[[str], AsyncIterator[Any]]:
    async def open(url: str) -> AsyncIterator[Any]:
        import sqlalchemy as sa
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(_engine_url(url, driver), poolclass=sa.NullPool)
        async with engine.connect() as conn:

            async def send(sql: str) -> Any:
                return _answered(await conn.execute(sa.text(in_mysql(sql) if driver == "asyncmy" else sql)))

            if driver == "aiosqlite":
                await send(TABLE)
                await conn.commit()
            yield conn, conn.begin, send
        await engine.dispose()

    return open


def _async_session(driver: str, scoped: bool = False) -> Callable[[str], AsyncIterator[Any]]:
    async def open(url: str) -> AsyncIterator[Any]:
        import sqlalchemy as sa
        from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine

        engine = create_async_engine(_engine_url(url, driver), poolclass=sa.NullPool)
        make = async_sessionmaker(engine)
        session: Any = async_scoped_session(make, scopefunc=lambda: 1) if scoped else make()

        async def send(sql: str) -> Any:
            return _answered(await session.execute(sa.text(in_mysql(sql) if driver == "asyncmy" else sql)))

        if driver == "aiosqlite":
            async with session.begin():
                await send(TABLE)
        yield session, session.begin, send
        await session.close()
        await engine.dispose()

    return open


OPEN: dict[str, Callable[[str], Any]] = {
    "sqlite3": _sqlite3,
    "sqlalchemy-pysqlite": _sqlalchemy("pysqlite"),
    "session-pysqlite": _session("pysqlite"),
    "django-sqlite": _django("sqlite"),
    "aiosqlite": _aiosqlite,
    "sqlalchemy-aiosqlite": _async_sqlalchemy("aiosqlite"),
    "session-aiosqlite": _async_session("aiosqlite"),
    "psycopg": _psycopg,
    "psycopg-autocommit": _psycopg_autocommit,
    "sqlalchemy-psycopg": _sqlalchemy("psycopg"),
    "session-psycopg": _session("psycopg"),
    "scoped-psycopg": _session("psycopg", scoped=True),
    "django-postgres": _django("postgresql"),
    "asyncpg": _asyncpg,
    "asyncpg-pool": _asyncpg_pool,
    "async-psycopg": _async_psycopg(False),
    "async-psycopg-autocommit": _async_psycopg(True),
    "sqlalchemy-asyncpg": _async_sqlalchemy("asyncpg"),
    "session-asyncpg": _async_session("asyncpg"),
    "scoped-asyncpg": _async_session("asyncpg", scoped=True),
    "sqlalchemy-async-psycopg": _async_sqlalchemy("psycopg"),
    "session-async-psycopg": _async_session("psycopg"),
    "pymysql": _pymysql(False),
    "pymysql-autocommit": _pymysql(True),
    "sqlalchemy-pymysql": _sqlalchemy("pymysql"),
    "session-pymysql": _session("pymysql"),
    "django-mysql": _django("mysql"),
    "asyncmy": _asyncmy(False),
    "asyncmy-autocommit": _asyncmy(True),
    "sqlalchemy-asyncmy": _async_sqlalchemy("asyncmy"),
    "session-asyncmy": _async_session("asyncmy"),
}
