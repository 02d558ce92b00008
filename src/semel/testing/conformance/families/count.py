"""Count: how many live records a tenant has, up to a limit. For stores that declare ``counts``.

Every proof has a tenant of its own, so that the records of other proofs do not count.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from semel.core.ops import Claimed, Complete, Count, Release
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import claim, drained, won
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Batch,
    Elsewhere,
    Family,
    Request,
    Script,
    Together,
    new_id,
)

FAMILY = Family("count")
MANY = 1000


def new_tenant() -> str:
    return f"tenant {new_id().hex()}"


def held(
    tenant: str, *, lease: float = LIVE, ttl: float = TTL, takeover: Takeover = Takeover.RETRY
) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    id = new_id()
    return id, (yield from won(claim(id, tenant=tenant, lease=lease, ttl=ttl, takeover=takeover)))


@FAMILY(counts=True)
def a_tenant_without_records_has_none() -> Script:
    assert (yield Count(new_tenant(), MANY)) == 0


@FAMILY(counts=True)
def every_live_record_is_counted_whatever_its_state() -> Script:
    tenant = new_tenant()
    yield from held(tenant)
    yield from held(tenant, ttl=SHORT)  # its owner is still running after the ttl
    done, claimed = yield from held(tenant)
    assert (yield Complete(done, claimed.token, b"answer", TTL)) is True
    lost, claimed = yield from held(tenant)
    assert (yield Release(lost, claimed.token, State.UNKNOWN)) is True
    yield from held(tenant, lease=SHORT)
    yield from held(tenant, lease=SHORT, ttl=SHORT, takeover=Takeover.REJECT)  # in doubt, so it does not expire
    yield PAST_SHORT
    assert (yield Count(tenant, MANY)) == 6
    assert (yield Elsewhere(Count(tenant, MANY))) == 6


@FAMILY(counts=True)
def what_has_expired_or_was_let_go_is_not_counted() -> Script:
    tenant = new_tenant()
    yield from held(tenant)
    done, claimed = yield from held(tenant)
    assert (yield Complete(done, claimed.token, b"old", SHORT)) is True
    yield from held(tenant, lease=SHORT, ttl=SHORT)
    free, claimed = yield from held(tenant)
    assert (yield Release(free, claimed.token)) is True
    yield PAST_SHORT
    assert (yield Count(tenant, MANY)) == 1


@FAMILY(counts=True)
def a_sweep_changes_no_count() -> Script:
    """The records that it removes were not counted before, and those that it makes unknown still count."""
    tenant = new_tenant()
    yield from held(tenant)
    yield from held(tenant, lease=SHORT, ttl=SHORT)
    yield from held(tenant, lease=SHORT, ttl=SHORT, takeover=Takeover.REJECT)
    yield PAST_SHORT
    assert (yield Count(tenant, MANY)) == 2
    yield from drained()
    assert (yield Count(tenant, MANY)) == 2


@FAMILY(counts=True)
def other_tenants_do_not_count() -> Script:
    tenant, other = new_tenant(), new_tenant()
    for _ in range(3):
        yield from held(tenant)
    yield from held(other)
    assert (yield Batch([Count(tenant, MANY), Count(other, MANY), Count(tenant.upper(), MANY)])) == [3, 1, 0]


@FAMILY(counts=True)
def it_is_counted_no_further_than_asked() -> Script:
    tenant = new_tenant()
    for _ in range(5):
        yield from held(tenant)
    for limit, counted in ((1, 1), (4, 4), (5, 5), (6, 5)):
        assert (yield Count(tenant, limit)) == counted


@FAMILY(counts=True)
def without_a_tenant_those_of_no_tenant_are_counted() -> Script:
    before = yield Count("", MANY)
    yield from held("")
    yield from held("")
    yield from held(new_tenant())
    assert (yield Count("", MANY)) == before + 2


@FAMILY(counts=True)
def a_count_sees_what_the_same_batch_did_before_it() -> Script:
    tenant = new_tenant()
    first, second = (claim(new_id(), tenant=tenant) for _ in range(2))
    answers = yield Batch([first, second, Count(tenant, MANY)])
    assert answers[2] == 2


@FAMILY(counts=True)
def counting_among_claims_loses_nobody() -> Script:
    tenant = new_tenant()
    claims = [claim(new_id(), tenant=tenant) for _ in range(10)]
    answers = yield Together([*claims, Count(tenant, MANY), Elsewhere(Count(tenant, MANY))])
    assert all(0 <= counted <= 10 for counted in answers[10:])
    assert (yield Count(tenant, MANY)) == 10
