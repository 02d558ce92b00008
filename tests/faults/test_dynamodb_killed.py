"""Writes that go with the completion, in a process that is killed between any two calls: the ledger is exact."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import get_args

import pytest

from tests.faults import dynamodb_transfers as transfers
from tests.partial_failures.nursery import Nursery
from tests.servers import DynamoDBServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]
MOST_CALLS = 20
MOMENTS: tuple[transfers.Moment, ...] = get_args(transfers.Moment)


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    """Forked from one that has read everything once."""
    nursery = Nursery(transfers.run, transfers.prepare)
    yield nursery
    nursery.close()


@pytest.mark.parametrize(
    ("operation", "check", "calls", "moment"),
    [
        *(pytest.param(transfers.pay, transfers.paid_once, 2, moment, id=f"sync-{moment}") for moment in MOMENTS),
        # The event loop's calls are the same ones: the worst of the moments will do.
        pytest.param(transfers.pay_async, transfers.paid_once, 2, "lost", id="async-lost"),
        pytest.param(transfers.overdraw, transfers.paid_never, 4, "lost", id="refused-lost"),
    ],
)
def test_the_ledger_is_exact_after_a_failure_at_any_call(
    dynamodb: DynamoDBServer,
    processes: Nursery,
    operation: Callable[[transfers.World], None],
    check: Callable[[transfers.World], None],
    calls: int,
    moment: transfers.Moment,
) -> None:
    make, met = transfers.worlds(dynamodb.table()), 0
    for at in range(1, MOST_CALLS):
        world = make()
        code = processes.run((operation, world, moment, at))
        if code == 0:
            break  # it made fewer calls than that
        # A renewal on the side may be under way still when the operation is over.
        assert code in (transfers.MET, -signal.SIGKILL), f"{moment} call {at}"
        met += code == (transfers.MET if moment == "lost" else -signal.SIGKILL)
        assert processes.run((operation, world, None, 0)) == 0, f"no answer after {moment} call {at}"
        check(world)
    assert met >= calls
