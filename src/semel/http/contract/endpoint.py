"""The life of a protected request, from the claim to the answer, written once for every framework.

``Lifecycle`` holds what is known about one request. Its methods ``claim``, ``handler_raised``, ``application_raised``
and ``answered`` are flows: generators that yield requests and are sent the results, as in ``semel.core.flows``. They do
no I/O and know no event loop and no framework. The responders of ASGI and WSGI drive them.

A handler is claimed in one of two places: by its decorator just before it runs, or by the middleware at the edge
(``routes=``). Every request ends in one of these ways:

====================================================  ================  ===============================================
what happens                                          the attempt       the client gets
====================================================  ================  ===============================================
the key is missing or malformed, the body too long    none              the error
the client leaves before its request is complete      none              nothing (ASGI), 400 (WSGI)
the key has a stored answer                           none              the stored answer, marked as a replay
the key is in use, or was used for another request    none              409 or 422
the store cannot be reached                           none              503
the handler answers, and its status is stored         complete          its answer, once it is stored
the handler answers, and its status is not stored     decline           its answer; the key is free again
the answer is whole, but another owner took over      complete or lost  the other owner's answer
the store does not take the answer                    complete, later   its answer, marked ``Idempotent-Stored: false``,
                                                                        or 500 where the policy withholds it
its transaction does not commit                       complete fails    503; an answer that has begun is cut off
the lease is lost and the handler cancelled (ASGI)    lost              the new owner's answer, or 409
the handler raises PreconditionError                  decline           412, 428 or 400; the key is free again
its transaction conflicts with another one            fail, rolled      the request is run again; 503 after the last
                                                      back              try, or once a part of the answer was sent
it raises and its steps cannot all be undone          fail              500; nobody may run it again
it raises LeaseLost, because a step was refused       fail              409
it raises anything else, below the decorator          goes on           what the framework answers to the error
the error leaves the application, and is stored       complete          500 now and on replays; the server logs it
the error leaves the application, and is not stored   fail              the server's own answer; the key is free again
====================================================  ================  ===============================================

When the client disconnects after the claim, the handler runs to its end all the same, and its answer is stored for the
retry.

When two transactions conflict, the database rolls one of them back and asks for it to be run again. Nothing was sent
then, so the application is run again from the edge, as if the request had come again: with its body, and with its scope
or environ as they came. The number of runs is bounded as in ``guard.run_in_transaction``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, MutableMapping
from enum import Enum, auto
from functools import cached_property
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from semel.core.call import Call, Declined, Outcome, Pause, Raised, Returned, Stopped
from semel.core.encoding.snapshot import StoredResponse, make_response
from semel.core.transactional import pause_after
from semel.core.values import value
from semel.engine.drive.attempts import AsyncAttempt, Attempt
from semel.engine.transaction.rules import TRIES
from semel.errors import (
    BodyTooLarge,
    ConfigurationError,
    KeyInvalid,
    KeyMissing,
    LeaseLost,
    NotUndone,
    PreconditionError,
    SemelError,
    StoreError,
    TransactionConflict,
)
from semel.http.contract.conditional import Preconditions, preconditions
from semel.http.contract.exchange import ALLOW_ORIGIN, CLAIMED, Exchange
from semel.http.contract.responses import FAILED, UNSTORED
from semel.http.contract.routes import Middleware
from semel.http.contract.rules import Conditional, Idempotent, Natural, Rule
from semel.observe import events

A = TypeVar("A", Attempt, AsyncAttempt)
T = TypeVar("T")


class ReadBody:
    """Read the rest of the body and keep it for the application.

    The answer is False if the client left before the end. Raises BodyTooLarge.
    """


class FindTenant:
    """Call ``tenant=`` to find the tenant of the request."""


READ_BODY: Final = ReadBody()
FIND_TENANT: Final = FindTenant()
STOPPED: Final = Stopped()


@value
class OpenTransaction:
    """Open the connection of a ``connection=`` route and lock the key in it. The answer is that to a ``Call``."""

    call: Call
    connect: Callable[[], Any]


@value
class Compensate:
    """Undo the handler's steps, in the thread or task of the handler. The answer is the error to report."""

    error: BaseException


Request: TypeAlias = (
    "ReadBody | FindTenant | Call | OpenTransaction | Pause | Compensate | Returned | Declined | Stopped | Raised"
)
"""What a flow yields.

A ``Call`` is to be claimed under a lease: the answer is an attempt, or an Outcome if there is nothing to run. The last
four end the attempt: complete, decline, lost and fail.
"""
EndpointFlow: TypeAlias = Generator[Request, Any, T]


class Framework(NamedTuple):
    """What a framework supplies for endpoints that are claimed by a decorator."""

    blank: Callable[[], Any]
    """Make a response that takes the place of the handler's when it does not run. The middleware sends the real one."""
    abort: Callable[[int], Exception]
    """Make the framework's own exception for a refusal with this status.

    It is raised so that whatever cleans up after a handler, such as a database session, sees that the handler failed.
    Again the middleware sends the real answer.
    """
    run_again: Callable[[], BaseException]
    """Make the exception that an endpoint raises when it is about to be run again."""


class Ending(Enum):
    """What the responder does with an error that the application raised."""

    RAISE = auto()
    """Raise it, so that the server answers."""
    ANSWER = auto()
    """Send ``Lifecycle.answer`` instead."""
    ANSWER_AND_RAISE = auto()
    """Send ``Lifecycle.answer``, then raise the error, for the server's log."""
    RUN_AGAIN = auto()
    """Run the application again."""


class RunAgain(BaseException):
    """Leaves an application that is to be run again. Not an Exception, so that error handlers let it pass."""


_REFUSALS: Final[dict[type[SemelError], type[events.Event]]] = {
    KeyMissing: events.KeyMissingEvent,
    KeyInvalid: events.KeyInvalidEvent,
    BodyTooLarge: events.BodyTooLargeEvent,
    PreconditionError: events.PreconditionRefused,
}
"""Refusals without a claim, of which the engine knows nothing, and the events that tell of them."""
_ABANDONED: Final = (Exception, BaseExceptionGroup, RunAgain)
"""Errors that are expected of an application that is about to be run again. Task groups may wrap them."""


class Lifecycle(Generic[A]):
    """One request: the rule it is claimed under, the attempt that runs, and the answer once it is known."""

    def __init__(
        self,
        middleware: Middleware[Any, Any, Any],
        environment: MutableMapping[str, Any],
        exchange: Exchange | Callable[[MutableMapping[str, Any], Middleware[Any, Any, Any]], Exchange],
    ) -> None:
        """
        :param environment: the ASGI scope or the WSGI environ.
        :param exchange: the exchange, or a function that is called when it is first needed.
        """
        self._middleware: Middleware[Any, Any, Any] = middleware
        self._environment: MutableMapping[str, Any] = environment
        if isinstance(exchange, Exchange):
            self.exchange = exchange
        else:
            self._make_exchange = exchange
        self.rule: Idempotent | None = None
        """The rule that the request was claimed under, or was refused by."""
        self.natural: Natural | None = None
        self.preconditions: Preconditions | None = None
        self.early_call: Call | None = None
        """The call, if the responder has made it before the flow asks for it."""
        self.over = False
        """Whether the application has ended, or was cancelled before a claim: nobody would end an attempt."""
        self.claiming = False
        """Whether a claim is under way, so that there may be an attempt in a moment."""
        self.on_settled: Callable[[], None] | None = None
        """Called when there is no attempt any more, and none is being claimed."""
        self.attempt: A | None = None
        """The attempt, while it runs."""
        self.capture: Capture | None = None
        """The handler's answer, while the attempt runs."""
        self.answer: StoredResponse | None = None
        """The answer to send in place of the application's."""
        self.stored = True
        """False if the attempt has ended and its answer is not stored yet."""
        self.rerun: Rerun | None = None
        """The original request; None if it cannot be run again."""
        self.runs_again = False
        """Whether the application is about to be run again, so that what it answers now is dropped."""

    @cached_property
    def exchange(self) -> Exchange:
        return self._make_exchange(self._environment, self._middleware)

    @property
    def lease_lost(self) -> bool:
        attempt = self.attempt
        return attempt is not None and attempt.lease is not None and attempt.lease.lost

    # -- the claim

    def claim(self, declared: Rule) -> EndpointFlow[bool]:
        """Claim the request's key. Returns whether the handler is to run; if not, ``answer`` is known.

        A handler in a thread, or in a task that the framework started, goes on when the application's own task is
        cancelled. Its answer would reach nobody, and never be stored. So a claim that is made, or ends, after the
        application was cancelled is withdrawn: the handler does not run, and the key is free.
        """
        if self.over:
            return False
        if self.rule is not None or self.natural is not None or CLAIMED in self._environment:
            raise ConfigurationError(
                "this request was claimed already: one rule for one request, and one middleware of Semel"
            )
        if not isinstance(declared, Idempotent):
            self.natural = declared if isinstance(declared, Natural) else None
            return True
        middleware, exchange = self._middleware, self.exchange
        known = middleware.rules.get(id(declared))
        rule = self.rule = middleware.rule(declared) if known is None else known[1]
        tenant: str | None = None
        if middleware.binds_hosts:
            exchange.host = middleware.matched_route(self._environment).host
        try:
            key = exchange.key or exchange.read_key(rule)  # the responder may have read it before
            if isinstance(rule, Conditional):
                self.preconditions = preconditions(exchange.headers, required=rule.precondition_required)
            if key is None:
                if not isinstance(rule, Conditional):  # that one is protected by its precondition
                    self._tell(events.Unkeyed)
                return True
            if not rule.reads_body and rule.connection is None:
                exchange.body = None
            # The tenant comes first: a request that has none is refused before its body is read.
            if middleware.tenant is not None:
                tenant = yield FIND_TENANT
            if exchange.complete:
                if exchange.size > (rule.max_request_body or 0):  # the middleware's, if the route has none
                    raise BodyTooLarge
            elif not (yield READ_BODY):
                return False
            self.claiming = True
            call = self.early_call or exchange.call(middleware.guard, rule, key, tenant)
            if call.hook is not None:
                call.route = middleware.route_name(self._environment, exchange)
            if rule.connection is None:
                begun = yield call
            else:
                begun = yield from self._open_transaction(call, rule.connection)
        except ConfigurationError:
            raise  # a mistake of the service: it belongs in the logs, not in an answer to a client
        except SemelError as error:
            self.answer = self._refuse(error, tenant)
            return False
        else:
            if isinstance(begun, Outcome):
                self.answer = exchange.replay(begun.value, rule)
                return False
            self.attempt = begun
        finally:
            exchange.body = None
            self.claiming = False
            if self.attempt is None and self.on_settled is not None:
                self.on_settled()
        self._environment[CLAIMED] = True
        self.capture = Capture()
        self.capture.rule, self.capture.key_name = rule, exchange.key_header.name
        if self.over:
            yield from self._end(Declined(None))
            return False
        return True

    def _refuse(self, error: SemelError, tenant: str | None = None) -> StoredResponse:
        """Return the answer to a request that is refused. Tell why, unless the engine has told it."""
        for kind, event in _REFUSALS.items():
            if isinstance(error, kind):
                self._tell(event, *((error.status,) if kind is PreconditionError else ()), tenant=tenant)
        return self.exchange.refusal(error, self.rule)

    def _tell(self, event: type[events.Event], *details: Any, tenant: str | None = None) -> None:
        """Tell an event of a request that has made no claim, or of one whose attempt is not over."""
        if self.rule is None:
            return
        if self.attempt is not None:
            self.attempt.call.tell(event, *details)
            return
        call = self.exchange.call(self._middleware.guard, self.rule, self.exchange.key or "", None)
        if call.hook is not None:
            call.id, call.tenant = b"", tenant or call.tenant
            call.route = self._middleware.route_name(self._environment, self.exchange)
            call.tell(event, *details)

    def _open_transaction(self, call: Call, connect: Callable[[], Any]) -> EndpointFlow[Any]:
        """Open the transaction, and retry it after a conflict. The handler has not run yet, so it is not repeated."""
        rerun = self.rerun or Rerun({})  # without one, the application cannot be run again, but this can
        rerun.body = self.exchange.body
        while True:
            try:
                return (yield OpenTransaction(call, connect))
            except TransactionConflict:
                pause = rerun.next_pause(call)
                if pause is None:
                    raise
            except StoreError as error:
                call.alert(events.StoreFailed, "the beginning of the transaction", str(error))
                raise
            yield Pause(pause)

    # -- how it ends

    def answered(self) -> EndpointFlow[None]:
        """Store the application's complete answer. If ``answer`` is set afterwards, send that one instead."""
        rule, capture = self.rule, self.capture
        assert rule is not None
        assert capture is not None
        stored = capture.to_store()
        status = stored.status
        if (status < 500 and status not in rule.released) or rule.stores(status):
            if capture.overflowed and self.attempt is not None:
                self.attempt.call.alert(events.BodyOmitted, rule.max_stored_body)
            return self._end(Returned(stored))
        return self._end(STOPPED if self.lease_lost else Declined(stored))

    def handler_raised(
        self, error: BaseException, framework: Framework, *, superseded: bool = False
    ) -> EndpointFlow[BaseException | None]:
        """End the attempt of a decorated handler that raised.

        Returns the error that its endpoint must raise, or None if the endpoint must return ``blank()``.

        :param superseded: the handler was cancelled because its lease was lost.
        """
        left = yield from self._end_with(error, superseded)
        if isinstance(left, BaseException):
            return left  # the framework may have an answer to it, which is then the handler's
        if superseded:
            return None
        return framework.run_again() if self.runs_again else framework.abort(left)

    def application_raised(
        self, error: BaseException, *, superseded: bool = False, sent: bool = False
    ) -> EndpointFlow[Ending]:
        """End the attempt of an application that raised. Returns what the responder must do.

        :param superseded: the lease is lost, and the error is probably a consequence of that.
        :param sent: a part of an answer that was not captured has been sent.
        """
        if self.runs_again:
            return Ending.RUN_AGAIN if isinstance(error, _ABANDONED) else Ending.RAISE
        rule = self.rule
        if self.attempt is None or rule is None:
            declared = rule is not None or self.natural is not None
            if isinstance(error, PreconditionError) and declared and not sent:  # the key was left out
                self.answer = self.answer or self._refuse(error)
                return Ending.ANSWER
            return Ending.RAISE
        left = yield from self._end_with(error, superseded)
        if not isinstance(left, BaseException):
            return self._answer_or_run_again(Ending.ANSWER)
        if isinstance(left, LeaseLost):
            yield from self._end(Raised(left), refuse=False)
            self.answer = self.exchange.refusal(left, rule)
            return Ending.ANSWER
        if isinstance(left, rule.policy.remembered) or (isinstance(left, Exception) and rule.stores(500)):
            yield from self._end(Returned(FAILED))
            self.answer = self.answer or self.exchange.failure(self.stored)
            return self._answer_or_run_again(Ending.ANSWER_AND_RAISE)
        yield from self._end(Raised(left), refuse=False)
        return Ending.RAISE

    def _answer_or_run_again(self, ending: Ending) -> Ending:
        return Ending.RUN_AGAIN if self.runs_again else ending

    def _end_with(self, error: BaseException, superseded: bool) -> EndpointFlow[BaseException | int]:
        """End the attempt if this error decides how. Returns the error that is left, or the status of the refusal."""
        attempt = self.attempt
        if superseded:
            yield from self._end(STOPPED)
            return LeaseLost.status
        if isinstance(error, PreconditionError):
            refusal = self._refuse(error)
            if attempt is not None:
                yield from self._end(STOPPED if self.lease_lost else Declined(None))
            self.answer = self.answer or refusal
            return error.status
        if attempt is None:
            return error
        if attempt.conflicts(error):
            yield from self._end(Raised(error))
            return TransactionConflict.status
        error = yield Compensate(error)
        if isinstance(error, NotUndone):
            yield from self._end(Raised(error), refuse=False)
            self.answer = self.exchange.refusal(error, self.rule)
            return error.status
        return error

    def _end(self, how: Returned | Declined | Stopped | Raised, *, refuse: bool = True) -> EndpointFlow[None]:
        """End the attempt. Sets ``answer`` if another owner took over, or if the outcome could not be stored.

        :param refuse: turn an error of the store into the answer; otherwise raise it.
        """
        attempt, rule, capture = self.attempt, self.rule, self.capture
        assert attempt is not None
        assert rule is not None
        try:
            outcome = yield how
        except SemelError as error:
            if not refuse:
                raise
            sent = capture is not None and capture.overflowed
            if isinstance(error, TransactionConflict) and self.rerun is not None and not sent:
                self.runs_again = self.rerun.plan(attempt.call)
            if not self.runs_again:
                if isinstance(error, StoreError) and error.retryable and not isinstance(error, TransactionConflict):
                    attempt.call.alert(events.StoreFailed, "the end of the call", str(error))
                self.answer = self.exchange.refusal(error, rule)
        else:
            if outcome is None:
                pass
            elif outcome.replayed:
                self.answer = self.exchange.replay(outcome.value, rule)
            elif not outcome.stored:
                self.stored = False
                if capture is not None and capture.status:  # otherwise the handler raised, and another answer is sent
                    capture.headers.append(UNSTORED)
        finally:
            self.attempt = self.capture = None
            self._environment.pop(CLAIMED, None)
            if self.on_settled is not None:
                self.on_settled()

    # -- running again

    def start_over(self) -> bytes:
        """Restore the original request for the next run of the application. Returns its body."""
        assert self.rerun is not None
        body = self.rerun.restore(self._environment)
        self.exchange.body = self.rerun.body
        self.rule = self.answer = self.preconditions = None
        self.runs_again = False
        return body


class Capture:
    """One answer: its status, its header lines, and its body up to ``max_stored_body``."""

    rule: Idempotent
    key_name: bytes
    """The header of the key, which Semel sets itself."""
    status = 0
    size = 0
    """Bytes of the body so far."""
    overflowed = False
    allows_origin = False
    """Whether a script of another origin may read the answer (CORS)."""
    headers: list[tuple[bytes, bytes]]
    """All header lines except those that Semel sets itself."""
    _replayed: list[tuple[bytes, bytes]]
    _chunks: list[bytes]

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers, self._replayed, self._chunks = [], [], []
        wanted, mark = self.rule.replay_header_names, self.rule.replay_marker_name
        for name, content in headers:
            line = bytes(name).lower(), bytes(content)
            if line[0] == self.key_name or line[0] == mark:
                continue
            if line[0] in wanted:
                self._replayed.append(line)
            if line[0] == ALLOW_ORIGIN:
                self.allows_origin = True
            self.headers.append(line)

    def add(self, chunk: bytes) -> bool:
        """Add a chunk. Returns False once the answer is too large to be stored: it is let through then."""
        if self.overflowed:
            return False
        self.size += len(chunk)
        self._chunks.append(bytes(chunk))  # the application may reuse its buffer
        self.overflowed = self.size > self.rule.max_stored_body
        return not self.overflowed

    def take(self) -> bytes:
        """Remove and return what was held back so far."""
        body = b"".join(self._chunks)
        self._chunks = []
        return body

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks) if self.size else b""

    def to_store(self) -> StoredResponse:
        """Return the answer as it is stored."""
        if self.overflowed or (self.size and not self.rule.keep_body):
            return make_response((self.status, self._replayed, b"", True))
        return make_response((self.status, self._replayed, b"".join(self._chunks), False))


def cut_off() -> ConnectionError:
    """It is too late to send another answer. The missing end tells the client that this one is not valid."""
    return ConnectionError("the answer was let through, and could not be stored")


class Rerun:
    """One request, as it came."""

    __slots__ = ("_dicts", "_runs", "_snapshot", "body", "pause")

    def __init__(self, request: MutableMapping[str, Any], shared: Iterable[Any] = ()) -> None:
        """
        :param request: the scope or environ, which routers change.
        :param shared: values of the request. The dicts among them, such as its session and its state, are written to
            while it is handled, so they are copied too, one level deep.
        """
        self._snapshot = dict(request)
        self._dicts = [
            (value, dict(dict.items(value)), dict(getattr(value, "__dict__", ())))
            for value in shared
            if isinstance(value, dict)
        ]
        self._runs = 0
        self.body: list[bytes] | None = None
        """The chunks of the body; None if it was not read, or is too large to be kept."""
        self.pause: float | None = None
        """Seconds to wait before the next run; None if none is planned."""

    def next_pause(self, call: Call) -> float | None:
        """Count a conflict. Returns the seconds to wait before the next run; None if that was the last one."""
        self._runs += 1
        return None if self._runs >= TRIES else pause_after(call, self._runs)

    def plan(self, call: Call) -> bool:
        """Count a conflict, and plan the next run. Returns whether there will be one."""
        if self.body is not None:
            self.pause = self.next_pause(call)
        return self.pause is not None

    def restore(self, request: MutableMapping[str, Any]) -> bytes:
        """Restore the scope or environ and the dicts that it shares. Returns the body."""
        request.clear()
        request.update(self._snapshot)
        for shared, entries, attributes in self._dicts:  # in place: middlewares outside of us hold the same objects
            dict.clear(shared)
            dict.update(shared, entries)  # dict's own methods: a session takes note of how it is used
            if hasattr(shared, "__dict__"):
                shared.__dict__.clear()
                shared.__dict__.update(attributes)
        self.pause = None
        assert self.body is not None
        return b"".join(self.body)
