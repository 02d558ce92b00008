"""The steps of one operation over all of its attempts: capture a value, run a step, undo the steps of a failed one.

A step is stored when it has returned, so an attempt that takes over knows which steps are done and continues after
them. It must request the same steps in the same order with the same arguments. Otherwise the program has changed, and
continuing would mix the old one with the new one.

``StepJournal`` holds the flows, written once for sync and async as in ``core/flows.py``: generators that yield Ops for
the store and, for the engine, ``RunStep``, ``RunUndo``, ``FindMark``, ``WriteMark`` and ``Pause``. Each flow returns
its result, or ``Failed`` with an error that the engine raises.

Names in the store: a captured value is stored under its own name, a step as ``~step:NAME``. ``~undo:NAME`` says that
the step was undone. ``~failed`` says that the operation failed and its steps are being undone; it holds the failure.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Final, TypeAlias

from semel.core.call import Call, Failed, Pause, Raised, describe_error
from semel.core.encoding.canonical import encode_value
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.serializers import Serializer, cached_serializer, decode_error, decode_result
from semel.core.encoding.snapshot import Kind, NotSerializable, Snapshot
from semel.core.endings import settle_pauses
from semel.core.keys import normalize_key
from semel.core.ops import Claimed, Op, SaveStep
from semel.core.values import value
from semel.errors import (
    LeaseLost,
    NotUndone,
    PolicyError,
    RecordTooLarge,
    RequestError,
    ResultNotStored,
    SnapshotUnreadable,
    StepMismatch,
    StoreError,
    StoreUncertain,
)
from semel.observe import events

RESERVED: Final = "~"
_STEP: Final = "~step:"
_UNDONE: Final = "~undo:"
_FAILED: Final = "~failed"
_DIGEST: Final = 16
_HEAD: Final = _DIGEST + 1  # the digest of a step's arguments, and whether it can be undone; then comes its result

_SAYS_NOTHING: Final = (LeaseLost, StepMismatch, StoreError)
"""Errors that do not mean that the work has failed. The steps stay as they are for the next attempt."""


@value
class RunStep:
    """Run the function of a step. The answer is Returned or Raised."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str


@value
class RunUndo:
    """Call the undo function of a step with the step's result. The answer is Returned or Raised."""

    function: Callable[[Any], Any]
    value: Any
    name: str


@value
class FindMark:
    """Look for the mark of a step in the caller's transaction. The answer is whether it is there."""

    id: bytes
    name: str


@value
class WriteMark:
    """Write the mark of a step in the caller's transaction. The answer is False if the token is stale."""

    op: SaveStep


StepFlow: TypeAlias = Generator["Op[Any] | RunStep | RunUndo | FindMark | WriteMark | Pause", Any, Any]


class StepJournal:
    """What one attempt knows about the steps of its operation."""

    __slots__ = (
        "_call",
        "_in_transaction",
        "_recorded",
        "_requested",
        "_results",
        "_saved",
        "_token",
        "_undoable",
        "compensated",
    )

    def __init__(self, call: Call, token: int | None, saved: Sequence[tuple[str, bytes]] = ()) -> None:
        """
        :param token: the attempt's token; None when it runs without a lease, so that nothing is stored.
        :param saved: what earlier attempts stored, in order.
        """
        self._call = call
        self._token = token
        self._saved = dict(saved)
        self._recorded = [name.removeprefix(_STEP) for name, _ in saved if name.startswith(_STEP)]
        """Steps of earlier attempts, in the order in which they were done."""
        self._requested: list[str] = []
        """Steps that this attempt has requested."""
        self._results: dict[tuple[str, str], Any] = {}
        """Values and results of this attempt, so that a retry after a failed save stores the same one."""
        self._undoable: list[RunUndo] = []
        """How to undo the finished steps."""
        self._in_transaction: set[str] = set()
        """Steps whose marks are in a transaction of the caller, which may since have been rolled back."""
        self.compensated = False
        """Whether this attempt has failed, and its steps were undone as far as possible."""

    # -- the flows

    def capture(self, name: str, make: Callable[[], Any]) -> StepFlow:
        """Return the stored value of this name, or store what ``make`` returns."""
        _check_name(name)
        if name in self._saved:
            return self._decode(name, PLAIN, 0)
        if self.failing:
            return Failed(self.failure())
        known = ("value", name)
        if known not in self._results:
            try:
                self._results[known] = make()
            except BaseException as error:
                return Failed(error)
        result = self._results[known]
        if self._token is not None:
            yield from self._save(name, self._seal(name, result, PLAIN, b""))
        return result

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        undo: Callable[[Any], Any] | None = None,
        in_transaction: bool = False,
    ) -> StepFlow:
        """Return the stored result of this step, or run and store it. Raises StepMismatch if an earlier attempt did
        something else in its place.
        """
        digest = _digest(self._call, args, kwargs)
        serializer = _serializer_of(function)
        if in_transaction and name in self._in_transaction:
            committed = self._token is not None and (yield FindMark(self._call.id, _STEP + name))
            if not committed:
                self._forget(name)
        if self._enter(name, digest):
            result = self._decode(_STEP + name, serializer, _HEAD)
            self._call.tell(events.StepReplayed, name)
        elif self.failing:
            return Failed(self.failure())
        else:
            try:
                head = digest + (b"\x01" if undo is not None else b"\x00")
                result = yield from self._run(RunStep(function, args, kwargs, name), in_transaction, serializer, head)
            except BaseException:
                self._requested.remove(name)  # it failed, and may be tried again
                raise
            if type(result) is Failed:
                self._requested.remove(name)
                return result
        if undo is not None:
            self._undoable.append(RunUndo(undo, result, name))
        return result

    def _run(self, request: RunStep, in_transaction: bool, serializer: Serializer, head: bytes) -> StepFlow:
        """Run the step and store its result. Returns the result, or Failed."""
        known, entry = ("step", request.name), _STEP + request.name
        if in_transaction or known not in self._results:
            outcome = yield request
            if type(outcome) is Raised:
                return Failed(outcome.error)
            result = outcome.value
            if not in_transaction:
                self._results[known] = result
        else:
            result = self._results[known]
        if self._token is not None:
            sealed = self._seal(entry, result, serializer, head)
            if in_transaction:
                op = self._entry(entry, sealed)
                self._note_stored(op, (yield WriteMark(op)))
            else:
                yield from self._save(entry, sealed)
        if in_transaction:
            self._in_transaction.add(request.name)
        return result

    def compensate(self, error: BaseException) -> StepFlow:
        """The handler raised ``error``: undo its steps, the last one first. Returns the error to raise."""
        if self.compensated or not _is_failure(error):
            return error
        if self._token is not None and self._in_transaction:
            # Which steps are done depends on how the caller's transaction ended. Our own claim, sent again, is
            # answered with the steps that are committed.
            try:
                assert self._call.claim is not None
                self._settle((yield self._call.claim))
            except _SAYS_NOTHING as interruption:
                return interruption
        if not (self.failing or self._to_undo() or self._out_of_reach()):
            return error
        self.compensated = True
        remaining: list[tuple[str, str]] = []
        try:
            if self.failing:
                error = self.failure()
            elif self._token is not None:
                # From here on every attempt undoes.
                yield from self._save(_FAILED, self._call.seal_error(error, _FAILED))
            for each in self._to_undo():
                reason = yield from self._undo(each)
                if reason is not None:
                    remaining.append((each.name, reason))
        except _SAYS_NOTHING as interruption:  # the next attempt undoes the rest
            return interruption
        return self._after_undoing(error, remaining)

    def _undo(self, step: RunUndo) -> StepFlow:
        """Undo one step, with retries. Returns None, or why it failed."""
        for pause in chain(settle_pauses(self._call.policy), [None]):
            outcome = yield step
            if type(outcome) is not Raised:
                break
            error = outcome.error
            if not isinstance(error, Exception):
                raise error
            tell = self._call.alert if pause is None else self._call.tell
            tell(events.UndoFailed, step.name, describe_error(error))
            if pause is None:
                return describe_error(error)
            yield Pause(pause)
        if self._token is not None:
            yield from self._save(_UNDONE + step.name, self._seal(_UNDONE + step.name, None, PLAIN, b""))
        return None

    def _save(self, name: str, sealed: bytes) -> StepFlow:
        op = self._entry(name, sealed)
        try:
            try:
                stored = yield op
            except RecordTooLarge as too_large:
                op = self._without_result(op, too_large)
                stored = yield op
        except StoreError as error:
            if isinstance(error, StoreUncertain):
                self._call.has_steps = True  # it may be stored: the end of this attempt must not delete it
            if self._in_transaction:
                names = ", ".join(map(repr, sorted(self._in_transaction)))
                error.add_note(
                    f"The transaction in which {names} was marked may still be open, and then it holds the record: "
                    "commit it before you store anything else, or pass the same connection= there too"
                )
            raise
        self._note_stored(op, stored)

    # -- the end of the handler

    @property
    def failing(self) -> bool:
        """Whether the operation has failed and its steps are being undone."""
        return _FAILED in self._saved

    @property
    def in_transaction(self) -> bool:
        """Whether a step was marked in a transaction of the caller that may still be open."""
        return bool(self._in_transaction)

    def failure(self) -> BaseException:
        """Return the error with which the operation failed, in this or an earlier attempt."""
        try:
            snapshot = self._open(_FAILED)
            if snapshot.kind is Kind.ERROR:
                return decode_error(snapshot.payload, self._call.policy.remembered)
        except SnapshotUnreadable as unreadable:
            return unreadable
        if snapshot.kind is Kind.EMPTY:
            return ResultNotStored(f"{self._call} failed, but its failure was not stored: {snapshot.reason}")
        raise SnapshotUnreadable(f"{self._call}: the failure that is being undone was not stored as one")

    def leave(self) -> None:
        """The handler has returned. Raises StepMismatch if it left out a step that an earlier attempt did, the failure
        if the operation is being undone, and PolicyError if its writes could come too late to undo a step.
        """
        if self.failing:
            raise self.failure()
        missing = self._recorded[len(self._requested) :]
        if missing:
            raise StepMismatch(
                f"{self._call}: an earlier attempt did {', '.join(map(repr, missing))}, which this one did not request"
            )
        if self._call.writes and self._to_undo():
            raise PolicyError(
                f"{self._call}: op.write() cannot be combined with undo=: the writes are made after the handler has "
                "returned, too late to undo a step if they are refused. Send them in a step of their own instead"
            )

    def _to_undo(self) -> list[RunUndo]:
        """Return the finished steps that are not undone yet, the last one first."""
        return [step for step in reversed(self._undoable) if _UNDONE + step.name not in self._saved]

    def _out_of_reach(self) -> list[str]:
        """Return the steps of earlier attempts that this one has not reached, so that their undo is not known here."""
        return [
            name
            for name in reversed(self._recorded[len(self._requested) :])
            if _UNDONE + name not in self._saved and self._head(_STEP + name)[_DIGEST:] == b"\x01"
        ]

    def _after_undoing(self, error: BaseException, remaining: list[tuple[str, str]]) -> BaseException:
        remaining += [(name, "this attempt did not get to it") for name in self._out_of_reach()]
        if not remaining:
            self._call.has_steps = False  # nothing is left of it: the next call is a first call
            return error
        names = ", ".join(f"{name!r} ({reason})" for name, reason in remaining)
        not_undone = NotUndone(
            f"{self._call} failed with {describe_error(error)}, and could not be undone: {names}. "
            "Undo these by hand, then release() it",
            tuple(name for name, _ in remaining),
        )
        not_undone.__cause__ = error
        return not_undone

    # -- entries

    def _enter(self, name: str, digest: bytes) -> bool:
        """Note that a step was requested. Returns whether it is done."""
        _check_name(name)
        if name in self._requested:
            raise PolicyError(f"{self._call}: the step {name!r} is used twice: each step needs its own name")
        at = len(self._requested)
        self._requested.append(name)
        stored = _STEP + name in self._saved
        if at < len(self._recorded) and self._recorded[at] != name:
            raise StepMismatch(
                f"{self._call}: step {at + 1} was {self._recorded[at]!r} in an earlier attempt and is {name!r} now. "
                "Finish it with the code that began it, or resolve() it"
            )
        if stored and self._head(_STEP + name)[:_DIGEST] != digest:
            raise StepMismatch(
                f"{self._call}: the step {name!r} is done, but with other arguments. "
                "Finish it with the code that began it, or resolve() it"
            )
        return stored

    def _forget(self, name: str) -> None:
        """Forget a step whose transaction was rolled back, so that it may be requested again."""
        self._in_transaction.discard(name)
        self._saved.pop(_STEP + name, None)
        self._requested = [step for step in self._requested if step != name]
        self._undoable = [step for step in self._undoable if step.name != name]

    def _settle(self, answer: Any) -> None:
        """Forget the steps that are not among those in the answer to our own claim."""
        if type(answer) is not Claimed or answer.token != self._token:
            raise LeaseLost(f"{self._call}: another owner took over")
        stored = {name for name, _ in answer.steps}
        for name in sorted(self._in_transaction):
            if _STEP + name not in stored:
                self._forget(name)
        self._in_transaction.clear()
        self._call.has_steps = bool(self._saved)

    def _note_stored(self, op: SaveStep, stored: bool) -> None:
        if not stored:
            raise LeaseLost(f"{self._call}: another owner took over before {_label(op.name)!r} was saved")
        self._saved[op.name] = op.value
        self._call.has_steps = True
        self._call.tell(events.StepSaved, _label(op.name))

    def _entry(self, name: str, sealed: bytes) -> SaveStep:
        assert self._token is not None
        return SaveStep(self._call.id, self._token, name, sealed, len(self._saved))

    def _without_result(self, op: SaveStep, error: RecordTooLarge) -> SaveStep:
        """Return an entry that marks the step as done, without its result: it has happened and must not happen again.
        Raises the error for a captured value, which cannot be stored without its value.
        """
        if not op.name.startswith(_STEP):
            raise error
        head = self._call.codec.open(op.value, self._call.id, op.name).payload[:_HEAD]
        payload = head + str(error).encode("utf-8", "replace")[:500]
        self._call.alert(events.ResultDropped, f"{_label(op.name)}: {error}")
        return replace(op, value=self._call.codec.seal(Kind.EMPTY, "", payload, self._call.id, op.name))

    def _seal(self, entry: str, result: Any, serializer: Serializer, head: bytes) -> bytes:
        try:
            payload = head + serializer.encode(result)
        except NotSerializable as error:
            if isinstance(result, Coroutine):
                result.close()
                raise PolicyError(
                    f"the function of {_label(entry)!r} is async and is not awaited here: a step under AsyncSemel may "
                    "be an async def; a step under Semel and a captured value may not"
                ) from error
            raise PolicyError(f"the value of {_label(entry)!r} cannot be stored: {error}") from error
        return self._call.codec.seal(Kind.VALUE, serializer.name, payload, self._call.id, entry)

    def _open(self, entry: str) -> Snapshot:
        return self._call.codec.open(self._saved[entry], self._call.id, entry)

    def _head(self, entry: str) -> bytes:
        return self._open(entry).payload[:_HEAD]

    def _decode(self, entry: str, serializer: Serializer, skip: int) -> Any:
        snapshot = self._open(entry)
        if snapshot.kind is Kind.EMPTY:
            reason = snapshot.payload[skip:].decode("utf-8", "replace")
            raise StepMismatch(
                f"{self._call}: step {len(self._requested)} is done, but its result was not stored, and a re-run "
                f"cannot continue without it: {reason}. Find out what is left to do, then resolve() it"
            )
        return decode_result(serializer, snapshot.serializer, snapshot.payload[skip:])


def _is_failure(error: BaseException) -> bool:
    """Whether the error means that the work failed. An interruption or an error of the store does not."""
    return isinstance(error, Exception) and not isinstance(error, _SAYS_NOTHING)


def _digest(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return the digest of a step's arguments. The value of an argument that is not plain data is left out."""
    hash = blake2b(digest_size=_DIGEST, key=call.id, person=b"semel.step.1")
    for name, argument in [*((str(at), arg) for at, arg in enumerate(args)), *sorted(kwargs.items())]:
        encoded = encode_value(argument, strict=False).encode("utf-8", "surrogatepass")
        hash.update(b"%d:%b%d:" % (len(name), name.encode(), len(encoded)))
        hash.update(encoded)
    return hash.digest()


def _serializer_of(function: Callable[..., Any]) -> Serializer:
    """Return the serializer of a step's result, by its function's return annotation as for ``once``."""
    if not getattr(function, "__annotations__", None):
        return PLAIN
    try:
        return cached_serializer(typing.get_type_hints(function).get("return", Any))
    except (NameError, TypeError):  # a name that only the type checker knows; an annotation that has no hash
        return PLAIN


def _label(name: str) -> str:
    """Return the readable name of an entry."""
    return name.removeprefix(_STEP).replace(_UNDONE, "undo of ").replace(_FAILED, "failed")


def _check_name(name: object) -> None:
    try:
        if isinstance(name, str) and not name.startswith(RESERVED) and len(name) <= 240:
            normalize_key(name)
            return
    except RequestError:
        pass
    raise PolicyError(f"a step name has 1 to 240 printable characters and does not start with ~: {str(name)[:40]!r}")
