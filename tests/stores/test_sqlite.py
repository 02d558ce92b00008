"""SQLite: the conformance suite, sync and async, with a second instance on the same file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from semel import AsyncSQLiteStore, SQLiteStore
from semel.testing import conformance

pytestmark = pytest.mark.slow  # most of it waits for leases to end, and for the disk


class TestSQLiteStore(conformance.StoreSuite):
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], SQLiteStore]:
        return lambda: SQLiteStore(tmp_path / "records.db")


class TestAsyncSQLiteStore(conformance.AsyncStoreSuite):
    sampled = True
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], AsyncSQLiteStore]:
        return lambda: AsyncSQLiteStore(tmp_path / "records.db")
