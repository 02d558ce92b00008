"""Outgoing keys: the key that the running operation sends with a call or a message, also from other threads.

A client asks ``outgoing_call(method, url, body, hosts=…)`` for each request that it is about to send. In an operation,
and for a host that was named, it gets the headers to add: the key and the lineage. Nothing is written at the call site.
The key is made of the operation and of the request. Requests with the same method, URL and body are numbered: they are
interchangeable, so it does not matter which of them is the first one in the next attempt. After an unclear outcome an
equal request is the retry of the same call, and has its number. In ``with op.propagate("charge"):`` the key is that of
the step, whatever is sent.

``outgoing_headers()`` and ``outgoing_metadata()`` are for code that sets headers itself. They work only in a scope of
``op.propagate``. A scope without a name has one key per target there.

This module knows no HTTP client and no broker. It returns plain dicts of strings.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from contextvars import ContextVar
from hashlib import blake2b
from typing import Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

from semel.core.keys import check_name, derive, header_value
from semel.core.lineage import Lineage, lineage_metadata, write_lineage
from semel.engine.operation.handle import (
    ForkSafeLock,
    OperationHandle,
    OperationPart,
    outgoing_scope,
    part,
    running,
)
from semel.errors import PolicyError

P = ParamSpec("P")
T = TypeVar("T")

HEADER: Final = "Idempotency-Key"
METADATA: Final = "idempotency-key"
"""In lower case, as most clients write it: the headers of most brokers are case-sensitive."""
CAUSATION: Final = "causation-id"
_TO: Final = "~to:"
"""The prefix of targets, so that a target is never equal to the name of a step."""
_CALL: Final = "~call:"
"""The prefix of requests, likewise."""
_MESSAGE: Final = "~message:"
"""The prefix of messages, likewise."""
_HOST: Final = re.compile(r"(\*\.)?[^\s*/@?#\\]+")
_numbering: Final = ForkSafeLock()


class OutgoingCall:
    """One logical request of an operation. Retries of it send the same headers."""

    __slots__ = ("_equals", "_number", "headers", "key")

    def __init__(self, key: str, headers: dict[str, str], equals: _Equals | None, number: int) -> None:
        self.key = key
        self.headers = headers
        """Add each of them that the request does not have already: the key, root, parent and perhaps a trace."""
        self._equals = equals
        self._number = number

    def end(self, *, known: bool) -> None:
        """Say whether the outcome is known: it succeeded, or it was definitely refused.

        If it is not known, the next equal request of this attempt is taken for its retry and has the same key. Without
        this call, an equal request is always another one.
        """
        if self._equals is not None and not known:
            with _numbering.lock:
                self._equals.unclear.append(self._number)


class _Equals:
    """The equal requests of one attempt of an operation."""

    __slots__ = ("count", "unclear")

    def __init__(self) -> None:
        self.count = 0
        self.unclear: list[int] = []
        """The numbers of requests whose outcome is not known."""

    def next(self) -> int:
        if self.unclear:
            number = min(self.unclear)
            self.unclear.remove(number)
            return number
        self.count += 1
        return self.count - 1


class _Outgoing:
    """What one attempt of an operation has sent."""

    __slots__ = ("equals", "messages", "steps")

    def __init__(self) -> None:
        self.messages: MessageOrigin | None = None
        self.equals: defaultdict[str, _Equals] = defaultdict(_Equals)
        """By request."""
        self.steps: dict[str, str] = {}
        """The first request of each step."""


def _outgoing_of(op: OperationHandle) -> _Outgoing:
    """Return what this attempt has sent. The lock must be held."""
    sent: _Outgoing = op.outgoing or _Outgoing()
    op.outgoing = sent
    return sent


class MessageOrigin:
    """Where the messages come from that are added to an outbox now: an operation, or a message that is applied.

    Their ids are made of its identity and of their place among its messages, so a re-run adds the same messages. A step
    counts its own messages: a re-run of the operation leaves out the steps that are done.
    """

    __slots__ = ("_counts", "_identity", "headers")

    def __init__(self, identity: bytes, causation: str, lineage: Lineage) -> None:
        """
        :param identity: 16 bytes.
        :param causation: the key of the operation, or the id of the message.
        """
        self._identity = identity
        self._counts: dict[str, int] = {}
        self.headers = lineage_metadata(lineage)
        if cause := lineage_metadata(Lineage(root=causation)):  # as a header can hold it
            (self.headers[CAUSATION],) = cause.values()
        """The headers of every message that comes from here."""

    def next_id(self, name: str) -> str:
        """Return the id of the next message of this name."""
        within = part.get()
        if within is None or within.operation != self._identity:
            within = OperationPart(self._identity, "", self._counts)
        with _numbering.lock:
            number = within.counts.get(name, 0)
            within.counts[name] = number + 1
        return derive(self._identity, f"{_MESSAGE}{within.name}\n{number} {name}")


message_origin: ContextVar[MessageOrigin | None] = ContextVar("semel_message_origin", default=None)
"""Set while a message is applied. A running operation comes before it."""


def current_origin(op: OperationHandle | None = None) -> MessageOrigin | None:
    """Return where a message comes from that is added now: the operation, by default the one that is running."""
    op = op or running.get()
    if op is None:
        return message_origin.get()
    with _numbering.lock:
        sent = _outgoing_of(op)
        if sent.messages is None:
            lineage = op._next_lineage
            sent.messages = MessageOrigin(op.id, lineage.parent, lineage)
        return sent.messages


def outgoing_call(
    method: str,
    url: str,
    body: bytes = b"",
    *,
    hosts: Collection[str],
    step: str | None = None,
    header: str = HEADER,
    quote: bool = False,
) -> OutgoingCall | None:
    """Return the headers for a request that is about to be sent, or None if it gets nothing from an operation.

    That is so outside of an operation, and for a host that is not among ``hosts``. Call it once for each request that
    the program makes, and not for each retry. Call it anew for the target of a redirect, with the headers of the first
    request taken away, so that they do not reach another host. Then call ``end`` with what became of it.

    :param url: the absolute URL.
    :param body: the request's body, or a digest of it. It must be the same in each attempt of the operation.
    :param hosts: names such as ``"orders.internal"``, ``"127.0.0.1:8001"`` (only this port) or ``"*.shop.example"``
        (every host below it). A client checks its setting once with ``check_hosts``, and passes what that returned.
    :param step: the name of the call. Then method, URL and body do not count. Defaults to the name of the scope.
    :param header: the name that the receiver knows, such as ``"PayPal-Request-Id"``.
    :param quote: send the key as a quoted string, as in the draft standard.
    """
    op = running.get()
    scope = outgoing_scope.get()
    if scope is not None and (op is None or op.id == scope.operation.id):
        op, step = scope.operation, step or scope.step
    if op is None or not _is_named(url, hosts if type(hosts) is frozenset else check_hosts(hosts)):
        return None
    target = f"{method.upper()} {url.partition('#')[0]}"
    request = f"{_CALL}{target} {blake2b(body, digest_size=16).hexdigest()}"
    equals, number = None, 0
    with _numbering.lock:  # threads of a handler may send at the same time
        sent = _outgoing_of(op)
        if step is None:
            equals = sent.equals[request]
            number = equals.next()
        elif sent.steps.setdefault(step, request) != request:
            _warn_of_two_requests(op, step, target)
    key = derive(op.id, step or (f"{request}#{number}" if number else request))
    return OutgoingCall(key, {header: header_value(key, quote), **write_lineage(op._next_lineage)}, equals, number)


def check_hosts(hosts: Collection[str]) -> frozenset[str]:
    """Check the hosts of ``outgoing_call``. Raises PolicyError."""
    if isinstance(hosts, str):
        raise PolicyError(f"hosts are a list of names, not a text: write [{hosts!r}]")
    checked = frozenset(str(host).lower() for host in hosts)
    for host in checked:
        if not _HOST.fullmatch(host):
            raise PolicyError(f"a host is a name such as 'orders.internal', with a port or not, and not {host!r}")
    return checked


def _is_named(url: str, hosts: frozenset[str]) -> bool:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # no port, or no address
        return False
    if "\\" in url:
        return False  # clients disagree about which host this is
    port = port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return (
        host in hosts
        or f"{host}:{port}" in hosts
        or any(each.startswith("*.") and host.endswith(each[1:]) for each in hosts)
    )


def _warn_of_two_requests(op: OperationHandle, step: str, target: str) -> None:
    warnings.warn(
        f"{op.name}: the step {step!r} sends different requests, the last one to {target.partition('?')[0]}, with one "
        "key. The receiver will refuse them, or answer them like the first. Give each request of a loop its own step, "
        "op.propagate(f'mail to {user}'), or name none",
        stacklevel=3,
    )


def derive_key(step: str) -> str | None:
    """Return the key for a step of the running operation, like ``op.derive(step)``, or None outside an operation."""
    op = running.get()
    return None if op is None else op.derive(check_name("a step", step))


def outgoing_key(target: str = "") -> str | None:
    """Return the key for a call that is about to be made, or None if no scope of ``op.propagate`` is open.

    :param target: which call it is, such as ``"POST https://pay.example/charges"``; required if the scope has no name.
    """
    scope = outgoing_scope.get()
    if scope is None:
        return None
    op = running.get()
    if op is not None and op.id != scope.operation.id:
        return None  # another operation started inside the scope: its calls are not part of this one
    if scope.step is not None:
        return scope.operation.derive(scope.step)
    if not target:
        raise PolicyError(
            f"{scope.operation!r}: which call is this? Name the step, op.propagate('charge'), "
            "or the target, outgoing_headers('POST https://…')"
        )
    return derive(scope.operation.id, _TO + target)


def outgoing_headers(target: str = "", *, header: str = HEADER, quote: bool = False) -> dict[str, str]:
    """Return the header to send with an HTTP request, ``{"Idempotency-Key": …}``, or an empty dict outside a scope.

    :param target: as for ``outgoing_key``.
    :param header: the name that the receiver knows, such as ``"PayPal-Request-Id"``.
    :param quote: send the key as a quoted string, as in the draft standard.
    """
    key = outgoing_key(target)
    return {} if key is None else {header: header_value(key, quote)}


def outgoing_metadata(target: str = "") -> dict[str, str]:
    """Return the headers or attributes to send with a message, or an empty dict outside a scope.

    They are ``idempotency-key`` and the lineage of the operation: ``idempotency-root``, ``idempotency-parent``, and
    ``traceparent`` if the operation came with one.

    :param target: as for ``outgoing_key``.
    """
    scope = outgoing_scope.get()
    key = outgoing_key(target)
    if scope is None or key is None:
        return {}
    return {METADATA: key, **lineage_metadata(scope.operation._next_lineage)}


def in_context(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it runs in the current context. For threads and executors, which do not copy it.

    ``pool.submit(in_context(send), parcel)``. Tasks and ``asyncio.to_thread`` need no help: they copy the context.
    """
    if inspect.iscoroutinefunction(function):
        raise PolicyError("in_context() is for plain functions: a task already has the context that it was created in")
    context = contextvars.copy_context()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)  # a copy: one context cannot be in two threads at once

    return run
