"""What a flow works on and what it gives back: the call in hand, its outcome, and the words of a recover hook."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from semel.core.encoding.failures import decode_error, encode_error
from semel.core.encoding.serializers import PLAIN, NotSerializable, Serializer, decode_result
from semel.core.encoding.snapshot import Codec, Kind
from semel.core.ops import Complete, CompleteWith
from semel.core.values import value
from semel.errors import ResultNotStored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from semel.core.policy import Policy
    from semel.core.quota import Meter
    from semel.observe.events import Event, EventHook

__all__ = ["CANNOT_TELL", "NOT_DONE", "Call", "Failed", "Outcome", "Recovered", "Verdict"]

T = TypeVar("T")
_VALUE: Final = Kind.VALUE
"""Looked up in every call, and Python 3.11 takes its time to find a member."""


@value
class Outcome(Generic[T]):
    """What came of a call."""

    value: T
    replayed: bool
    """True when the handler did not run: this is the first call's answer."""
    attempt: int
    """Which attempt gave the answer; more than 1 when an abandoned one was taken over."""


@value
class Failed:
    """The handler's own error, for the engine to raise: raised inside a generator, a StopIteration would be garbled."""

    error: BaseException


@value
class Recovered(Generic[T]):
    """A recover hook's word: the abandoned attempt had done it, and this is the result."""

    value: T


class Verdict:
    """A recover hook's word without a result; compare by identity with NOT_DONE and CANNOT_TELL."""

    __slots__ = ("_word",)

    def __init__(self, word: str) -> None:
        self._word = word

    def __repr__(self) -> str:
        return self._word


NOT_DONE: Final = Verdict("NOT_DONE")
"""The abandoned attempt had no effect: run the handler again."""
CANNOT_TELL: Final = Verdict("CANNOT_TELL")
"""Nobody can say: the operation becomes UNKNOWN until it is resolved."""


def shown(error: BaseException) -> str:
    """An exception in words, also one whose own words fail."""
    try:
        return repr(error)
    except Exception:
        return type(error).__qualname__


class Call:
    """One call of one operation: made by an engine, read by the flow."""

    __slots__ = (
        "accept", "codec", "fingerprint", "has_steps", "hook", "id", "input", "key", "nonce", "operation", "policy",
        "quota", "resumption", "serializer", "stored_key", "tenant", "writes",
    )  # fmt: skip

    def __init__(
        self,
        id: bytes,
        tenant: str,
        operation: str,
        key: str,
        stored_key: str | None,
        fingerprint: bytes,
        nonce: int,
        policy: Policy,
        serializer: Serializer,
        codec: Codec,
        hook: EventHook | None,
        quota: Meter | None = None,
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.operation = operation
        self.key = key
        self.stored_key = stored_key
        self.fingerprint = fingerprint
        self.nonce = nonce
        self.policy = policy
        self.serializer = serializer
        self.codec = codec
        self.hook = hook
        self.quota = quota
        self.has_steps = False
        self.input: bytes | None = None
        """What the function was called with, where that is to be kept."""
        self.resumption = False
        """Made by a resumer: it goes on with what was abandoned, and begins nothing."""
        self.accept: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]] | None = None
        """How the store takes the handler's own writes; None where it takes none."""
        self.writes: tuple[Any, ...] | None = ()
        """Made with the completion; None once that is on its way."""

    def __str__(self) -> str:
        return f"{self.operation}[{self.key}]" if self.stored_key is not None else f"{self.operation}[…]"

    def tell(self, event: type[Event], *details: Any) -> None:
        """Hand an event to the hook; with no hook none is made."""
        if self.hook is not None:
            self.hook(event(self.operation, self.tenant, self.key, *details))

    def seal_value(self, result: Any) -> bytes:
        """Raises NotSerializable for whatever is wrong: the caller has an effect to remember and must go on."""
        try:
            payload = self.serializer.encode(result)
        except NotSerializable:
            raise
        except Exception as error:  # a serializer of the user's may raise anything
            raise NotSerializable(f"the serializer {self.serializer.name!r} failed: {shown(error)}") from error
        return self._sealed(_VALUE, self.serializer.name, payload)

    def seal_nothing(self, reason: str) -> bytes:
        try:
            return self._sealed(Kind.EMPTY, "", reason.encode("utf-8", "replace")[:500])
        except NotSerializable:  # in clear, and says nothing: that it is done matters more than why there is no result
            return Codec(compression=None).seal_empty("its result could not be sealed", self.id)

    def seal_input(self) -> bytes:
        return self._sealed(Kind.VALUE, PLAIN.name, self.input or b"")

    def completion(self, token: int, snapshot: bytes, result: Any) -> Complete:
        """The Op that ends it with this result: the handler's writes go with it, and later ones come too late."""
        writes, self.writes = self.writes, None
        if not writes or not self.keeps_writes(result):
            return Complete(self.id, token, snapshot, self.policy.kept_seconds)
        return CompleteWith(self.id, token, snapshot, self.policy.kept_seconds, writes)

    def shortened(self, op: Complete, result: Any, reason: str) -> Iterator[tuple[Complete, NotSerializable | None]]:
        """The same for a store that cannot hold so much, less and less of it, at last that it is done and no more; with
        each, what the caller is told is lost."""
        yield replace(op, snapshot=self.seal_nothing(reason)), NotSerializable(reason)

    def keeps_writes(self, result: Any) -> bool:
        """Whether this result says that what was asked for is done."""
        return True

    def _sealed(self, kind: Kind, serializer: str, payload: bytes) -> bytes:
        try:
            return self.codec.seal(kind, serializer, payload, self.id)
        except NotSerializable:
            raise
        except Exception as error:  # a cipher of the user's may raise anything: its key service is down
            raise NotSerializable(f"the result cannot be sealed: {shown(error)}") from error

    def seal_error(self, error: BaseException) -> bytes:
        try:
            return self._sealed(Kind.ERROR, "", encode_error(error))
        except NotSerializable as too_large:
            return self.seal_nothing(f"{type(error).__qualname__}, {too_large}")

    def open_snapshot(self, blob: bytes | None) -> Any:
        """The remembered result; a remembered failure is raised."""
        snapshot = self.codec.open(blob or b"", self.id)
        if snapshot.kind is _VALUE:
            return decode_result(self.serializer, snapshot.serializer, snapshot.payload)
        if snapshot.kind is Kind.ERROR:
            raise decode_error(snapshot.payload, self.policy.remembered)
        raise ResultNotStored(f"{self} is done, but its result was not kept: {snapshot.reason}")
