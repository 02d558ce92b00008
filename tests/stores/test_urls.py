"""A URL that names no store is refused in words that show one that does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, Policy, PolicyError, Quota, Semel, SQLiteStore, StoreUnavailable
from semel.errors import StoreURLError
from semel.stores.urls import open_async_store, open_store


@pytest.mark.parametrize("url", ["app.db", "./app.db", "postgresql", ""])
def test_a_file_name_is_no_url(url: str) -> None:
    for opened in (open_store, open_async_store):
        with pytest.raises(
            StoreURLError, match=r"is no URL: write sqlite:///app\.db for a file; there are also: memory"
        ):
            opened(url)


@pytest.mark.parametrize("url", ["sqlite:app.db", "sqlite://app.db"])
def test_slashes_that_are_missing_are_shown(url: str) -> None:
    with pytest.raises(StoreURLError, match=r"is no SQLite URL: write sqlite:///file\.db"):
        open_store(url)


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(StoreURLError, match=r"no store is called 'mongodb'; there are: memory, sqlite, postgresql"):
        open_store("mongodb://localhost/app")


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
    with pytest.raises(StoreURLError, match=r"'app\.db' is no URL: write sqlite:///app\.db for a file"):
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
