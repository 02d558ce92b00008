"""Fixtures for pytest: ``pytest_plugins = ["semel.testing.plugin"]`` in a ``conftest.py``."""

from __future__ import annotations

import pytest

from semel.testing.crashpoints import break_everywhere, crash_everywhere

__all__ = ["Crashpoints", "crashpoints"]


class Crashpoints:
    """``crashpoints.kill(setup, operation, check)`` and ``crashpoints.fail(…)``; see ``semel.testing.crashpoints``."""

    kill = staticmethod(crash_everywhere)
    fail = staticmethod(break_everywhere)


@pytest.fixture
def crashpoints() -> Crashpoints:
    """Crashes at every point of an operation."""
    return Crashpoints()
