"""The table of partial failures: what happens in each mode if a call fails at a given moment.

A *moment* is the point at which the first call fails: its process is killed, the store does not respond, or the effect
itself fails. A *cell* says what the first caller gets, what a retry does, how often the effect has happened in the end,
and the final state of the record. The tests carry out every cell on every store that supports it, and kill real
processes. The runbook page is generated from the same table.

This module is only data. It uses no store and runs nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from semel.core.states import State

__all__ = ["CELLS", "Cell", "First", "Mode", "Moment", "Retry", "cells_of"]


class Mode(Enum):
    """How an operation is protected; the value describes it in the docs."""

    LEASED = "leased; the effect is in another system, which does not know the key"
    DERIVED_KEY = "leased; the effect is in another system, which gets the key from `op.derive()`"
    AT_MOST_ONCE = '`guarantee="at_most_once"`'
    RECOVER_HOOK = "leased, with a `recover=` hook that can find the effect"
    STEPS = "two steps; the effect is the first, in another system that does not know the key"
    OWN_TRANSACTION = "the effect is in a transaction that Semel opens (`own_transaction=True`)"
    CALLERS_TRANSACTION = "the effect is in a transaction that the caller opens"


class Moment(Enum):
    """The point at which the first call fails."""

    KILLED_BEFORE_CLAIM = "killed before the claim"
    CLAIM_NOT_STORED = "the claim cannot be stored"
    CLAIM_ANSWER_LOST = "the claim is stored, but the store's response is lost"
    KILLED_BEFORE_EFFECT = "killed after the claim, before the effect"
    EFFECT_FAILED = "the effect fails and has not happened"
    FAILURE_KILLED = "the effect fails, then killed"
    FAILURE_NOT_STORED = "the effect fails, and the store is unreachable"
    FAILURE_ANSWER_LOST = "the effect fails; the failure is stored, but the store's response is lost"
    EFFECT_ANSWER_LOST = "the effect happens, but its response is lost, so the handler raises"
    KILLED_AFTER_EFFECT = "killed after the effect"
    STEP_NOT_STORED = "the step cannot be stored"
    STEP_ANSWER_LOST = "the step is stored, but the store's response is lost"
    KILLED_AFTER_STEP = "killed after the step is stored, before the next step"
    LATER_STEP_FAILED = "a later step fails"
    CONFLICT = "the transaction conflicts with another one"
    OUTCOME_NOT_STORED = "the effect happens, and the store is unreachable"
    OUTCOME_LATE = "the outcome cannot be stored at first"
    OUTCOME_ANSWER_LOST = "the outcome is stored, but the store's response is lost"
    KILLED_BEFORE_COMMIT = "killed after the record is written, before the commit"
    ROLLED_BACK = "the caller rolls back"
    COMMIT_ANSWER_LOST = "committed, but the database's response is lost"
    KILLED_AFTER_OUTCOME = "killed after the outcome is stored"
    ANSWER_LOST = "the call succeeds, but the answer is lost on its way to the caller"


class First(Enum):
    """What the first caller gets."""

    NOTHING = "nothing"
    ANSWER = "its answer"
    ERROR = "the handler's error"
    UNAVAILABLE = "`StoreUnavailable`"
    UNCERTAIN = "`StoreUncertain`"
    CONFLICT = "`TransactionConflict`"
    DRIVER = "the driver's error"


class Retry(Enum):
    """What a retry of the same call does."""

    RUNS = "runs"
    RESUMES = "continues after the first step"
    RECOVERS = "the hook finds the effect and returns its answer"
    REPLAYS = "replays the answer"
    REPLAYS_FAILURE = "replays the failure"
    REFUSED = "`OutcomeUnknown`: find out what happened, then resolve it"


class Cell(NamedTuple):
    """One mode, and one moment at which the first call fails."""

    mode: Mode
    moment: Moment
    first: First
    retry: Retry
    waits: bool
    """Whether a retry is refused (InProgress) until the lease of the first call has ended."""
    effects: int
    """How often the effect has happened in the end."""
    state: State
    """The final state of the record."""


_LEASED: Final = {
    Moment.KILLED_BEFORE_CLAIM: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.CLAIM_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 1, State.DONE),
    Moment.CLAIM_ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.KILLED_BEFORE_EFFECT: (First.NOTHING, Retry.RUNS, True, 1, State.DONE),
    Moment.EFFECT_FAILED: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.FAILURE_KILLED: (First.NOTHING, Retry.RUNS, True, 1, State.DONE),
    Moment.FAILURE_NOT_STORED: (First.ERROR, Retry.RUNS, True, 1, State.DONE),
    Moment.FAILURE_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 2, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RUNS, True, 2, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.ANSWER, Retry.RUNS, True, 2, State.DONE),
    Moment.OUTCOME_LATE: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.OUTCOME_ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.KILLED_AFTER_OUTCOME: (First.NOTHING, Retry.REPLAYS, False, 1, State.DONE),
    Moment.ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
}

_DERIVED: Final = {
    **_LEASED,
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RUNS, True, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.ANSWER, Retry.RUNS, True, 1, State.DONE),
}

_AT_MOST_ONCE: Final = {
    **_LEASED,
    Moment.KILLED_BEFORE_EFFECT: (First.NOTHING, Retry.REFUSED, True, 0, State.UNKNOWN),
    Moment.EFFECT_FAILED: (First.ERROR, Retry.REPLAYS_FAILURE, False, 0, State.DONE),
    Moment.FAILURE_KILLED: (First.NOTHING, Retry.REFUSED, True, 0, State.UNKNOWN),
    Moment.FAILURE_NOT_STORED: (First.ERROR, Retry.REFUSED, True, 0, State.UNKNOWN),
    Moment.FAILURE_ANSWER_LOST: (First.ERROR, Retry.REPLAYS_FAILURE, False, 0, State.DONE),
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.REPLAYS_FAILURE, False, 1, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.REFUSED, True, 1, State.UNKNOWN),
    Moment.OUTCOME_NOT_STORED: (First.ANSWER, Retry.REFUSED, True, 1, State.UNKNOWN),
}

_RECOVER: Final = {
    **_LEASED,
    # The hook runs only after a silent owner. A handler that raises says that nothing happened; if it is not sure, it
    # must not raise.
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 2, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RECOVERS, True, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.ANSWER, Retry.RECOVERS, True, 1, State.DONE),
}

_STEPS: Final = {
    **_LEASED,
    Moment.STEP_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 2, State.DONE),
    Moment.STEP_ANSWER_LOST: (First.UNCERTAIN, Retry.RESUMES, False, 1, State.DONE),
    Moment.KILLED_AFTER_STEP: (First.NOTHING, Retry.RESUMES, True, 1, State.DONE),
    Moment.LATER_STEP_FAILED: (First.ERROR, Retry.RESUMES, False, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.ANSWER, Retry.RESUMES, True, 1, State.DONE),
}

_TRANSACTION: Final = {
    Moment.KILLED_BEFORE_CLAIM: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.CLAIM_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_BEFORE_EFFECT: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.EFFECT_FAILED: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.CONFLICT: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 1, State.DONE),
    Moment.OUTCOME_ANSWER_LOST: (First.UNCERTAIN, Retry.REPLAYS, False, 1, State.DONE),
    Moment.KILLED_AFTER_OUTCOME: (First.NOTHING, Retry.REPLAYS, False, 1, State.DONE),
    Moment.ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
}

_CALLERS: Final[dict[Moment, tuple[First, Retry, bool, int, State]]] = {
    **{moment: cell for moment, cell in _TRANSACTION.items() if moment is not Moment.OUTCOME_ANSWER_LOST},
    Moment.CONFLICT: (First.CONFLICT, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_BEFORE_COMMIT: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.ROLLED_BACK: (First.ANSWER, Retry.RUNS, False, 1, State.DONE),
    Moment.COMMIT_ANSWER_LOST: (First.DRIVER, Retry.REPLAYS, False, 1, State.DONE),
}

_TABLE: Final = {
    Mode.LEASED: _LEASED,
    Mode.DERIVED_KEY: _DERIVED,
    Mode.AT_MOST_ONCE: _AT_MOST_ONCE,
    Mode.RECOVER_HOOK: _RECOVER,
    Mode.STEPS: _STEPS,
    Mode.OWN_TRANSACTION: _TRANSACTION,
    Mode.CALLERS_TRANSACTION: _CALLERS,
}

_ORDER: Final = {moment: at for at, moment in enumerate(Moment)}


def cells_of(mode: Mode) -> list[Cell]:
    """Return the cells of a mode, in chronological order."""
    return [Cell(mode, moment, *_TABLE[mode][moment]) for moment in sorted(_TABLE[mode], key=_ORDER.__getitem__)]


CELLS: Final = tuple(cell for mode in Mode for cell in cells_of(mode))
"""The cells of all modes."""
