"""Batch: ``execute_many`` answers its Ops in order, each as if it had been sent alone."""

from __future__ import annotations

from semel.core.ops import (
    Claimed,
    Complete,
    Existing,
    Lookup,
    Release,
    Renew,
    Resolve,
    SaveStep,
    Sweep,
    Swept,
)
from semel.core.states import State
from semel.testing.conformance.phrases import abandoned, claim, done, running, won
from semel.testing.conformance.script import LIVE, SHORT, TTL, Batch, Elsewhere, Family, Script, new_id

FAMILY = Family("batch")


@FAMILY()
def nothing_is_answered_with_nothing() -> Script:
    assert (yield Batch([])) == []


@FAMILY()
def every_kind_of_op_is_answered() -> Script:
    runs, owner = yield from running()
    finishes, finisher = yield from running()
    ends, ender = yield from running()
    ready, _ = yield from done(b"ready")
    silent, _ = yield from abandoned()
    fresh, absent = new_id(), new_id()
    answers = yield Batch(
        [
            claim(fresh),
            claim(runs),
            claim(ready),
            claim(silent),
            Renew(runs, owner.token, LIVE),
            SaveStep(runs, owner.token, "charge", b"1", 0),
            Complete(finishes, finisher.token, b"finished", TTL),
            Release(ends, ender.token),
            Lookup(ready),
            Lookup(absent),
            Resolve(absent, None, TTL),
            Sweep(0),
        ]
    )
    first, shown, replay, taken, renewed, saved, completed, released, found, missing, resolved, swept = answers
    assert (type(first), first.attempt) == (Claimed, 1)
    assert (type(shown), shown.record.state) == (Existing, State.RUNNING)
    assert (type(replay), replay.record.snapshot) == (Existing, b"ready")
    assert (type(taken), taken.attempt) == (Claimed, 2)
    assert (renewed, saved, completed, released) == (True, True, True, True)
    assert (found.snapshot, missing, resolved) == (b"ready", None, State.ABSENT)
    assert swept == Swept(0, 0)
    assert (yield Lookup(fresh)).token == first.token
    assert (yield Lookup(finishes)).snapshot == b"finished"
    assert (yield Lookup(ends)) is None


@FAMILY()
def ops_on_one_record_are_answered_in_order() -> Script:
    id, claimed = yield from running()
    token = claimed.token
    answers = yield Batch(
        [
            Lookup(id),
            SaveStep(id, token, "charge", b"1", 0),
            claim(id),
            Complete(id, token, b"first", TTL),
            Lookup(id),
            claim(id),
            Complete(id, token, b"second", TTL),
            Renew(id, token, LIVE),
            Release(id, token),
            Resolve(id, None, TTL),
            Lookup(id),
        ]
    )
    assert answers[0].state is State.RUNNING
    assert answers[1] is True
    assert answers[2].record.state is State.RUNNING
    assert answers[3] is True
    assert (answers[4].state, answers[4].snapshot) == (State.DONE, b"first")
    assert answers[5].record.snapshot == b"first"
    assert answers[6:9] == [True, False, False]
    assert answers[9] is State.DONE
    assert answers[10].snapshot == b"first"


@FAMILY()
def a_record_may_come_and_go_within_a_batch() -> Script:
    id, claimed = yield from running()
    first, second = claim(id), claim(id)
    answers = yield Batch([Release(id, claimed.token), Lookup(id), first, second, first, Lookup(id)])
    assert answers[:2] == [True, None]
    assert (type(answers[2]), answers[2].attempt) == (Claimed, 1)
    assert answers[2].token > claimed.token
    assert answers[3].record.token == answers[2].token
    assert answers[4] == answers[2]
    assert answers[5].token == answers[2].token


@FAMILY()
def of_many_claims_of_one_record_the_first_is_won() -> Script:
    id = new_id()
    answers = yield Batch([claim(id) for _ in range(20)])
    assert type(answers[0]) is Claimed
    assert {answer.record.token for answer in answers[1:]} == {answers[0].token}
    assert {answer.record.state for answer in answers[1:]} == {State.RUNNING}


@FAMILY()
def of_many_takeovers_of_one_record_the_first_is_won() -> Script:
    id, old = yield from abandoned()
    answers = yield Batch([claim(id) for _ in range(20)])
    assert (type(answers[0]), answers[0].attempt) == (Claimed, 2)
    assert {answer.record.token for answer in answers[1:]} == {answers[0].token}
    assert answers[0].token > old.token


@FAMILY()
def a_takeover_within_a_batch_fences_the_old_owner() -> Script:
    id, old = yield from abandoned()
    answers = yield Batch(
        [
            claim(id),
            Renew(id, old.token, LIVE),
            SaveStep(id, old.token, "stale", b"", 0),
            Complete(id, old.token, b"", TTL),
        ]
    )
    assert type(answers[0]) is Claimed
    assert answers[1:] == [False, False, False]
    answers = yield Batch([Complete(id, answers[0].token, b"answer", TTL), claim(id)])
    assert answers[1].record.snapshot == b"answer"


@FAMILY()
def steps_saved_in_one_batch_keep_their_order() -> Script:
    id, first = yield from running()
    names = [f"step {position}" for position in range(10)]
    saves = [SaveStep(id, first.token, name, name.encode(), position) for position, name in enumerate(names)]
    answers = yield Batch(
        [*saves, SaveStep(id, first.token, "step 0", b"other", 10), Release(id, first.token, State.ABANDONED)]
    )
    assert answers == [True] * 12
    assert (yield from won(claim(id))).steps == tuple((name, name.encode()) for name in names)


@FAMILY()
def a_large_batch_is_answered_in_full() -> Script:
    ids = [new_id() for _ in range(300)]
    answers = yield Batch([claim(id) for id in ids])
    assert {type(answer) for answer in answers} == {Claimed}
    finished = yield Batch(
        [Complete(id, answer.token, b"answer of " + id, TTL) for id, answer in zip(ids, answers, strict=True)]
    )
    assert finished == [True] * 300
    found = yield Elsewhere(Batch([Lookup(id) for id in ids]))
    assert [record.snapshot for record in found] == [b"answer of " + id for id in ids]


@FAMILY()
def short_and_long_durations_do_not_mix_within_a_batch() -> Script:
    brief, long = new_id(), new_id()
    answers = yield Batch([claim(brief, lease=SHORT, ttl=TTL), claim(long, lease=10 * LIVE, ttl=5 * TTL)])
    assert {type(answer) for answer in answers} == {Claimed}
    first, second = yield Batch([Lookup(brief), Lookup(long)])
    assert first.lease_left <= SHORT
    assert 9 * LIVE < second.lease_left <= 10 * LIVE
    assert first.expires_in <= TTL < 4 * TTL < second.expires_in <= 5 * TTL
