"""How a moment of the table is brought about: where the first call is struck, and with what."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from semel.core.ops import Claim, Complete, Release, SaveStep
from semel.errors import StoreError, StoreUnavailable, StoreUncertain, TransactionConflict
from tests.partial_failures.table import Mode, Moment

Write = Literal["claim", "effect", "step", "later", "outcome", "commit"]
WRITES: dict[type, Write] = {Claim: "claim", SaveStep: "step", Complete: "outcome", Release: "outcome"}
STORE_WRITES = ("claim", "step", "outcome")


class EffectFailed(Exception):
    """What the handler raises."""


class DriverLost(Exception):
    """What a caller's own commit raises."""


class Strike(NamedTuple):
    how: Literal["kill", "fail", "gone", "raise", "conflict", "roll back"]
    when: Literal["before", "after"]
    write: Write


FAILS = Strike("raise", "before", "effect")
STRIKES: dict[Moment, tuple[Strike, ...]] = {
    Moment.KILLED_BEFORE_CLAIM: (Strike("kill", "before", "claim"),),
    Moment.CLAIM_NOT_STORED: (Strike("fail", "before", "claim"),),
    Moment.CLAIM_ANSWER_LOST: (Strike("fail", "after", "claim"),),
    Moment.KILLED_BEFORE_EFFECT: (Strike("kill", "before", "effect"),),
    Moment.EFFECT_FAILED: (FAILS,),
    Moment.FAILURE_KILLED: (FAILS, Strike("kill", "before", "outcome")),
    Moment.FAILURE_NOT_STORED: (FAILS, Strike("gone", "before", "outcome")),
    Moment.FAILURE_ANSWER_LOST: (FAILS, Strike("fail", "after", "outcome")),
    Moment.EFFECT_ANSWER_LOST: (Strike("raise", "after", "effect"),),
    Moment.KILLED_AFTER_EFFECT: (Strike("kill", "after", "effect"),),
    Moment.STEP_NOT_STORED: (Strike("fail", "before", "step"),),
    Moment.STEP_ANSWER_LOST: (Strike("fail", "after", "step"),),
    Moment.KILLED_AFTER_STEP: (Strike("kill", "after", "step"),),
    Moment.LATER_STEP_FAILED: (Strike("raise", "before", "later"),),
    Moment.CONFLICT: (Strike("conflict", "before", "outcome"),),
    Moment.OUTCOME_NOT_STORED: (Strike("gone", "before", "outcome"),),
    Moment.OUTCOME_LATE: (Strike("fail", "before", "outcome"),),
    Moment.OUTCOME_ANSWER_LOST: (Strike("fail", "after", "outcome"),),
    Moment.KILLED_BEFORE_COMMIT: (Strike("kill", "before", "commit"),),
    Moment.ROLLED_BACK: (Strike("roll back", "before", "commit"),),
    Moment.COMMIT_ANSWER_LOST: (Strike("raise", "after", "commit"),),
    Moment.KILLED_AFTER_OUTCOME: (Strike("kill", "after", "outcome"),),
    Moment.ANSWER_LOST: (),
}


class RollBack(Exception):
    """The caller changes its mind."""


class Trouble:
    """What one call meets. Every place that could be struck asks ``at``."""

    def __init__(self, mode: Mode | None = None, moment: Moment | None = None) -> None:
        self.left = list(STRIKES[moment]) if moment is not None else []
        if mode is Mode.CALLERS_TRANSACTION and moment is Moment.KILLED_AFTER_OUTCOME:
            self.left = [Strike("kill", "after", "commit")]  # there it is stored when the caller commits
        self.gone = False

    def at(self, when: Literal["before", "after"], write: Write) -> None:
        if self.gone and write in STORE_WRITES:
            raise StoreUnavailable("gone, on purpose")
        if not self.left or (when, write) != (self.left[0].when, self.left[0].write):
            return
        how = self.left.pop(0).how
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        if how == "raise":
            raise DriverLost if write == "commit" else EffectFailed("refused")
        if how == "roll back":
            raise RollBack
        if how == "conflict":
            raise TransactionConflict("on purpose")
        self.gone = how == "gone"
        raise StoreUnavailable("on purpose: not done") if when == "before" else StoreUncertain("on purpose: done")


class Troubled:
    """A store, and what its connections become, struck on the way."""

    def __init__(self, inner: Any, trouble: Trouble) -> None:
        self._inner = inner
        self._trouble = trouble
        self.wakes, self.counts, self.resumes, self.lists = inner.wakes, inner.counts, inner.resumes, inner.lists
        self.trails = inner.trails
        self.accept = inner.accept

    def execute(self, op: Any) -> Any:
        write = WRITES.get(type(op))
        if write is None:
            return self._inner.execute(op)
        self._trouble.at("before", write)
        answer = self._inner.execute(op)
        self._trouble.at("after", write)
        return answer

    def execute_many(self, ops: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        for op in ops:
            try:
                answers.append(self.execute(op))
            except StoreError as error:
                answers.append(error)
        return answers

    def wait(self, id: bytes, seconds: float) -> None:
        self._inner.wait(id, seconds)

    def open(self) -> None: ...

    def close(self) -> None:
        self._inner.close()

    def adopt(self, conn: object) -> Any:
        return TroubledUnit(self._inner.adopt(conn), self._trouble)


class TroubledUnit:
    """A caller's transaction, struck on the way."""

    def __init__(self, inner: Any, trouble: Trouble) -> None:
        self._inner = inner
        self._trouble = trouble

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def lock(self, op: Any) -> Any:
        self._trouble.at("before", "claim")
        return self._inner.lock(op)

    def keep(self, op: Any) -> None:
        self._trouble.at("before", "outcome")
        self._inner.keep(op)
        self._trouble.at("after", "outcome")
