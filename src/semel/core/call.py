"""One call of an operation: what it is, what its flow asks of the engine, and what comes of it.

A flow (``core/flows.py``, ``core/transactional.py``) works on a ``Call``. It yields Ops for the store
(``core/ops.py``) and the requests below for the engine: ``Run``, ``Recover``, ``Await``, ``Pause`` and ``StoreLater``.
The engine reports what the handler did as ``Returned``, ``Raised``, ``Declined``, ``Stopped`` or ``NotRun``. In the
end the flow returns an ``Outcome``, or ``Failed`` with the error that the engine raises.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from semel.core.encoding.plain import PLAIN
from semel.core.encoding.serializers import ResultSerializer, decode_error, decode_result, encode_error
from semel.core.encoding.snapshot import NOT_SEALED, Envelope, Kind, NotSerializable
from semel.core.lineage import format_trace, read_lineage
from semel.core.ops import INPUT, Claim, Claimed, Complete, CompleteWith, Op, Record
from semel.core.values import value
from semel.errors import ResultNotStored, SemelError
from semel.observe import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from semel.core.policy import Policy
    from semel.core.quota import Meter
    from semel.observe.events import Event, EventHook

T = TypeVar("T")
_VALUE: Final = Kind.VALUE  # a local name: finding an Enum member in its class is slow on Python 3.11


# -- what comes of a call


@value
class Outcome(Generic[T]):
    """The result of a call, and where it comes from."""

    value: T
    replayed: bool
    """True when the handler did not run: this is the first call's result."""
    attempt: int
    """Which attempt produced the result; more than 1 when an abandoned attempt was taken over."""
    stored: bool = True
    """False when the handler ran and its result is not stored. Semel goes on trying in the background for a while."""


@value
class Failed:
    """The handler's own error, for the engine to raise. A flow cannot raise it: Python turns a StopIteration that
    leaves a generator into a RuntimeError.
    """

    error: BaseException


# -- what a flow asks of the engine


@value
class Run:
    """Run the handler and keep the lease alive meanwhile. ``claimed`` is None when the store is down and the policy
    allows running unprotected.
    """

    claimed: Claimed | None


@value
class Recover:
    """Call the recover hook under the new lease."""

    claimed: Claimed


@value
class Await:
    """Wait until the record may have changed, for at most ``seconds``. Where nothing wakes the engine, it returns after
    ``interval``, and the flow looks again. The answer is the number of seconds that passed.
    """

    id: bytes
    seconds: float
    interval: float


@value
class Pause:
    """Sleep for ``seconds``."""

    seconds: float


@value
class StoreLater:
    """Go on trying to store this outcome in the background, and keep the lease alive meanwhile."""

    op: Complete
    report: tuple[Any, ...]
    """The event to report once it is stored: its class and its details."""


# -- what the engine reports of the handler


@value
class Returned:
    """The handler returned this value."""

    value: Any


@value
class Raised:
    """The handler raised this error."""

    error: BaseException


@value
class Declined:
    """The handler returned this value and says that nothing happened: the caller gets it, and the key is free again."""

    value: Any


@value
class Stopped:
    """The lease was lost, and the engine stopped the handler."""


@value
class NotRun:
    """The handler was not started, for this reason. For example, the caller was cancelled first."""

    error: BaseException


Request: TypeAlias = "Op[Any] | Run | Recover | Await | Pause | StoreLater"
Flow: TypeAlias = Generator[Request, Any, "Outcome[Any] | Failed"]


# -- what a recover hook returns


@value
class Recovered(Generic[T]):
    """Returned by a recover hook: the abandoned attempt had done its work, and this is the result."""

    value: T


class Verdict:
    """Returned by a recover hook that has no result: ``NOT_DONE`` or ``CANNOT_TELL``. Compare by identity."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


NOT_DONE: Final = Verdict("NOT_DONE")
"""The abandoned attempt had no effect: run the handler again."""
CANNOT_TELL: Final = Verdict("CANNOT_TELL")
"""Nobody can say what the abandoned attempt did: the operation becomes UNKNOWN until it is resolved."""


# -- the call


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call of one operation. An engine creates it, and a flow reads it."""

    id: bytes
    tenant: str
    operation: str
    key: str
    stored_key: str | None
    fingerprint: bytes
    nonce: int
    policy: Policy
    serializer: ResultSerializer
    codec: Envelope
    hook: EventHook | None
    quota: Meter | None = None
    log: Callable[[Call, type[Event], tuple[Any, ...]], None] | None = None
    """The guard's own log of what an operator must know; None if a hook logs all events."""
    claim: Claim | None = None
    """What ``make_claim`` has returned."""
    completion: Complete | None = None
    """The completion, if a driver has sent it before the flow asks for it."""
    route: str = ""
    """The operation's name on events, if it differs: over HTTP it has the template of the path, not the path itself."""
    comparison: str = "the same request"
    """What the fingerprint compares, in words, for the error that says that it differs."""
    has_steps: bool = False
    """Whether the store holds steps of this operation, so that a failed attempt must not delete the record."""
    input: bytes | None = None
    """The encoded arguments of a resumable function, to be stored before it runs."""
    resumption: bool = False
    """Made by a resumer: it continues an abandoned operation, and starts no new one."""
    accept: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]] | None = None
    """The store's function that checks and adds the handler's own writes; None if the store takes none."""
    writes: tuple[Any, ...] | None = ()
    """Writes to make together with the completion; None once the completion was sent."""
    lineage: Mapping[bytes, bytes] | None = None
    """The header lines that say where the request comes from, not checked: see ``semel.core.lineage``."""
    clock: Callable[[], float] = float
    """The engine's clock. Without a hook nothing is timed, and it is always 0."""
    began: float = 0.0
    """When the call was made, by that clock."""
    waited: float = 0.0
    """How many seconds it has waited for another call since."""
    sent: float = 0.0
    """When the completion was made, in seconds after the claim."""
    trace: bytes | None = None
    """The trace of the request, as a snapshot holds it; None if nobody wants traces."""
    started: bool = False
    """Whether the start was reported."""

    def __str__(self) -> str:
        return f"{self.operation}[{self.key}]" if self.stored_key is not None else f"{self.operation}[…]"

    def tell(self, event: type[Event], *details: Any) -> None:
        """Hand an event to the hook. Without a hook no event is created."""
        if self.hook is not None:
            route = self.route or self.operation
            self.hook(event(self.operation, self.tenant, self.key, *details, route=route, id=self.id))

    # The events of nearly every call. These do what ``tell`` does, with less overhead.

    def tell_start(self, token: int) -> None:
        """Report that the first attempt begins, unless a driver has already done so before the flow."""
        if not self.started and self.hook is not None:
            self.started = True
            elapsed, root, parent = self.clock() - self.began - self.waited, "", ""
            if self.lineage is not None:
                lineage = read_lineage(self.lineage)
                root, parent = lineage.root, lineage.parent
            route = self.route or self.operation
            self.hook(events.Started(
                self.operation, self.tenant, self.key, 1, token, root, parent, elapsed, route, self.id
            ))  # fmt: skip

    def tell_completion(self, attempt: int, op: Complete) -> None:
        """Report that the result is stored."""
        if self.hook is not None:
            elapsed, size = self.clock() - self.began - self.waited, len(op.snapshot)
            route, stored = self.route or self.operation, elapsed - self.sent
            self.hook(events.Completed(
                self.operation, self.tenant, self.key, attempt, size, elapsed, stored, route, self.id
            ))  # fmt: skip

    def tell_replay(self, record: Record) -> None:
        """Report that a duplicate is answered with this record."""
        if self.hook is not None:
            route, seconds = self.route or self.operation, self.clock() - self.began
            trace = "" if self.trace is None else format_trace(self.codec.open_trace(record.snapshot or b"", self.id))
            self.hook(events.Replayed(
                self.operation, self.tenant, self.key, record.age, record.attempt, seconds, trace, route, self.id
            ))  # fmt: skip

    def elapsed(self) -> float:
        """Return the seconds since the claim, without those that it waited for another call."""
        return self.clock() - self.began - self.waited

    def alert(self, event: type[Event], *details: Any) -> None:
        """Report what an operator must know, to the guard's log and to the hook."""
        if self.log is not None:
            self.log(self, event, details)
        self.tell(event, *details)

    def make_claim(self) -> Claim:
        """Return the claim that the call makes, always the same, so that the store recognises a repeated one."""
        policy = self.policy
        self.claim = claim = Claim(
            self.id, self.nonce, self.fingerprint, policy.lease_seconds, policy.retention_seconds, policy.takeover,
            self.tenant, self.operation, self.stored_key,
        )  # fmt: skip
        return claim

    # What is stored

    def seal_value(self, result: Any) -> bytes:
        """Return the snapshot of a result. Raises NotSerializable whatever goes wrong: the effect has happened, and the
        flow must go on to remember that.
        """
        serializer = self.serializer
        try:
            payload = serializer.encode(result)
            try:
                if self.trace:
                    return self.codec.seal(serializer.kind, serializer.name, payload, self.id, "", self.trace)
                return self.codec.seal(serializer.kind, serializer.name, payload, self.id)
            except NotSerializable:
                raise
            except Exception as error:
                raise _not_sealed(error) from error
        except NotSerializable as error:
            less = serializer.shorten(result)
            if less is None:
                raise
            self.alert(events.ResultDropped, str(error))
        except Exception as error:  # a user's serializer may raise anything
            raise NotSerializable(f"the serializer {serializer.name!r} failed: {describe_error(error)}") from error
        return self._seal(serializer.kind, serializer.name, serializer.encode(less))

    def seal_nothing(self, reason: str, entry: str = "") -> bytes:
        """Return a snapshot that says: done, but there is no result, for this reason."""
        try:
            return self._seal(Kind.EMPTY, "", reason.encode("utf-8", "replace")[:500], entry)
        except NotSerializable:
            return NOT_SEALED  # the cipher fails: that it is done matters more than the reason

    def seal_error(self, error: BaseException, entry: str = "") -> bytes:
        """Return the snapshot of an exception that is remembered as the answer, or in that entry of the journal."""
        try:
            return self._seal(Kind.ERROR, "", encode_error(error), entry)
        except NotSerializable as too_large:
            return self.seal_nothing(f"{type(error).__qualname__}, {too_large}", entry)

    def seal_input(self) -> bytes:
        """Return the snapshot of the arguments. Raises NotSerializable."""
        return self._seal(_VALUE, PLAIN.name, self.input or b"", INPUT)

    def open_outcome(self, snapshot: bytes | None, attempt: int, replayed: bool = True) -> Outcome[Any]:
        """Return the outcome that a snapshot holds, or raise the stored exception."""
        kind, name, payload = opened = self.codec.open(snapshot or b"", self.id)
        serializer = self.serializer
        if kind is _VALUE:
            if serializer is PLAIN and name == PLAIN.name:
                return Outcome(PLAIN.decode(payload), replayed, attempt)  # as decode_result does
            if serializer.kind is _VALUE:
                return Outcome(decode_result(serializer, name, payload), replayed, attempt)
            # guard.resolve() stores plain data, whatever the operation's own results are.
            return Outcome(serializer.convert(decode_result(PLAIN, name, payload)), replayed, attempt)
        if kind is serializer.kind:
            return Outcome(serializer.decode(payload), replayed, attempt)
        if kind is not Kind.ERROR:
            raise ResultNotStored(f"{self} is done, but its result was not stored: {opened.reason}")
        error = decode_error(payload, self.policy.remembered)
        if serializer.kind is not _VALUE and not isinstance(error, SemelError):
            # Remembered when the operation was a plain function. Whoever calls it now cannot raise the exception.
            raise ResultNotStored(f"{self} is done, but what is stored is no HTTP response") from error
        raise error

    def make_completion(self, token: int, snapshot: bytes, result: Any) -> Complete:
        """Return the Op that ends the call with this result, together with the handler's writes if it has had an
        effect. Later writes are refused.
        """
        if self.hook is not None:
            self.sent = self.clock() - self.began - self.waited
        writes, self.writes = self.writes, None
        if not writes or not self.serializer.has_effect(result):
            return Complete(self.id, token, snapshot, self.policy.retention_seconds)
        return CompleteWith(self.id, token, snapshot, self.policy.retention_seconds, writes)

    def shorter_completions(
        self, op: Complete, result: Any, reason: str
    ) -> Iterator[tuple[Complete, NotSerializable | None]]:
        """Yield smaller versions of a completion that the store cannot hold, the last one without any result. Beside
        each stands the error for the caller, or None where the result is still usable.
        """
        less = self.serializer.shorten(result)
        if less is not None:
            try:
                snapshot = self._seal(self.serializer.kind, self.serializer.name, self.serializer.encode(less))
            except NotSerializable:  # the cipher fails
                pass
            else:
                yield replace(op, snapshot=snapshot), None
        yield replace(op, snapshot=self.seal_nothing(reason)), NotSerializable(reason)

    def _seal(self, kind: Kind, serializer: str, payload: bytes, entry: str = "") -> bytes:
        try:
            return self.codec.seal(kind, serializer, payload, self.id, entry, b"" if entry else self.trace or b"")
        except NotSerializable:
            raise
        except Exception as error:
            raise _not_sealed(error) from error


def _not_sealed(error: Exception) -> NotSerializable:
    """A user's cipher may raise anything; for example, its key service is down."""
    return NotSerializable(f"the result cannot be sealed: {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Return ``repr(error)``, or the name of its class where that fails."""
    try:
        return repr(error)
    except Exception:
        return type(error).__qualname__
