"""Race: of several callers at the same moment one wins, the others see its record, and none gets an error.

Every second caller uses the second instance of the store, if there is one. Each race is run several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.core.ops import Claimed, Complete, Existing, Lookup, Op, Release, Renew, Resolve, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import abandoned, claim, done, running, shown, unknown, won
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Batch,
    Elsewhere,
    Family,
    Script,
    Together,
    new_id,
)

FAMILY = Family("race")
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


@FAMILY()
def of_many_claims_one_is_won() -> Script:
    for _ in range(ROUNDS):
        id = new_id()
        winner = one_winner((yield rivals([claim(id) for _ in range(RIVALS)])), 1)
        assert (yield Lookup(id)).token == winner.token


@FAMILY()
def of_many_takeovers_one_is_won() -> Script:
    for _ in range(ROUNDS):
        id, old = yield from abandoned()
        winner = one_winner((yield rivals([claim(id) for _ in range(RIVALS)])), 2)
        assert winner.token > old.token
        assert (yield Lookup(id)).token == winner.token


@FAMILY()
def of_many_claims_of_an_expired_answer_one_is_won() -> Script:
    for _ in range(ROUNDS):
        id, old = yield from done(b"old", ttl=SHORT)
        yield PAST_SHORT
        assert one_winner((yield rivals([claim(id) for _ in range(RIVALS)])), 1).token > old.token


@FAMILY()
def one_claim_sent_many_times_is_one_claim() -> Script:
    for _ in range(ROUNDS):
        id = new_id()
        answers = yield rivals([claim(id, nonce=7) for _ in range(RIVALS)])
        assert {type(answer) for answer in answers} == {Claimed}
        assert len({(answer.token, answer.attempt) for answer in answers}) == 1


@FAMILY()
def claims_of_many_records_do_not_disturb_each_other() -> Script:
    ids = [new_id() for _ in range(RIVALS)]
    answers = yield rivals([claim(id) for id in ids for _ in range(3)])
    for i in range(RIVALS):
        one_winner(answers[3 * i : 3 * i + 3], 1)


@FAMILY()
def nobody_wins_what_may_not_be_run_again() -> Script:
    for _ in range(ROUNDS):
        id, old = yield from abandoned(takeover=Takeover.REJECT)
        answers = yield rivals([claim(id) for _ in range(RIVALS)])
        assert {(type(answer), answer.record.state, answer.record.token) for answer in answers} == {
            (Existing, State.UNKNOWN, old.token)
        }


@FAMILY()
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


@FAMILY()
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


@FAMILY()
def a_late_renewal_or_the_takeover_wins() -> Script:
    for _ in range(2 * ROUNDS):
        id, old = yield from abandoned()
        renewed, taken = yield rivals([Renew(id, old.token, LIVE), claim(id)])
        assert renewed is (type(taken) is Existing)
        assert (yield Lookup(id)).token == (old.token if renewed else taken.token)


@FAMILY()
def a_completion_or_a_release_wins() -> Script:
    for _ in range(2 * ROUNDS):
        id, claimed = yield from running()
        completed, released = yield rivals([Complete(id, claimed.token, b"answer", TTL), Release(id, claimed.token)])
        assert completed is not released
        assert ((yield Lookup(id)) is None) is released


@FAMILY()
def of_many_completions_the_first_stays() -> Script:
    for _ in range(ROUNDS):
        id, claimed = yield from running()
        snapshots = [b"answer %d" % i for i in range(RIVALS)]
        answers = yield rivals([Complete(id, claimed.token, snapshot, TTL) for snapshot in snapshots])
        assert answers == [True] * RIVALS
        stored = (yield Lookup(id)).snapshot
        assert stored in snapshots
        assert (yield from shown(claim(id), State.DONE)).snapshot == stored


@FAMILY()
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


@FAMILY()
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


@FAMILY()
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


@FAMILY()
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


@FAMILY()
def of_many_values_for_a_step_one_stays() -> Script:
    id, first = yield from running()
    saves: list[Op[Any]] = [SaveStep(id, first.token, "charge", b"%d" % i, 0) for i in range(RIVALS)]
    saves += [SaveStep(id, first.token, f"step {i}", b"%d" % i, i + 1) for i in range(RIVALS)]
    assert (yield rivals(saves)) == [True] * len(saves)
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    steps = dict((yield from won(claim(id))).steps)
    assert steps.pop("charge") in [b"%d" % i for i in range(RIVALS)]
    assert steps == {f"step {i}": b"%d" % i for i in range(RIVALS)}


@FAMILY()
def batches_over_the_same_records_do_not_stand_in_each_others_way() -> Script:
    """The batches have opposite orders. A store that locks row by row must sort them or retry, or it would deadlock."""
    attempts = []
    for _ in range(RIVALS):
        attempts.append((yield from running()))
    renewals = [Renew(id, claimed.token, LIVE) for id, claimed in attempts]
    completions = [Complete(id, claimed.token, b"answer", TTL) for id, claimed in attempts]
    claims = [claim(id) for id, _ in attempts]
    for ops in (renewals, completions, claims):
        for _ in range(ROUNDS):
            both = yield Together([Batch(ops), Elsewhere(Batch(ops[::-1])), Batch(ops[::-1]), Elsewhere(Batch(ops))])
            for answers in both:
                if ops is claims:
                    assert {answer.record.snapshot for answer in answers} == {b"answer"}
                else:
                    assert answers == [True] * RIVALS
