"""Who may change a record.

Lease: how long an owner counts as alive, what a late owner may still do, and how an owner releases the key.
Fencing: an owner that was replaced holds a stale token and can change nothing.
Resolve: someone has found out what happened. Only a record in doubt can be resolved. With its token a finished record
can be freed. With an expected state the record stays as it is in every other one.
"""

from __future__ import annotations

from semel.core.ops import FOREVER, Complete, Lookup, Release, Renew, Resolve, SaveStep, Sweep, Swept
from semel.core.states import State, Takeover
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Elsewhere,
    Family,
    Script,
    Together,
    abandoned,
    assert_owner_is_refused,
    assert_unchanged,
    charged,
    claim,
    done,
    drained,
    new_id,
    replaced,
    running,
    shown,
    unknown,
    won,
)

LEASE = Family("lease")


@LEASE()
def a_renewal_holds_it_for_longer() -> Script:
    id, claimed = yield from running()
    assert (yield Renew(id, claimed.token, 10 * LIVE)) is True
    record = yield Lookup(id)
    assert 9 * LIVE < record.lease_left <= 10 * LIVE
    assert (record.state, record.token, record.attempt) == (State.RUNNING, claimed.token, 1)
    assert LIVE < record.expires_in <= TTL


@LEASE()
def a_renewed_lease_outlives_its_first_end() -> Script:
    id, claimed = yield from running(lease=SHORT)
    assert (yield Renew(id, claimed.token, LIVE)) is True
    yield PAST_SHORT
    yield from shown(claim(id), State.RUNNING)


@LEASE()
def a_renewal_never_makes_it_shorter() -> Script:
    """A renewal that arrives late, or asks for less time, must not shorten the lease."""
    id, claimed = yield from running()
    assert (yield Renew(id, claimed.token, SHORT)) is True
    yield PAST_SHORT
    record = yield from shown(claim(id), State.RUNNING)
    assert (record.token, record.attempt) == (claimed.token, 1)
    assert record.lease_left > SHORT


@LEASE()
def a_late_renewal_cannot_revive_what_was_let_go() -> Script:
    """A renewal may arrive after the release. The key must be free at once, not after another lease."""
    for to in (State.ABANDONED, State.UNKNOWN, State.ABSENT):
        id, first = yield from charged()
        assert (yield Release(id, first.token, to)) is True
        before = yield Lookup(id)
        assert (yield Renew(id, first.token, 50 * TTL)) is False
        yield from assert_unchanged(id, before)


@LEASE()
def what_was_let_go_takes_no_further_word_of_its_owner() -> Script:
    id, first = yield from running()
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    yield from assert_owner_is_refused(id, first.token)
    assert (yield from won(claim(id))).attempt == 2


@LEASE()
def a_late_owner_whom_nobody_replaced_may_renew() -> Script:
    for takeover in Takeover:
        id, claimed = yield from abandoned(takeover=takeover)
        assert (yield Renew(id, claimed.token, LIVE)) is True
        record = yield from shown(claim(id), State.RUNNING)
        assert (record.token, record.attempt) == (claimed.token, 1)


@LEASE()
def a_late_owner_whom_nobody_replaced_may_complete() -> Script:
    for takeover in Takeover:
        id, claimed = yield from abandoned(takeover=takeover)
        assert (yield Complete(id, claimed.token, b"late", TTL)) is True
        assert (yield from shown(claim(id), State.DONE)).snapshot == b"late"


@LEASE()
def a_late_owner_whom_nobody_replaced_may_save_a_step() -> Script:
    """The record stays abandoned: saving a step does not renew the lease."""
    id, claimed = yield from abandoned()
    assert (yield SaveStep(id, claimed.token, "charge", b"1", 0)) is True
    assert (yield Lookup(id)).state is State.ABANDONED
    assert (yield from won(claim(id))).steps == (("charge", b"1"),)


@LEASE()
def a_late_owner_whom_nobody_replaced_may_let_go() -> Script:
    for to, seen in ((State.ABSENT, None), (State.ABANDONED, State.ABANDONED), (State.UNKNOWN, State.UNKNOWN)):
        id, claimed = yield from abandoned()
        assert (yield Release(id, claimed.token, to)) is True
        record = yield Lookup(id)
        assert (record and record.state) == seen


@LEASE()
def a_lost_owner_may_still_say_that_it_happened() -> Script:
    id, claimed = yield from abandoned(takeover=Takeover.REJECT)
    yield from shown(claim(id), State.UNKNOWN)
    assert (yield Complete(id, claimed.token, b"late", TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"late"


@LEASE()
def a_lost_owner_may_still_say_that_it_did_not_happen() -> Script:
    id, claimed = yield from abandoned(takeover=Takeover.REJECT)
    yield from shown(claim(id), State.UNKNOWN)
    assert (yield Release(id, claimed.token)) is True
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).attempt == 1


@LEASE()
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


@LEASE()
def a_renewal_never_revives_what_is_done() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    assert (yield Renew(id, claimed.token, 50 * TTL)) is False
    yield from assert_unchanged(id, before)
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@LEASE()
def what_is_done_cannot_be_let_go() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    for to in (State.ABSENT, State.ABANDONED, State.UNKNOWN):
        assert (yield Release(id, claimed.token, to)) is False
        yield from assert_unchanged(id, before)
    assert (yield SaveStep(id, claimed.token, "late", b"1", 0)) is False
    yield from assert_unchanged(id, before)


@LEASE()
def let_go_because_nothing_happened_the_next_try_is_a_first_try() -> Script:
    id, first = yield from running(fingerprint=b"f" * 16, takeover=Takeover.REJECT)
    assert (yield Release(id, first.token, State.ABSENT)) is True
    assert (yield Lookup(id)) is None
    assert (yield Release(id, first.token, State.ABSENT)) is False
    second = yield from won(claim(id, fingerprint=b"g" * 16))
    assert second.attempt == 1
    assert second.token > first.token
    assert (yield Lookup(id)).fingerprint == b"g" * 16


@LEASE()
def let_go_with_its_steps_the_next_try_takes_over_at_once() -> Script:
    id, first = yield from charged()
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    record = yield Lookup(id)
    assert record.state is State.ABANDONED
    second = yield from won(claim(id))
    assert (second.attempt, second.steps) == (2, (("charge", b"1"),))
    assert second.token > first.token


@LEASE()
def let_go_because_nobody_can_tell_it_is_unknown() -> Script:
    id, claimed = yield from unknown()
    record = yield Lookup(id)
    assert (record.state, record.token, record.snapshot) == (State.UNKNOWN, claimed.token, None)


@LEASE()
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


FENCING = Family("fencing")


@FENCING()
def a_replaced_owner_is_refused_while_the_new_one_runs() -> Script:
    id, old, new = yield from replaced()
    yield from assert_owner_is_refused(id, old.token)
    assert (yield Complete(id, new.token, b"answer", TTL)) is True


@FENCING()
def a_replaced_owner_is_refused_after_the_new_one_finished() -> Script:
    id, old, new = yield from replaced()
    assert (yield Complete(id, new.token, b"answer", TTL)) is True
    yield from assert_owner_is_refused(id, old.token)
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@FENCING()
def a_replaced_owner_is_refused_after_the_new_one_fell_silent() -> Script:
    id, old = yield from abandoned()
    yield from won(claim(id, lease=SHORT))
    yield PAST_SHORT
    yield from assert_owner_is_refused(id, old.token)
    assert (yield from won(claim(id))).attempt == 3


@FENCING()
def a_replaced_owner_is_refused_after_the_new_one_gave_up() -> Script:
    id, old, new = yield from replaced()
    assert (yield Release(id, new.token, State.UNKNOWN)) is True
    yield from assert_owner_is_refused(id, old.token)


@FENCING()
def a_replaced_owner_is_refused_after_the_new_one_let_go() -> Script:
    """The record is gone, so the store must not answer the old owner that something was stored."""
    id, old, new = yield from replaced()
    assert (yield Release(id, new.token)) is True
    yield from assert_owner_is_refused(id, old.token)
    yield from assert_owner_is_refused(id, new.token)


@FENCING(second=True)
def a_replaced_owner_is_refused_across_instances() -> Script:
    id, old = yield from abandoned()
    new = yield from won(Elsewhere(claim(id)))
    yield from assert_owner_is_refused(id, old.token)
    assert (yield Elsewhere(Complete(id, new.token, b"answer", TTL))) is True
    yield from assert_owner_is_refused(id, old.token)
    yield from assert_owner_is_refused(id, old.token, elsewhere=True)


@FENCING()
def a_token_of_a_record_that_was_removed_fits_no_later_one() -> Script:
    id, old = yield from running()
    assert (yield Release(id, old.token)) is True
    new = yield from won(claim(id))
    assert new.token > old.token
    yield from assert_owner_is_refused(id, old.token)


@FENCING()
def a_token_of_a_record_that_expired_fits_no_later_one() -> Script:
    for finished in (True, False):
        # A record that is completed in time needs a lease that holds until then.
        id, old = yield from running(lease=LIVE if finished else SHORT, ttl=SHORT)
        if finished:
            assert (yield Complete(id, old.token, b"old", SHORT)) is True
        yield PAST_SHORT
        new = yield from won(claim(id))
        assert (new.attempt, new.token > old.token) == (1, True)
        yield from assert_owner_is_refused(id, old.token)


@FENCING(keeps_expired=True)
def a_token_of_a_record_that_was_swept_fits_no_later_one() -> Script:
    yield from drained()
    id, old = yield from abandoned(ttl=SHORT)
    assert (yield Sweep(10)) == Swept(1, 0)
    yield from assert_owner_is_refused(id, old.token)
    new = yield from won(claim(id))
    assert (new.attempt, new.token > old.token) == (1, True)
    yield from assert_owner_is_refused(id, old.token)


@FENCING()
def tokens_grow_however_quickly_they_follow() -> Script:
    id = new_id()
    last = 0
    for _ in range(20):
        claimed = yield from won(claim(id))
        assert claimed.token > last
        last = claimed.token
        assert (yield Release(id, last, State.ABANDONED)) is True
        claimed = yield from won(claim(id))
        assert (claimed.attempt, claimed.token > last) == (2, True)
        last = claimed.token
        assert (yield Release(id, last)) is True


@FENCING()
def a_made_up_token_is_refused() -> Script:
    """By a record in any state, and by an absent one."""
    for make in (running, done, unknown, abandoned):
        id, claimed = yield from make()
        for token in (0, 1, claimed.token - 1, claimed.token + 1, 2**63 - 1):
            yield from assert_owner_is_refused(id, token)
    absent = new_id()
    yield from assert_owner_is_refused(absent, 0)
    yield from assert_owner_is_refused(absent, 1)


@FENCING()
def a_token_fits_its_own_record_only() -> Script:
    _, first = yield from running()
    other, second = yield from running()
    if first.token != second.token:  # two records may by chance be claimed in the same instant
        yield from assert_owner_is_refused(other, first.token)


@FENCING()
def a_lost_owner_is_refused_after_someone_resolved_it() -> Script:
    for snapshot in (b"resolved", None):
        id, old = yield from abandoned(takeover=Takeover.REJECT)
        yield from shown(claim(id), State.UNKNOWN)
        assert (yield Resolve(id, snapshot, TTL)) is State.UNKNOWN
        yield from assert_owner_is_refused(id, old.token)
        if snapshot is None:
            assert (yield from won(claim(id))).token > old.token
            yield from assert_owner_is_refused(id, old.token)
        else:
            assert (yield Lookup(id)).token > old.token


RESOLVE = Family("resolve")


@RESOLVE()
def what_is_absent_stays_absent() -> Script:
    for snapshot in (b"resolved", b"", None):
        for force in (False, True):
            id = new_id()
            assert (yield Resolve(id, snapshot, TTL, force)) is State.ABSENT
            assert (yield Lookup(id)) is None


@RESOLVE()
def what_is_done_stays_done() -> Script:
    id, _ = yield from done(b"answer")
    before = yield Lookup(id)
    for snapshot in (b"resolved", b"", None):
        for force in (False, True):
            assert (yield Resolve(id, snapshot, 50 * TTL, force)) is State.DONE
            yield from assert_unchanged(id, before)


@RESOLVE()
def a_live_attempt_is_left_alone() -> Script:
    id, _ = yield from running(takeover=Takeover.REJECT)
    before = yield Lookup(id)
    for snapshot in (b"resolved", b"", None):
        assert (yield Resolve(id, snapshot, 50 * TTL)) is State.RUNNING
        yield from assert_unchanged(id, before)


@RESOLVE()
def what_is_in_doubt_is_done_with_this_answer() -> Script:
    for make in (unknown, abandoned):
        for snapshot in (b"resolved", b"", bytes(range(256))):
            id, claimed = yield from make()
            found = yield Lookup(id)
            assert (yield Resolve(id, snapshot, 5 * TTL)) is found.state
            record = yield from shown(claim(id), State.DONE)
            assert (record.snapshot, record.attempt) == (snapshot, 1)
            assert record.token > claimed.token
            assert 4 * TTL < (yield Lookup(id)).expires_in <= 5 * TTL


@RESOLVE()
def what_is_in_doubt_never_happened() -> Script:
    for make in (unknown, abandoned):
        id, claimed = yield from make()
        found = yield Lookup(id)
        assert (yield Resolve(id, None, TTL)) is found.state
        assert (yield Lookup(id)) is None
        again = yield from won(claim(id))
        assert (again.attempt, again.token > claimed.token) == (1, True)


@RESOLVE()
def what_was_resolved_cannot_be_resolved_again() -> Script:
    id, _ = yield from unknown()
    assert (yield Resolve(id, b"first", TTL)) is State.UNKNOWN
    before = yield Lookup(id)
    assert (yield Resolve(id, b"second", TTL)) is State.DONE
    assert (yield Resolve(id, None, TTL)) is State.DONE
    yield from assert_unchanged(id, before)


@RESOLVE()
def force_resolves_a_live_attempt() -> Script:
    id, claimed = yield from running()
    assert (yield Resolve(id, b"forced", TTL, True)) is State.RUNNING
    record = yield from shown(claim(id), State.DONE)
    assert (record.snapshot, record.token > claimed.token) == (b"forced", True)
    id, claimed = yield from running()
    assert (yield Resolve(id, None, TTL, True)) is State.RUNNING
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).token > claimed.token


@RESOLVE()
def a_finished_record_is_freed_by_its_token() -> Script:
    id, old = yield from done(b"failed")
    assert (yield Resolve(id, None, TTL, False, old.token)) is State.DONE
    assert (yield Lookup(id)) is None
    yield from assert_owner_is_refused(id, old.token)
    again = yield from won(claim(id, fingerprint=b"f" * 16))
    assert (again.attempt, again.steps, again.token > old.token) == (1, (), True)
    yield from assert_owner_is_refused(id, old.token)
    assert (yield Complete(id, again.token, b"paid", TTL)) is True
    record = yield from shown(claim(id), State.DONE)
    assert (record.snapshot, record.fingerprint, record.token) == (b"paid", b"f" * 16, again.token)


@RESOLVE()
def a_finished_record_is_freed_once() -> Script:
    id, old = yield from done(b"failed")
    assert (yield Resolve(id, None, TTL, False, old.token)) is State.DONE
    assert (yield Resolve(id, None, TTL, False, old.token)) is State.ABSENT
    again = yield from won(claim(id))
    before = yield Lookup(id)
    for force in (False, True):
        assert (yield Resolve(id, None, TTL, force, old.token)) is State.ABSENT
        yield from assert_unchanged(id, before)
    assert (yield Complete(id, again.token, b"paid", TTL)) is True
    before = yield Lookup(id)
    assert (yield Resolve(id, None, TTL, True, old.token)) is State.ABSENT
    yield from assert_unchanged(id, before)


@RESOLVE()
def another_token_frees_nothing() -> Script:
    for make in (running, abandoned, unknown, done):
        id, claimed = yield from make()
        before = yield Lookup(id)
        for snapshot in (b"resolved", None):
            for token in (claimed.token + 1, claimed.token - 1, 1):
                assert (yield Resolve(id, snapshot, 50 * TTL, True, token)) is State.ABSENT
                yield from assert_unchanged(id, before)


@RESOLVE()
def a_token_gives_a_finished_record_no_other_answer() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    assert (yield Resolve(id, b"resolved", 50 * TTL, True, claimed.token)) is State.DONE
    yield from assert_unchanged(id, before)


@RESOLVE()
def what_is_still_in_the_expected_state_is_changed() -> Script:
    for make in (running, abandoned, unknown, done):
        for snapshot in (None, b"resolved"):
            id, claimed = yield from make()
            state = (yield Lookup(id)).state
            if state is State.DONE and snapshot is not None:
                continue
            assert (yield Resolve(id, snapshot, TTL, True, claimed.token, (state,))) is state
            record = yield Lookup(id)
            assert record is None if snapshot is None else record.snapshot == snapshot
            yield from assert_owner_is_refused(id, claimed.token)
    id, claimed = yield from unknown()
    expected = (State.ABANDONED, State.UNKNOWN)
    assert (yield Resolve(id, b"resolved", TTL, False, claimed.token, expected)) is State.UNKNOWN
    assert (yield Lookup(id)).snapshot == b"resolved"


@RESOLVE()
def what_is_in_another_state_stays_as_it_is() -> Script:
    for make in (running, abandoned, unknown, done):
        id, claimed = yield from make()
        before = yield Lookup(id)
        others = tuple(state for state in State if state is not before.state)
        for expected in (others, *((state,) for state in others)):
            for snapshot in (None, b"resolved"):
                for token in (None, claimed.token):
                    assert (yield Resolve(id, snapshot, 50 * TTL, True, token, expected)) is before.state
        yield from assert_unchanged(id, before)


@RESOLVE()
def an_expected_state_allows_no_more_than_before() -> Script:
    id, claimed = yield from running()
    before = yield Lookup(id)
    for token in (None, claimed.token):
        assert (yield Resolve(id, None, 50 * TTL, False, token, (State.RUNNING,))) is State.RUNNING
    assert (yield Resolve(id, None, 50 * TTL, True, claimed.token + 1, (State.RUNNING,))) is State.ABSENT
    yield from assert_unchanged(id, before)
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    assert (yield Resolve(id, None, 50 * TTL, True, None, (State.DONE,))) is State.DONE
    assert (yield Resolve(id, b"resolved", 50 * TTL, True, claimed.token, (State.DONE,))) is State.DONE
    yield from assert_unchanged(id, before)
    absent = new_id()
    assert (yield Resolve(absent, b"resolved", TTL, True, None, (State.ABSENT,))) is State.ABSENT
    assert (yield Lookup(absent)) is None


@RESOLVE()
def an_outcome_that_the_owner_reports_late_is_not_freed() -> Script:
    """The owner completes with the token that a person has seen before."""
    for make in (running, abandoned, unknown):
        id, claimed = yield from make()
        seen = yield Lookup(id)
        assert (yield Complete(id, claimed.token, b"paid", TTL)) is True
        before = yield Lookup(id)
        assert (yield Resolve(id, None, 50 * TTL, True, seen.token, (seen.state,))) is State.DONE
        yield from assert_unchanged(id, before)


@RESOLVE()
def a_freed_record_leaves_no_steps_and_is_not_swept_into_doubt() -> Script:
    id, claimed = yield from charged()
    assert (yield Complete(id, claimed.token, b"failed", TTL)) is True
    assert (yield Resolve(id, None, TTL, False, claimed.token)) is State.DONE
    yield from drained()
    assert (yield Lookup(id)) is None
    again = yield from won(claim(id))
    assert (again.attempt, again.steps, again.token > claimed.token) == (1, (), True)


@RESOLVE(second=True)
def of_two_people_who_free_it_at_once_one_does() -> Script:
    for _ in range(5):
        id, claimed = yield from done(b"failed")
        one, two, three = (Resolve(id, None, TTL, False, claimed.token) for _ in range(3))
        found = yield Together([one, Elsewhere(two), three])
        assert sorted(found) == [State.ABSENT, State.ABSENT, State.DONE]
        yield from won(Elsewhere(claim(id)))


@RESOLVE()
def fingerprint_and_age_are_kept() -> Script:
    id, _ = yield from abandoned(fingerprint=b"f" * 16)
    assert (yield Resolve(id, b"resolved", TTL)) is State.ABANDONED
    record = yield Lookup(id)
    assert record.fingerprint == b"f" * 16
    assert (record.tenant, record.operation, record.key) == ("acme", "conformance", "key")
    assert SHORT <= record.age < LIVE


@RESOLVE()
def an_expired_attempt_is_absent_or_in_doubt_as_for_a_claim() -> Script:
    id, _ = yield from abandoned(ttl=SHORT)
    assert (yield Resolve(id, b"resolved", TTL)) is State.ABSENT
    assert (yield Lookup(id)) is None
    id, _ = yield from abandoned(ttl=SHORT, takeover=Takeover.REJECT)
    assert (yield Resolve(id, b"resolved", TTL)) is State.ABANDONED
    assert (yield Lookup(id)).snapshot == b"resolved"
