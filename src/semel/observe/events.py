"""The events of an operation's life. ``EVENTS`` lists them all.

A guard passes each event to its hooks, ``Semel(store, on_event=…)``. Without a hook it creates no events, and measures
no times. This module imports nothing from engines, stores or sinks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, TypeAlias, dataclass_transform

from semel.errors import ConfigurationError

DEBUG: Final = 10
INFO: Final = 20
WARNING: Final = 30
ERROR: Final = 40
Source: TypeAlias = Literal["engine", "step", "http", "client", "outbox", "relay", "inbox", "store"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _FrozenDataclass:
    """Makes its subclasses frozen dataclasses.

    ``dataclass(frozen=True)`` compiles six methods for each class, and a process uses few of the events. So all of them
    share these methods, and a constructor is compiled when it is first used.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        if "__init__" not in cls.__dict__:
            cls.__init__ = _ConstructorToBe(cls)  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self) -> int:
        return hash(_compared(self))

    def __repr__(self) -> str:
        values = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__qualname__}({', '.join(values)})"

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __setattr__(self, name: str, value: object) -> NoReturn:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")

        def __delattr__(self, name: str) -> NoReturn:
            raise FrozenInstanceError(f"cannot delete field {name!r}")


_set_fields: Final = _FrozenDataclass.__dict__["__dict__"].__set__
"""Sets all fields at once. The constructor of a frozen dataclass sets one after the other, and takes twice as long."""


def _compared(instance: Any) -> tuple[Any, ...]:
    """Return the values by which an instance is told from others of its class."""
    return tuple(getattr(instance, each.name) for each in fields(instance) if each.compare)


class _ConstructorToBe:
    """Stands in a class for ``__init__``. The first access replaces it by the constructor."""

    __slots__ = ("_cls",)

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        cls = self._cls
        defaults = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
        texts = {name: f"{name}=defaults[{name!r}]" for name in defaults}
        positional = [texts.get(each.name, each.name) for each in fields(cls) if not each.kw_only]
        keywords = [texts.get(each.name, each.name) for each in fields(cls) if each.kw_only]
        values = ", ".join(f"{each.name!r}: {each.name}" for each in fields(cls))
        names: dict[str, Any] = {"defaults": defaults, "set_fields": _set_fields}
        exec(f"def __init__(self, {', '.join([*positional, '*', *keywords])}): set_fields(self, {{{values}}})", names)
        method = names["__init__"]
        method.__qualname__ = f"{cls.__qualname__}.__init__"
        method.__annotations__ = {each.name: each.type for each in fields(cls)} | {"return": None}
        cls.__init__ = method
        return method.__get__(instance, owner)


class Event(_FrozenDataclass):
    """The base of all events. ``level`` is a level of the standard library's logging."""

    name: ClassVar[str] = ""
    """The name of the class, in lower case and without Event at its end: ``taken_over``."""
    level: ClassVar[int] = DEBUG
    source: ClassVar[Source] = "engine"
    """Which part tells it."""
    operation: str
    tenant: str
    key: str
    """The key as the caller passed it. If keys are secrets, hash it before it leaves the process."""
    route: str = field(default="", kw_only=True, compare=False)
    """A name for metrics, of which there are few: over HTTP the method and the template of the path, such as
    ``POST /orders/{id}``; elsewhere the operation."""
    id: bytes = field(default=b"", kw_only=True, compare=False)
    """The record's 16-byte identity, a hash of tenant, operation and key; empty if the event is about no record."""

    def __init_subclass__(cls, source: Source = "engine", level: int | None = None) -> None:
        super().__init_subclass__()
        cls.name = re.sub("(?<=.)([A-Z])", r"_\1", cls.__name__.removesuffix("Event")).lower()
        cls.source = source
        if level is not None:
            cls.level = level


class Started(Event):
    """The claim was won and the handler is about to run."""

    attempt: int
    token: int
    root: str = ""
    """The key at the start of the chain of services, as the caller named it."""
    parent: str = ""
    """The key of the caller's operation, likewise."""
    seconds: float = 0.0
    """How long the claim took."""

    def __init__(
        self, operation: str, tenant: str, key: str, attempt: int, token: int, root: str = "", parent: str = "",
        seconds: float = 0.0, route: str = "", id: bytes = b"",
    ) -> None:  # fmt: skip
        _set_fields(self, {
            "operation": operation, "tenant": tenant, "key": key, "attempt": attempt, "token": token, "root": root,
            "parent": parent, "seconds": seconds, "route": route, "id": id,
        })  # fmt: skip


class TakenOver(Event, level=WARNING):
    """An abandoned attempt was taken over. The handler or the recover hook is about to run."""

    attempt: int
    token: int


class Completed(Event):
    """The handler returned and its result is stored."""

    attempt: int
    size: int
    """Bytes of the stored snapshot."""
    seconds: float = 0.0
    """From the claim to the stored result."""
    store_seconds: float = 0.0
    """How long it took to store the result, or to commit the transaction that holds it; 0 if it was not measured: the
    result was stored later, or by the statement that made it."""

    def __init__(
        self, operation: str, tenant: str, key: str, attempt: int, size: int, seconds: float = 0.0,
        store_seconds: float = 0.0, route: str = "", id: bytes = b"",
    ) -> None:  # fmt: skip
        _set_fields(self, {
            "operation": operation, "tenant": tenant, "key": key, "attempt": attempt, "size": size,
            "seconds": seconds, "store_seconds": store_seconds, "route": route, "id": id,
        })  # fmt: skip


class Prepared(Event):
    """The handler returned and its result is written in the caller's transaction. It is stored when that commits."""

    attempt: int
    size: int
    """Bytes of the snapshot."""
    seconds: float = 0.0
    """From the claim to the written result."""


class Conflicted(Event, level=INFO):
    """A transaction conflicted with another one and was rolled back. It is run again, unless its tries are used up or
    the guarantee forbids it. Of a consumer, ``operation`` is the type of the message, and ``key`` its id."""

    tries: int
    """How often it has been run."""
    error: str


class FailureRemembered(Event):
    """The handler raised an exception that the policy remembers, and it is stored."""

    attempt: int
    error: str
    seconds: float = 0.0
    """From the claim to the stored exception."""


class RecoveredEvent(Event, level=INFO):
    """The recover hook found out what an abandoned attempt did."""

    attempt: int


class Released(Event, level=INFO):
    """The handler raised. The key is free again; an operation with finished steps resumes after them."""

    attempt: int
    error: str
    resumable: bool
    seconds: float = 0.0
    """From the claim to the release."""


class Replayed(Event, level=INFO):
    """A duplicate was answered with the stored outcome."""

    age: float
    """Seconds since the first attempt."""
    attempt: int
    seconds: float = 0.0
    """How long the duplicate waited for its answer, with the time in which the first call still ran."""
    trace: str = ""
    """The ``traceparent`` of the request whose outcome it is, if a hook follows traces."""

    def __init__(
        self, operation: str, tenant: str, key: str, age: float, attempt: int, seconds: float = 0.0, trace: str = "",
        route: str = "", id: bytes = b"",
    ) -> None:  # fmt: skip
        _set_fields(self, {
            "operation": operation, "tenant": tenant, "key": key, "age": age, "attempt": attempt, "seconds": seconds,
            "trace": trace, "route": route, "id": id,
        })  # fmt: skip


class Waited(Event):
    """A duplicate waited for the first call."""

    seconds: float


class TurnedAway(Event, level=INFO):
    """A duplicate was refused because the first call still runs."""

    retry_after: float


class Mismatched(Event, level=WARNING):
    """A request was refused because its key belongs to a different request."""


class WentUnknown(Event, level=ERROR):
    """A call found an operation whose outcome is unknown."""

    attempt: int


class LeaseLostEvent(Event, level=ERROR):
    """An attempt lost its lease to another owner, and its outcome was refused."""

    attempt: int
    token: int


class Renewed(Event):
    """The lease of a running handler was renewed."""

    attempt: int


class RenewalFailed(Event, level=WARNING):
    """A lease could not be renewed. The renewal is retried before the lease ends."""

    error: str


class StepSaved(Event, source="step"):
    """A step or a captured value was stored."""

    step: str


class StepReplayed(Event, source="step"):
    """A step was not run again, because an earlier attempt has done it: its stored result was used."""

    step: str


class UndoFailed(Event, source="step", level=ERROR):
    """A step of a failed operation could not be undone at this try."""

    step: str
    error: str


class ResultDropped(Event, level=ERROR):
    """The operation is remembered as done, but its result could not be stored."""

    reason: str


class Unstored(Event, level=ERROR):
    """The handler ended, but its outcome could not be stored. Semel goes on trying in the background."""

    attempt: int
    error: str


class StoreFailed(Event, level=ERROR):
    """The store failed at this Op. The policy decides what happens next."""

    op: str
    error: str


class Unprotected(Event, level=ERROR):
    """The store was down and the policy is ``on_store_error="open"``: the handler runs without a record."""


class Unkeyed(Event, source="http", level=INFO):
    """A request was sent without its optional key: the handler runs without a record."""


class KeyMissingEvent(Event, source="http", level=INFO):
    """An HTTP request was refused because it has no key. ``key`` is empty."""


class KeyInvalidEvent(Event, source="http", level=INFO):
    """An HTTP request was refused because its key is malformed. ``key`` is empty."""


class BodyTooLargeEvent(Event, source="http", level=INFO):
    """An HTTP request was refused because its body is longer than ``max_request_body``."""


class PreconditionRefused(Event, source="http", level=INFO):
    """An HTTP request was refused because of its If-Match or If-None-Match."""

    status: int
    """412 if the resource has changed, 428 if the header is missing, 400 if it is malformed."""


class BodyOmitted(Event, source="http", level=WARNING):
    """An HTTP answer is longer than ``max_stored_body``, or is a file that the server sends, so it is stored without
    its body. The client gets all of it, and a replay only its status and headers."""

    limit: int
    """The ``max_stored_body`` of the route, in bytes."""


class Expired(Event, level=WARNING):
    """A request was refused because the answer of its key has expired."""

    age: float
    """Seconds since the first attempt."""


class OverQuota(Event, level=WARNING):
    """A new key was refused because its tenant holds as many live keys as its quota allows."""

    live_keys: int
    """How many live keys the tenant holds, counted up to the quota."""


class Resolved(Event, level=INFO):
    """An operation in doubt was settled by ``resolve()`` or ``release()``."""

    happened: bool


class OutcomeReleased(Event, level=WARNING):
    """The stored outcome of a finished operation was dropped by ``release(stored=…)``: the next call runs it again."""

    outcome: str
    """``failure``, ``result``, or ``unreadable`` if the guard could not tell."""
    token: int
    """The token of the record that was dropped."""


class SweptEvent(Event):
    """A sweep removed expired records. ``operation``, ``tenant`` and ``key`` are empty."""

    removed: int
    unknown: int


class CacheLost(Event, source="store", level=WARNING):
    """The cache of a tiered store does not answer, so the primary is used instead. ``operation``, ``tenant`` and
    ``key`` are empty. Passed to the store's own hook.
    """

    error: str


class CacheBack(Event, source="store", level=INFO):
    """The cache of a tiered store answers again. ``operation``, ``tenant`` and ``key`` are empty."""


class RecoveryFailed(Event, level=WARNING):
    """A resumer could not resume an abandoned operation. It tries again later."""

    attempt: int
    error: str


class RecoveryGivenUp(Event, level=ERROR):
    """An abandoned operation has used up its tries, so resumers ignore it. Each resumer reports it once."""

    attempt: int


class Emitted(Event, source="outbox"):
    """A message was added to the outbox. It is sent if the transaction commits. ``operation``, ``tenant`` and ``key``
    are those of the operation that added it; without one, the type and the id of the message."""

    message: str
    """The message's id."""
    destination: str
    stream: str
    type: str


class Published(Event, source="relay"):
    """A relay has sent a batch of messages, and they are gone from the outbox. ``operation``, ``tenant`` and ``key``
    are empty."""

    count: int


class PublishFailed(Event, source="relay", level=WARNING):
    """A message could not be sent, and is tried again later. ``operation`` is its type, and ``key`` its id."""

    stream: str
    error: str
    starts: int
    """How many attempts have begun."""


class PublishGivenUp(Event, source="relay", level=ERROR):
    """A message could not be sent, and is in the dead letters now. ``operation`` is its type, and ``key`` its id."""

    stream: str
    error: str
    starts: int


class StreamBlocked(Event, source="relay", level=ERROR):
    """A message cannot be sent, and the later ones of its stream wait for it. The relay goes on trying. Each relay
    reports it once."""

    stream: str
    error: str
    starts: int


class BrokerLost(Event, source="relay", level=ERROR):
    """The broker cannot be reached, or only this destination, if one is named. The relay waits, and counts no attempt.
    ``operation``, ``tenant`` and ``key`` are empty."""

    error: str
    destination: str = ""


class BrokerBack(Event, source="relay", level=INFO):
    """The broker takes messages again, or only this destination, if one is named. ``operation``, ``tenant`` and ``key``
    are empty."""

    destination: str = ""


class RelayLate(Event, source="relay", level=WARNING):
    """A relay was slower than its lease, so another one may have taken its lanes. What it has sent is sent again.
    ``operation``, ``tenant`` and ``key`` are empty."""

    sent: int
    """How many messages it had sent."""


class SlotLag(Event, source="relay", level=WARNING):
    """The database keeps much of its own log for the outbox, because the relay is behind or a transaction is open for
    long. In the end its disk is full. ``operation``, ``tenant`` and ``key`` are empty."""

    retained: int
    """How many bytes it keeps."""


class AppliedEvent(Event, source="inbox"):
    """A consumer has applied a message. ``operation`` is its type, or the consumer if ``inbox.process`` applied it, and
    ``key`` its id."""

    consumer: str
    seconds: float
    """How long it took, with the commit."""
    root: str = ""
    """The key at the start of the chain of services, from the message's headers."""
    parent: str = ""
    """The key of the operation that sent it, likewise."""


class Skipped(Event, source="inbox", level=INFO):
    """A message was delivered again, and was not applied again. ``operation`` is its type, and ``key`` its id."""

    consumer: str
    seconds: float
    root: str = ""
    parent: str = ""


class ApplyFailed(Event, source="inbox", level=WARNING):
    """The handler of a message failed, and the message is delivered again later. ``operation`` is its type, and ``key``
    its id."""

    stream: str
    error: str
    starts: int
    """How many attempts have begun."""


class ApplyGivenUp(Event, source="inbox", level=ERROR):
    """A message could not be applied, and is in the dead letters now. ``operation`` is its type, and ``key`` its id."""

    stream: str
    error: str
    starts: int


class StreamGap(Event, source="inbox", level=WARNING):
    """A message was applied although messages of its stream that come before it were not. ``operation`` is its type,
    and ``key`` its id."""

    stream: str
    missing: int
    """How many messages."""


class ConsumerInterrupted(Event, source="inbox", level=ERROR):
    """A consumer cannot reach its broker or its database. It tries again, and counts no attempt. ``operation``,
    ``tenant`` and ``key`` are empty."""

    error: str


class CallRetried(Event, source="client", level=INFO):
    """A client sends its request again. ``operation`` is the method and the URL without its query, and ``route`` the
    method and the server."""

    attempts: int
    """How often it was sent."""
    reason: str
    pause: float
    """Seconds until it is sent again."""


class CallResumed(Event, source="client", level=INFO):
    """A client sends a request again that an earlier call has left in the journal. ``operation`` and ``route`` as in
    ``CallRetried``."""

    age: float
    """Seconds since its key was first used."""


class CallEnded(Event, source="client"):
    """A client knows the outcome of its call. ``operation`` and ``route`` as in ``CallRetried``."""

    outcome: str
    """``succeeded`` or ``rejected``."""
    attempts: int
    replayed: bool
    """Whether the server had the answer stored."""
    seconds: float


class CallUnknown(Event, source="client", level=ERROR):
    """A client has given up, and its request may have been executed. ``operation`` and ``route`` as in
    ``CallRetried``."""

    attempts: int
    """How often it was sent; 0 if the journal held it for so long that it is not sent again."""
    reason: str
    seconds: float


EVENTS: Final[tuple[type[Event], ...]] = tuple(
    each for each in globals().values() if isinstance(each, type) and issubclass(each, Event) and each is not Event
)
"""All events. The reference page is generated from this table."""


EventHook: TypeAlias = Callable[[Event], None]
"""A function that takes an event. It runs in the call that causes the event."""

EventHooks: TypeAlias = EventHook | Sequence[EventHook]
"""The type of ``on_event=``: one hook, or several, which are called in turn."""


class LoggingHook:
    """A hook that logs events, so that the guard does not log them as well."""

    def __init__(self, log: EventHook) -> None:
        self._log = log

    def __call__(self, event: Event) -> None:
        self._log(event)


class TracingHook:
    """A hook that follows traces. The trace that it returns for a request is stored with the outcome, and
    is on the events of its replays.
    """

    def __init__(self, tell: EventHook, trace: Callable[[], bytes]) -> None:
        """
        :param trace: returns the trace of the request that is being made: 16 bytes, its span: 8 bytes, and the flags:
            1 byte. Empty if there is none.
        """
        self._tell = tell
        self.trace = trace

    def __call__(self, event: Event) -> None:
        self._tell(event)


def hooks_of(on_event: EventHooks | None) -> tuple[EventHook, ...]:
    """Return the hooks of an ``on_event=`` setting. Raises ConfigurationError."""
    if on_event is None:
        return ()
    hooks = (on_event,) if callable(on_event) else on_event
    if not isinstance(hooks, (tuple, list)) or not all(map(callable, hooks)):
        raise ConfigurationError(
            f"on_event= is a function of an event, such as log_events(), or a list of them, not {on_event!r}"
        )
    return tuple(hooks)


def call_hooks(hooks: tuple[EventHook, ...], logger: str) -> EventHook | None:
    """Return a hook that calls these in turn, or None if there are none.

    Their errors are logged: a hook must never fail the operation that it observes.
    """
    if not hooks:
        return None
    first: Any
    first, *others = hooks
    if isinstance(first.__call__, MethodType):  # it is called faster than the object
        first = first.__call__

    def call(event: Event) -> None:
        try:
            first(event)
        except Exception:
            logging.getLogger(logger).exception("the event hook failed at %s", event.name)
        if rest is not None:
            rest(event)

    rest = call_hooks(tuple(others), logger)
    return call
