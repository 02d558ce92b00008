"""A Hypothesis state machine that plays random sequences of Ops on a store and compares its answers with the model.

A lease or ttl is either long (1000 seconds, so that it never ends during a test) or short. The step that sets a short
one also waits until it has ended. So the state of a record is never in doubt, and no test depends on the speed of the
machine.

The model is ``core/semantics.apply`` over a dict, with a clock of its own. It ignores what depends on real clocks:
tokens are matched by their order, and durations are compared coarsely. A store may also differ from it in three ways.
The record in the answer to a claim may carry the claim's own tenant, operation and key, because the same id implies the
same values. A sweep may leave a record until the ttl of its claim has ended, even if the ttl of its result was shorter.
And a record that someone has released may be gone at once, or only after the next sweep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    Lookup,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
    Sweep,
    Swept,
)
from semel.core.semantics import Row, apply, is_expired, sweepable
from semel.core.states import State, Takeover
from semel.engine.ports import AsyncStore, Store
from semel.stores.urls import BridgedStore
from semel.testing.conformance.script import MovableClock

R = TypeVar("R")
LONG: Final = 1000.0

which = st.sampled_from([0, 0, 0, 1, 1, 2])
lasting = st.sampled_from(["long", "short"])
answers = st.sampled_from([b"", b"one", b"two", bytes(range(256))])
ends = st.sampled_from([State.ABSENT, State.ABANDONED, State.UNKNOWN])
expected = st.just(()) | st.lists(st.sampled_from(State), min_size=1, max_size=3, unique=True).map(tuple)
tokens = st.sampled_from(["newest"] * 6 + ["older", "oldest", "next", "made up"])
moves = st.sampled_from(["claim", "renew", "save", "complete", "release", "lookup", "resolve", "free"])
COARSE: Final = 300.0
"""Seconds by which times may differ. Long times are longer than this, and short ones have already ended."""
STEP: Final = 0.001
"""Model time between two Ops."""


class StoreMachine(RuleBasedStateMachine):
    """Ops on three records, with several fingerprints, all takeover rules, and current, stale and invented tokens."""

    open_store: Callable[[], Store]
    clock: MovableClock | None
    tick: float
    forgets_expired: bool

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).open_store()
        self.model = Model(forgets_expired=self.forgets_expired)
        self.ids = [os.urandom(16) for _ in range(3)]
        self.nonces = [0] * 3
        self.nonce = 0
        self.positions = 0
        self._pause()
        self._sweep_all(1000)  # remove what other sequences left behind

    def teardown(self) -> None:
        try:
            for id in self.ids:
                self._play(Lookup(id))
        finally:
            self.store.close()

    # -- one Op at a time ------------------------------------------------------------------------------------------

    @rule(
        i=which, lease=lasting, ttl=lasting, takeover=st.sampled_from(Takeover), again=st.booleans(),
        fingerprint=st.sampled_from([b"", b"f" * 16, b"f" * 16, b"g" * 16]),
    )  # fmt: skip
    def claim(self, i: int, lease: str, ttl: str, takeover: Takeover, again: bool, fingerprint: bytes) -> None:
        self._do(self._claim(i, lease, ttl, takeover, again, fingerprint), lease, ttl)

    @rule(i=which)
    def claim_plainly(self, i: int) -> None:
        self._do(self._claim(i, "long", "long", Takeover.RETRY, False, b""))

    @rule(i=which, token=tokens, lease=lasting)
    def renew(self, i: int, token: str, lease: str) -> None:
        self._do(Renew(self.ids[i], self._token(i, token), self._seconds(lease)), lease)

    @rule(i=which, token=tokens, ttl=lasting, snapshot=answers)
    def complete(self, i: int, token: str, ttl: str, snapshot: bytes) -> None:
        self._do(Complete(self.ids[i], self._token(i, token), snapshot, self._seconds(ttl)), ttl)

    @rule(i=which, token=tokens, to=ends)
    def release(self, i: int, token: str, to: State) -> None:
        self._do(Release(self.ids[i], self._token(i, token), to))

    @rule(
        i=which,
        token=tokens,
        names=st.lists(st.sampled_from(["reserve", "charge", "ship"]), min_size=1, max_size=3),
        value=answers,
    )
    def save_steps(self, i: int, token: str, names: list[str], value: bytes) -> None:
        for name in names:
            self._do(self._save(i, token, name, value))

    @rule(i=which, snapshot=st.none() | answers, ttl=lasting, force=st.booleans())
    def resolve(self, i: int, snapshot: bytes | None, ttl: str, force: bool) -> None:
        self._do(Resolve(self.ids[i], snapshot, self._seconds(ttl), force), ttl)

    @rule(i=which, snapshot=st.none() | st.none() | answers, force=st.booleans(), token=tokens, states=expected)
    def free(self, i: int, snapshot: bytes | None, force: bool, token: str, states: tuple[State, ...]) -> None:
        self._do(Resolve(self.ids[i], snapshot, LONG, force, self._token(i, token), states))

    @rule(i=which, snapshot=st.none() | answers, force=st.booleans(), states=expected)
    def resolve_in_states(self, i: int, snapshot: bytes | None, force: bool, states: tuple[State, ...]) -> None:
        self._do(Resolve(self.ids[i], snapshot, LONG, force, None, states))

    # -- many ------------------------------------------------------------------------------------------------------

    @rule(plan=st.lists(st.tuples(st.integers(0, 1), moves, tokens, answers), min_size=2, max_size=7))
    def batch(self, plan: list[tuple[int, str, str, bytes]]) -> None:
        """Play several Ops on two records in one call. All times are long: a short one could end during the call."""
        ops: list[Op[Any]] = [self._planned(*part) for part in plan]
        answers = self.store.execute_many(ops)
        assert len(answers) == len(ops)
        for op, answer in zip(ops, answers, strict=True):
            self.model.play(op, answer)
        for id in self.ids[:2]:
            self._play(Lookup(id))

    @precondition(lambda self: self.model.sweep_is_certain())
    @rule(limit=st.sampled_from([1, 2, 100]))
    def sweep(self, limit: int) -> None:
        """Sweep until nothing is left, because a store may choose which records a bounded sweep takes first."""
        freed = self.model.freed()
        expected = self.model.sweep()
        removed, unknown = self._sweep_all(limit)
        assert unknown == expected.unknown
        least = 0 if self.forgets_expired else expected.removed - freed
        assert least <= removed <= expected.removed
        for id in self.ids:
            self._play(Lookup(id))

    def _sweep_all(self, limit: int) -> tuple[int, int]:
        removed = unknown = 0
        for _ in range(1000):
            swept = self.store.execute(Sweep(limit))
            assert swept.removed + swept.unknown <= limit
            if not swept.removed + swept.unknown:
                return removed, unknown
            removed += swept.removed
            unknown += swept.unknown
        raise AssertionError("the sweep never ends: it does not remove what it counts")

    # -- how -------------------------------------------------------------------------------------------------------

    def _do(self, op: Op[Any], *durations: str) -> None:
        self._play(op)
        if "short" in durations:
            self._pause()
        self._play(Lookup(op.id))

    def _play(self, op: Op[Any]) -> None:
        self.model.play(op, self.store.execute(op))

    def _pause(self) -> None:
        seconds = 3 * self.tick
        self.clock.advance(seconds) if self.clock is not None else time.sleep(seconds)
        self.model.now += seconds

    def _seconds(self, lasting: str) -> float:
        return self.tick if lasting == "short" else LONG

    def _token(self, i: int, kind: str) -> int:
        known = self.model.tokens(self.ids[i]) or [0]
        tokens = {"newest": known[-1], "older": known[-2:][0], "oldest": known[0], "next": known[-1] + 1, "made up": 1}
        return tokens[kind]

    def _claim(self, i: int, lease: str, ttl: str, takeover: Takeover, again: bool, fingerprint: bytes) -> Claim:
        if not again:
            self.nonce += 1
            self.nonces[i] = self.nonce
        return Claim(
            self.ids[i], self.nonces[i], fingerprint, self._seconds(lease), self._seconds(ttl), takeover,
            "acme", "conformance", f"key {i}",
        )  # fmt: skip

    def _save(self, i: int, token: str, name: str, value: bytes) -> SaveStep:
        self.positions += 1
        return SaveStep(self.ids[i], self._token(i, token), name, value, self.positions)

    def _planned(self, i: int, move: str, token: str, value: bytes) -> Op[Any]:
        id, chosen = self.ids[i], self._token(i, token)
        match move:
            case "claim":
                return self._claim(i, "long", "long", Takeover.RETRY, False, b"")
            case "renew":
                return Renew(id, chosen, LONG)
            case "save":
                return self._save(i, token, "charge", value)
            case "complete":
                return Complete(id, chosen, value, LONG)
            case "release":
                return Release(id, chosen, State.ABANDONED)
            case "lookup":
                return Lookup(id)
            case "free":
                return Resolve(id, None, LONG, False, chosen)
            case _:
                return Resolve(id, value, LONG)


def machine_for(
    open_store: Callable[[], Store],
    *,
    clock: MovableClock | None = None,
    tick: float = 0.002,
    forgets_expired: bool = False,
) -> type[StoreMachine]:
    """Return a state machine for a store.

    :param open_store: opens the store, once for each sequence. It may return the same records each time, or new ones.
    :param clock: the store's clock, if the suite can move it. Otherwise the machine sleeps until short times end.
    :param tick: seconds that a short lease lasts. A store that counts in whole seconds needs more than the default.
    :param forgets_expired: whether the store removes expired records by itself.
    """
    members = {"open_store": staticmethod(open_store), "clock": clock, "tick": tick, "forgets_expired": forgets_expired}
    return type("StoreMachine", (StoreMachine,), members)


def async_machine_for(open_store: Callable[[], AsyncStore], **settings: Any) -> type[StoreMachine]:
    """Return a state machine for an async store. ``open_store`` is called inside an event loop.

    :param settings: those of ``machine_for``.
    """
    return machine_for(lambda: BridgedStore(open_store), **settings)


def check(machine: type[StoreMachine], examples: int = 40, steps: int = 30) -> None:
    """Play ``examples`` random sequences. Fails with the smallest one whose answers differ from the model."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


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
        token = op.token if isinstance(op, (Renew, Complete, Release, SaveStep, Resolve)) else None
        if token is not None:
            return replace(op, token=self._ours.get((op.id, token), -1))
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
        elif changed is not None and _is_freed(changed):
            self._promised[op.id] = self.now
        self._compare(op, expected, answer)

    def sweep_is_certain(self) -> bool:
        """Whether the store must remove every record that it may remove."""
        return all(sweepable(row, self.now) is None or self._promised[id] <= self.now for id, row in self.rows.items())

    def freed(self) -> int:
        """Return how many records someone has released. A store may have removed them already."""
        return sum(map(_is_freed, self.rows.values()))

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


def _is_freed(row: Row) -> bool:
    return row.expires == 0.0
