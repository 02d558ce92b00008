"""What a claim is answered.

Claim: which caller may run, which one gets the existing record, and which one may take over an abandoned attempt.
Replay: a finished record returns its snapshot byte for byte until it expires, and never changes.
Values: all bytes, texts, sizes and durations that the library allows are stored and returned unchanged.
"""

from __future__ import annotations

import unicodedata
from itertools import product

from semel.core.ops import FOREVER, Complete, Lookup, Release, Renew, SaveStep
from semel.core.states import State, Takeover
from semel.errors import RecordTooLarge
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Elapse,
    Elsewhere,
    Family,
    Script,
    abandoned,
    assert_unchanged,
    claim,
    done,
    new_id,
    running,
    shown,
    unknown,
    won,
)

CLAIM = Family("claim")


@CLAIM()
def an_absent_record_is_won() -> Script:
    id, claimed = yield from running(fingerprint=b"f" * 16)
    assert (claimed.attempt, claimed.steps) == (1, ())
    assert 0 < claimed.token < 2**63
    record = yield Lookup(id)
    assert (record.id, record.state, record.token, record.attempt) == (id, State.RUNNING, claimed.token, 1)
    assert (record.fingerprint, record.snapshot) == (b"f" * 16, None)
    assert (record.tenant, record.operation, record.key) == ("acme", "conformance", "key")
    assert 0 < record.lease_left <= LIVE
    assert LIVE < record.expires_in <= TTL
    assert 0 <= record.age < LIVE


@CLAIM()
def looking_up_an_absent_record_does_not_make_one() -> Script:
    id = new_id()
    assert (yield Lookup(id)) is None
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).attempt == 1


@CLAIM()
def a_running_record_is_shown() -> Script:
    id, claimed = yield from running()
    before = yield Lookup(id)
    for _ in range(2):
        record = yield from shown(claim(id, lease=50 * TTL, ttl=50 * TTL), State.RUNNING)
        assert (record.token, record.attempt, record.snapshot) == (claimed.token, 1, None)
        assert 0 < record.lease_left <= LIVE
        assert 0 <= record.age < LIVE
    yield from assert_unchanged(id, before)


@CLAIM(second=True)
def a_record_is_shown_to_every_instance() -> Script:
    id, claimed = yield from running()
    record = yield from shown(Elsewhere(claim(id)), State.RUNNING)
    assert record.token == claimed.token
    assert (yield Elsewhere(Complete(id, claimed.token, b"answer", TTL))) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == b"answer"


@CLAIM()
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


@CLAIM()
def the_same_takeover_sent_again_is_answered_alike() -> Script:
    id, _ = yield from abandoned()
    second = claim(id)
    claimed = yield from won(second)
    assert claimed.attempt == 2
    assert (yield from won(second)) == claimed


@CLAIM()
def the_same_claim_sent_after_it_is_done_shows_the_answer() -> Script:
    id = new_id()
    first = claim(id)
    claimed = yield from won(first)
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert (yield from shown(first, State.DONE)).snapshot == b"answer"


@CLAIM()
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


@CLAIM()
def another_fingerprint_never_changes_a_record() -> Script:
    """This holds in every state. A different request must neither take over an abandoned record nor make it unknown."""
    for takeover in Takeover:
        silent, _ = yield from abandoned(fingerprint=b"f" * 16, takeover=takeover)
        before = yield Lookup(silent)
        assert before.state is State.ABANDONED
        for rule in Takeover:
            record = yield from shown(claim(silent, fingerprint=b"g" * 16, takeover=rule), State.ABANDONED)
            assert record.fingerprint == b"f" * 16
            yield from assert_unchanged(silent, before)
    for make, state in ((running, State.RUNNING), (done, State.DONE)):
        id, _ = yield from make(fingerprint=b"f" * 16)
        before = yield Lookup(id)
        record = yield from shown(claim(id, fingerprint=b"g" * 16), state)
        assert record.fingerprint == b"f" * 16
        yield from assert_unchanged(id, before)


@CLAIM()
def an_empty_fingerprint_matches_any() -> Script:
    for stored, requested in ((b"", b"f" * 16), (b"f" * 16, b""), (b"", b""), (b"f" * 16, b"f" * 16)):
        id, _ = yield from abandoned(fingerprint=stored)
        assert (yield from won(claim(id, fingerprint=requested))).attempt == 2
        assert (yield Lookup(id)).fingerprint == stored


@CLAIM()
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


@CLAIM()
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


@CLAIM()
def the_new_owners_rule_counts_from_then_on() -> Script:
    id, _ = yield from abandoned()
    yield from won(claim(id, lease=SHORT))
    yield PAST_SHORT
    assert (yield from won(claim(id, lease=SHORT, takeover=Takeover.RECOVER))).attempt == 3
    yield PAST_SHORT
    assert (yield from won(claim(id, lease=SHORT, takeover=Takeover.RECOVER))).attempt == 4
    yield PAST_SHORT
    yield from shown(claim(id), State.UNKNOWN)


@CLAIM()
def a_done_record_is_shown_however_it_is_claimed() -> Script:
    id, claimed = yield from done(b"answer")
    before = yield Lookup(id)
    for rule in Takeover:
        record = yield from shown(claim(id, takeover=rule, lease=50 * TTL, ttl=50 * TTL), State.DONE)
        assert (record.snapshot, record.token) == (b"answer", claimed.token)
        yield from assert_unchanged(id, before)


@CLAIM()
def an_unknown_record_is_shown_however_it_is_claimed() -> Script:
    id, claimed = yield from unknown()
    before = yield Lookup(id)
    for rule in Takeover:
        record = yield from shown(claim(id, takeover=rule, lease=50 * TTL, ttl=50 * TTL), State.UNKNOWN)
        assert record.token == claimed.token
        yield from assert_unchanged(id, before)


REPLAY = Family("replay")


@REPLAY()
def the_answer_comes_back_byte_for_byte() -> Script:
    answer = b"\x00\xff answer \r\n\x00"
    id, claimed = yield from done(answer, fingerprint=b"f" * 16)
    for _ in range(3):
        record = yield from shown(claim(id, fingerprint=b"f" * 16), State.DONE)
        assert record.snapshot == answer
        assert type(record.snapshot) is bytes
        assert (record.id, record.token, record.attempt, record.fingerprint) == (id, claimed.token, 1, b"f" * 16)
        assert LIVE < record.expires_in <= TTL
    record = yield Lookup(id)
    assert (record.state, record.snapshot, record.fingerprint) == (State.DONE, answer, b"f" * 16)
    assert record.lease_left <= 0


@REPLAY()
def the_age_counts_from_the_first_claim() -> Script:
    id, claimed = yield from running()
    yield Elapse(0.1)
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert 0.1 <= (yield from shown(claim(id), State.DONE)).age < LIVE
    assert 0.1 <= (yield Lookup(id)).age < LIVE


@REPLAY()
def a_completion_sent_again_is_answered_alike() -> Script:
    """The first answer may have been lost. The record stays as the first completion left it."""
    id, claimed = yield from done(b"first")
    before = yield Lookup(id)
    for snapshot in (b"first", b"other", b""):
        assert (yield Complete(id, claimed.token, snapshot, 50 * TTL)) is True
        yield from assert_unchanged(id, before)


@REPLAY()
def the_answer_of_a_later_attempt_comes_back() -> Script:
    id, _ = yield from abandoned()
    second = yield from won(claim(id))
    assert (yield Complete(id, second.token, b"second", TTL)) is True
    record = yield from shown(claim(id), State.DONE)
    assert (record.snapshot, record.attempt, record.token) == (b"second", 2, second.token)


@REPLAY()
def the_ttl_of_the_completion_counts_from_the_completion() -> Script:
    id, _ = yield from done(ttl=TTL, answer_ttl=5 * TTL)
    assert 4 * TTL < (yield Lookup(id)).expires_in <= 5 * TTL


@REPLAY(second=True)
def a_completion_is_seen_by_every_instance_at_once() -> Script:
    for _ in range(5):
        id, _ = yield from done(b"answer")
        assert (yield Elsewhere(Lookup(id))).snapshot == b"answer"
        assert (yield from shown(Elsewhere(claim(id)), State.DONE)).snapshot == b"answer"


@REPLAY()
def replays_change_nothing() -> Script:
    id, _ = yield from done(b"answer")
    before = yield Lookup(id)
    for _ in range(20):
        yield from shown(claim(id, fingerprint=b"f" * 16, lease=50 * TTL, ttl=50 * TTL, key="other"), State.DONE)
    yield from assert_unchanged(id, before)


VALUES = Family("values")

TEXTS = (
    "",
    " ",
    "plain",
    "x" * 255,
    "é" * 255,
    "\U0001f4b8" * 255,
    "\u202eright to left\u202c",
    unicodedata.normalize("NFD", "Ångström"),
    "'; DROP TABLE semel_record; --",
    'it\'s "quoted" `so`',
    "100% %s %(name)s %%",
    ":id :now $1 ? {{word}} {0}",
    "back\\slash \\x00 \\' \\",
    "tab\tand\nnew\r\nline",
    '[1, {"a": null}]',
    "\ufeffmark",
    "\x7f\x01",
)
SNAPSHOTS = (b"", b"\x00", b"\\x00", bytes(range(256)), b"\xff" * 1000, b"'")
LARGE = bytes(range(256)) * 4096


@VALUES()
def any_snapshot_comes_back() -> Script:
    for snapshot in SNAPSHOTS:
        id, _ = yield from done(snapshot)
        assert (yield from shown(claim(id), State.DONE)).snapshot == snapshot
        assert (yield Elsewhere(Lookup(id))).snapshot == snapshot


@VALUES()
def a_large_snapshot_comes_back_or_is_refused_as_such() -> Script:
    """A store with a limit raises RecordTooLarge. The owner keeps its attempt, and may store something smaller."""
    id, claimed = yield from running()
    snapshot = LARGE
    try:
        assert (yield Complete(id, claimed.token, LARGE, TTL)) is True
    except RecordTooLarge:
        yield from shown(claim(id), State.RUNNING)
        snapshot = b"done"
        assert (yield Complete(id, claimed.token, snapshot, TTL)) is True
    assert (yield from shown(claim(id), State.DONE)).snapshot == snapshot
    assert (yield Elsewhere(Lookup(id))).snapshot == snapshot


@VALUES()
def any_text_comes_back() -> Script:
    for text in TEXTS:
        id, _ = yield from running(tenant=text, operation=text, key=text)
        record = yield Elsewhere(Lookup(id))
        assert (record.tenant, record.operation, record.key) == (text, text, text)


@VALUES()
def a_key_that_is_not_kept_is_none_and_not_empty() -> Script:
    for key in (None, ""):
        id, _ = yield from running(key=key)
        assert (yield Lookup(id)).key == key


@VALUES()
def any_fingerprint_comes_back() -> Script:
    for fingerprint in (b"", b"\x00" * 16, b"\xff" * 32, bytes(range(64))):
        id, _ = yield from running(fingerprint=fingerprint)
        assert (yield Lookup(id)).fingerprint == fingerprint
        assert (yield from shown(claim(id), State.RUNNING)).fingerprint == fingerprint


@VALUES()
def fingerprints_are_told_apart_to_the_last_byte() -> Script:
    id, claimed = yield from running(fingerprint=b"f" * 16)
    assert (yield Release(id, claimed.token, State.ABANDONED)) is True
    for other in (b"f" * 15, b"f" * 17, b"f" * 15 + b"\x00", b"F" * 16, b"\x00"):
        yield from shown(claim(id, fingerprint=other), State.ABANDONED)
    assert (yield from won(claim(id, fingerprint=b"f" * 16))).attempt == 2


@VALUES()
def any_nonce_is_remembered() -> Script:
    for nonce in (0, 1, 2**32, 2**53 + 1, 2**63 - 1):
        id, first = yield from running(nonce=nonce)
        assert (yield from won(claim(id, nonce=nonce))).token == first.token
        yield from shown(claim(id, nonce=nonce - 1 if nonce else 1), State.RUNNING)


@VALUES()
def tokens_are_exact() -> Script:
    """A store that stores numbers as doubles would accept a token that differs by one."""
    id, claimed = yield from running()
    for token in (claimed.token - 1, claimed.token + 1):
        assert (yield Renew(id, token, TTL)) is False
    assert (yield Renew(id, claimed.token, TTL)) is True


@VALUES()
def any_duration_is_taken() -> Script:
    for seconds in (0.000_001, 0.001, 0.5, 1, 86400.0, 1e9 + 0.123456, FOREVER):
        id, claimed = yield from running(lease=0.000_001)
        assert (yield Renew(id, claimed.token, seconds)) is True
        record = yield Lookup(id)
        assert seconds - 60 < record.lease_left <= seconds
        assert (yield Complete(id, claimed.token, b"answer", seconds)) is True
        if seconds > 60:
            assert seconds - 60 < (yield Lookup(id)).expires_in <= seconds
