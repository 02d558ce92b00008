"""Replay: a finished record returns its snapshot byte for byte until it expires, and never changes."""

from __future__ import annotations

from semel.core.ops import Complete, Lookup
from semel.core.states import State
from semel.testing.conformance.phrases import abandoned, assert_unchanged, claim, done, running, shown, won
from semel.testing.conformance.script import LIVE, TTL, Elapse, Elsewhere, Family, Script, new_id

FAMILY = Family("replay")


@FAMILY()
def the_answer_comes_back_byte_for_byte() -> Script:
    id = new_id()
    claimed = yield from won(claim(id, fingerprint=b"f" * 16))
    assert (yield Complete(id, claimed.token, b"\x00\xff answer \r\n\x00", TTL)) is True
    for _ in range(3):
        record = yield from shown(claim(id, fingerprint=b"f" * 16), State.DONE)
        assert record.snapshot == b"\x00\xff answer \r\n\x00"
        assert type(record.snapshot) is bytes
        assert (record.id, record.token, record.attempt, record.fingerprint) == (id, claimed.token, 1, b"f" * 16)
        assert LIVE < record.expires_in <= TTL
    record = yield Lookup(id)
    assert (record.state, record.snapshot, record.fingerprint) == (
        State.DONE,
        b"\x00\xff answer \r\n\x00",
        b"f" * 16,
    )
    assert record.lease_left <= 0


@FAMILY()
def the_age_counts_from_the_first_claim() -> Script:
    id, claimed = yield from running()
    yield Elapse(0.1)
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert 0.1 <= (yield from shown(claim(id), State.DONE)).age < LIVE
    assert 0.1 <= (yield Lookup(id)).age < LIVE


@FAMILY()
def a_completion_sent_again_is_answered_alike() -> Script:
    """The first answer may have been lost. The record stays as the first completion left it."""
    id, claimed = yield from running()
    assert (yield Complete(id, claimed.token, b"first", TTL)) is True
    before = yield Lookup(id)
    for snapshot in (b"first", b"other", b""):
        assert (yield Complete(id, claimed.token, snapshot, 50 * TTL)) is True
        yield from assert_unchanged(id, before)


@FAMILY()
def the_answer_of_a_later_attempt_comes_back() -> Script:
    id, _ = yield from abandoned()
    second = yield from won(claim(id))
    assert (yield Complete(id, second.token, b"second", TTL)) is True
    record = yield from shown(claim(id), State.DONE)
    assert (record.snapshot, record.attempt, record.token) == (b"second", 2, second.token)


@FAMILY()
def nobody_completes_what_is_absent() -> Script:
    id = new_id()
    assert (yield Complete(id, 1, b"answer", TTL)) is False
    assert (yield Lookup(id)) is None


@FAMILY()
def the_ttl_of_the_completion_counts_from_the_completion() -> Script:
    id, claimed = yield from running(ttl=TTL)
    assert (yield Complete(id, claimed.token, b"answer", 5 * TTL)) is True
    assert 4 * TTL < (yield Lookup(id)).expires_in <= 5 * TTL


@FAMILY(second=True)
def a_completion_is_seen_by_every_instance_at_once() -> Script:
    for _ in range(5):
        id, _ = yield from done(b"answer")
        assert (yield Elsewhere(Lookup(id))).snapshot == b"answer"
        assert (yield from shown(Elsewhere(claim(id)), State.DONE)).snapshot == b"answer"


@FAMILY()
def replays_change_nothing() -> Script:
    id, _ = yield from done(b"answer")
    before = yield Lookup(id)
    for _ in range(20):
        yield from shown(claim(id, fingerprint=b"f" * 16, lease=50 * TTL, ttl=50 * TTL, key="other"), State.DONE)
    yield from assert_unchanged(id, before)
