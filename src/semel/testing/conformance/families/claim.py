"""Claim: which caller may run, which one gets the existing record, and which one may take over an abandoned attempt."""

from __future__ import annotations

from itertools import product

from semel.core.ops import Complete, Lookup, SaveStep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import abandoned, assert_unchanged, claim, done, running, shown, unknown, won
from semel.testing.conformance.script import LIVE, PAST_SHORT, SHORT, TTL, Elsewhere, Family, Script, new_id

FAMILY = Family("claim")


@FAMILY()
def an_absent_record_is_won() -> Script:
    id = new_id()
    claimed = yield from won(claim(id, fingerprint=b"f" * 16))
    assert (claimed.attempt, claimed.steps) == (1, ())
    assert 0 < claimed.token < 2**63
    record = yield Lookup(id)
    assert (record.id, record.state, record.token, record.attempt) == (id, State.RUNNING, claimed.token, 1)
    assert (record.fingerprint, record.snapshot) == (b"f" * 16, None)
    assert (record.tenant, record.operation, record.key) == ("acme", "conformance", "key")
    assert 0 < record.lease_left <= LIVE
    assert LIVE < record.expires_in <= TTL
    assert 0 <= record.age < LIVE


@FAMILY()
def looking_up_an_absent_record_does_not_make_one() -> Script:
    id = new_id()
    assert (yield Lookup(id)) is None
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).attempt == 1


@FAMILY()
def a_running_record_is_shown() -> Script:
    id, claimed = yield from running()
    before = yield Lookup(id)
    for _ in range(2):
        record = yield from shown(claim(id, lease=50 * TTL, ttl=50 * TTL), State.RUNNING)
        assert (record.token, record.attempt, record.snapshot) == (claimed.token, 1, None)
        assert 0 < record.lease_left <= LIVE
        assert 0 <= record.age < LIVE
    yield from assert_unchanged(id, before)


@FAMILY(second=True)
def a_record_is_shown_to_every_instance() -> Script:
    id, claimed = yield from running()
    record = yield from shown(Elsewhere(claim(id)), State.RUNNING)
    assert record.token == claimed.token
    assert (yield Elsewhere(Complete(id, claimed.token, b"answer", TTL))) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@FAMILY()
def the_same_claim_sent_again_is_answered_alike() -> Script:
    """The first answer may have been lost. The owner must not be locked out by its own claim."""
    id = new_id()
    first = claim(id, fingerprint=b"f" * 16)
    claimed = yield from won(first)
    assert (yield from won(first)) == claimed
    assert (yield SaveStep(id, claimed.token, "reserve", b"1", 0)) is True
    again = yield from won(first)
    assert (again.token, again.attempt, again.steps) == (claimed.token, 1, (("reserve", b"1"),))
    yield from shown(claim(id, fingerprint=b"f" * 16), State.RUNNING)


@FAMILY()
def the_same_takeover_sent_again_is_answered_alike() -> Script:
    id, _ = yield from abandoned()
    second = claim(id)
    claimed = yield from won(second)
    assert claimed.attempt == 2
    assert (yield from won(second)) == claimed


@FAMILY()
def the_same_claim_sent_after_it_is_done_shows_the_answer() -> Script:
    id = new_id()
    first = claim(id)
    claimed = yield from won(first)
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert (yield from shown(first, State.DONE)).snapshot == b"answer"


@FAMILY()
def identities_are_told_apart_to_the_last_bit() -> Script:
    stem = new_id()[:14]
    ids = [stem + ending for ending in (b"\x00\x00", b"\x00\x01", b"\xff\xff", b"''", b"%s", b":a", b"aA", b"AA")]
    tokens = []
    for id in ids:
        claimed = yield from won(claim(id))
        assert claimed.attempt == 1
        tokens.append(claimed.token)
    for id, token in zip(ids, tokens, strict=True):
        record = yield Lookup(id)
        assert (record.id, record.token) == (id, token)


@FAMILY()
def another_fingerprint_never_changes_a_record() -> Script:
    """This holds in every state. A different request must neither take over an abandoned record nor make it unknown."""
    for takeover in Takeover:
        silent = new_id()
        yield from won(claim(silent, fingerprint=b"f" * 16, lease=SHORT, takeover=takeover))
        yield PAST_SHORT
        before = yield Lookup(silent)
        assert before.state is State.ABANDONED
        for rule in Takeover:
            record = yield from shown(claim(silent, fingerprint=b"g" * 16, takeover=rule), State.ABANDONED)
            assert record.fingerprint == b"f" * 16
            yield from assert_unchanged(silent, before)
    for state in (State.RUNNING, State.DONE):
        id = new_id()
        claimed = yield from won(claim(id, fingerprint=b"f" * 16))
        if state is State.DONE:
            assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
        before = yield Lookup(id)
        record = yield from shown(claim(id, fingerprint=b"g" * 16), state)
        assert record.fingerprint == b"f" * 16
        yield from assert_unchanged(id, before)


@FAMILY()
def an_empty_fingerprint_matches_any() -> Script:
    for stored, requested in ((b"", b"f" * 16), (b"f" * 16, b""), (b"", b""), (b"f" * 16, b"f" * 16)):
        id, _ = yield from abandoned(fingerprint=stored)
        assert (yield from won(claim(id, fingerprint=requested))).attempt == 2
        assert (yield Lookup(id)).fingerprint == stored


@FAMILY()
def an_abandoned_record_is_taken_over() -> Script:
    id, first = yield from abandoned()
    record = yield Lookup(id)
    assert (record.state, record.token, record.attempt) == (State.ABANDONED, first.token, 1)
    assert record.lease_left <= 0
    second = yield from won(claim(id))
    assert second.attempt == 2
    assert second.token > first.token
    record = yield Lookup(id)
    assert (record.state, record.token, record.attempt) == (State.RUNNING, second.token, 2)
    assert 0 < record.lease_left <= LIVE
    assert LIVE < record.expires_in <= TTL
    assert record.age >= SHORT


@FAMILY()
def both_sides_must_allow_a_takeover() -> Script:
    """A re-run needs RETRY on both sides. A claim with RECOVER always takes over. Otherwise the record is unknown."""
    cases = []
    for stored, requested in product(Takeover, Takeover):
        id = new_id()
        cases.append((id, stored, requested, (yield from won(claim(id, lease=SHORT, takeover=stored)))))
    yield PAST_SHORT
    for id, stored, requested, first in cases:
        if requested is Takeover.RECOVER or (stored is Takeover.RETRY and requested is Takeover.RETRY):
            claimed = yield from won(claim(id, takeover=requested))
            assert claimed.attempt == 2, (stored, requested)
            assert claimed.token > first.token
            continue
        record = yield from shown(claim(id, takeover=requested), State.UNKNOWN)
        assert (record.token, record.attempt) == (first.token, 1), (stored, requested)
        before = yield Lookup(id)
        assert before.state is State.UNKNOWN
        for rule in Takeover:
            yield from shown(claim(id, takeover=rule), State.UNKNOWN)
            yield from assert_unchanged(id, before)


@FAMILY()
def the_new_owners_rule_counts_from_then_on() -> Script:
    id, _ = yield from abandoned()
    yield from won(claim(id, lease=SHORT))
    yield PAST_SHORT
    assert (yield from won(claim(id, lease=SHORT, takeover=Takeover.RECOVER))).attempt == 3
    yield PAST_SHORT
    assert (yield from won(claim(id, lease=SHORT, takeover=Takeover.RECOVER))).attempt == 4
    yield PAST_SHORT
    yield from shown(claim(id), State.UNKNOWN)


@FAMILY()
def a_done_record_is_shown_however_it_is_claimed() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    for rule in Takeover:
        record = yield from shown(claim(id, takeover=rule, lease=50 * TTL, ttl=50 * TTL), State.DONE)
        assert (record.snapshot, record.token) == (b"answer", claimed.token)
        yield from assert_unchanged(id, before)


@FAMILY()
def an_unknown_record_is_shown_however_it_is_claimed() -> Script:
    id, claimed = yield from unknown()
    before = yield Lookup(id)
    for rule in Takeover:
        record = yield from shown(claim(id, takeover=rule, lease=50 * TTL, ttl=50 * TTL), State.UNKNOWN)
        assert record.token == claimed.token
        yield from assert_unchanged(id, before)
