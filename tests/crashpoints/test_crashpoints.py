"""Killed, or with a failing store, at every point: the harness finds what is careless, and passes what is not."""

from __future__ import annotations

import pytest

from semel.testing.crashpoints import CrashFailure, break_everywhere, crash_everywhere
from semel.testing.plugin import Crashpoints, crashpoints
from tests.crashpoints import scenarios

__all__ = ["crashpoints"]

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("operation", "check"),
    [
        (scenarios.leased_with_derived_key, scenarios.one_charge),
        (scenarios.at_most_once, scenarios.at_most_one_charge_and_said_so),
        (scenarios.steps, scenarios.one_of_each),
    ],
    ids=["leased", "at-most-once", "steps"],
)
@pytest.mark.parametrize("harness", [crash_everywhere, break_everywhere], ids=["killed", "store-fails"])
def test_every_mode_holds_at_every_point(harness, operation, check) -> None:  # type: ignore[no-untyped-def]
    report = harness(scenarios.folder, operation, check, teardown=scenarios.remove)
    assert len(report.points) >= 4
    assert len(set(report.points)) == len(report.points)


def test_what_cannot_be_sent_to_another_process_is_said() -> None:
    with pytest.raises(TypeError, match="the operation must be picklable"):
        crash_everywhere(lambda: "a world", lambda world: None, lambda world: None)
    with pytest.raises(CrashFailure, match=r"what setup\(\) returns must be picklable"):
        crash_everywhere(lambda: lambda: "a world", scenarios.broken, scenarios.one_charge)


def test_an_operation_that_fails_by_itself_is_no_crash(crashpoints: Crashpoints) -> None:
    with pytest.raises(CrashFailure, match="ZeroDivisionError"):
        crashpoints.kill(scenarios.folder, scenarios.broken, scenarios.one_charge, teardown=scenarios.remove)


def test_the_fixture_is_the_same(crashpoints: Crashpoints) -> None:
    report = crashpoints.fail(
        scenarios.folder, scenarios.leased_with_derived_key, scenarios.one_charge, teardown=scenarios.remove
    )
    assert report.points == [
        "the store failed before Claim (Op 1)",
        "the store failed before Complete (Op 2)",
        "the store failed after Claim (Op 1)",
        "the store failed after Complete (Op 2)",
    ]


def test_a_careless_effect_is_found() -> None:
    with pytest.raises(CrashFailure, match="2 charges"):
        crash_everywhere(
            scenarios.folder, scenarios.leased_and_careless, scenarios.one_charge, teardown=scenarios.remove
        )
