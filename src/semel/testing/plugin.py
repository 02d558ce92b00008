"""Fixtures for pytest: ``pytest_plugins = ["semel.testing.plugin"]`` in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from semel.testing.crashpoints import Report, break_everywhere, crash_everywhere

__all__ = ["Crashpoints", "crashpoints"]

W = TypeVar("W")


class Crashpoints:
    """``crashpoints.kill(setup, operation, check)`` and ``crashpoints.fail(…)``; see ``semel.testing.crashpoints``."""

    def kill(
        self, setup: Callable[[], W], operation: Callable[[W], Any], check: Callable[[W], None], **settings: Any
    ) -> Report:
        """Kill the operation before and after every call to a database."""
        return crash_everywhere(setup, operation, check, **settings)

    def fail(
        self, setup: Callable[[], W], operation: Callable[[W], Any], check: Callable[[W], None], **settings: Any
    ) -> Report:
        """Let the store fail before and after every Op."""
        return break_everywhere(setup, operation, check, **settings)


@pytest.fixture
def crashpoints() -> Crashpoints:
    """Crashes at every point of an operation."""
    return Crashpoints()
