"""The keeper tells traffic from silence by how many leases have begun; else every short call would wake its thread."""

from __future__ import annotations

from typing import Any, cast

from semel.engine.drive.leases import Lease, Leases


class _Held:
    span = 30.0


def test_a_lease_that_came_and_went_counts_as_traffic() -> None:
    leases = Leases()
    lease = cast(Lease, cast(Any, _Held()))
    leases.hold(lease)
    leases.drop(lease)
    assert len(leases) == 0
    assert leases.begun == 1
