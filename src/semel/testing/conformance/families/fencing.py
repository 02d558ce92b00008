"""Fencing: an owner that was replaced holds a stale token and can change nothing."""

from __future__ import annotations

from semel.core.ops import Complete, Lookup, Release, Resolve, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import (
    abandoned,
    assert_owner_is_refused,
    claim,
    done,
    drained,
    running,
    shown,
    unknown,
    won,
)
from semel.testing.conformance.script import PAST_SHORT, SHORT, TTL, Elsewhere, Family, Script, new_id

FAMILY = Family("fencing")


@FAMILY()
def a_replaced_owner_is_refused_while_the_new_one_runs() -> Script:
    id, old = yield from abandoned()
    new = yield from won(claim(id))
    yield from assert_owner_is_refused(id, old.token)
    assert (yield Complete(id, new.token, b"answer", TTL)) is True


@FAMILY()
def a_replaced_owner_is_refused_after_the_new_one_finished() -> Script:
    id, old = yield from abandoned()
    new = yield from won(claim(id))
    assert (yield Complete(id, new.token, b"answer", TTL)) is True
    yield from assert_owner_is_refused(id, old.token)
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@FAMILY()
def a_replaced_owner_is_refused_after_the_new_one_fell_silent() -> Script:
    id, old = yield from abandoned()
    yield from won(claim(id, lease=SHORT))
    yield PAST_SHORT
    yield from assert_owner_is_refused(id, old.token)
    assert (yield from won(claim(id))).attempt == 3


@FAMILY()
def a_replaced_owner_is_refused_after_the_new_one_gave_up() -> Script:
    id, old = yield from abandoned()
    new = yield from won(claim(id))
    assert (yield Release(id, new.token, State.UNKNOWN)) is True
    yield from assert_owner_is_refused(id, old.token)


@FAMILY()
def a_replaced_owner_is_refused_after_the_new_one_let_go() -> Script:
    """The record is gone, so the store must not answer the old owner that something was stored."""
    id, old = yield from abandoned()
    new = yield from won(claim(id))
    assert (yield Release(id, new.token)) is True
    yield from assert_owner_is_refused(id, old.token)
    yield from assert_owner_is_refused(id, new.token)


@FAMILY(second=True)
def a_replaced_owner_is_refused_across_instances() -> Script:
    id, old = yield from abandoned()
    new = yield from won(Elsewhere(claim(id)))
    yield from assert_owner_is_refused(id, old.token)
    assert (yield Elsewhere(Complete(id, new.token, b"answer", TTL))) is True
    yield from assert_owner_is_refused(id, old.token)
    yield from assert_owner_is_refused(id, old.token, elsewhere=True)


@FAMILY()
def a_token_of_a_record_that_was_removed_fits_no_later_one() -> Script:
    id, old = yield from running()
    assert (yield Release(id, old.token)) is True
    new = yield from won(claim(id))
    assert new.token > old.token
    yield from assert_owner_is_refused(id, old.token)


@FAMILY()
def a_token_of_a_record_that_expired_fits_no_later_one() -> Script:
    for finished in (True, False):
        id = new_id()
        old = yield from won(claim(id, lease=SHORT, ttl=SHORT))
        if finished:
            assert (yield Complete(id, old.token, b"old", SHORT)) is True
        yield PAST_SHORT
        new = yield from won(claim(id))
        assert (new.attempt, new.token > old.token) == (1, True)
        yield from assert_owner_is_refused(id, old.token)


@FAMILY(keeps_expired=True)
def a_token_of_a_record_that_was_swept_fits_no_later_one() -> Script:
    yield from drained()
    id, old = yield from abandoned(ttl=SHORT)
    swept = yield Sweep(10)
    assert (swept.removed, swept.unknown) == (1, 0)
    yield from assert_owner_is_refused(id, old.token)
    new = yield from won(claim(id))
    assert (new.attempt, new.token > old.token) == (1, True)
    yield from assert_owner_is_refused(id, old.token)


@FAMILY()
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


@FAMILY()
def a_made_up_token_is_refused() -> Script:
    for make in (running, done, unknown, abandoned):
        id, claimed = yield from make()
        for token in (0, 1, claimed.token - 1, claimed.token + 1, 2**63 - 1):
            yield from assert_owner_is_refused(id, token)
    absent = new_id()
    yield from assert_owner_is_refused(absent, 0)
    yield from assert_owner_is_refused(absent, 1)


@FAMILY()
def a_token_fits_its_own_record_only() -> Script:
    _, first = yield from running()
    other, second = yield from running()
    if first.token != second.token:  # two records may by chance be claimed in the same instant
        yield from assert_owner_is_refused(other, first.token)


@FAMILY()
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
