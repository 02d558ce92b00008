"""What Ops do to a record: every (state, Op) pair goes where the table says, and nowhere else."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    Lookup,
    Release,
    Renew,
    Resolve,
    SaveStep,
)
from semel.core.semantics import RULES, Row, apply, state_of, sweepable
from semel.core.states import OWNER_MOVES, TRANSITIONS, Move, State, Takeover

ID = b"0123456789abcdef"
NOW = 1_000_000.0
TOKEN = int(NOW * 1_000_000) - 5


def claim(nonce: int = 2, fingerprint: bytes = b"", takeover: Takeover = Takeover.RETRY, lease: float = 30.0) -> Claim:
    return Claim(ID, nonce, fingerprint, lease, 3600.0, takeover, "t", "op", "k")


def row(state: State, **changes: Any) -> Row | None:
    """A row that is in this state at NOW."""
    if state is State.ABSENT:
        return None
    written = State.RUNNING if state is State.ABANDONED else state
    lease_end = NOW + 10 if state is State.RUNNING else NOW - 10
    made = Row(
        ID, written, TOKEN, 1, 1, Takeover.RETRY, b"f" * 16, lease_end, NOW - 60, NOW + 60, "t", "op", "k",
        b"snapshot" if state is State.DONE else None, (("step", b"v"),),
    )  # fmt: skip
    return made._replace(**changes)


OWNERS = {
    Move.RENEW: Renew(ID, TOKEN, 30.0),
    Move.SAVE_STEP: SaveStep(ID, TOKEN, "other", b"v", 1),
    Move.COMPLETE: Complete(ID, TOKEN, b"answer", 3600.0),
    Move.RELEASE: Release(ID, TOKEN),
    Move.YIELD: Release(ID, TOKEN, State.ABANDONED),
    Move.GIVE_UP: Release(ID, TOKEN, State.UNKNOWN),
}
PAIRS = [(state, move) for state in State for move in OWNERS]


def test_every_owners_move_and_every_op_is_tried_here() -> None:
    assert set(OWNERS) == OWNER_MOVES
    assert set(RULES) == {Claim, Renew, Complete, Release, SaveStep, Lookup, Resolve}


@pytest.mark.parametrize(("state", "move"), PAIRS, ids=lambda value: value.name)
def test_an_owners_move_goes_where_the_table_says_and_nowhere_else(state: State, move: Move) -> None:
    before = row(state)
    after, held = apply(before, OWNERS[move], NOW)
    target = TRANSITIONS.get((state, move))
    if target is None:
        again = state is State.DONE and move is Move.COMPLETE
        assert held is again, "a completion said twice is known; anything else is stale"
        assert after == before
    else:
        assert held is True
        assert state_of(after, NOW) is target


@pytest.mark.parametrize(("state", "move"), PAIRS, ids=lambda value: value.name)
def test_a_stale_token_changes_nothing_in_any_state(state: State, move: Move) -> None:
    before = row(state, token=TOKEN) if state is not State.ABSENT else None
    op = OWNERS[move]
    fields = {name: getattr(op, name) for name in op.__dataclass_fields__}  # type: ignore[attr-defined]
    for token in (TOKEN - 1, TOKEN + 1, 0):
        stale = type(op)(**{**fields, "token": token})
        assert apply(before, stale, NOW) == (before, False), token


CLAIMS = [
    # state, the record's takeover, the claim's takeover, the same request → the state afterwards
    (State.ABSENT, Takeover.RETRY, Takeover.RETRY, True, State.RUNNING),
    (State.RUNNING, Takeover.RETRY, Takeover.RETRY, True, None),
    (State.RUNNING, Takeover.RECOVER, Takeover.RECOVER, True, None),
    (State.DONE, Takeover.RETRY, Takeover.RECOVER, True, None),
    (State.UNKNOWN, Takeover.RETRY, Takeover.RECOVER, True, None),
    (State.ABANDONED, Takeover.RETRY, Takeover.RETRY, True, State.RUNNING),
    (State.ABANDONED, Takeover.RETRY, Takeover.REJECT, True, State.UNKNOWN),
    (State.ABANDONED, Takeover.REJECT, Takeover.RETRY, True, State.UNKNOWN),
    (State.ABANDONED, Takeover.REJECT, Takeover.RECOVER, True, State.RUNNING),
    (State.ABANDONED, Takeover.RECOVER, Takeover.RETRY, True, State.UNKNOWN),
    (State.ABANDONED, Takeover.RECOVER, Takeover.RECOVER, True, State.RUNNING),
    (State.ABANDONED, Takeover.RETRY, Takeover.RETRY, False, None),
    (State.ABANDONED, Takeover.REJECT, Takeover.REJECT, False, None),
]


@pytest.mark.parametrize(("state", "theirs", "ours", "same", "target"), CLAIMS)
def test_a_claim_goes_where_the_table_says(
    state: State, theirs: Takeover, ours: Takeover, same: bool, target: Any
) -> None:
    before = row(state, takeover=theirs) if state is not State.ABSENT else None
    op = claim(takeover=ours, fingerprint=b"f" * 16 if same else b"g" * 16)
    after, answer = apply(before, op, NOW)
    if target is State.RUNNING:
        assert isinstance(answer, Claimed)
        assert after is not None
        assert after.token == answer.token > (before.token if before else 0)
        assert answer.attempt == (before.attempt + 1 if before else 1)
        assert answer.steps == (before.steps if before else ()), "what earlier attempts saved is handed on"
        assert after.lease_end == NOW + 30
    else:
        assert isinstance(answer, Existing)
        assert answer.record.state is (target or state)
        assert after == before or target is State.UNKNOWN
    assert state_of(after, NOW) is (target or state)


@pytest.mark.parametrize("mine", [b"", b"f" * 16])
@pytest.mark.parametrize("theirs", [b"", b"f" * 16])
def test_a_request_without_a_fingerprint_matches_every_other(mine: bytes, theirs: bytes) -> None:
    _, answer = apply(row(State.ABANDONED, fingerprint=theirs), claim(fingerprint=mine), NOW)
    assert isinstance(answer, Claimed)


def test_the_same_claim_is_answered_alike_while_it_runs_and_not_later() -> None:
    running = row(State.RUNNING, nonce=2)
    after, answer = apply(running, claim(nonce=2), NOW)
    assert after is running
    assert isinstance(answer, Claimed)
    assert (answer.token, answer.attempt, answer.steps) == (TOKEN, 1, (("step", b"v"),))
    assert isinstance(apply(row(State.DONE, nonce=2), claim(nonce=2), NOW)[1], Existing)
    later = apply(row(State.ABANDONED, nonce=2), claim(nonce=2), NOW)[1]
    assert isinstance(later, Claimed)
    assert later.attempt == 2


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize("state", State, ids=lambda s: s.name)
def test_a_resolution_goes_where_the_table_says(state: State, happened: bool, force: bool) -> None:
    before = row(state)
    after, found = apply(before, Resolve(ID, b"answer" if happened else None, 60.0, force), NOW)
    assert found is state
    target = TRANSITIONS.get((state, Move.RESOLVE_DONE if happened else Move.RESOLVE_ABSENT))
    if force and state is State.RUNNING:
        target = State.DONE if happened else State.ABSENT
    if target is None:
        assert after == before
    else:
        assert after is not None
        assert state_of(after, NOW) is target
        assert after.token > TOKEN, "the lost owner's token is stale from now on"
        assert after.snapshot == (b"answer" if happened else None)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("token", [TOKEN, TOKEN + 1])
@pytest.mark.parametrize("state", State, ids=lambda s: s.name)
def test_a_record_is_freed_by_its_own_token_only(state: State, token: int, force: bool) -> None:
    before = row(state)
    after, found = apply(before, Resolve(ID, None, 60.0, force, token), NOW)
    if token != TOKEN:
        assert (after, found) == (before, State.ABSENT)
        return
    assert found is state
    move = Move.FREE if state is State.DONE else Move.RESOLVE_ABSENT
    freed = (state, move) in TRANSITIONS or (force and state is State.RUNNING)
    assert (state_of(after, NOW) is State.ABSENT) is (freed or state is State.ABSENT)
    assert (after != before) is freed


@pytest.mark.parametrize("snapshot", [None, b"answer"])
@pytest.mark.parametrize("token", [None, TOKEN, TOKEN + 1])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("state", State, ids=lambda s: s.name)
def test_an_expected_state_forbids_and_never_allows(
    state: State, force: bool, token: int | None, snapshot: bytes | None
) -> None:
    before = row(state)
    whatever = apply(before, Resolve(ID, snapshot, 60.0, force, token), NOW)
    for expected in State:
        op = Resolve(ID, snapshot, 60.0, force, token, (expected,))
        assert apply(before, op, NOW) == (whatever if expected is state else (before, whatever[1]))
        op = Resolve(ID, snapshot, 60.0, force, token, (expected, state))
        assert apply(before, op, NOW) == whatever


@pytest.mark.parametrize("clock", [NOW, NOW - 3600, 0.0], ids=["stands still", "steps back", "begins anew"])
@pytest.mark.parametrize("state", [State.RUNNING, State.UNKNOWN, State.DONE], ids=lambda s: s.name)
def test_tokens_grow_after_a_release_whatever_the_clock_does(state: State, clock: float) -> None:
    freed, _ = apply(row(state), Resolve(ID, None, 60.0, True, TOKEN), NOW)
    again, answer = apply(freed, claim(), clock)
    assert again is not None
    assert (answer.token > TOKEN, answer.attempt, answer.steps) == (True, 1, ())
    for late in OWNERS.values():
        assert apply(again, late, clock) == (again, False)


@pytest.mark.parametrize("state", State, ids=lambda s: s.name)
def test_a_look_up_shows_the_record_and_changes_nothing(state: State) -> None:
    before = row(state)
    after, found = apply(before, Lookup(ID), NOW)
    assert after is before
    assert (found is None) is (state is State.ABSENT)
    if found is not None:
        assert (found.state, found.token, found.tenant, found.operation, found.key) == (state, TOKEN, "t", "op", "k")
        assert found.age == 60
        assert found.expires_in == 60


@pytest.mark.parametrize("takeover", Takeover, ids=lambda t: t.name)
@pytest.mark.parametrize("state", State, ids=lambda s: s.name)
def test_what_time_makes_of_a_record(state: State, takeover: Takeover) -> None:
    """Past its time, a record goes only where nothing about it is in doubt."""
    old = row(state, expires=NOW - 1, takeover=takeover) if state is not State.ABSENT else None
    seen = state_of(old, NOW)
    if state is State.DONE or (state is State.ABANDONED and takeover is Takeover.RETRY):
        assert seen is State.ABSENT
    else:
        assert seen is state
    if old is not None:
        verdict = sweepable(old, NOW)
        if seen is State.ABSENT:
            assert verdict is State.ABSENT
        elif state is State.ABANDONED:
            assert verdict is State.UNKNOWN
        else:
            assert verdict is None


def test_nothing_is_swept_before_its_time() -> None:
    for state in State:
        made = row(state)
        if made is not None:
            assert sweepable(made, NOW) is None


def test_an_expired_attempts_owner_is_still_heard_while_nobody_took_its_place() -> None:
    old = row(State.ABANDONED, expires=NOW - 1)
    after, held = apply(old, Complete(ID, TOKEN, b"late", 60.0), NOW)
    assert held is True
    assert state_of(after, NOW) is State.DONE


def test_the_first_value_of_a_step_stays() -> None:
    after, held = apply(row(State.RUNNING), SaveStep(ID, TOKEN, "step", b"second", 1), NOW)
    assert held is True
    assert after is not None
    assert after.steps == (("step", b"v"),)


def test_a_new_claim_after_expiry_forgets_the_old_steps_and_outgrows_the_old_token() -> None:
    old = row(State.DONE, expires=NOW - 1, token=TOKEN + 10**9)
    after, answer = apply(old, claim(), NOW)
    assert isinstance(answer, Claimed)
    assert answer.steps == ()
    assert answer.token == TOKEN + 10**9 + 1
    assert after is not None
    assert after.attempt == 1


OPERATIONS = st.lists(
    st.one_of(
        st.builds(
            claim, nonce=st.integers(1, 4), fingerprint=st.sampled_from([b"", b"a" * 16, b"b" * 16]),
            takeover=st.sampled_from(Takeover), lease=st.sampled_from([0.5, 5.0]),
        ),
        st.tuples(st.sampled_from(["renew", "complete", "release", "yield", "give_up", "step"]), st.integers(0, 5)),
        st.sampled_from([0.1, 1.0, 10.0, 4000.0]),
        st.builds(Resolve, st.just(ID), st.sampled_from([None, b"x"]), st.just(60.0), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 5)),
    ),
    max_size=25,
)  # fmt: skip


def owners(word: str, token: int) -> Any:
    return {
        "renew": Renew(ID, token, 5.0),
        "complete": Complete(ID, token, b"answer %d" % token, 3600.0),
        "release": Release(ID, token),
        "yield": Release(ID, token, State.ABANDONED),
        "give_up": Release(ID, token, State.UNKNOWN),
        "step": SaveStep(ID, token, "s", b"v", 0),
        "free": Resolve(ID, None, 60.0, False, token),
    }[word]


@settings(max_examples=settings.default.max_examples)
@given(OPERATIONS)
def test_whatever_comes_tokens_grow_and_a_finished_answer_never_changes(things: list[Any]) -> None:
    now, current, tokens = NOW, None, [0]
    for thing in things:
        if isinstance(thing, float):
            now += thing
            continue
        if isinstance(thing, tuple):
            word, which = thing
            op = owners(word, tokens[-1 - which % len(tokens)])
        else:
            op = thing
        before = state_of(current, now)
        after, answer = apply(current, op, now)
        if isinstance(answer, Claimed):
            assert answer.token >= tokens[-1]
            if answer.token == tokens[-1]:
                assert before is State.RUNNING, "only a claim sent twice gets a token twice"
            else:
                tokens.append(answer.token)
        if before is State.DONE:
            freed = type(op) is Resolve and current is not None and op.token == current.token and op.snapshot is None
            assert state_of(after, now) is State.ABSENT if freed else after is current
        current = after
        now += 0.000_001
