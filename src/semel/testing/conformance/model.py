"""The model that a store is compared with: ``core/semantics.apply`` over a dict, with a clock of its own.

The model ignores what depends on real clocks: tokens are matched by their order, and durations are compared coarsely. A
store may also differ from it in two ways. The record in the answer to a claim may carry the claim's own tenant,
operation and key, because the same id implies the same values. And a sweep may leave a record until the ttl of its
claim has ended, even if the ttl of its result was shorter.
"""

from __future__ import annotations

from typing import Any, Final

from semel.core.ops import Claim, Claimed, Complete, Existing, Op, Record, Release, Renew, SaveStep, Swept
from semel.core.semantics import Row, apply, is_expired, sweepable
from semel.core.states import State

__all__ = ["Model"]

COARSE: Final = 300.0
"""Seconds by which times may differ. Long times are longer than this, and short ones have already ended."""
STEP: Final = 0.001
"""Model time between two Ops."""


class Model:
    """Applies Ops by the table of transitions, and compares the store's answers with its own."""

    def __init__(self, *, forgets_expired: bool = False) -> None:
        self.now = 1_000_000.0
        self.rows: dict[bytes, Row] = {}
        self.forgets_expired = forgets_expired
        self._promised: dict[bytes, float] = {}
        self._ours: dict[tuple[bytes, int], int] = {}
        self._theirs: dict[tuple[bytes, int], int] = {}

    # -- tokens ----------------------------------------------------------------------------------------------------

    def tokens(self, id: bytes) -> list[int]:
        """Return every token that the store issued for this record, oldest first. All but the last are stale."""
        return sorted(token for other, token in self._ours if other == id)

    def _same_token(self, id: bytes, ours: int, theirs: int) -> None:
        """Check that the store's tokens grow, and that its n-th token stands for the model's n-th."""
        known = self._theirs.get((id, ours))
        if known is not None:
            assert theirs == known, f"token {theirs}, but the store issued {known} before"
            return
        assert theirs > max(self.tokens(id), default=0), f"token {theirs} does not grow: {self.tokens(id)}"
        self._theirs[id, ours] = theirs
        self._ours[id, theirs] = ours

    def _with_our_token(self, op: Any) -> Any:
        """Return the Op with the model's token instead of the store's. An invented token becomes -1, which is stale."""
        if isinstance(op, (Renew, Complete, Release, SaveStep)):
            fields = {name: getattr(op, name) for name in type(op).__dataclass_fields__}
            return type(op)(**{**fields, "token": self._ours.get((op.id, op.token), -1)})
        return op

    # -- Ops -------------------------------------------------------------------------------------------------------

    def play(self, op: Op[Any], answer: Any) -> None:
        """Apply ``op`` to the model, and compare its answer with the store's."""
        self.now += STEP
        row = self.rows.get(op.id)
        if self.forgets_expired and row is not None and is_expired(row, self.now):
            del self.rows[op.id]
            row = None
        changed, expected = apply(row, self._with_our_token(op), self.now)
        if changed is None:
            self.rows.pop(op.id, None)
        else:
            self.rows[op.id] = changed
        if type(op) is Claim and type(expected) is Claimed and expected.attempt == 1 and changed is not row:
            self._promised[op.id] = self.now + op.ttl
        self._compare(op, expected, answer)

    def sweep_is_certain(self) -> bool:
        """Whether the store must remove every record that it may remove."""
        return all(sweepable(row, self.now) is None or self._promised[id] <= self.now for id, row in self.rows.items())

    def sweep(self) -> Swept:
        """Sweep all records, without a limit."""
        self.now += STEP
        verdicts = {id: sweepable(row, self.now) for id, row in self.rows.items()}
        for id, verdict in verdicts.items():
            if verdict is State.ABSENT:
                del self.rows[id]
            elif verdict is State.UNKNOWN:
                self.rows[id] = self.rows[id]._replace(state=State.UNKNOWN)
        counted = list(verdicts.values())
        return Swept(counted.count(State.ABSENT), counted.count(State.UNKNOWN))

    # -- answers ---------------------------------------------------------------------------------------------------

    def _compare(self, op: Op[Any], expected: Any, answer: Any) -> None:
        assert type(answer) is type(expected), f"the answer to {op} is {answer}, not {expected}"
        if type(expected) is Claimed:
            assert (answer.attempt, answer.steps) == (expected.attempt, expected.steps)
            self._same_token(op.id, expected.token, answer.token)
        elif type(expected) is Existing:
            self._same_record(op.id, expected.record, answer.record)
        elif type(expected) is Record:
            self._same_record(op.id, expected, answer)
            assert (answer.tenant, answer.operation, answer.key) == (expected.tenant, expected.operation, expected.key)
        else:
            assert answer == expected, f"the answer to {op} is {answer!r}, not {expected!r}"

    def _same_record(self, id: bytes, ours: Record, theirs: Record) -> None:
        assert theirs.id == id
        assert theirs.state is ours.state
        self._same_token(id, ours.token, theirs.token)
        assert (theirs.attempt, theirs.fingerprint) == (ours.attempt, ours.fingerprint)
        assert theirs.snapshot == ours.snapshot
        assert (theirs.expires_in > 0) == (ours.expires_in > 0)
        assert abs(theirs.expires_in - ours.expires_in) < COARSE
        assert -1 < theirs.age < COARSE
        if ours.state is State.RUNNING:
            assert theirs.lease_left > 0
            assert abs(theirs.lease_left - ours.lease_left) < COARSE
        elif ours.state is State.ABANDONED:
            assert theirs.lease_left <= 0
