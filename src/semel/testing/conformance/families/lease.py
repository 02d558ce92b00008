"""Lease: how long an owner counts as alive, what a late owner may still do, and how an owner releases the key."""

from __future__ import annotations

from semel.core.ops import FOREVER, Complete, Lookup, Release, Renew, SaveStep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import (
    abandoned,
    assert_owner_is_refused,
    assert_unchanged,
    claim,
    done,
    running,
    shown,
    unknown,
    won,
)
from semel.testing.conformance.script import LIVE, PAST_SHORT, SHORT, TTL, Family, Script, new_id

FAMILY = Family("lease")


@FAMILY()
def a_renewal_holds_it_for_longer() -> Script:
    id, claimed = yield from running()
    assert (yield Renew(id, claimed.token, 10 * LIVE)) is True
    record = yield Lookup(id)
    assert 9 * LIVE < record.lease_left <= 10 * LIVE
    assert (record.state, record.token, record.attempt) == (State.RUNNING, claimed.token, 1)
    assert LIVE < record.expires_in <= TTL


@FAMILY()
def a_renewed_lease_outlives_its_first_end() -> Script:
    id = new_id()
    claimed = yield from won(claim(id, lease=SHORT))
    assert (yield Renew(id, claimed.token, LIVE)) is True
    yield PAST_SHORT
    yield from shown(claim(id), State.RUNNING)


@FAMILY()
def a_renewal_never_makes_it_shorter() -> Script:
    """A renewal that arrives late, or asks for less time, must not shorten the lease."""
    id, claimed = yield from running()
    assert (yield Renew(id, claimed.token, SHORT)) is True
    yield PAST_SHORT
    record = yield from shown(claim(id), State.RUNNING)
    assert (record.token, record.attempt) == (claimed.token, 1)
    assert record.lease_left > SHORT


@FAMILY()
def a_late_renewal_cannot_revive_what_was_let_go() -> Script:
    """A renewal may arrive after the release. The key must be free at once, not after another lease."""
    for to in (State.ABANDONED, State.UNKNOWN, State.ABSENT):
        id, first = yield from running()
        assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
        assert (yield Release(id, first.token, to)) is True
        before = yield Lookup(id)
        assert (yield Renew(id, first.token, 50 * TTL)) is False
        yield from assert_unchanged(id, before)


@FAMILY()
def what_was_let_go_takes_no_further_word_of_its_owner() -> Script:
    id, first = yield from running()
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    yield from assert_owner_is_refused(id, first.token)
    assert (yield from won(claim(id))).attempt == 2


@FAMILY()
def nobody_renews_what_is_absent() -> Script:
    id = new_id()
    assert (yield Renew(id, 1, LIVE)) is False
    assert (yield Lookup(id)) is None


@FAMILY()
def a_late_owner_whom_nobody_replaced_may_renew() -> Script:
    for takeover in Takeover:
        id, claimed = yield from abandoned(takeover=takeover)
        assert (yield Renew(id, claimed.token, LIVE)) is True
        record = yield from shown(claim(id), State.RUNNING)
        assert (record.token, record.attempt) == (claimed.token, 1)


@FAMILY()
def a_late_owner_whom_nobody_replaced_may_complete() -> Script:
    for takeover in Takeover:
        id, claimed = yield from abandoned(takeover=takeover)
        assert (yield Complete(id, claimed.token, b"late", TTL)) is True
        assert (yield from shown(claim(id), State.DONE)).snapshot == b"late"


@FAMILY()
def a_late_owner_whom_nobody_replaced_may_save_a_step() -> Script:
    """The record stays abandoned: saving a step does not renew the lease."""
    id, claimed = yield from abandoned()
    assert (yield SaveStep(id, claimed.token, "charge", b"1", 0)) is True
    assert (yield Lookup(id)).state is State.ABANDONED
    assert (yield from won(claim(id))).steps == (("charge", b"1"),)


@FAMILY()
def a_late_owner_whom_nobody_replaced_may_let_go() -> Script:
    for to, seen in ((State.ABSENT, None), (State.ABANDONED, State.ABANDONED), (State.UNKNOWN, State.UNKNOWN)):
        id, claimed = yield from abandoned()
        assert (yield Release(id, claimed.token, to)) is True
        record = yield Lookup(id)
        assert (record and record.state) == seen


@FAMILY()
def a_lost_owner_may_still_say_that_it_happened() -> Script:
    id, claimed = yield from abandoned(takeover=Takeover.REJECT)
    yield from shown(claim(id), State.UNKNOWN)
    assert (yield Complete(id, claimed.token, b"late", TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"late"


@FAMILY()
def a_lost_owner_may_still_say_that_it_did_not_happen() -> Script:
    id, claimed = yield from abandoned(takeover=Takeover.REJECT)
    yield from shown(claim(id), State.UNKNOWN)
    assert (yield Release(id, claimed.token)) is True
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).attempt == 1


@FAMILY()
def a_lost_owner_may_not_carry_on() -> Script:
    """An unknown operation does not continue: no renewal, no step, no release to ABANDONED."""
    id, claimed = yield from unknown()
    before = yield Lookup(id)
    for move in (
        Renew(id, claimed.token, 50 * TTL),
        SaveStep(id, claimed.token, "late", b"1", 0),
        Release(id, claimed.token, State.ABANDONED),
    ):
        assert (yield move) is False
        yield from assert_unchanged(id, before)
    assert (yield Release(id, claimed.token, State.UNKNOWN)) is True
    yield from assert_unchanged(id, before)


@FAMILY()
def a_renewal_never_revives_what_is_done() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    assert (yield Renew(id, claimed.token, 50 * TTL)) is False
    yield from assert_unchanged(id, before)
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@FAMILY()
def what_is_done_cannot_be_let_go() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    for to in (State.ABSENT, State.ABANDONED, State.UNKNOWN):
        assert (yield Release(id, claimed.token, to)) is False
        yield from assert_unchanged(id, before)
    assert (yield SaveStep(id, claimed.token, "late", b"1", 0)) is False
    yield from assert_unchanged(id, before)


@FAMILY()
def let_go_because_nothing_happened_the_next_try_is_a_first_try() -> Script:
    id = new_id()
    first = yield from won(claim(id, fingerprint=b"f" * 16, takeover=Takeover.REJECT))
    assert (yield Release(id, first.token, State.ABSENT)) is True
    assert (yield Lookup(id)) is None
    assert (yield Release(id, first.token, State.ABSENT)) is False
    second = yield from won(claim(id, fingerprint=b"g" * 16))
    assert second.attempt == 1
    assert second.token > first.token
    assert (yield Lookup(id)).fingerprint == b"g" * 16


@FAMILY()
def let_go_with_its_steps_the_next_try_takes_over_at_once() -> Script:
    id, first = yield from running()
    assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    record = yield Lookup(id)
    assert record.state is State.ABANDONED
    second = yield from won(claim(id))
    assert (second.attempt, second.steps) == (2, (("charge", b"1"),))
    assert second.token > first.token


@FAMILY()
def let_go_because_nobody_can_tell_it_is_unknown() -> Script:
    id, claimed = yield from running()
    assert (yield Release(id, claimed.token, State.UNKNOWN)) is True
    record = yield Lookup(id)
    assert (record.state, record.token, record.snapshot) == (State.UNKNOWN, claimed.token, None)


@FAMILY()
def nobody_lets_go_of_what_is_absent() -> Script:
    id = new_id()
    for to in (State.ABSENT, State.ABANDONED, State.UNKNOWN):
        assert (yield Release(id, 1, to)) is False
        assert (yield Lookup(id)) is None


@FAMILY()
def the_smallest_lease_ends_and_the_longest_does_not() -> Script:
    brief, endless = new_id(), new_id()
    yield from won(claim(brief, lease=0.000_001))
    claimed = yield from won(claim(endless, lease=FOREVER, ttl=FOREVER))
    yield PAST_SHORT
    assert (yield Lookup(brief)).state is State.ABANDONED
    record = yield Lookup(endless)
    assert record.state is State.RUNNING
    assert FOREVER - TTL < record.lease_left <= FOREVER
    assert FOREVER - TTL < record.expires_in <= FOREVER
    assert (yield Renew(endless, claimed.token, FOREVER)) is True
    yield from shown(claim(endless), State.RUNNING)
