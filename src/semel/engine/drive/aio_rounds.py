# Twin: rounds.py is generated from this file by make twins.
# Twin: aio_keeper.py -> keeper.py
"""What a keeper sends to the store: renewals of the leases that are due, outcomes of the backlog, and sweeps.

When it does so is decided in ``aio_keeper.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from semel.core.ops import Op, Sweep
from semel.engine.drive.leases import Leases
from semel.engine.ports import AsyncStore
from semel.errors import StoreUncertain

SWEEP_LIMIT: Final = 1000
"""Records removed in one step of a sweep."""
SWEEP_STEPS: Final = 100
"""Steps of one background sweep."""
SWEEP_AGAIN: Final = 1.0
"""Seconds until the next sweep after one that has reached this bound: more expires than ``sweep_every`` removes."""


async def renew_async(store: AsyncStore, leases: Leases) -> None:
    """Renew the leases that are due, in as few round trips as ``Leases.trips`` allows."""
    for due in leases.trips(time.monotonic()):
        sent = time.monotonic()
        answers = await execute_all_async(store, [lease.renewal() for lease in due])
        leases.note_renewals(due, answers, sent, time.monotonic())


async def execute_all_async(store: AsyncStore, ops: Sequence[Op[Any]]) -> list[Any]:
    """Execute the Ops. The answer of one that failed is its error, whatever the store raises or leaves out."""
    try:
        answers = list(await store.execute_many(ops))
    except Exception as error:  # a store that breaks its contract must not end the keeper
        answers = [error]
    return [*answers, *[StoreUncertain("the store did not answer") for _ in ops]][: len(ops)]


async def sweep_async(store: AsyncStore, on_swept: Callable[[int, int], None], closed: Callable[[], bool]) -> bool:
    """Remove expired records. Returns whether there is more to remove than one sweep may take."""
    for _ in range(SWEEP_STEPS):
        try:
            swept = await store.execute(Sweep(SWEEP_LIMIT))
            on_swept(swept.removed, swept.unknown)
        except Exception:  # the next sweep tries again, and the keeper must not end
            return False
        if swept.removed + swept.unknown < SWEEP_LIMIT or closed():
            return False
    return True
