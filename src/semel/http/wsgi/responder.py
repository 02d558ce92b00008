"""One WSGI request under the contract: its body on the way in, its answer on the way out, and the attempt between.

The claim is asked for by whoever knows the rule: the middleware at the edge, or a decorated endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.core.call import Outcome
from semel.core.encoding.snapshot import StoredResponse
from semel.engine.drive.attempts import Attempt
from semel.engine.operation.operation import running
from semel.errors import (
    BodyTooLarge,
    ConfigurationError,
    LeaseLost,
    NotUndone,
    PreconditionError,
    SemelError,
)
from semel.http.contract.capture import Capture, cut_off
from semel.http.contract.conditional import Preconditions, hold, let_go
from semel.http.contract.exchange import CLAIMED, FAILED, SETTLED, Exchange
from semel.http.contract.rerun import Rerun, RunAgain
from semel.http.contract.rules import Exempt, Idempotent, Natural, Rule
from semel.http.in_transaction import open_transaction
from semel.http.wsgi.answers import ExcInfo, Held, LetThrough, Peeked, ThenRaised, Write
from semel.http.wsgi.body import RequestBody
from semel.http.wsgi.lines import KEY, Lines, as_bytes, as_text, header_lines, path_text, status_line
from semel.http.wsgi.rerun import Rerunning

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

    from semel.http.wsgi.middleware import WSGIMiddleware

__all__ = ["App", "Environ", "Responder"]

Environ: TypeAlias = dict[str, Any]
App: TypeAlias = "Callable[[Environ, StartResponse], Iterable[bytes]]"

_CUT: Final = StoredResponse(400, [(b"content-length", b"0")], b"")
"""For a client that went away before its request was whole."""


class Responder(Rerunning):
    """One request: its body on the way in, its answer on the way out, and the attempt between."""

    def __init__(self, middleware: WSGIMiddleware, environ: Environ, start_response: StartResponse) -> None:
        self._middleware = middleware
        self._environ = environ
        self._server = start_response
        self._exchange: Exchange | None = None
        self._body: RequestBody | None = None
        self._rule: Idempotent | None = None
        self._answer: StoredResponse | None = None
        self._carrier: list[tuple[bytes, bytes]] = []
        """The lines of what the application said in the place of an answer that is known already."""
        self._held: Held | None = None
        self._started = False
        """Whether the application has begun its answer."""
        self._passed = False
        """Whether an answer that is not held back has begun."""
        self._app_answer: Any = None
        self._raises = False
        """Whether the error of the application follows its answer, for the server's log."""
        self._natural: Natural | None = None
        self.attempt: Attempt | None = None
        self.preconditions: Preconditions | None = None
        self.max_request_body: int | None = None
        """Bytes of a request that the application itself takes, where that is fewer than the rule allows."""

    @property
    def exchange(self) -> Exchange:
        if self._exchange is None:
            environ = self._environ
            self._exchange = Exchange(
                environ["REQUEST_METHOD"],
                path_text(environ),
                environ.get("QUERY_STRING", "").encode("latin-1"),
                header_lines(environ),
                secret=self._middleware.guard.secret,
                docs=self._middleware.docs,
            )
        return self._exchange

    def respond(self, rule: Rule | None) -> Iterable[bytes]:
        """Run the application; ``rule`` is the one to be claimed here, at the edge."""
        if KEY in self._environ:
            if self._middleware.kept.wanted:
                self._rerun = Rerun(self._environ)
            self._body = RequestBody(self._environ, self.exchange.fed)
            self._environ["wsgi.input"] = self._body
        answer = self._run_once(rule)
        while self._starts_over():
            answer = self._run_once(rule)
        return answer

    def _run_once(self, rule: Rule | None) -> Iterable[bytes]:
        if rule is not None and not self._claimed_here(rule):
            return self._say()
        token = running.set(self.attempt.operation) if self.attempt is not None else None
        held = hold(self.preconditions)
        try:
            return self._run()
        finally:
            let_go(held)
            if token is not None:
                running.reset(token)

    def _claimed_here(self, rule: Rule) -> bool:
        claimed = False
        try:
            claimed = self.claim(rule)
        finally:
            if not claimed:
                self._close()
        return claimed

    def _run(self) -> Iterable[bytes]:
        try:
            answer = self._app_answer = self._middleware.app(self._environ, self.start_response)
            if not self._started:  # a generator: it runs up to its first bytes, and then we know
                answer = Peeked(answer)
            if self._answer is None:
                if self._held is None:
                    return answer  # no claim was made: untouched, so that a server knows its own file wrapper again
                rest = self._held.take(iter(answer))
                if rest is not None:
                    return LetThrough(rest, self._through, self._broken)
            self._close()
            if self._answer is None:
                self._finish()
        except BaseException as error:
            running_still = self.attempt is not None
            self._broken(error)
            if self.runs_again and isinstance(error, (Exception, RunAgain)):
                return []
            if isinstance(error, PreconditionError) and self._rule is not None and not self._passed:
                self.refuse(error)
            elif self._answer is None or not running_still:
                self._held = None  # it has us, as we have it: else both would wait for the garbage collector
                raise
            if self._raises:
                return ThenRaised(self._say(), error)
        return [] if self.runs_again else self._say()

    def _close(self) -> None:
        """Close what the application returned, once, as WSGI demands: it may run the application's own clean-up."""
        answer, self._app_answer = self._app_answer, None
        self._environ.pop(CLAIMED, None)
        try:
            if hasattr(answer, "close"):
                answer.close()
        finally:
            if self._body is not None:
                self._body.close()

    # -- the attempt

    def claim(self, declared: Rule) -> bool:
        """Claim the request's key; whether the handler is to run. If not, what to answer is known."""
        if self._rule is not None or self._natural is not None or CLAIMED in self._environ:
            raise ConfigurationError(
                "this request was claimed already: one rule for one request, and one middleware of Semel"
            )
        if self._started:
            raise ConfigurationError("the answer has begun already: the claim comes before start_response()")
        if isinstance(declared, Exempt):
            return True
        if isinstance(declared, Natural):
            self._natural = declared
            return True
        rule = self._rule = self._middleware.rule(declared)
        exchange, guard = self.exchange, self._middleware.guard
        try:
            key = exchange.read_key(rule)
            self.preconditions = exchange.preconditions(rule)
            if key is None:
                exchange.tell_unprotected(guard, rule)
                return True
            if not rule.reads_json and rule.connection is None:
                exchange.body = None
            if self._body is not None:
                if not self._body.spool(self._longest(rule)):
                    raise BodyTooLarge
                if self._body.cut:  # half a request is none
                    self._answer = _CUT
                    return False
            call = exchange.call(guard, rule, key, self._tenant())
            if rule.connection is None:
                begun = guard.begin(call)
            else:
                if self._rerun is not None:
                    self._rerun.body = exchange.body
                begun = open_transaction(guard, rule.connection, call, self._rerun)
        except ConfigurationError:
            raise  # the service's mistake: for its logs, and no answer of ours
        except SemelError as error:
            self._answer = exchange.refusal(error, rule)
            return False
        finally:
            exchange.body = None
        if isinstance(begun, Outcome):
            self._answer = exchange.replay(begun.value, rule)
            return False
        self.attempt = begun
        self._environ[CLAIMED] = True
        self._held = Held(Capture(rule), self._send_first)
        return True

    def refuse(self, error: PreconditionError | NotUndone) -> None:
        """The handler found that the precondition does not hold: nothing was done, and the key is free again.

        Or it failed, and its steps could not be undone: then nobody may run it again.
        """
        attempt, self.attempt = self.attempt, None
        if attempt is not None and isinstance(error, NotUndone):
            attempt.fail(error)
        elif attempt is not None:
            lost = attempt.lease is not None and attempt.lease.lost
            self._settle(attempt, attempt.lost if lost else lambda: attempt.decline(None))
        if self._answer is None:
            self._answer = self.exchange.refusal(error, self._rule)

    def _longest(self, rule: Idempotent) -> int:
        """The middleware's bound, where the route has none of its own; or the application's, if that is lower."""
        assert rule.max_request_body is not None
        return (
            rule.max_request_body
            if self.max_request_body is None
            else min(rule.max_request_body, self.max_request_body)
        )

    def _tenant(self) -> str | None:
        resolve, request = self._middleware.tenant, self._middleware.request
        if resolve is None:
            return None
        tenant: str | None = resolve(self._environ if request is None else request(self._environ))
        if not tenant:
            raise ConfigurationError("tenant= gave nothing for this request: it must come after authentication")
        return tenant

    def _broken(self, error: BaseException) -> None:
        """The application raised. It may be that an answer is known all the same."""
        if self.conflicts(error):  # of an application that is claimed at the edge
            self.give_way(error)
        attempt, rule = self.attempt, self._rule
        self.attempt = None
        try:
            self._close()
        finally:
            if attempt is not None and rule is not None:
                self._failed(attempt, rule, error)

    def _failed(self, attempt: Attempt, rule: Idempotent, error: BaseException) -> None:
        if attempt.lease is not None and attempt.lease.lost:
            self._settle(attempt, attempt.lost)  # the successor's answer is ours
        elif isinstance(error, PreconditionError):
            self._settle(attempt, lambda: attempt.decline(None))
            self._answer = self._answer or self.exchange.refusal(error, rule)
        elif isinstance(error := attempt.compensate(error), (LeaseLost, NotUndone)):
            # What the handler wanted to save was refused; or, in an application claimed at the edge, half of it stands.
            attempt.fail(error)
            self._answer = self.exchange.refusal(error, rule)
        elif isinstance(error, rule.policy.remembered) or (isinstance(error, Exception) and rule.stores(500)):
            self._settle(attempt, lambda: attempt.complete(FAILED))
            if self.runs_again:
                return  # another call came between
            if self._answer is None:
                self._answer = self.exchange.failed()
            self._raises = True
        else:
            attempt.fail(error)

    def _finish(self) -> None:
        """The answer is whole: store it, and only then let it go."""
        attempt, rule, held = self.attempt, self._rule, self._held
        assert attempt is not None
        assert rule is not None
        assert held is not None
        self.attempt = None
        stored = held.capture.stored()
        if rule.stores(stored.status):
            self._settle(attempt, lambda: attempt.complete(stored))
        elif attempt.lease is not None and attempt.lease.lost:
            self._settle(attempt, attempt.lost)
        else:
            self._settle(attempt, lambda: attempt.decline(stored))

    def _settle(self, attempt: Attempt, end: Callable[[], Outcome[Any] | None]) -> None:
        """End the attempt. When it had been replaced, or cannot be stored, the answer is another one."""
        rule = self._rule
        assert rule is not None
        try:
            outcome = end()
        except SemelError as error:
            if not self._plans_again(error, attempt, let_through=self._held is not None and self._held.begun):
                self._answer = self.exchange.refusal(error, rule)
        else:
            if outcome is not None and outcome.replayed:
                self._answer = self.exchange.replay(outcome.value, rule)

    # -- out

    def start_response(self, status: str, headers: Lines, exc_info: ExcInfo | None = None, /) -> Write:
        """What the application begins its answer with."""
        write: Write
        if self._natural is not None and self._natural.settled(self._environ["REQUEST_METHOD"], int(status[:3])):
            self._answer = SETTLED
        if self._answer is not None:  # this one only stands for the answer that is known already
            self._carrier = as_bytes(headers)
            write = _dropped
        elif self._held is not None:
            write = self._held.start(status, headers, exc_info)
        else:
            self._passed = True
            write = self._server(status, headers, exc_info) if exc_info else self._server(status, headers)
        self._started = True
        return write

    def _through(self) -> None:
        """All of an answer that is let through was made; its end still waits."""
        try:
            self._close()
        except BaseException as error:
            self._broken(error)
            raise
        self._finish()
        if self._answer is not None:
            raise cut_off()

    def _say(self) -> Iterable[bytes]:
        """Give the server the answer that is known: ours, or the one that was held back."""
        answer, held = self._answer, self._held
        if held is not None and held.begun:
            return []
        if answer is not None:
            self._held = None  # it has us, as we have it
            body = answer.body
            self._send(status_line(answer.status), self.exchange.carried(answer.headers, self._carrier, self._rule))
        else:
            assert held is not None
            body = held.capture.body
            held.begin()
        return [body] if body else []

    def _send_first(self, status: str, headers: list[tuple[bytes, bytes]]) -> Write:
        return self._send(status, self.exchange.first(headers))

    def _send(self, status: str, headers: list[tuple[bytes, bytes]]) -> Write:
        return self._server(status, as_text(self.exchange.exposed(headers, self._rule)))


def _dropped(chunk: bytes) -> None:
    """The write() of an answer that is not sent."""
