"""The engines that scenarios run on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.driving import ENGINES, Engine, engine_of, renew_early


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Both engines, one on memory and one on SQLite."""
    yield from engine_of(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=["sync-memory", "async-memory"])
def quick_engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Both engines, on memory: for what the store has no part in."""
    yield from engine_of(request.param, tmp_path, monkeypatch)


@pytest.fixture
def renews_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards renew their leases long before they need to: see ``renew_early``."""
    renew_early(monkeypatch)
