"""How long a record lives.

Expiry: after its ttl a record is absent, even before it is swept, unless its outcome is in doubt.
Sweep: expired records are removed in bounded batches, those in doubt become unknown, and others are unchanged.
Count: how many live records a tenant has, up to a limit. For stores that declare ``counts``.
"""

from __future__ import annotations

from semel.core.ops import FOREVER, Complete, Count, Lookup, Release, Renew, Resolve, Sweep, Swept
from semel.core.states import State, Takeover
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Batch,
    Elsewhere,
    Family,
    Script,
    Together,
    abandoned,
    abandoned_many,
    assert_unchanged,
    charged,
    claim,
    done,
    drained,
    new_id,
    running,
    several,
    shown,
    unknown,
    won,
)

EXPIRY = Family("expiry")


@EXPIRY()
def an_answer_past_its_ttl_is_absent() -> Script:
    id, old = yield from done(b"old", ttl=SHORT)
    yield PAST_SHORT
    assert (yield Lookup(id)) is None
    claimed = yield from won(claim(id))
    assert (claimed.attempt, claimed.steps, claimed.token > old.token) == (1, (), True)


@EXPIRY()
def an_answer_may_expire_sooner_than_its_claim_promised() -> Script:
    id, _ = yield from done(ttl=TTL, answer_ttl=SHORT)
    yield PAST_SHORT
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).attempt == 1


@EXPIRY()
def an_answer_may_live_longer_than_its_claim_promised() -> Script:
    id, _ = yield from done(b"kept", ttl=SHORT, answer_ttl=TTL)
    yield PAST_SHORT
    yield Sweep(1000)
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"kept"


@EXPIRY()
def an_abandoned_attempt_past_its_ttl_is_absent_when_it_may_be_run_again() -> Script:
    id, old = yield from abandoned(ttl=SHORT)
    assert (yield Lookup(id)) is None
    claimed = yield from won(claim(id, takeover=Takeover.REJECT))
    assert (claimed.attempt, claimed.token > old.token) == (1, True)


@EXPIRY()
def an_abandoned_attempt_past_its_ttl_is_never_absent_when_it_may_not_be_run_again() -> Script:
    for stored in (Takeover.REJECT, Takeover.RECOVER):
        for requested in Takeover:
            id, old = yield from abandoned(ttl=SHORT, takeover=stored)
            record = yield Lookup(id)
            assert (record.state, record.token) == (State.ABANDONED, old.token)
            if requested is Takeover.RECOVER:
                assert (yield from won(claim(id, takeover=requested))).attempt == 2
            else:
                yield from shown(claim(id, takeover=requested), State.UNKNOWN)
                assert (yield Lookup(id)).token == old.token


@EXPIRY()
def a_mismatching_claim_past_the_ttl_is_a_first_claim() -> Script:
    """Nothing of an expired record remains, not even its fingerprint."""
    for finished in (True, False):
        # A record that is completed in time needs a lease that holds until then.
        lease = LIVE if finished else SHORT
        id, old = yield from running(fingerprint=b"f" * 16, lease=lease, ttl=SHORT, key="old")
        if finished:
            assert (yield Complete(id, old.token, b"old", SHORT)) is True
        yield PAST_SHORT
        assert (yield from won(claim(id, fingerprint=b"g" * 16, key="new"))).attempt == 1
        record = yield Lookup(id)
        assert (record.fingerprint, record.key, record.snapshot) == (b"g" * 16, "new", None)


@EXPIRY()
def nothing_of_an_expired_record_is_left_in_the_next() -> Script:
    id, old = yield from charged(ttl=SHORT)
    assert (yield Complete(id, old.token, b"old", SHORT)) is True
    yield PAST_SHORT
    new = yield from won(claim(id, takeover=Takeover.RECOVER, tenant="other", operation="other", key=None))
    assert (new.attempt, new.steps) == (1, ())
    record = yield Lookup(id)
    assert (record.tenant, record.operation, record.key) == ("other", "other", None)
    assert (record.snapshot, record.attempt, record.state) == (None, 1, State.RUNNING)
    assert record.age < LIVE
    assert LIVE < record.expires_in <= TTL
    assert (yield Release(id, new.token, State.ABANDONED)) is True
    yield from shown(claim(id), State.UNKNOWN)  # the takeover rule is that of the new record


@EXPIRY()
def a_live_attempt_outlives_its_ttl() -> Script:
    id, claimed = yield from running(ttl=SHORT)
    yield PAST_SHORT
    yield Sweep(1000)
    record = yield from shown(claim(id), State.RUNNING)
    assert record.token == claimed.token
    assert (yield Renew(id, claimed.token, LIVE)) is True
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@EXPIRY()
def what_is_unknown_never_expires() -> Script:
    given_up, _ = yield from unknown(ttl=SHORT)
    refused, _ = yield from abandoned(ttl=SHORT, takeover=Takeover.REJECT)
    yield from shown(claim(refused), State.UNKNOWN)
    yield PAST_SHORT
    yield from drained()
    for id in (given_up, refused):
        assert (yield Lookup(id)).state is State.UNKNOWN
        yield from shown(claim(id), State.UNKNOWN)


@EXPIRY()
def a_late_answer_to_what_was_unknown_lives_its_ttl() -> Script:
    id, claimed = yield from unknown()
    assert (yield Complete(id, claimed.token, b"late", SHORT)) is True
    yield PAST_SHORT
    assert (yield Lookup(id)) is None


@EXPIRY()
def a_resolved_answer_lives_its_ttl() -> Script:
    id, _ = yield from unknown()
    assert (yield Resolve(id, b"resolved", SHORT)) is State.UNKNOWN
    yield PAST_SHORT
    assert (yield Lookup(id)) is None


@EXPIRY()
def what_is_kept_for_ever_is_kept() -> Script:
    id, _ = yield from done(b"kept", ttl=FOREVER)
    yield PAST_SHORT
    yield Sweep(1000)
    record = yield Lookup(id)
    assert (record.state, record.snapshot) == (State.DONE, b"kept")
    assert FOREVER - TTL < record.expires_in <= FOREVER


@EXPIRY()
def a_takeover_starts_a_new_ttl() -> Script:
    id, _ = yield from abandoned(ttl=TTL)
    yield from won(claim(id, ttl=5 * TTL))
    assert 4 * TTL < (yield Lookup(id)).expires_in <= 5 * TTL


@EXPIRY(keeps_expired=True)
def a_late_owner_of_an_expired_attempt_may_still_complete() -> Script:
    """Its result counts as long as no other owner has replaced it."""
    id, claimed = yield from abandoned(ttl=SHORT)
    assert (yield Lookup(id)) is None
    assert (yield Complete(id, claimed.token, b"late", TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"late"


SWEEP = Family("sweep")


@SWEEP(keeps_expired=True)
def expired_records_are_removed_and_counted() -> Script:
    yield from drained()
    for _ in range(3):
        yield from done(b"old", ttl=SHORT)
    yield from abandoned_many(2, ttl=SHORT)
    assert (yield Sweep(100)) == Swept(5, 0)
    assert (yield Sweep(100)) == Swept(0, 0)


@SWEEP()
def what_may_not_be_run_again_becomes_unknown_and_stays() -> Script:
    yield from drained()
    rejecting = yield from abandoned_many(2, ttl=SHORT, takeover=Takeover.REJECT)
    recovering = yield from abandoned_many(1, ttl=SHORT, takeover=Takeover.RECOVER)
    assert (yield Sweep(100)) == Swept(0, 3)
    assert (yield Sweep(100)) == Swept(0, 0)
    for id in (*rejecting, *recovering):
        record = yield Lookup(id)
        assert (record.state, record.attempt) == (State.UNKNOWN, 1)


@SWEEP()
def an_owner_may_still_report_what_a_sweep_made_unknown() -> Script:
    id, claimed = yield from abandoned(ttl=SHORT, takeover=Takeover.REJECT)
    yield from drained()
    assert (yield Lookup(id)).state is State.UNKNOWN
    assert (yield Complete(id, claimed.token, b"late", TTL)) is True
    assert (yield Lookup(id)).snapshot == b"late"


@SWEEP()
def everything_else_is_left_as_it_is() -> Script:
    live, _ = yield from running()
    live_past_its_ttl, _ = yield from running(ttl=SHORT)
    finished, _ = yield from done(b"answer")
    lost, _ = yield from unknown()
    (silent,) = yield from abandoned_many(1)
    (silent_for_good,) = yield from abandoned_many(1, takeover=Takeover.REJECT)
    completed_late, _ = yield from done(ttl=SHORT, answer_ttl=TTL)
    ids = (live, live_past_its_ttl, finished, lost, silent, silent_for_good, completed_late)
    yield PAST_SHORT
    before = []
    for id in ids:
        before.append((yield Lookup(id)))
    yield from drained()
    for id, record in zip(ids, before, strict=True):
        assert record is not None
        yield from assert_unchanged(id, record)


@SWEEP(keeps_expired=True)
def one_sweep_takes_no_more_than_its_limit() -> Script:
    yield from drained()
    yield from abandoned_many(5, ttl=SHORT)
    yield from abandoned_many(4, ttl=SHORT, takeover=Takeover.REJECT)
    assert (yield Sweep(0)) == Swept(0, 0)
    removed = unknown = rounds = 0
    while removed + unknown < 9:
        swept = yield Sweep(2)
        assert 1 <= swept.removed + swept.unknown <= 2
        removed += swept.removed
        unknown += swept.unknown
        rounds += 1
    assert (removed, unknown) == (5, 4)
    assert rounds >= 5
    assert (yield Sweep(2)) == Swept(0, 0)


@SWEEP(keeps_expired=True)
def a_record_claimed_again_after_it_expired_is_not_swept() -> Script:
    yield from drained()
    id, old = yield from done(b"old", ttl=SHORT)
    yield PAST_SHORT
    new = yield from won(claim(id))
    assert (yield Sweep(100)) == Swept(0, 0)
    assert (yield Lookup(id)).token == new.token > old.token
    assert (yield Release(id, new.token)) is True


@SWEEP(keeps_expired=True)
def sweeps_at_the_same_time_count_each_record_once() -> Script:
    yield from drained()
    yield from abandoned_many(20, ttl=SHORT)
    doubtful = yield from abandoned_many(10, ttl=SHORT, takeover=Takeover.REJECT)
    removed = unknown = 0
    for _ in range(10):  # a sweep may skip records that another one has locked
        answers = yield Together([Sweep(7), Elsewhere(Sweep(7)), Sweep(7), Elsewhere(Sweep(7))])
        assert all(swept.removed + swept.unknown <= 7 for swept in answers)
        removed += sum(swept.removed for swept in answers)
        unknown += sum(swept.unknown for swept in answers)
        if removed + unknown >= 30:
            break
    assert (removed, unknown) == (20, 10)
    for id in doubtful:
        assert (yield Lookup(id)).state is State.UNKNOWN


COUNT = Family("count")
MANY = 1000


def new_tenant() -> str:
    return f"tenant {new_id().hex()}"


@COUNT(counts=True)
def a_tenant_without_records_has_none() -> Script:
    assert (yield Count(new_tenant(), MANY)) == 0


@COUNT(counts=True)
def every_live_record_is_counted_whatever_its_state() -> Script:
    tenant = new_tenant()
    yield from running(tenant=tenant)
    yield from running(tenant=tenant, ttl=SHORT)  # its owner is still running after the ttl
    yield from done(tenant=tenant)
    yield from unknown(tenant=tenant)
    yield from running(tenant=tenant, lease=SHORT)
    # In doubt, so it does not expire.
    yield from running(tenant=tenant, lease=SHORT, ttl=SHORT, takeover=Takeover.REJECT)
    yield PAST_SHORT
    assert (yield Count(tenant, MANY)) == 6
    assert (yield Elsewhere(Count(tenant, MANY))) == 6


@COUNT(counts=True)
def what_has_expired_or_was_let_go_is_not_counted() -> Script:
    tenant = new_tenant()
    yield from running(tenant=tenant)
    yield from done(tenant=tenant, answer_ttl=SHORT)
    yield from running(tenant=tenant, lease=SHORT, ttl=SHORT)
    free, claimed = yield from running(tenant=tenant)
    assert (yield Release(free, claimed.token)) is True
    yield PAST_SHORT
    assert (yield Count(tenant, MANY)) == 1


@COUNT(counts=True)
def a_sweep_changes_no_count() -> Script:
    """The records that it removes were not counted before, and those that it makes unknown still count."""
    tenant = new_tenant()
    yield from running(tenant=tenant)
    yield from running(tenant=tenant, lease=SHORT, ttl=SHORT)
    yield from running(tenant=tenant, lease=SHORT, ttl=SHORT, takeover=Takeover.REJECT)
    yield PAST_SHORT
    assert (yield Count(tenant, MANY)) == 2
    yield from drained()
    assert (yield Count(tenant, MANY)) == 2


@COUNT(counts=True)
def other_tenants_do_not_count() -> Script:
    tenant, other = new_tenant(), new_tenant()
    yield from several(3, tenant=tenant)
    yield from running(tenant=other)
    assert (yield Batch([Count(tenant, MANY), Count(other, MANY), Count(tenant.upper(), MANY)])) == [3, 1, 0]


@COUNT(counts=True)
def it_is_counted_no_further_than_asked() -> Script:
    tenant = new_tenant()
    yield from several(5, tenant=tenant)
    for limit, counted in ((1, 1), (4, 4), (5, 5), (6, 5)):
        assert (yield Count(tenant, limit)) == counted


@COUNT(counts=True)
def without_a_tenant_those_of_no_tenant_are_counted() -> Script:
    before = yield Count("", MANY)
    yield from several(2, tenant="")
    yield from running(tenant=new_tenant())
    assert (yield Count("", MANY)) == before + 2


@COUNT(counts=True)
def a_count_sees_what_the_same_batch_did_before_it() -> Script:
    tenant = new_tenant()
    first, second = (claim(new_id(), tenant=tenant) for _ in range(2))
    answers = yield Batch([first, second, Count(tenant, MANY)])
    assert answers[2] == 2


@COUNT(counts=True)
def counting_among_claims_loses_nobody() -> Script:
    tenant = new_tenant()
    claims = [claim(new_id(), tenant=tenant) for _ in range(10)]
    answers = yield Together([*claims, Count(tenant, MANY), Elsewhere(Count(tenant, MANY))])
    assert all(0 <= counted <= 10 for counted in answers[10:])
    assert (yield Count(tenant, MANY)) == 10
