"""Several at once.

Race: of several callers at the same moment one wins, the others see its record, and none gets an error. Every
second caller uses the second instance of the store, if there is one. Each race is run several times.
Batch: ``execute_many`` answers its Ops in order, each as if it had been sent alone.
Wake-up: the store wakes a waiter when the record is no longer running, whichever instance ended the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from semel.core.ops import (
    Claimed,
    Complete,
    Existing,
    Lookup,
    Op,
    Release,
    Renew,
    Resolve,
    SaveStep,
    Sweep,
    Swept,
)
from semel.core.states import State, Takeover
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Batch,
    Elsewhere,
    Family,
    Linger,
    Script,
    Together,
    WaitForChange,
    abandoned,
    claim,
    done,
    new_id,
    next_attempt,
    running,
    several,
    shown,
    unknown,
    won,
)

RACE = Family("race")
RIVALS = 12
ROUNDS = 3


def rivals(ops: Sequence[Op[Any]]) -> Together:
    return Together([Elsewhere(op) if i % 2 else op for i, op in enumerate(ops)])


def one_winner(answers: Sequence[Claimed | Existing], attempt: int) -> Claimed:
    """Check that exactly one claim was won and that the others got its record. Returns the winner's answer."""
    winners = [answer for answer in answers if type(answer) is Claimed]
    assert len(winners) == 1, winners
    assert winners[0].attempt == attempt
    for answer in answers:
        if type(answer) is Existing:
            assert (answer.record.state, answer.record.token) == (State.RUNNING, winners[0].token)
    return winners[0]


@RACE()
def of_many_claims_one_is_won() -> Script:
    for _ in range(ROUNDS):
        id = new_id()
        winner = one_winner((yield rivals([claim(id) for _ in range(RIVALS)])), 1)
        assert (yield Lookup(id)).token == winner.token


@RACE()
def of_many_takeovers_one_is_won() -> Script:
    for _ in range(ROUNDS):
        id, old = yield from abandoned()
        winner = one_winner((yield rivals([claim(id) for _ in range(RIVALS)])), 2)
        assert winner.token > old.token
        assert (yield Lookup(id)).token == winner.token


@RACE()
def of_many_claims_of_an_expired_answer_one_is_won() -> Script:
    for _ in range(ROUNDS):
        id, old = yield from done(b"old", ttl=SHORT)
        yield PAST_SHORT
        assert one_winner((yield rivals([claim(id) for _ in range(RIVALS)])), 1).token > old.token


@RACE()
def one_claim_sent_many_times_is_one_claim() -> Script:
    for _ in range(ROUNDS):
        id = new_id()
        answers = yield rivals([claim(id, nonce=7) for _ in range(RIVALS)])
        assert {type(answer) for answer in answers} == {Claimed}
        assert len({(answer.token, answer.attempt) for answer in answers}) == 1


@RACE()
def claims_of_many_records_do_not_disturb_each_other() -> Script:
    ids = [new_id() for _ in range(RIVALS)]
    answers = yield rivals([claim(id) for id in ids for _ in range(3)])
    for i in range(RIVALS):
        one_winner(answers[3 * i : 3 * i + 3], 1)


@RACE()
def nobody_wins_what_may_not_be_run_again() -> Script:
    for _ in range(ROUNDS):
        id, old = yield from abandoned(takeover=Takeover.REJECT)
        answers = yield rivals([claim(id) for _ in range(RIVALS)])
        assert {(type(answer), answer.record.state, answer.record.token) for answer in answers} == {
            (Existing, State.UNKNOWN, old.token)
        }


@RACE()
def a_rejecting_and_a_retrying_claim_cannot_both_have_their_way() -> Script:
    for _ in range(ROUNDS):
        id, _ = yield from abandoned()
        answers = yield rivals([claim(id, takeover=Takeover(i % 3 == 0)) for i in range(RIVALS)])
        record = yield Lookup(id)
        if record.state is State.RUNNING:
            assert one_winner(answers, 2).token == record.token
        else:
            assert record.state is State.UNKNOWN
            assert {(type(answer), answer.record.state) for answer in answers} == {(Existing, State.UNKNOWN)}


@RACE()
def a_late_completion_or_the_takeover_wins() -> Script:
    for _ in range(2 * ROUNDS):
        id, old = yield from abandoned()
        completed, taken = yield rivals([Complete(id, old.token, b"late", TTL), claim(id)])
        record = yield Lookup(id)
        if completed:
            assert (record.state, record.snapshot) == (State.DONE, b"late")
            assert taken.record.snapshot == b"late"
        else:
            assert type(taken) is Claimed
            assert (record.state, record.token, record.snapshot) == (State.RUNNING, taken.token, None)


@RACE()
def a_late_renewal_or_the_takeover_wins() -> Script:
    for _ in range(2 * ROUNDS):
        id, old = yield from abandoned()
        renewed, taken = yield rivals([Renew(id, old.token, LIVE), claim(id)])
        assert renewed is (type(taken) is Existing)
        assert (yield Lookup(id)).token == (old.token if renewed else taken.token)


@RACE()
def a_completion_or_a_release_wins() -> Script:
    for _ in range(2 * ROUNDS):
        id, claimed = yield from running()
        completed, released = yield rivals([Complete(id, claimed.token, b"answer", TTL), Release(id, claimed.token)])
        assert completed is not released
        assert ((yield Lookup(id)) is None) is released


@RACE()
def of_many_completions_the_first_stays() -> Script:
    for _ in range(ROUNDS):
        id, claimed = yield from running()
        snapshots = [b"answer %d" % i for i in range(RIVALS)]
        answers = yield rivals([Complete(id, claimed.token, snapshot, TTL) for snapshot in snapshots])
        assert answers == [True] * RIVALS
        stored = (yield Lookup(id)).snapshot
        assert stored in snapshots
        assert (yield from shown(claim(id), State.DONE)).snapshot == stored


@RACE()
def a_claim_beside_a_release_runs_or_is_turned_away() -> Script:
    for _ in range(2 * ROUNDS):
        id, old = yield from running()
        released, *answers = yield rivals([Release(id, old.token), *(claim(id) for _ in range(4))])
        assert released is True
        winners = [answer for answer in answers if type(answer) is Claimed]
        assert len(winners) <= 1
        record = yield Lookup(id)
        assert (record and record.token) == (winners[0].token if winners else None)
        assert {a.record.token for a in answers if type(a) is Existing} <= {old.token, *(w.token for w in winners)}


@RACE()
def claim_and_sweep_and_release_at_once_make_one_first_attempt() -> Script:
    for _ in range(2 * ROUNDS):
        id, old = yield from abandoned(ttl=SHORT)
        answers = yield rivals(
            [claim(id), Sweep(100), Release(id, old.token), claim(id), claim(id), Sweep(100), claim(id), Sweep(100)]
        )
        winner = one_winner([answer for answer in answers if type(answer) in (Claimed, Existing)], 1)
        record = yield Lookup(id)
        assert (record.state, record.token) == (State.RUNNING, winner.token)
        assert winner.token > old.token


@RACE()
def a_sweep_never_takes_what_was_claimed_again() -> Script:
    ids = []
    for _ in range(RIVALS):
        id, _ = yield from done(b"old", ttl=SHORT)
        ids.append(id)
    yield PAST_SHORT
    answers = yield rivals([op for id in ids for op in (claim(id), Sweep(100))])
    for id, answer in zip(ids, answers[::2], strict=True):
        assert type(answer) is Claimed
        assert (yield Lookup(id)).token == answer.token


@RACE()
def of_two_resolutions_one_counts() -> Script:
    for _ in range(2 * ROUNDS):
        id, _ = yield from unknown()
        found = yield rivals([Resolve(id, b"resolved", TTL), Resolve(id, None, TTL)])
        record = yield Lookup(id)
        if record is None:
            assert found == [State.ABSENT, State.UNKNOWN]
        else:
            assert record.snapshot == b"resolved"
            assert found == [State.UNKNOWN, State.DONE]


@RACE()
def of_an_owners_report_and_a_resolution_of_what_was_seen_one_counts() -> Script:
    """A person has seen the token and the state. The owner reports with the same token, and that changes the state."""
    moves: dict[State, Callable[[bytes, int], Op[bool]]] = {
        State.DONE: lambda id, token: Complete(id, token, b"paid", TTL),
        State.RUNNING: lambda id, token: Renew(id, token, LIVE),
        State.UNKNOWN: lambda id, token: Release(id, token, State.UNKNOWN),
    }
    for make, targets in (
        (running, (State.DONE, State.UNKNOWN)),
        (abandoned, (State.DONE, State.UNKNOWN, State.RUNNING)),
        (unknown, (State.DONE,)),
    ):
        for target in targets * ROUNDS:
            id, claimed = yield from make()
            seen = yield Lookup(id)
            freed, reported = yield rivals(
                [Resolve(id, None, TTL, True, claimed.token, (seen.state,)), moves[target](id, claimed.token)]
            )
            record = yield Lookup(id)
            if reported:
                assert (freed, record.state, record.token) == (target, target, claimed.token)
            else:
                assert (freed, record) == (seen.state, None)


@RACE()
def of_many_values_for_a_step_one_stays() -> Script:
    id, first = yield from running()
    saves: list[Op[Any]] = [SaveStep(id, first.token, "charge", b"%d" % i, 0) for i in range(RIVALS)]
    saves += [SaveStep(id, first.token, f"step {i}", b"%d" % i, i + 1) for i in range(RIVALS)]
    assert (yield rivals(saves)) == [True] * len(saves)
    steps = dict((yield from next_attempt(id, first)).steps)
    assert steps.pop("charge") in [b"%d" % i for i in range(RIVALS)]
    assert steps == {f"step {i}": b"%d" % i for i in range(RIVALS)}


@RACE()
def batches_over_the_same_records_do_not_stand_in_each_others_way() -> Script:
    """The batches have opposite orders. A store that locks row by row must sort them or retry, or it would deadlock."""
    attempts = yield from several(RIVALS)
    renewals = [Renew(id, claimed.token, LIVE) for id, claimed in attempts.items()]
    completions = [Complete(id, claimed.token, b"answer", TTL) for id, claimed in attempts.items()]
    claims = [claim(id) for id in attempts]
    for ops in (renewals, completions, claims):
        for _ in range(ROUNDS):
            both = yield Together([Batch(ops), Elsewhere(Batch(ops[::-1])), Batch(ops[::-1]), Elsewhere(Batch(ops))])
            for answers in both:
                if ops is claims:
                    assert {answer.record.snapshot for answer in answers} == {b"answer"}
                else:
                    assert answers == [True] * RIVALS


BATCH = Family("batch")


@BATCH()
def nothing_is_answered_with_nothing() -> Script:
    assert (yield Batch([])) == []


@BATCH()
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


@BATCH()
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


@BATCH()
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


@BATCH()
def of_many_claims_of_one_record_the_first_is_won() -> Script:
    id = new_id()
    answers = yield Batch([claim(id) for _ in range(20)])
    assert type(answers[0]) is Claimed
    assert {answer.record.token for answer in answers[1:]} == {answers[0].token}
    assert {answer.record.state for answer in answers[1:]} == {State.RUNNING}


@BATCH()
def of_many_takeovers_of_one_record_the_first_is_won() -> Script:
    id, old = yield from abandoned()
    answers = yield Batch([claim(id) for _ in range(20)])
    assert (type(answers[0]), answers[0].attempt) == (Claimed, 2)
    assert {answer.record.token for answer in answers[1:]} == {answers[0].token}
    assert answers[0].token > old.token


@BATCH()
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


@BATCH()
def steps_saved_in_one_batch_keep_their_order() -> Script:
    id, first = yield from running()
    names = [f"step {position}" for position in range(10)]
    saves = [SaveStep(id, first.token, name, name.encode(), position) for position, name in enumerate(names)]
    answers = yield Batch(
        [*saves, SaveStep(id, first.token, "step 0", b"other", 10), Release(id, first.token, State.ABANDONED)]
    )
    assert answers == [True] * 12
    assert (yield from won(claim(id))).steps == tuple((name, name.encode()) for name in names)


@BATCH()
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


@BATCH()
def short_and_long_durations_do_not_mix_within_a_batch() -> Script:
    brief, long = new_id(), new_id()
    answers = yield Batch([claim(brief, lease=SHORT, ttl=TTL), claim(long, lease=10 * LIVE, ttl=5 * TTL)])
    assert {type(answer) for answer in answers} == {Claimed}
    first, second = yield Batch([Lookup(brief), Lookup(long)])
    assert first.lease_left <= SHORT
    assert 9 * LIVE < second.lease_left <= 10 * LIVE
    assert first.expires_in <= TTL < 4 * TTL < second.expires_in <= 5 * TTL


WAKEUP = Family("wakeup")
LONG = 20.0
SOON = 10.0

ENDINGS: tuple[Callable[[bytes, int], Op[Any]], ...] = (
    lambda id, token: Complete(id, token, b"answer", TTL),
    lambda id, token: Release(id, token, State.ABSENT),
    lambda id, token: Release(id, token, State.ABANDONED),
    lambda id, token: Release(id, token, State.UNKNOWN),
    lambda id, token: Resolve(id, b"forced", TTL, True),
    lambda id, token: Resolve(id, None, TTL, True),
)


def _after_a_while(request: Op[Any] | Elsewhere) -> Script:
    """Send the request when the others are probably waiting. One that comes later must not wait at all."""
    yield Linger(0.1)
    return (yield request)


@WAKEUP(wakes=True)
def nobody_waits_for_what_is_not_running() -> Script:
    assert (yield WaitForChange(new_id(), LONG)) < SOON
    for make in (done, unknown, abandoned):
        id, _ = yield from make()
        assert (yield WaitForChange(id, LONG)) < SOON
        assert (yield Elsewhere(WaitForChange(id, LONG))) < SOON


@WAKEUP(wakes=True)
def a_wait_ends_by_its_limit() -> Script:
    id, claimed = yield from running()
    assert (yield WaitForChange(id, 0.1)) < SOON
    assert (yield WaitForChange(id, 0)) < SOON
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert (yield WaitForChange(id, LONG)) < SOON


@WAKEUP(wakes=True)
def whatever_ends_an_attempt_wakes_its_waiters() -> Script:
    for ending in ENDINGS:
        id, claimed = yield from running()
        *waited, _ = yield Together(
            [WaitForChange(id, LONG), WaitForChange(id, LONG), _after_a_while(ending(id, claimed.token))]
        )
        assert max(waited) < SOON


@WAKEUP(wakes=True, second=True)
def an_attempt_ended_elsewhere_wakes_its_waiters() -> Script:
    for ending in ENDINGS:
        id, claimed = yield from running()
        *waited, _ = yield Together(
            [
                WaitForChange(id, LONG),
                Elsewhere(WaitForChange(id, LONG)),
                _after_a_while(Elsewhere(ending(id, claimed.token))),
            ]
        )
        assert max(waited) < SOON


@WAKEUP(wakes=True)
def an_attempt_that_carries_on_does_not_lose_its_waiters() -> Script:
    """A waiter that a renewal or a step wakes early, and that waits again, must still be woken at the end."""
    id, claimed = yield from running()

    def carries_on() -> Script:
        yield Linger(0.05)
        assert (yield Renew(id, claimed.token, LIVE)) is True
        assert (yield SaveStep(id, claimed.token, "charge", b"1", 0)) is True
        yield Linger(0.05)
        return (yield Complete(id, claimed.token, b"answer", TTL))

    waited, completed = yield Together([WaitForChange(id, LONG), carries_on()])
    assert completed is True
    assert waited < SOON


@WAKEUP(wakes=True)
def each_waits_for_its_own_record() -> Script:
    attempts = yield from several(8)
    waits = [WaitForChange(id, LONG) for id in attempts]
    ends = [_after_a_while(Complete(id, claimed.token, b"answer", TTL)) for id, claimed in attempts.items()]
    answers = yield Together([*waits, *ends])
    assert max(answers[:8]) < SOON
    assert answers[8:] == [True] * 8


@WAKEUP(wakes=True)
def a_waiter_that_went_away_harms_nobody() -> Script:
    id, claimed = yield from running()
    assert (yield WaitForChange(id, 0.05)) < SOON
    waited, completed = yield Together(
        [WaitForChange(id, LONG), _after_a_while(Complete(id, claimed.token, b"answer", TTL))]
    )
    assert completed is True
    assert waited < SOON
