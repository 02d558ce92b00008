"""The steps of one operation, over all of its attempts: what was done, in which order, with what, and what was undone.

A step is written down when it has returned, so an attempt that takes over is told what is done already and goes on
after it. For that it must ask for the same steps in the same order, with the same arguments: anything else is another
program, and to go on would mix the two. Pure: what is to be stored comes out as ``SaveStep``.

Names in the store: a captured value under its own name; ``~step:NAME`` a step; ``~undo:NAME`` that it was undone;
``~failed`` that the operation failed and is being undone, with the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

from semel.core.call import Call
from semel.core.encoding.canonical import encode_value
from semel.core.encoding.serializers import PLAIN, NotSerializable, Serializer, decode_result
from semel.core.encoding.snapshot import Kind
from semel.core.keys import normalize_key
from semel.core.ops import SaveStep
from semel.errors import PolicyError, RequestError, SnapshotUnreadable, StepMismatch

__all__ = ["Journal", "Undo", "digest_of", "label", "mark_of"]

RESERVED: Final = "~"
_STEP: Final = "~step:"
_UNDONE: Final = "~undo:"
_FAILED: Final = "~failed"
_DIGEST: Final = 16
_HEAD: Final = _DIGEST + 1
"""A step's arguments, and whether it can be undone; then what it returned."""


class Undo:
    """A finished step that can be undone."""

    __slots__ = ("function", "name", "value")

    def __init__(self, name: str, value: Any, function: Callable[[Any], Any]) -> None:
        self.name = name
        self.value = value
        self.function = function


class Journal:
    """What one attempt knows of the operation's steps."""

    __slots__ = ("_asked", "_call", "_recorded", "_saved", "_undos", "lent")

    def __init__(self, call: Call, saved: Sequence[tuple[str, bytes]] = ()) -> None:
        self._call = call
        self._saved = dict(saved)
        self._recorded = [name.removeprefix(_STEP) for name, _ in saved if name.startswith(_STEP)]
        """Steps of earlier attempts, in the order they were done."""
        self._asked: list[str] = []
        """Steps that this attempt has asked for."""
        self._undos: list[Undo] = []
        self.lent: set[str] = set()
        """Steps marked in a transaction of the caller's, which may have been rolled back since."""

    # -- captured values

    def captured(self, name: str) -> tuple[Any] | None:
        """A value that was captured before, or None."""
        _check(name)
        blob = self._saved.get(name)
        return None if blob is None else (self._decode(blob, PLAIN, 0),)

    def capture(self, token: int, name: str, value: Any) -> SaveStep:
        return self._entry(token, name, self._sealed(name, value, PLAIN, b""))

    # -- steps

    def enter(self, name: str, digest: bytes) -> bytes | None:
        """A step is asked for: what it has left, where it is done. Raises StepMismatch where that was another."""
        _check(name)
        if name in self._asked:
            raise PolicyError(f"{self._call}: the step {name!r} is asked for twice: each has a name of its own")
        at = len(self._asked)
        self._asked.append(name)
        blob = self._saved.get(_STEP + name)
        if at < len(self._recorded) and self._recorded[at] != name:
            raise StepMismatch(
                f"{self._call}: step {at + 1} was {self._recorded[at]!r} in an earlier attempt and is {name!r} now. "
                "Finish it with the code that began it, or resolve() it"
            )
        if blob is not None and self._open(blob)[1][:_DIGEST] != digest:
            raise StepMismatch(
                f"{self._call}: the step {name!r} is done, and was given other arguments then. "
                "Finish it with the code that began it, or resolve() it"
            )
        return blob

    def retract(self, name: str) -> None:
        """A step that was entered has failed, and may be tried again."""
        self._asked.remove(name)

    def lend(self, name: str) -> None:
        """The mark of this step is in a transaction of the caller's."""
        self.lent.add(name)

    def forget(self, name: str) -> None:
        """That transaction was rolled back: the step is not done, and may be asked for again."""
        self.lent.discard(name)
        self._saved.pop(_STEP + name, None)
        self._asked = [asked for asked in self._asked if asked != name]
        self._undos = [undo for undo in self._undos if undo.name != name]

    def settle(self, saved: Sequence[tuple[str, bytes]]) -> None:
        """This is what the store has: what was only lent and is not in it was rolled back."""
        stored = {name for name, _ in saved}
        for name in sorted(self.lent):
            if _STEP + name not in stored:
                self.forget(name)
        self.lent.clear()

    def value(self, blob: bytes, serializer: Serializer) -> Any:
        """What a finished step returned."""
        return self._decode(blob, serializer, _HEAD)

    def finish(
        self, token: int, name: str, value: Any, serializer: Serializer, digest: bytes, undoable: bool
    ) -> SaveStep:
        """A step has returned."""
        head = digest + (b"\x01" if undoable else b"\x00")
        return self._entry(token, _STEP + name, self._sealed(name, value, serializer, head))

    def shortened(self, op: SaveStep, reason: str) -> SaveStep | None:
        """The same for a store that cannot hold so much: the step is done, and what it returned is not kept. None of a
        captured value, which is nothing else."""
        if not op.name.startswith(_STEP):
            return None
        head = self._open(op.value)[1][:_HEAD]
        payload = head + reason.encode("utf-8", "replace")[:500]
        return replace(op, value=self._call.codec.seal(Kind.EMPTY, "", payload, self._call.id))

    def leave(self) -> None:
        """The handler has returned: raises StepMismatch where it left out what an earlier attempt did."""
        left = self._recorded[len(self._asked) :]
        if left and not self.failing:
            raise StepMismatch(
                f"{self._call}: an earlier attempt did {', '.join(map(repr, left))}, which this one did not ask for"
            )

    # -- undoing

    @property
    def failing(self) -> bool:
        """Whether the operation has failed and is being undone."""
        return _FAILED in self._saved

    def can_undo(self, name: str, value: Any, function: Callable[[Any], Any]) -> None:
        self._undos.append(Undo(name, value, function))

    def to_undo(self) -> list[Undo]:
        """What is done, can be undone and is not yet, the last first."""
        return [each for each in reversed(self._undos) if _UNDONE + each.name not in self._saved]

    def out_of_reach(self) -> list[str]:
        """What an earlier attempt did and could undo, and this one has not come to: its undo is not known here."""
        return [
            name
            for name in reversed(self._recorded[len(self._asked) :])
            if _UNDONE + name not in self._saved and self._open(self._saved[_STEP + name])[1][_DIGEST:_HEAD] == b"\x01"
        ]

    def fail(self, token: int, error: BaseException) -> SaveStep:
        """From here on every attempt undoes."""
        return self._entry(token, _FAILED, self._call.seal_error(error))

    def failure(self) -> BaseException:
        """What the operation failed with, in whichever attempt that was."""
        try:
            Call.open_snapshot(self._call, self._saved[_FAILED])
        except BaseException as error:
            return error
        raise SnapshotUnreadable(f"{self._call}: the failure that is being undone was not stored as one")

    def undone(self, token: int, name: str) -> SaveStep:
        return self._entry(token, _UNDONE + name, self._sealed(name, None, PLAIN, b""))

    # -- what is stored

    def saved(self, op: SaveStep) -> None:
        """The store has it."""
        self._saved[op.name] = op.value

    @property
    def empty(self) -> bool:
        return not self._saved

    def _entry(self, token: int, name: str, blob: bytes) -> SaveStep:
        return SaveStep(self._call.id, token, name, blob, len(self._saved))

    def _sealed(self, name: str, value: Any, serializer: Serializer, prefix: bytes) -> bytes:
        try:
            payload = prefix + serializer.encode(value)
        except NotSerializable as error:
            if isinstance(value, Coroutine):
                value.close()
                raise PolicyError(
                    f"the function of {name!r} is async and is not awaited here: a step under AsyncSemel may be an "
                    "async def, one under Semel and a captured value may not"
                ) from error
            raise PolicyError(f"the value of {name!r} cannot be stored: {error}") from error
        return self._call.codec.seal(Kind.VALUE, serializer.name, payload, self._call.id)

    def _open(self, blob: bytes) -> tuple[str, bytes]:
        snapshot = self._call.codec.open(blob, self._call.id)
        return snapshot.serializer, snapshot.payload

    def _decode(self, blob: bytes, serializer: Serializer, skip: int) -> Any:
        snapshot = self._call.codec.open(blob, self._call.id)
        if snapshot.kind is Kind.EMPTY:
            reason = snapshot.payload[skip:].decode("utf-8", "replace")
            raise StepMismatch(
                f"{self._call}: step {len(self._asked)} is done, but what it returned was not kept, and a re-run "
                f"cannot go on without it: {reason}. Find out what is left to do, then resolve() it"
            )
        return decode_result(serializer, snapshot.serializer, snapshot.payload[skip:])


def digest_of(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Of a step's arguments. What is no plain data, such as a session, counts as a blank."""
    hash = blake2b(digest_size=_DIGEST, key=call.id, person=b"semel.step.1")
    for name, given in [*((str(at), arg) for at, arg in enumerate(args)), *sorted(kwargs.items())]:
        encoded = encode_value(given, strict=False).encode("utf-8", "surrogatepass")
        hash.update(b"%d:%b%d:" % (len(name), name.encode(), len(encoded)))
        hash.update(encoded)
    return hash.digest()


def mark_of(name: str) -> str:
    """Under which name the store has a step."""
    return _STEP + name


def label(name: str) -> str:
    """The name of an entry, for people."""
    return name.removeprefix(_STEP).replace(_UNDONE, "undo of ").replace(_FAILED, "failed")


def _check(name: object) -> None:
    try:
        if isinstance(name, str) and not name.startswith(RESERVED) and len(name) <= 240:
            normalize_key(name)
            return
    except RequestError:
        pass
    raise PolicyError(f"a step has a name of 1 to 240 printable characters, without ~ in front, not {str(name)[:40]!r}")
