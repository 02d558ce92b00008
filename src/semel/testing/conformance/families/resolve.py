"""Resolve: someone has found out what happened. Only a record in doubt can be resolved."""

from __future__ import annotations

from semel.core.ops import Lookup, Resolve
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import abandoned, assert_unchanged, claim, done, running, shown, unknown, won
from semel.testing.conformance.script import LIVE, SHORT, TTL, Family, Script, new_id

FAMILY = Family("resolve")


@FAMILY()
def what_is_absent_stays_absent() -> Script:
    for snapshot in (b"resolved", b"", None):
        for force in (False, True):
            id = new_id()
            assert (yield Resolve(id, snapshot, TTL, force)) is State.ABSENT
            assert (yield Lookup(id)) is None


@FAMILY()
def what_is_done_stays_done() -> Script:
    id, _ = yield from done(b"answer")
    before = yield Lookup(id)
    for snapshot in (b"resolved", b"", None):
        for force in (False, True):
            assert (yield Resolve(id, snapshot, 50 * TTL, force)) is State.DONE
            yield from assert_unchanged(id, before)


@FAMILY()
def a_live_attempt_is_left_alone() -> Script:
    id, _ = yield from running(takeover=Takeover.REJECT)
    before = yield Lookup(id)
    for snapshot in (b"resolved", b"", None):
        assert (yield Resolve(id, snapshot, 50 * TTL)) is State.RUNNING
        yield from assert_unchanged(id, before)


@FAMILY()
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


@FAMILY()
def what_is_in_doubt_never_happened() -> Script:
    for make in (unknown, abandoned):
        id, claimed = yield from make()
        found = yield Lookup(id)
        assert (yield Resolve(id, None, TTL)) is found.state
        assert (yield Lookup(id)) is None
        again = yield from won(claim(id))
        assert (again.attempt, again.token > claimed.token) == (1, True)


@FAMILY()
def what_was_resolved_cannot_be_resolved_again() -> Script:
    id, _ = yield from unknown()
    assert (yield Resolve(id, b"first", TTL)) is State.UNKNOWN
    before = yield Lookup(id)
    assert (yield Resolve(id, b"second", TTL)) is State.DONE
    assert (yield Resolve(id, None, TTL)) is State.DONE
    yield from assert_unchanged(id, before)


@FAMILY()
def force_resolves_a_live_attempt() -> Script:
    id, claimed = yield from running()
    assert (yield Resolve(id, b"forced", TTL, True)) is State.RUNNING
    record = yield from shown(claim(id), State.DONE)
    assert (record.snapshot, record.token > claimed.token) == (b"forced", True)
    id, claimed = yield from running()
    assert (yield Resolve(id, None, TTL, True)) is State.RUNNING
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).token > claimed.token


@FAMILY()
def fingerprint_and_age_are_kept() -> Script:
    id, _ = yield from abandoned(fingerprint=b"f" * 16)
    assert (yield Resolve(id, b"resolved", TTL)) is State.ABANDONED
    record = yield Lookup(id)
    assert (record.fingerprint, record.tenant, record.operation, record.key) == (
        b"f" * 16,
        "acme",
        "conformance",
        "key",
    )
    assert SHORT <= record.age < LIVE


@FAMILY()
def an_expired_attempt_is_absent_or_in_doubt_as_for_a_claim() -> Script:
    id, _ = yield from abandoned(ttl=SHORT)
    assert (yield Resolve(id, b"resolved", TTL)) is State.ABSENT
    assert (yield Lookup(id)) is None
    id, _ = yield from abandoned(ttl=SHORT, takeover=Takeover.REJECT)
    assert (yield Resolve(id, b"resolved", TTL)) is State.ABANDONED
    assert (yield Lookup(id)).snapshot == b"resolved"
