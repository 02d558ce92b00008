"""A URL that names no store is refused in words that show one that does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, Policy, PolicyError, Quota, Semel, SQLiteStore, StoreUnavailable
from semel.errors import StoreURLError
from semel.stores.settings import plain_url
from semel.stores.urls import check_store, migrate_store, open_async_store, open_store


@pytest.mark.parametrize("url", ["app.db", "./app.db", "postgresql", ""])
def test_a_file_name_is_no_url(url: str) -> None:
    for opened in (open_store, open_async_store):
        with pytest.raises(
            StoreURLError, match=r"is no URL: write sqlite:///app\.db for a file, .*; there are also: memory"
        ):
            opened(url)


@pytest.mark.parametrize("url", ["sqlite:app.db", "sqlite://app.db"])
def test_slashes_that_are_missing_are_shown(url: str) -> None:
    with pytest.raises(StoreURLError, match=r"is no SQLite URL: write sqlite:///file\.db"):
        open_store(url)


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(StoreURLError, match=r"no store is called 'mongodb'; there are: memory, sqlite, postgresql"):
        open_store("mongodb://localhost/app")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"host=db.internal user=app password={SECRET} dbname=shop",
        f"host=db.internal password={SECRET}:x",
        f"password={SECRET}",
        f"app:{SECRET}@db.internal/shop",
        f"{SECRET}:x@db.internal/shop",
        SECRET,
        f"postgresql//app:{SECRET}@db.internal/shop",
        f"postgresql+{SECRET}@db.internal:5432/shop",
        f"//app:{SECRET}@db.internal/shop",
        f"sqlite://app:{SECRET}@db.internal/shop",
        f"sqlite://app:[{SECRET}@h/shop",
        f"sqlite://\u2100{SECRET}/shop",
        f"mongodb://app:{SECRET}@db.internal/shop",
        f"mysql://app:x?{SECRET}=y@db.internal/shop",
        f"mysql://app:\u2100{SECRET}@db.internal/shop",
        f"redis://:x?{SECRET}=y@db.internal",
        f"redis://:x/{SECRET}@db.internal",
        f"redis://:\u2100{SECRET}@db.internal",
        f"dynamodb://app:{SECRET}@eu-central-1/semel",
        f"dynamodb://\u2100{SECRET}/semel",
        f"tiered:host=db.internal password={SECRET},redis://cache.internal",
        f"tiered:postgresql://app:{SECRET}@db.internal/shop",
        f"tiered:mongodb://app:{SECRET}@db.internal/shop,redis://cache.internal",
    ],
)
def test_what_cannot_be_read_is_never_quoted(url: str) -> None:
    tables = () if url.startswith("redis:") else (migrate_store, check_store)
    for use in (open_store, open_async_store, *tables):
        with pytest.raises(StoreURLError) as refused:
            use(url)
        assert SECRET not in str(refused.value)
        assert SECRET not in str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("postgresql+asyncpg://app:p%40w@h:5433/shop", "postgresql://app:p%40w@h:5433/shop"),
        ("postgresql+asyncpg://h/shop?a=b&ssl=require", "postgresql://h/shop?a=b&sslmode=require"),
        ("postgresql+psycopg://h/shop?sslmode=require", "postgresql://h/shop?sslmode=require"),
        ("postgresql+psycopg2://h/shop", "postgresql://h/shop"),
        ("mysql+pymysql://h/shop?charset=utf8mb4", "mysql://h/shop?charset=utf8mb4"),
        ("mariadb+asyncmy://h/shop", "mariadb://h/shop"),
        ("sqlite+aiosqlite:///app.db", "sqlite:///app.db"),
        ("redis+cluster://h", "redis+cluster://h"),
        ("postgresql://a+b:c@h/shop", "postgresql://a+b:c@h/shop"),
    ],
)
def test_the_driver_of_an_sqlalchemy_url_is_left_out(url: str, plain: str) -> None:
    assert plain_url(url) == plain


def test_a_sqlalchemy_url_of_a_file_opens_it(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'app.db'}"
    assert migrate_store(url)
    check_store(url)
    with Semel(url, sweep_every=None) as guard:
        assert guard.run("ship", key=1, call=lambda: "shipped") == "shipped"
    assert asyncio.run(_replays(url))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg2"])
def test_a_sqlalchemy_url_of_postgresql_opens_it(postgres_url: str, driver: str) -> None:
    url = postgres_url.replace("postgresql://", f"postgresql+{driver}://", 1)
    migrate_store(url)
    check_store(url)
    with Semel(url, sweep_every=None) as guard:
        guard.run("ship", key=driver, call=lambda: "shipped")
    assert asyncio.run(_replays(url, driver))


@pytest.mark.parametrize("driver", ["pymysql", "asyncmy", "mysqldb"])
def test_a_sqlalchemy_url_of_mysql_opens_it(mariadb_url: str, driver: str) -> None:
    scheme, separator, rest = mariadb_url.partition("://")
    url = f"{scheme}+{driver}{separator}{rest}{'&' if '?' in rest else '?'}charset=utf8mb4"
    migrate_store(url)
    check_store(url)
    with Semel(url, sweep_every=None) as guard:
        guard.run("ship", key=driver, call=lambda: "shipped")
    assert asyncio.run(_replays(url, driver))


async def _replays(url: str, key: object = 1) -> bool:
    async with AsyncSemel(url, sweep_every=None) as guard:
        return (await guard.run_outcome("ship", key=key, call=_never)).replayed


# -- a guard by the URL of its store


def test_a_guard_takes_the_url_of_its_store_and_closes_it_with_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with Semel(url, sweep_every=None) as guard:
        assert guard.run("ship", key=1, call=lambda: "shipped") == "shipped"
        assert _open_files(tmp_path)
    assert not _open_files(tmp_path)
    with Semel(SQLiteStore(tmp_path / "app.db"), sweep_every=None) as other:
        assert other.run_outcome("ship", key=1, call=lambda: "again").replayed


def test_an_async_guard_takes_the_url_of_its_store(tmp_path: Path) -> None:
    async def call() -> str:
        return "shipped"

    async def main() -> None:
        async with AsyncSemel(f"sqlite:///{tmp_path / 'app.db'}", sweep_every=None) as guard:
            assert await guard.run("ship", key=1, call=call) == "shipped"
            assert (await guard.run_outcome("ship", key=1, call=call)).replayed
        assert not _open_files(tmp_path)

    asyncio.run(main())


def test_a_guard_by_url_works_on_a_server(redis_url: str) -> None:
    with Semel(redis_url, sweep_every=None) as guard:
        assert guard.run("ship", key=1, call=lambda: "shipped") == "shipped"

    async def main() -> bool:
        async with AsyncSemel(redis_url, sweep_every=None) as twin:
            return (await twin.run_outcome("ship", key=1, call=_never)).replayed

    assert asyncio.run(main()) is True
    with pytest.raises(StoreUnavailable):
        guard.run("ship", key=2, call=lambda: "late")


async def _never() -> str:
    raise AssertionError("it has run before")


@pytest.mark.parametrize("guard", [Semel, AsyncSemel])
def test_a_guard_says_of_a_url_what_a_store_by_url_says(guard: Any) -> None:
    with pytest.raises(StoreURLError, match=r"no store is called 'mongodb'; there are: memory, sqlite, postgresql"):
        guard("mongodb://localhost/app")
    with pytest.raises(StoreURLError, match=r"is no URL: write sqlite:///app\.db for a file"):
        guard("app.db")
    with pytest.raises(ConfigurationError, match=r"or its URL, 'sqlite:///app\.db', not None"):
        guard(None)


def test_a_guard_that_is_set_up_wrongly_opens_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with pytest.raises(PolicyError):
        Semel(url, sweep_every="soon")
    with pytest.raises(ConfigurationError, match="quota="):
        Semel(url, quota=7)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with Semel(url, quota=Quota(live_keys=1), policy=Policy(ttl="7d"), tenant="acme", sweep_every=None) as guard:
        assert guard.policy.ttl == "7d"


def _open_files(folder: Path) -> list[str]:
    fds = Path("/proc/self/fd")
    if not fds.exists():
        pytest.skip("what is open is asked of /proc")
    links = [os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink() and os.path.lexists(fd)]
    return [link for link in links if link.startswith(str(folder))]
