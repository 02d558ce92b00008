"""The transition table: closed, complete, and drawn whole."""

import pytest

from semel.core.states import OWNER_MOVES, TRANSITIONS, Move, State, Takeover, mermaid


def test_every_state_can_be_reached_and_left() -> None:
    reached = {State.ABSENT}
    while True:
        found = reached | {target for (state, _), target in TRANSITIONS.items() if state in reached}
        if found == reached:
            break
        reached = found
    assert reached == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State), "no state is a dead end"


def test_every_move_is_made_somewhere() -> None:
    assert {move for _, move in TRANSITIONS} == set(Move)


def test_every_state_has_a_way_back_to_absent() -> None:
    going_home = {State.ABSENT}
    while True:
        found = going_home | {state for (state, _), target in TRANSITIONS.items() if target in going_home}
        if found == going_home:
            break
        going_home = found
    assert going_home == set(State)


def test_a_finished_record_only_goes() -> None:
    assert {move for state, move in TRANSITIONS if state is State.DONE} == {Move.EXPIRE, Move.FREE}


def test_an_unknown_record_never_expires_and_is_never_taken_over() -> None:
    moves = {move for state, move in TRANSITIONS if state is State.UNKNOWN}
    assert not moves & {Move.EXPIRE, Move.TAKE_OVER, Move.CLAIM, Move.LEASE_ENDS}


def test_only_a_silent_owner_is_replaced() -> None:
    assert {state for state, move in TRANSITIONS if move is Move.TAKE_OVER} == {State.ABANDONED}


def test_a_running_record_is_changed_by_its_owner_or_the_clock_alone() -> None:
    moves = {move for state, move in TRANSITIONS if state is State.RUNNING}
    assert moves == OWNER_MOVES | {Move.LEASE_ENDS}


def test_the_numbers_that_stores_write_do_not_change() -> None:
    assert {state.name: int(state) for state in State} == {
        "ABSENT": 0, "RUNNING": 1, "DONE": 2, "UNKNOWN": 3, "ABANDONED": 4,
    }  # fmt: skip
    assert {rule.name: int(rule) for rule in Takeover} == {"RETRY": 0, "REJECT": 1, "RECOVER": 2}


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[State.DONE, Move.CLAIM] = State.RUNNING  # type: ignore[index]


def test_the_diagram_names_every_state_and_every_move_that_changes_something() -> None:
    text = mermaid()
    assert text.startswith("stateDiagram-v2\n    [*] --> absent")
    for state in State:
        assert f"    {state.name.lower()} --> " in text
        assert f" --> {state.name.lower()}" in text
    for (state, move), target in TRANSITIONS.items():
        line = f"    {state.name.lower()} --> {target.name.lower()}: {move.value}"
        assert (line in text.splitlines()) is (state is not target)
