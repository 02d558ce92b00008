"""One call from its key to its outcome, written once for every HTTP library, sync and async.

``deliver`` is a generator. It yields what is to be done next, and the drivers in ``aio.py`` and ``sync.py`` do it::

    write ──▶ send ──▶ an answer that is final ───────────────▶ clear ────▶ succeeded or rejected
               ▲  └──▶ no answer, or one to be retried ──┬────▶ release ──▶ unknown: it stays in the journal
               └────── Sleep ◀───────────────────────────┘

The journal's steps are left out if there is no journal. A module for an HTTP library only translates its requests,
responses and exceptions. Nothing here knows such a library.

A definite refusal is not always the outcome. If the answer to an earlier attempt is missing, that attempt may have had
its effect. A refusal that a server makes before it looks at the key (401, 403, 409, 429, a redirect, …) then says
nothing about it, and the outcome is unknown.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Collection, Generator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

from semel.client.retry import Retry, advice, origin_of
from semel.core.call import describe_error
from semel.core.keys import header_value, normalize_key
from semel.engine.operation.propagation import OutgoingCall, check_hosts, outgoing_call
from semel.errors import ConfigurationError, KeyExpired, NoAnswer
from semel.observe import events
from semel.observe.events import EventHook, EventHooks, call_hooks, hooks_of

log = logging.getLogger("semel.client")

HEADER: Final = "Idempotency-Key"
METHODS: Final = ("POST", "PATCH")
REPLAYED: Final = "Idempotent-Replayed"
NOT_ABOUT_THE_KEY: Final = frozenset(
    {307, 308, 401, 403, 404, 405, 407, 408, 409, 412, 421, 423, 425, 428, 429, 431, 451}
)
"""Refusals that servers make before they look at the key, or that leave the key free, unless they are replays."""

TOO_OLD: Final = "too old to be sent again"
CallOutcome: TypeAlias = Literal["succeeded", "rejected", "unknown"]


class Receipt(NamedTuple):
    """What became of a call: ``response.extensions["idempotency"]``, or ``response.idempotency``."""

    key: str
    outcome: CallOutcome
    """``"succeeded"``; ``"rejected"``: not done, and the same key will not do it; ``"unknown"``: it may have been done,
    so send it again with the same key, or ask the server."""
    replayed: bool
    """Whether the server had the answer stored: an earlier attempt was executed."""
    attempts: int
    """How often the request was sent."""


class Answer(NamedTuple):
    """A response, with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: Callable[[], bytes]
    """Returns the decoded body."""
    response: Any
    """The library's own object."""


class Lost(NamedTuple):
    """An attempt without an answer."""

    error: Exception
    sent: bool
    """Whether any of it may have reached the server. At the end: of this attempt or an earlier one."""
    mistake: bool = False
    """The library refuses the request itself. Another attempt would fail in the same way."""
    over: bool = False
    """The caller's own time limit has ended."""


Reply: TypeAlias = Answer | Lost


class Sleep(NamedTuple):
    """Wait before the next attempt."""

    seconds: float


class Written(NamedTuple):
    """The journal's answer to WriteEntry."""

    created: float
    """When the key was first used, in seconds since 1970."""
    known: bool
    """Whether the journal had the entry already: the request may have been sent before."""


Plain = Literal["send", "write", "clear", "release"]
Step: TypeAlias = Plain | Sleep


@dataclass(slots=True, eq=False)
class Intent:
    """One call that the caller wants to happen once."""

    method: str
    url: str
    value: str
    """The field value of the key, as it is sent."""
    adds: Mapping[str, str]
    """Headers to send: the key, and those of the operation that makes the call. Empty for a redirect to another server,
    which must not learn the key."""
    removes: Collection[str] = ()
    """Headers not to send: what the HTTP library has copied from the request that was redirected."""
    headers: Mapping[str, Any] | None = None
    """The headers of the request, for the journal."""
    body: bytes = b""
    resumed: float | None = None
    """When the key was first used, for a call that is read from the journal, which then keeps its entry itself."""
    fresh: bool = False
    """Not made by a redirect."""
    doubt: bool = False
    """Whether the request may have been executed before."""
    outgoing: OutgoingCall | None = None
    """The same call as the operation that makes it knows it."""
    settled: Receipt | None = None
    """The outcome, if the server has answered and only sends the caller on to read the result."""
    call: object = None
    """See ``Settings.intent``."""
    handled: BaseException | None = field(default_factory=sys.exception)
    """The error that the caller is handling. Python makes it the context of all errors of this call."""

    @property
    def key(self) -> str:
        return bare_key(self.value)


class _Redirect(NamedTuple):
    """Where a server has sent the caller, and with which key it came."""

    target: str
    origin: str
    method: str
    value: str
    adds: Mapping[str, str]
    outgoing: OutgoingCall | None
    receipt: Receipt
    call: object


_redirect: ContextVar[_Redirect | None] = ContextVar("semel_client_redirect", default=None)
resuming: ContextVar[float | None] = ContextVar("semel_client_resuming", default=None)
"""Set while an entry of the journal is sent again: when its key was first used."""


_entropy: Final[list[bytes]] = []
"""Random bytes for the next keys. ``os.urandom`` releases the GIL: if each key called it, the journal's thread would
run in between, and remove most entries in a commit of their own instead of many at once."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_entropy.clear)


def new_key() -> str:
    """Return a random UUID, as ``uuid.uuid4`` makes it."""
    try:
        number = _entropy.pop()
    except IndexError:
        more = os.urandom(16 * 64)
        _entropy.extend(more[start : start + 16] for start in range(16, len(more), 16))
        number = more[:16]
    return str(uuid.UUID(bytes=number, version=4))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all clients share. Each client takes them as keyword arguments."""

    retry: Retry = field(default_factory=Retry)
    methods: Collection[str] = METHODS
    header: str = HEADER
    quote_keys: bool = False
    new_key: Callable[[], str] = new_key
    hosts: Collection[str] = ()
    on_event: EventHooks | None = None
    hook: EventHook | None = field(init=False)
    """Calls the hooks of ``on_event``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", check_hosts(self.hosts))
        object.__setattr__(self, "hook", call_hooks(hooks_of(self.on_event), "semel.client"))

    def intent(self, method: str, url: str, headers: Mapping[str, Any], *, call: object = None) -> Intent | None:
        """Return the intent of a request, or None if it is sent as it is.

        :param headers: found by any spelling of their names. They may hold a key already.
        :param call: None if the HTTP library copies the key when it follows a redirect. Otherwise an object of the
            library that all requests of one call share, and those of no other call.
        """
        present = headers.get(self.header)
        if isinstance(present, bytes):  # requests takes both
            present = present.decode("latin-1")
        redirect = _redirect.get()
        if redirect is not None:
            _redirect.set(None)
            if _follows(redirect, method, url, present, call):
                return _redirected(redirect, method, url)
        if present is None and method not in self.methods:
            return None
        value = present or header_value(normalize_key(self.new_key()), self.quote_keys)
        return Intent(method, url, value, {self.header: value}, resumed=resuming.get(), fresh=True, call=call)

    def complete(self, intent: Intent, headers: MutableMapping[str, Any]) -> None:
        """Put the headers of the intent into the request. Call it when the intent has its body.

        Inside an operation, and for a named host, the key is derived from the operation, and the lineage goes along.
        What the request has already, it keeps.
        """
        if self.hosts and intent.fresh and intent.resumed is None:
            outgoing = outgoing_call(
                intent.method, intent.url, intent.body, hosts=self.hosts, header=self.header, quote=self.quote_keys
            )
            if outgoing is not None:
                intent.outgoing = outgoing
                adds = {name: text for name, text in outgoing.headers.items() if name not in headers}
                intent.value = adds.get(self.header, intent.value)
                intent.adds = {**intent.adds, **adds}
        for name in intent.removes:
            headers.pop(name, None)
        for name, text in intent.adds.items():
            headers[name] = text
        intent.headers = headers


def _follows(redirect: _Redirect, method: str, url: str, key: str | None, call: object) -> bool:
    """Whether the request is what an HTTP library makes of a redirect. Most libraries copy the headers, aiohttp not."""
    if call is not redirect.call or origin_of(url) != origin_of(redirect.target):
        return False
    if key is not None or (call is None and redirect.adds):  # without the key, it is another call to this address
        return key == redirect.value
    return method in (redirect.method, "GET") and _comparable(url) == _comparable(redirect.target)


def _redirected(redirect: _Redirect, method: str, url: str) -> Intent:
    """The intent of a request that follows a redirect."""
    receipt, adds = redirect.receipt, redirect.adds
    if method != redirect.method:  # it only reads the result
        return Intent(method, url, redirect.value, {}, adds.keys(), settled=receipt, call=redirect.call)
    doubt = receipt.outcome == "unknown"
    # The same host by https is no other server.
    if origin_of(url) in (redirect.origin, redirect.origin.replace("http://", "https://", 1)):
        return Intent(
            method, url, redirect.value, adds, resumed=resuming.get(), doubt=doubt, outgoing=redirect.outgoing,
            call=redirect.call,
        )  # fmt: skip
    if doubt:
        raise NoAnswer(
            f"the request with the key {receipt.key!r} was redirected to another server, {origin_of(url)}, after an "
            "attempt without an answer. It may have been executed, and the key means nothing there, so it is not sent.",
            key=receipt.key,
            attempts=receipt.attempts,
        )
    log.warning("%s %s: redirected to another server, so it is sent once and without its key", method, url)
    return Intent(method, url, redirect.value, {}, adds.keys(), call=redirect.call)


def _comparable(url: str) -> str:
    return unquote(url.partition("#")[0])


def bare_key(value: str) -> str:
    """Return the key that a field value names, which may be quoted."""
    if len(value) > 1 and value.startswith('"') and value.endswith('"'):
        return value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return value


def deliver(
    intent: Intent, retry: Retry, journaled: bool, hook: EventHook | None = None
) -> Generator[Step, Any, tuple[Receipt, Reply]]:
    """Send the request until its outcome is known, or until ``retry`` forbids another attempt."""
    if intent.settled is not None:
        reply: Reply = yield "send"
        return intent.settled, reply
    age_before, doubt = 0.0, intent.doubt
    journaled = journaled and bool(intent.adds) and intent.resumed is None
    if intent.resumed is not None:
        age_before, doubt = max(0.0, time.time() - intent.resumed), True
        if hook is not None and intent.fresh:
            tell(hook, intent, events.CallResumed, age_before)
    if journaled:
        written: Written = yield "write"
        age_before, doubt = max(0.0, time.time() - written.created), doubt or written.known
        if written.known and hook is not None:
            tell(hook, intent, events.CallResumed, age_before)
        if written.known and age_before > retry.lifetime:
            yield "release"
            if hook is not None:
                tell(hook, intent, events.CallUnknown, 0, TOO_OLD, 0.0)
            raise KeyExpired(
                f"the key {intent.key!r} was first used too long ago, and the server may have forgotten it: a request "
                "with it could be executed again. Ask the server what happened."
            )
    quota = retry.quota
    started = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        reply = yield "send"
        outcome: CallOutcome = "unknown"
        replayed = retryable = expired = False
        after = 0.0
        if type(reply) is Answer:
            status = reply.status
            replayed = reply.headers.get(REPLAYED, "false").lower() != "false"
            if status >= 400:
                retryable, after, expired = advice(status, reply.headers, reply.body, time.time(), retry.statuses)
            if not (retryable or expired):
                outcome = _outcome(status, doubt and not replayed)
        else:
            assert type(reply) is Lost
            retryable = not (reply.mistake or reply.over)
            if reply.mistake and not doubt:
                outcome = "rejected"
            doubt = doubt or reply.sent
            reply = reply._replace(sent=doubt)
        if retryable and intent.adds:
            doubt = doubt or (type(reply) is Answer and reply.status not in (425, 429))
            elapsed = time.monotonic() - started
            wait = retry.wait(attempts, after, elapsed, age_before + elapsed, random.random())
            if wait is not None and (quota is None or quota.take(origin_of(intent.url))):
                if hook is not None:
                    tell(hook, intent, events.CallRetried, attempts, _reason(reply), wait)
                yield Sleep(wait)
                continue
        if outcome == "succeeded" and quota is not None and quota.in_use:
            quota.give_back(origin_of(intent.url), attempts > 1)
        if journaled:
            yield "release" if outcome == "unknown" else "clear"
        receipt = Receipt(intent.key, outcome, replayed, attempts)
        if hook is not None:
            elapsed = time.monotonic() - started
            if outcome == "unknown":
                tell(hook, intent, events.CallUnknown, attempts, _reason(reply), elapsed)
            else:
                tell(hook, intent, events.CallEnded, outcome, attempts, replayed, elapsed)
        if intent.outgoing is not None:
            intent.outgoing.end(known=outcome != "unknown")
        if type(reply) is Answer and 300 <= reply.status < 400:
            _remember_redirect(intent, reply, receipt)
        return receipt, reply


def tell(hook: EventHook, intent: Intent, event: type[events.Event], *details: Any) -> None:
    """Tell an event of this call."""
    origin = origin_of(intent.url)
    path = urlsplit(intent.url).path
    hook(event(f"{intent.method} {origin}{path}", "", intent.key, *details, route=f"{intent.method} {origin}"))


def _reason(reply: Reply) -> str:
    return f"status {reply.status}" if isinstance(reply, Answer) else describe_error(reply.error)


def _outcome(status: int, doubt: bool) -> CallOutcome:
    """What a final answer says about the operation."""
    if status in NOT_ABOUT_THE_KEY:
        return "unknown" if doubt else "rejected"
    if status < 400:
        return "succeeded"
    return "rejected" if status < 500 else "unknown"


def _remember_redirect(intent: Intent, answer: Answer, receipt: Receipt) -> None:
    location = answer.headers.get("Location")
    if location:
        target = urljoin(intent.url, location)
        _redirect.set(
            _Redirect(
                target, origin_of(intent.url), intent.method, intent.value, intent.adds, intent.outgoing, receipt,
                intent.call,
            )
        )  # fmt: skip


def failure(kind: type[NoAnswer], receipt: Receipt, lost: Lost) -> Exception:
    """Return what to raise for a call that ended without an answer: the library's own error, or ``kind`` because of it.

    The library's own error says enough if the request was refused before it was sent, or if only the page that a
    redirect leads to could not be read.
    """
    if receipt.outcome != "unknown":
        return lost.error
    times = "once" if receipt.attempts == 1 else f"{receipt.attempts} times"
    reason = f"{type(lost.error).__name__}: {lost.error}".removesuffix(": ")
    advice = (
        "It may have been executed: send it again with the same key, or ask the server."
        if lost.sent
        else "It was not sent: no connection was made."
    )
    error = kind(
        f"no answer, tried {times} with the key {receipt.key!r}: {reason}. {advice}",
        key=receipt.key,
        attempts=receipt.attempts,
    )
    error.__cause__ = lost.error
    return error


def whole_body(body: Any) -> bytes:
    """Return the bytes of a body that is text, bytes or a file. Raises ConfigurationError for any other."""
    if body is None:
        return b""
    if hasattr(body, "read"):
        body = body.read()
    if isinstance(body, str):
        return body.encode()
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise not_replayable("an iterator")
    return bytes(body)


def not_replayable(what: str) -> ConfigurationError:
    """Return the error for a body that can be read only once."""
    return ConfigurationError(
        f"the body of this request is {what}, which can be sent only once, so it cannot be retried. Nothing was sent. "
        "Pass bytes or a file that can be read again, or read it first: b''.join(stream)."
    )


def lost(
    intent: Intent,
    error: Exception,
    not_sent: tuple[type[Exception], ...],
    mistakes: tuple[type[Exception], ...] = (),
) -> Lost:
    """Return the attempt that ended with this error.

    :param not_sent: errors of the HTTP library that mean that nothing has reached the server.
    :param mistakes: errors that mean that the library refuses the request itself.
    """
    mistake = isinstance(error, mistakes) or _is_certificate_error(error, intent.handled)
    return Lost(error, sent=not (mistake or isinstance(error, not_sent)), mistake=mistake)


def _is_certificate_error(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether the server's certificate was refused. Another attempt would end in the same way.

    :param handled: the error before this call, which says nothing about it.
    """
    while error is not None and error is not handled:
        if type(error).__name__ == "SSLCertVerificationError":
            return True
        error = error.__cause__ or error.__context__
    return False
