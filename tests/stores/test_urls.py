"""A URL that names no store is refused in words that show one that does."""

from __future__ import annotations

import pytest

from semel import StoreURLError
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
