"""Expiry: after its ttl a record is absent, even before it is swept, unless its outcome is in doubt."""

from __future__ import annotations

from semel.core.ops import FOREVER, Complete, Lookup, Release, Renew, Resolve, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import abandoned, claim, done, drained, running, shown, unknown, won
from semel.testing.conformance.script import LIVE, PAST_SHORT, SHORT, TTL, Family, Script, new_id

FAMILY = Family("expiry")


@FAMILY()
def an_answer_past_its_ttl_is_absent() -> Script:
    id, old = yield from done(b"old", ttl=SHORT)
    yield PAST_SHORT
    assert (yield Lookup(id)) is None
    claimed = yield from won(claim(id))
    assert (claimed.attempt, claimed.steps, claimed.token > old.token) == (1, (), True)


@FAMILY()
def an_answer_may_expire_sooner_than_its_claim_promised() -> Script:
    id, claimed = yield from running(ttl=TTL)
    assert (yield Complete(id, claimed.token, b"brief", SHORT)) is True
    yield PAST_SHORT
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).attempt == 1


@FAMILY()
def an_answer_may_live_longer_than_its_claim_promised() -> Script:
    id, claimed = yield from running(ttl=SHORT)
    assert (yield Complete(id, claimed.token, b"kept", TTL)) is True
    yield PAST_SHORT
    yield Sweep(1000)
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"kept"


@FAMILY()
def an_abandoned_attempt_past_its_ttl_is_absent_when_it_may_be_run_again() -> Script:
    id, old = yield from abandoned(ttl=SHORT)
    assert (yield Lookup(id)) is None
    claimed = yield from won(claim(id, takeover=Takeover.REJECT))
    assert (claimed.attempt, claimed.token > old.token) == (1, True)


@FAMILY()
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


@FAMILY()
def a_mismatching_claim_past_the_ttl_is_a_first_claim() -> Script:
    """Nothing of an expired record remains, not even its fingerprint."""
    for finished in (True, False):
        id = new_id()
        old = yield from won(claim(id, fingerprint=b"f" * 16, lease=SHORT, ttl=SHORT, key="old"))
        if finished:
            assert (yield Complete(id, old.token, b"old", SHORT)) is True
        yield PAST_SHORT
        assert (yield from won(claim(id, fingerprint=b"g" * 16, key="new"))).attempt == 1
        record = yield Lookup(id)
        assert (record.fingerprint, record.key, record.snapshot) == (b"g" * 16, "new", None)


@FAMILY()
def nothing_of_an_expired_record_is_left_in_the_next() -> Script:
    id = new_id()
    old = yield from won(claim(id, ttl=SHORT))
    assert (yield SaveStep(id, old.token, "charge", b"1", 0)) is True
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


@FAMILY()
def a_live_attempt_outlives_its_ttl() -> Script:
    id, claimed = yield from running(ttl=SHORT)
    yield PAST_SHORT
    yield Sweep(1000)
    record = yield from shown(claim(id), State.RUNNING)
    assert record.token == claimed.token
    assert (yield Renew(id, claimed.token, LIVE)) is True
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@FAMILY()
def what_is_unknown_never_expires() -> Script:
    given_up = new_id()
    claimed = yield from won(claim(given_up, ttl=SHORT))
    assert (yield Release(given_up, claimed.token, State.UNKNOWN)) is True
    refused, _ = yield from abandoned(ttl=SHORT, takeover=Takeover.REJECT)
    yield from shown(claim(refused), State.UNKNOWN)
    yield PAST_SHORT
    yield from drained()
    for id in (given_up, refused):
        assert (yield Lookup(id)).state is State.UNKNOWN
        yield from shown(claim(id), State.UNKNOWN)


@FAMILY()
def a_late_answer_to_what_was_unknown_lives_its_ttl() -> Script:
    id, claimed = yield from unknown()
    assert (yield Complete(id, claimed.token, b"late", SHORT)) is True
    yield PAST_SHORT
    assert (yield Lookup(id)) is None


@FAMILY()
def a_resolved_answer_lives_its_ttl() -> Script:
    id, _ = yield from unknown()
    assert (yield Resolve(id, b"resolved", SHORT)) is State.UNKNOWN
    yield PAST_SHORT
    assert (yield Lookup(id)) is None


@FAMILY()
def what_is_kept_for_ever_is_kept() -> Script:
    id, claimed = yield from running(ttl=FOREVER)
    assert (yield Complete(id, claimed.token, b"kept", FOREVER)) is True
    yield PAST_SHORT
    yield Sweep(1000)
    record = yield Lookup(id)
    assert (record.state, record.snapshot) == (State.DONE, b"kept")
    assert FOREVER - TTL < record.expires_in <= FOREVER


@FAMILY()
def a_takeover_starts_a_new_ttl() -> Script:
    id, _ = yield from abandoned(ttl=TTL)
    yield from won(claim(id, ttl=5 * TTL))
    assert 4 * TTL < (yield Lookup(id)).expires_in <= 5 * TTL


@FAMILY(keeps_expired=True)
def a_late_owner_of_an_expired_attempt_may_still_complete() -> Script:
    """Its result counts as long as no other owner has replaced it."""
    id, claimed = yield from abandoned(ttl=SHORT)
    assert (yield Lookup(id)) is None
    assert (yield Complete(id, claimed.token, b"late", TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"late"
