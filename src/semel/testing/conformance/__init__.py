"""The conformance suite for stores: derive a test class from ``StoreSuite`` or ``AsyncStoreSuite``.

::

    class TestMyStore(conformance.StoreSuite):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda: MyStore(tmp_path / "records.db")

Needs pytest. The comparison with the model also needs Hypothesis, and is skipped without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

_WITH_ASSERTIONS = ("claims", "concurrency", "lifetimes", "listing", "owners", "script", "steps", "aio_stage", "stage")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _WITH_ASSERTIONS))

from semel.testing.conformance.aio_stage import AsyncStage  # noqa: E402
from semel.testing.conformance.script import (  # noqa: E402
    Batch,
    Elapse,
    Elsewhere,
    Family,
    Linger,
    ManualClock,
    MovableClock,
    Proof,
    Script,
    Together,
    WaitForChange,
)
from semel.testing.conformance.stage import Stage, play  # noqa: E402
from semel.testing.conformance.suite import FAMILIES, AsyncStoreSuite, StoreSuite, play_async  # noqa: E402

if TYPE_CHECKING:
    from semel.testing.conformance.machine import async_machine_for as async_machine_for
    from semel.testing.conformance.machine import check as check
    from semel.testing.conformance.machine import machine_for as machine_for

__all__ = [
    "FAMILIES", "AsyncStage", "AsyncStoreSuite", "Batch", "Elapse", "Elsewhere", "Family", "Linger", "ManualClock",
    "MovableClock", "Proof", "Script", "Stage", "StoreSuite", "Together", "WaitForChange", "async_machine_for", "check",
    "machine_for", "play", "play_async",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("machine_for", "async_machine_for", "check"):  # the only part that needs Hypothesis
        from semel.testing.conformance import machine

        return getattr(machine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
