"""Sweep: expired records are removed in bounded batches, those in doubt become unknown, and others are unchanged.

The proofs compare counts, so no other process may sweep the same records at the same time.
"""

from __future__ import annotations

from semel.core.ops import Complete, Lookup, Release, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import (
    abandoned_many,
    assert_unchanged,
    claim,
    done,
    drained,
    running,
    unknown,
    won,
)
from semel.testing.conformance.script import PAST_SHORT, SHORT, TTL, Elsewhere, Family, Script, Together, new_id

FAMILY = Family("sweep")


@FAMILY(keeps_expired=True)
def expired_records_are_removed_and_counted() -> Script:
    yield from drained()
    for _ in range(3):
        yield from done(b"old", ttl=SHORT)
    yield from abandoned_many(2, ttl=SHORT)
    swept = yield Sweep(100)
    assert (swept.removed, swept.unknown) == (5, 0)
    swept = yield Sweep(100)
    assert (swept.removed, swept.unknown) == (0, 0)


@FAMILY()
def what_may_not_be_run_again_becomes_unknown_and_stays() -> Script:
    yield from drained()
    rejecting = yield from abandoned_many(2, ttl=SHORT, takeover=Takeover.REJECT)
    recovering = yield from abandoned_many(1, ttl=SHORT, takeover=Takeover.RECOVER)
    swept = yield Sweep(100)
    assert (swept.removed, swept.unknown) == (0, 3)
    swept = yield Sweep(100)
    assert (swept.removed, swept.unknown) == (0, 0)
    for id in (*rejecting, *recovering):
        record = yield Lookup(id)
        assert (record.state, record.attempt) == (State.UNKNOWN, 1)


@FAMILY()
def an_owner_may_still_report_what_a_sweep_made_unknown() -> Script:
    id = new_id()
    claimed = yield from won(claim(id, lease=SHORT, ttl=SHORT, takeover=Takeover.REJECT))
    yield PAST_SHORT
    yield from drained()
    assert (yield Lookup(id)).state is State.UNKNOWN
    assert (yield Complete(id, claimed.token, b"late", TTL)) is True
    assert (yield Lookup(id)).snapshot == b"late"


@FAMILY()
def everything_else_is_left_as_it_is() -> Script:
    live, _ = yield from running()
    live_past_its_ttl, _ = yield from running(ttl=SHORT)
    finished, _ = yield from done(b"answer")
    lost, _ = yield from unknown()
    (silent,) = yield from abandoned_many(1)
    (silent_for_good,) = yield from abandoned_many(1, takeover=Takeover.REJECT)
    completed_late = new_id()
    claimed = yield from won(claim(completed_late, lease=SHORT, ttl=SHORT))
    assert (yield Complete(completed_late, claimed.token, b"kept", TTL)) is True
    ids = (live, live_past_its_ttl, finished, lost, silent, silent_for_good, completed_late)
    yield PAST_SHORT
    before = []
    for id in ids:
        before.append((yield Lookup(id)))
    yield from drained()
    for id, record in zip(ids, before, strict=True):
        assert record is not None
        yield from assert_unchanged(id, record)


@FAMILY(keeps_expired=True)
def one_sweep_takes_no_more_than_its_limit() -> Script:
    yield from drained()
    yield from abandoned_many(5, ttl=SHORT)
    yield from abandoned_many(4, ttl=SHORT, takeover=Takeover.REJECT)
    swept = yield Sweep(0)
    assert (swept.removed, swept.unknown) == (0, 0)
    removed = unknown = rounds = 0
    while removed + unknown < 9:
        swept = yield Sweep(2)
        assert 1 <= swept.removed + swept.unknown <= 2
        removed += swept.removed
        unknown += swept.unknown
        rounds += 1
    assert (removed, unknown) == (5, 4)
    assert rounds >= 5
    swept = yield Sweep(2)
    assert (swept.removed, swept.unknown) == (0, 0)


@FAMILY(keeps_expired=True)
def a_record_claimed_again_after_it_expired_is_not_swept() -> Script:
    yield from drained()
    id, old = yield from done(b"old", ttl=SHORT)
    yield PAST_SHORT
    new = yield from won(claim(id))
    swept = yield Sweep(100)
    assert (swept.removed, swept.unknown) == (0, 0)
    assert (yield Lookup(id)).token == new.token > old.token
    assert (yield Release(id, new.token)) is True


@FAMILY(keeps_expired=True)
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
