"""What happens when something fails half-way, in every mode and at every moment, as one table.

A *moment* is where the first call is struck: its process is killed, the store does not answer, or the effect itself
fails. A *cell* says what the first caller gets, what the same call does when it comes again, how often the effect has
happened when all is over, and the state the record is left in. The tests carry out every cell, with processes that are
killed, on every store it is about; the page of the runbook is written from the same table.

This module is data: it knows no store and runs nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from semel.core.states import State

__all__ = ["CELLS", "Cell", "First", "Mode", "Moment", "Retry", "cells_of"]


class Mode(Enum):
    """How an operation is protected; the value says it in words."""

    LEASED = "leased; the effect is outside, and knows no key"
    DERIVED_KEY = "leased; the effect is outside, and `op.derive()` is sent along"
    AT_MOST_ONCE = '`guarantee="at_most_once"`'
    RECOVER_HOOK = "leased, with a `recover=` hook that can find the effect"
    STEPS = "steps: the effect is the first of two, and knows no key"
    OWN_TRANSACTION = "transaction of Semel's (`own_transaction=True`); the effect is in it"
    CALLERS_TRANSACTION = "transaction of the caller's; the effect is in it"


class Moment(Enum):
    """Where the first call is struck."""

    KILLED_BEFORE_CLAIM = "killed before the claim"
    CLAIM_NOT_STORED = "the claim cannot be stored"
    CLAIM_ANSWER_LOST = "the claim is stored, the store's answer lost"
    KILLED_BEFORE_EFFECT = "killed after the claim, before the effect"
    EFFECT_FAILED = "the effect fails: it has not happened"
    FAILURE_KILLED = "the effect fails, then killed"
    FAILURE_NOT_STORED = "the effect fails, and the store is gone"
    FAILURE_ANSWER_LOST = "the effect fails; that is stored, the store's answer lost"
    EFFECT_ANSWER_LOST = "the effect happens, its answer is lost: the handler raises"
    KILLED_AFTER_EFFECT = "killed after the effect"
    STEP_NOT_STORED = "the step's mark cannot be stored"
    STEP_ANSWER_LOST = "the step's mark is stored, the store's answer lost"
    KILLED_AFTER_STEP = "killed after the step's mark, before the next step"
    LATER_STEP_FAILED = "a later step fails"
    CONFLICT = "another transaction stands in the way"
    OUTCOME_NOT_STORED = "the effect happens, and the store is gone"
    OUTCOME_LATE = "the outcome cannot be stored at first"
    OUTCOME_ANSWER_LOST = "the outcome is stored, the store's answer lost"
    KILLED_BEFORE_COMMIT = "killed after the record is written, before the commit"
    ROLLED_BACK = "the caller rolls back"
    COMMIT_ANSWER_LOST = "committed, the database's answer lost"
    KILLED_AFTER_OUTCOME = "killed after the outcome is stored"
    ANSWER_LOST = "all is well, and the answer is lost on its way to the caller"


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
    """What the same call does when it comes again."""

    RUNS = "runs"
    RESUMES = "goes on after the first step"
    RECOVERS = "the hook finds the effect: its answer"
    REPLAYS = "replays the answer"
    REPLAYS_FAILURE = "replays the failure"
    REFUSED = "`OutcomeUnknown`: find out, then resolve it"


class Cell(NamedTuple):
    """One mode, struck at one moment."""

    mode: Mode
    moment: Moment
    first: First
    retry: Retry
    waits: bool
    """Whether a retry is turned away (InProgress) until the lease of the first call has ended."""
    effects: int
    """How often the effect has happened in the end."""
    state: State
    """The record's, in the end."""


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
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, True, 2, State.DONE),
    Moment.OUTCOME_LATE: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.OUTCOME_ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.KILLED_AFTER_OUTCOME: (First.NOTHING, Retry.REPLAYS, False, 1, State.DONE),
    Moment.ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
}

_DERIVED: Final = {
    **_LEASED,
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RUNS, True, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, True, 1, State.DONE),
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
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.REFUSED, True, 1, State.UNKNOWN),
}

_RECOVER: Final = {
    **_LEASED,
    # The hook is asked about silence. A handler that raises has said that nothing happened: it must not, in doubt.
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 2, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RECOVERS, True, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.RECOVERS, True, 1, State.DONE),
}

_STEPS: Final = {
    **_LEASED,
    Moment.STEP_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 2, State.DONE),
    Moment.STEP_ANSWER_LOST: (First.UNCERTAIN, Retry.RESUMES, False, 1, State.DONE),
    Moment.KILLED_AFTER_STEP: (First.NOTHING, Retry.RESUMES, True, 1, State.DONE),
    Moment.LATER_STEP_FAILED: (First.ERROR, Retry.RESUMES, False, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.RESUMES, True, 1, State.DONE),
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

_CALLERS: Final = {
    Moment.KILLED_BEFORE_CLAIM: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.CLAIM_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_BEFORE_EFFECT: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.EFFECT_FAILED: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.EFFECT_ANSWER_LOST: (First.ERROR, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_AFTER_EFFECT: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.CONFLICT: (First.CONFLICT, Retry.RUNS, False, 1, State.DONE),
    Moment.OUTCOME_NOT_STORED: (First.UNAVAILABLE, Retry.RUNS, False, 1, State.DONE),
    Moment.KILLED_BEFORE_COMMIT: (First.NOTHING, Retry.RUNS, False, 1, State.DONE),
    Moment.ROLLED_BACK: (First.ANSWER, Retry.RUNS, False, 1, State.DONE),
    Moment.COMMIT_ANSWER_LOST: (First.DRIVER, Retry.REPLAYS, False, 1, State.DONE),
    Moment.KILLED_AFTER_OUTCOME: (First.NOTHING, Retry.REPLAYS, False, 1, State.DONE),
    Moment.ANSWER_LOST: (First.ANSWER, Retry.REPLAYS, False, 1, State.DONE),
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
    """The cells of a mode, in the order of time."""
    return [Cell(mode, moment, *_TABLE[mode][moment]) for moment in sorted(_TABLE[mode], key=_ORDER.__getitem__)]


CELLS: Final = tuple(cell for mode in Mode for cell in cells_of(mode))
"""All of them."""
