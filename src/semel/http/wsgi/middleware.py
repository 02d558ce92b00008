"""The WSGI middleware. It surrounds the application. Decorated endpoints make the claim, just before the handler.

It has the same shape and names as ``semel.http.asgi``, for ``Semel``. All of a request happens in the thread that
serves it. If the endpoints of an application cannot be decorated, ``routes=`` names their rules, and the claim is made
here, at the edge.

The responder drives the flows of ``semel.http.contract.endpoint``: it reads the body, makes the claim, runs the
application, holds its answer back until it is stored, and then sends it or the one that replaces it. The claim is made
by the part that knows the rule: the middleware at the edge, or a decorated endpoint.

A handler in a thread cannot be cancelled when its lease is lost. So any error of such a handler, like its answer, gives
way to the new owner's answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.core.call import Call, Declined, Pause, Raised, Returned
from semel.core.encoding.snapshot import StoredResponse
from semel.engine.drive.attempts import Attempt
from semel.engine.operation import Operation, running
from semel.errors import BodyTooLarge, ConfigurationError
from semel.http.contract.conditional import bind_preconditions, unbind_preconditions
from semel.http.contract.endpoint import (
    FIND_TENANT,
    READ_BODY,
    Compensate,
    Ending,
    Lifecycle,
    OpenTransaction,
    Request,
    Rerun,
    cut_off,
)
from semel.http.contract.exchange import Exchange
from semel.http.contract.responses import SETTLED
from semel.http.contract.routes import Middleware, no_tenant
from semel.http.contract.rules import SAFE_METHODS, Rule
from semel.http.drive.sync import drive
from semel.http.wsgi.answers import (
    ExcInfo,
    HeldAnswer,
    LetThrough,
    Lines,
    Peeked,
    ThenRaised,
    Write,
    as_bytes,
    as_text,
    header_lines,
    path_text,
    status_line,
)
from semel.http.wsgi.body import RequestBody
from semel.http.wsgi.transaction import open_transaction
from semel.stores.guard import Semel

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

Environ: TypeAlias = dict[str, Any]
App: TypeAlias = "Callable[[Environ, StartResponse], Iterable[bytes]]"

_INCOMPLETE: Final = StoredResponse(400, [(b"content-length", b"0")], b"")
"""The answer to a client that went away before its request was complete."""
TenantResolver: TypeAlias = "Callable[[Any], str | None]"

_SAFE: Final = object()
"""Marks a GET or the like: its endpoint runs as if it were not declared."""
_current: ContextVar[WSGIResponder | object | None] = ContextVar("semel_wsgi_responder", default=None)


def current_responder() -> WSGIResponder | None:
    """Return the responder of the current request; None for a method that is never claimed, such as GET.

    Raises ConfigurationError if the middleware is not installed.
    """
    responder = _current.get()
    if responder is None:
        raise ConfigurationError(
            "this endpoint is declared, but the middleware is not installed: "
            "install(app, guard=…, tenant=…) in Flask, WSGIMiddleware(app, guard=…, tenant=…) elsewhere"
        )
    return responder if isinstance(responder, WSGIResponder) else None


class WSGIMiddleware(Middleware[App, Semel, TenantResolver]):
    """Protects any WSGI application: ``app = WSGIMiddleware(app, guard=guard, tenant=…, routes=…)``."""

    GUARD = Semel

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._reported:
            self.report()
        method = environ["REQUEST_METHOD"].upper()  # frameworks that run "post" as a POST must not run it unclaimed
        if method in SAFE_METHODS:
            token = _current.set(_SAFE)
            try:
                answer = self.app(environ, start_response)
                # A generator runs when it is iterated, and by then nothing would be known of this request.
                return Peeked(answer) if isinstance(answer, GeneratorType) else answer
            finally:
                _current.reset(token)
        responder = WSGIResponder(self, environ, start_response)
        token = _current.set(responder)
        try:
            return responder.respond(self.find_rule(method, path_text(environ), path_text(environ, "SCRIPT_NAME")))
        finally:
            _current.reset(token)


class WSGIResponder:
    """Handles one request: reads its body, runs the application under an attempt, and sends the answer."""

    def __init__(self, middleware: WSGIMiddleware, environ: Environ, start_response: StartResponse) -> None:
        self.life: Lifecycle[Attempt] = Lifecycle(middleware, environ, _make_exchange)
        self.max_request_body: int | None = None
        """Bytes of a request that the application itself accepts, if that is fewer than the rule allows."""
        self._middleware = middleware
        self._environ = environ
        self._server = start_response
        self._body: RequestBody | None = None
        """None for a request without a key."""
        self._iterable: Any = None
        """What the application returned, until it is closed."""
        self._held: HeldAnswer | None = None
        self._started = False
        """Whether the application has called ``start_response``."""
        self._passed = False
        """Whether an answer that is not held back has begun."""
        self._carrier: list[tuple[bytes, bytes]] = []
        """The header lines of the answer that ``life.answer`` replaces."""

    # -- running the application

    def respond(self, rule: Rule | None) -> Iterable[bytes]:
        """Run the application; ``rule`` is the one to claim here, at the edge."""
        life = self.life
        if self._middleware.key_header.variable in self._environ:
            if self._middleware.reruns.possible:
                life.rerun = Rerun(self._environ)
            self._body = RequestBody(self._environ, life.exchange.feed)
            self._environ["wsgi.input"] = self._body
        answer = self._run_once(rule)
        while life.runs_again:
            self._start_over()
            answer = self._run_once(rule)
        return answer

    def _run_once(self, rule: Rule | None) -> Iterable[bytes]:
        life = self.life
        if rule is not None and not self._claim_at_edge(rule):
            return self._answer()
        token = running.set(life.attempt.operation) if life.attempt is not None else None
        bound = None if life.preconditions is None else bind_preconditions(life.preconditions)
        try:
            return self._run()
        finally:
            if bound is not None:
                unbind_preconditions(bound)
            if token is not None:
                running.reset(token)

    def _claim_at_edge(self, rule: Rule) -> bool:
        claimed = False
        try:
            claimed = self.claim(rule)
        finally:
            if not claimed:
                self._close()
        return claimed

    def _run(self) -> Iterable[bytes]:
        life = self.life
        try:
            iterable = self._iterable = self._middleware.app(self._environ, self.start_response)
            if not self._started:  # a generator: it runs up to its first bytes, and then we know
                iterable = Peeked(iterable)
            if life.answer is None:
                if self._held is None:
                    return iterable  # no claim was made: untouched, so that a server recognises its own file wrapper
                rest = self._held.take(iter(iterable))
                if rest is not None:
                    return LetThrough(rest, self._finish_let_through, self._application_raised)
            self._close()
            if life.answer is None:
                drive(life.answered(), self.perform)
        except BaseException as error:
            ending = self._application_raised(error)
            if ending is Ending.RAISE:
                self._held = None  # it refers to us, and we to it: both would wait for the garbage collector
                raise
            if ending is Ending.ANSWER_AND_RAISE:
                return ThenRaised(self._answer(), error)
        return [] if life.runs_again else self._answer()

    def _application_raised(self, error: BaseException) -> Ending:
        life = self.life
        try:
            self._close()
        finally:
            ending = drive(life.application_raised(error, superseded=life.lease_lost, sent=self._passed), self.perform)
        return ending

    def _start_over(self) -> None:
        """Restore the original request for the next run of the application."""
        life = self.life
        assert life.rerun is not None
        assert life.rerun.pause is not None
        assert self._body is not None
        time.sleep(life.rerun.pause)
        self._body.rewind(life.start_over())
        self._environ["wsgi.input"] = self._body
        self._held = None
        self._started = False
        self._carrier = []

    def _close(self) -> None:
        """Close what the application returned, once, as WSGI demands: it may run the application's own clean-up."""
        iterable, self._iterable = self._iterable, None
        try:
            if hasattr(iterable, "close"):
                iterable.close()
        finally:
            if self._body is not None:
                self._body.close()

    # -- the handler of a decorated endpoint

    @property
    def operation(self) -> Operation | None:
        """The handle of the running attempt."""
        return None if self.life.attempt is None else self.life.attempt.operation

    def claim(self, declared: Rule) -> bool:
        """Claim the request's key. Returns whether the handler is to run; if not, the answer is known."""
        if self._started:
            raise ConfigurationError("the answer has begun already: the claim comes before start_response()")
        claimed = drive(self.life.claim(declared), self.perform)
        if self.life.capture is not None:
            self._held = HeldAnswer(self.life.capture, self._send_first)
        return claimed

    # -- driving flows

    def perform(self, request: Request) -> Any:
        """Carry out one request of a flow."""
        if request is READ_BODY:
            return self._read_body()
        if isinstance(request, Call):
            return self._middleware.guard.begin(request)
        if request is FIND_TENANT:
            return self._find_tenant()
        if isinstance(request, OpenTransaction):
            return open_transaction(self._middleware.guard, request.connect, request.call)
        if isinstance(request, Pause):
            return time.sleep(request.seconds)
        attempt = self.life.attempt
        assert attempt is not None
        if isinstance(request, Compensate):
            return attempt.compensate(request.error)
        if isinstance(request, Returned):
            return attempt.complete(request.value)
        if isinstance(request, Declined):
            return attempt.decline(request.value)
        if isinstance(request, Raised):
            return attempt.fail(request.error)
        return attempt.lost()

    def _read_body(self) -> bool:
        body, rule = self._body, self.life.rule
        assert rule is not None
        assert rule.max_request_body is not None  # the middleware's, if the route has none
        if body is None:  # an application outside of us has put the key into the environ
            return True
        longest = (
            rule.max_request_body
            if self.max_request_body is None
            else min(rule.max_request_body, self.max_request_body)
        )
        if not body.spool(longest):
            raise BodyTooLarge
        if body.incomplete:
            self.life.answer = _INCOMPLETE
            return False
        return True

    def _find_tenant(self) -> str:
        resolve, request = self._middleware.tenant, self._middleware.request
        assert resolve is not None
        tenant: str | None = resolve(self._environ if request is None else request(self._environ))
        if not tenant:
            raise no_tenant()
        return tenant

    # -- the answer

    def start_response(self, status: str, headers: Lines, exc_info: ExcInfo | None = None, /) -> Write:
        """The ``start_response`` that the application is called with."""
        life = self.life
        write: Write
        if life.natural is not None and life.natural.settled(self._environ["REQUEST_METHOD"].upper(), int(status[:3])):
            life.answer = SETTLED
        if life.answer is not None:
            self._carrier = as_bytes(headers)
            write = _discard
        elif self._held is not None:
            write = self._held.start(status, headers, exc_info)
        else:
            self._passed = True
            write = self._server(status, headers, exc_info) if exc_info else self._server(status, headers)
        self._started = True
        return write

    def _finish_let_through(self) -> None:
        """Store an answer that is let through, before its last chunk is sent."""
        try:
            self._close()
        except BaseException as error:
            self._application_raised(error)
            raise
        drive(self.life.answered(), self.perform)
        if self.life.answer is not None:
            raise cut_off()

    def _answer(self) -> Iterable[bytes]:
        """Give the server the answer: ``life.answer``, or the one that was held back."""
        answer, held = self.life.answer, self._held
        if held is not None and held.begun:
            return []
        if answer is not None:
            self._held = None  # it refers to us, and we to it: both would wait for the garbage collector
            body = answer.body
            lines = self.life.exchange.with_carrier(answer.headers, self._carrier, self.life.rule)
            self._send(status_line(answer.status), lines)
        else:
            assert held is not None
            body = held.capture.body
            held.begin()
        return [body] if body else []

    def _send_first(self, status: str, headers: list[tuple[bytes, bytes]]) -> Write:
        return self._send(status, headers + self.life.exchange.echo)

    def _send(self, status: str, headers: list[tuple[bytes, bytes]]) -> Write:
        return self._server(status, as_text(self.life.exchange.expose(headers, self.life.rule)))


def _make_exchange(environ: Any, middleware: Any) -> Exchange:
    return Exchange(
        environ["REQUEST_METHOD"].upper(),
        path_text(environ),
        environ.get("QUERY_STRING", "").encode("latin-1"),
        header_lines(environ, middleware.key_header),
        secret=middleware.guard.secret,
        docs=middleware.docs,
        key_header=middleware.key_header,
    )


def _discard(chunk: bytes) -> None:
    """The write() of an answer that is not sent."""
