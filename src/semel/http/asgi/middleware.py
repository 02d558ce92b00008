"""The ASGI middleware. It surrounds the application. Decorated endpoints make the claim, just before the handler.

So authentication, rate limits and validation come first, and refuse requests without a claim. If the endpoints of an
application cannot be decorated, ``routes=`` names their rules, and the claim is made here, at the edge.

A request without a key claims nothing, so it gets no task and no buffer.

The responder drives the flows of ``semel.http.contract.endpoint``: it reads the body, makes the claim, runs the
application, holds its answer back until it is stored, and then sends it or the one that replaces it. The claim is made
by the part that knows the rule: the middleware at the edge, or a decorated endpoint.

The answer is stored inside the application's own call of ``send``. Work that follows the answer, such as a background
task, may take long or end the process, so the answer must be stored and sent before it.

The WSGI responder is written separately, not generated. Here the handler is a task that can be cancelled and can
outlive its client, and the answer is a series of messages. There the handler is a call in a thread that returns an
iterable.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Final, TypeAlias, TypeVar

from semel.core.call import Call, Declined, Outcome, Pause, Raised, Returned, Stopped
from semel.engine.aio import AsyncGuard
from semel.engine.drive.attempts import AsyncAttempt
from semel.engine.drive.waiting import EAGER, start_task
from semel.engine.operation import running
from semel.errors import ConfigurationError, KeyInvalid, PreconditionError, SemelError, StoreError
from semel.http.asgi.body import FILES, App, BodyReader, Message, Receive, Scope, Send, without_files
from semel.http.asgi.transaction import open_transaction_async
from semel.http.contract.conditional import bind_preconditions, unbind_preconditions
from semel.http.contract.endpoint import (
    FIND_TENANT,
    READ_BODY,
    Capture,
    Compensate,
    Ending,
    EndpointFlow,
    Framework,
    Lifecycle,
    OpenTransaction,
    Request,
    Rerun,
    RunAgain,
    cut_off,
)
from semel.http.contract.exchange import ALLOW_ORIGIN, CLAIMED, Exchange, name_of_line
from semel.http.contract.responses import SETTLED
from semel.http.contract.routes import Middleware, no_tenant
from semel.http.contract.rules import IN_MEMORY, SAFE_METHODS, Rule

T = TypeVar("T")
TenantResolver: TypeAlias = Callable[[Any], "str | Awaitable[str | None] | None"]

_SAFE: Final = object()
"""Marks a GET or the like: its endpoint runs as if it were not declared."""
current: ContextVar[ASGIResponder | object | None] = ContextVar("semel_responder", default=None)
_log = logging.getLogger("semel.http")


def current_responder() -> ASGIResponder | None:
    """Return the responder of the current request; None for a method that is never claimed, such as GET.

    Raises ConfigurationError if the middleware is not installed.
    """
    responder = current.get()
    if responder is None:
        raise ConfigurationError(
            "this endpoint is declared, but the middleware is not installed: "
            "install(app, guard=…, tenant=…) in FastAPI and Starlette, plugins=[SemelPlugin(guard=…, tenant=…)] in "
            "Litestar, ASGIMiddleware(app, guard=…, tenant=…) elsewhere"
        )
    return responder if isinstance(responder, ASGIResponder) else None


class ASGIMiddleware(Middleware[App, AsyncGuard, TenantResolver]):
    """Protects any ASGI application: ``app = ASGIMiddleware(app, guard=guard, tenant=…, routes=…)``."""

    GUARD = AsyncGuard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._begin_lifespan(receive, send)
            await self.app(scope, receive, send)
            return
        if not self._reported:  # the server has no lifespan
            self.report()
        method = scope["method"].upper()  # ASGI wants it so, but not every server does it
        if method in SAFE_METHODS:
            token = current.set(_SAFE)
            try:
                await self.app(scope, receive, send)
            finally:
                current.reset(token)
            return
        rule = None
        if self.routes.rules:
            rule = self.routes.rules.get((method, scope["path"]))  # the usual case of a find
            if rule is None:
                rule = self.find_rule(method, scope["path"], scope.get("root_path", ""))
        exchange = Exchange(
            method, scope["path"], scope.get("query_string", b""), scope["headers"],
            self.guard.secret, self.docs, self.key_header,
        )  # fmt: skip
        known = None if rule is None or not exchange.keys else self.rules.get(id(rule))
        if known is None or not known[1].claims_early or self.binds_hosts or CLAIMED in scope:
            await self._respond(exchange, rule, scope, receive, send)
            return

        # Make the claim before there is a responder. This does what the flow of a claim asks for, in the same order.
        # A replay ends here. In any other case the flow begins, and is given the results so far.
        effective, tenant, early = known[1], None, EarlyClaim()
        try:
            key = exchange.read_key(effective)
        except KeyInvalid:
            key = None
        if key is None:
            await self._respond(exchange, rule, scope, receive, send)
            return
        if self.tenant is not None:
            try:
                tenant = self.tenant(scope if self.request is None else self.request(scope))
                if type(tenant) is not str or not tenant:
                    tenant = await self.await_tenant(tenant)
            except Exception as error:
                early.results = [(None, error)]
                await self._respond(exchange, rule, scope, receive, send, early)
                return
            early.results = [(tenant, None)]
        longest = effective.max_request_body or 0
        if exchange.announced_length <= longest:
            message = early.message = await receive()
            chunk = message.get("body", b"")
            whole = message["type"] == "http.request" and not message.get("more_body", False)
            if whole and len(chunk) <= longest and len(chunk) <= IN_MEMORY:
                if effective.reads_body:
                    exchange.feed(chunk, False)
                else:
                    exchange.body, exchange.whole, exchange.size, exchange.complete = None, chunk, len(chunk), True
                try:
                    call = early.call = exchange.call(self.guard, effective, key, tenant)
                    if call.hook is not None:
                        call.route = self.route_name(scope, exchange)
                    begun = await self.guard.begin(call)
                except SemelError as error:
                    if early.call is not None:  # otherwise the flow makes it again, and finds the same error
                        early.results = [*early.results, (None, error)]
                else:
                    if isinstance(begun, Outcome):
                        status, lines, body, _ = exchange.replay(begun.value, effective)
                        if exchange.scripted or ALLOW_ORIGIN in map(name_of_line, lines):
                            lines = exchange.expose(lines, effective)
                        await send({"type": "http.response.start", "status": status, "headers": lines})
                        await send({"type": "http.response.body", "body": body, "more_body": False})
                        return
                    early.results = [*early.results, (begun, None)]
        await self._respond(exchange, rule, scope, receive, send, early)

    async def _respond(
        self,
        exchange: Exchange,
        rule: Rule | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        early: EarlyClaim | None = None,
    ) -> None:
        """Claim at the edge, if there is a rule, and run the application."""
        responder = ASGIResponder(self, exchange, scope, receive, send)
        body = responder.body
        token = current.set(responder)
        try:
            if body is None:
                await responder.respond_unkeyed(rule)
                return
            if rule is not None:
                claimed = False
                try:
                    if early is None:
                        claimed = await responder.drive(responder.life.claim(rule))
                    else:
                        responder.life.early_call = early.call
                        if early.message is not None:
                            body.begin_with(early.message)
                        claimed = await responder.drive(responder.life.claim(rule), early.results)
                finally:
                    if body.held is not None and not claimed:
                        body.close()
                if not claimed:
                    await responder.send_answer()
                    return
            # Run it in a task of its own: if the client disconnects and the server cancels us, the handler still
            # finishes, and its answer is stored for the retry. A bare future is cheaper than asyncio.shield().
            loop, work = responder.loop, responder.run_application(rule, body)
            task = start_task(work, loop) if EAGER else loop.create_task(work)
            if task.done():  # it never waited
                task.result()
                return
            responder.over = loop.create_future()
            try:
                await responder.over
            except asyncio.CancelledError:
                if not task.done():
                    self._leave(task, responder.life)
                raise
        finally:
            current.reset(token)

    async def _begin_lifespan(self, receive: Receive, send: Send) -> None:
        """Start, and tell the server if that fails."""
        try:
            await self.start()
        except ConfigurationError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise

    async def start(self) -> None:
        """Prepare for requests, when the application starts. Raises if a route is misconfigured, or tables are missing.

        A guard that an earlier run of the application has closed is opened again. A store that is away is no reason not
        to start: requests are refused until it is back.
        """
        if not self._reported:
            self.report()
        self.guard.open()
        try:
            await self.guard.check()
        except ConfigurationError:
            await self.guard.close()  # nothing runs that would close it later
            raise
        except StoreError as error:
            _log.warning("the application starts, but its store cannot be used: %s", error)

    async def await_tenant(self, found: Any) -> str:
        """Return the tenant that ``tenant=`` has found, or promises if it is async. Raises if there is none."""
        tenant: str | None = await found if inspect.isawaitable(found) else found
        if not tenant:
            raise no_tenant()
        return tenant

    @cached_property
    def _left(self) -> set[asyncio.Task[None]]:
        """Handlers that run on without a client. The event loop holds only weak references to tasks."""
        return set()

    def _leave(self, task: asyncio.Task[None], life: Lifecycle[Any]) -> None:
        """Let a handler run to its end although nobody waits for it any more. Before the claim, cancel it."""
        if life.attempt is None and not life.runs_again:
            life.over = True
            task.cancel()
        self._left.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._left.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a handler failed after its client had gone", exc_info=task.exception())


class EarlyClaim:
    """What is known of a claim before its flow begins."""

    results: Sequence[tuple[Any, BaseException | None]] = ()
    """The answers to the first requests of the flow, or the errors that they ended with."""
    call: Call | None = None
    message: Message | None = None
    """The first message of the server, for the application."""


class ASGIResponder:
    """Handles one request: reads its body, runs the application under an attempt, and sends the answer."""

    def __init__(
        self, middleware: ASGIMiddleware, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.life: Lifecycle[AsyncAttempt] = Lifecycle(middleware, scope, exchange)
        self._middleware = middleware
        self._scope = scope
        self._receive = receive
        self._send = send
        self.body: BodyReader | None = None
        """None for a request without a key, which goes straight to the application."""
        self.over: asyncio.Future[None] | None = None
        """The future that the middleware waits for while the application's task runs."""
        self._start: Message | None = None
        self._begun = False
        """Whether a part of an answer has been sent that is not captured or not held back."""
        self._answered = False
        """Whether ``life.answer`` has been sent."""
        self._client_left = False
        """Whether the client left before its request was complete."""
        if not exchange.keys:
            return
        if "extensions" in scope:
            without_files(scope)
        self.body = body = BodyReader()
        body.source, body.life = receive, self.life
        if middleware.reruns.possible:
            self.life.rerun = Rerun(scope, scope.values())

    @property
    def has_key(self) -> bool:
        """Whether the request has the header of the key, valid or not."""
        return self.body is not None

    # -- running the application

    async def respond_unkeyed(self, rule: Rule | None) -> None:
        """Run the application without a claim, and without a task of its own."""
        if rule is not None and not await self.claim(rule):
            await self.send_answer()
            return
        preconditions = self.life.preconditions
        bound = None if preconditions is None else bind_preconditions(preconditions)
        try:
            await self._middleware.app(self._scope, self._receive, self.send)
        except PreconditionError as error:
            if rule is None or await self.drive(self.life.application_raised(error, sent=self._begun)) is Ending.RAISE:
                raise
            await self.send_answer()
        finally:
            if bound is not None:
                unbind_preconditions(bound)

    async def run_application(self, rule: Rule | None, body: BodyReader) -> None:
        """Run the application, in a task of its own, and again if a transaction conflicted."""
        life = self.life
        try:
            while True:
                try:
                    if rule is not None:
                        # The application is the handler. The context is this task's own, and ends with it.
                        if life.preconditions is not None:
                            bind_preconditions(life.preconditions)
                        if life.attempt is not None:
                            running.set(life.attempt.operation)
                            if life.attempt.lease is not None and (task := asyncio.current_task(self.loop)) is not None:
                                life.attempt.lease.on_lost = task.cancel
                    await self._middleware.app(self._scope, body.receive, self.send)
                    if life.attempt is not None:
                        raise RuntimeError("the application ended without an answer")
                except BaseException as error:
                    ending = await self._application_raised(error)
                    if ending is Ending.ANSWER_AND_RAISE and not self._begun:
                        await self.send_answer()
                    if ending is Ending.RAISE or ending is Ending.ANSWER_AND_RAISE:
                        raise
                finally:
                    if body.held is not None:
                        body.close()
                if not life.runs_again or not await self._start_over(rule, body):
                    break
            if life.answer is not None and not self._answered:
                await self.send_answer()
        except asyncio.CancelledError:
            if self.over is not None:
                self.over.cancel()
            raise
        except BaseException as error:
            if self.over is None or self.over.done():  # nobody is waiting
                raise
            self.over.set_exception(error)
        else:
            if self.over is not None and not self.over.done():
                self.over.set_result(None)
        finally:
            self.life.over = True

    async def _application_raised(self, error: BaseException) -> Ending:
        if self.life.over:
            return Ending.RAISE  # cancelled before the claim: whoever still claims withdraws it
        attempt = self.life.attempt
        superseded = False
        if attempt is not None and attempt.lease is not None:
            attempt.lease.on_lost = None  # from here on only the record is settled, which must not be cancelled
            superseded = isinstance(error, asyncio.CancelledError) and self._superseded(asyncio.current_task(self.loop))
        return await self.drive(self.life.application_raised(error, superseded=superseded, sent=True))

    async def _start_over(self, rule: Rule | None, body: BodyReader) -> bool:
        """Restore the original request. Returns whether the application is to be run again."""
        rerun = self.life.rerun
        assert rerun is not None
        assert rerun.pause is not None
        await asyncio.sleep(rerun.pause)
        body.rewind(self.life.start_over())
        return rule is None or await self.claim(rule)

    # -- the handler of a decorated endpoint

    def claim(self, declared: Rule) -> Coroutine[Any, Any, bool]:
        """Claim the request's key. Returns whether the handler is to run; if not, the answer is known."""
        return self.drive(self.life.claim(declared))

    async def run(
        self,
        handler: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        framework: Framework,
    ) -> Any:
        """Run the handler of a decorated endpoint, after the claim, and end the attempt if it raises."""
        life = self.life
        attempt, preconditions = life.attempt, life.preconditions
        operation = task = None
        if attempt is not None:
            operation = attempt.operation
            task = asyncio.current_task(self.loop)
            if attempt.lease is not None and task is not None:
                attempt.lease.on_lost = task.cancel  # once the lease is lost, another process may run the handler
        bound = None if preconditions is None else bind_preconditions(preconditions)
        token = running.set(operation)
        try:
            result = await handler(*args, **kwargs)
            if operation is not None:
                operation.leave()
            return result
        except (Exception, asyncio.CancelledError) as error:
            # Handle a cancellation here: a framework's task group would turn it into another error.
            superseded = isinstance(error, asyncio.CancelledError)
            if superseded and not self._superseded(task):
                raise
            left = await self.drive(life.handler_raised(error, framework, superseded=superseded))
            if left is None:
                return framework.blank()
            if left is error:
                raise
            raise left from error
        finally:
            running.reset(token)
            if bound is not None:
                unbind_preconditions(bound)
            if attempt is not None and attempt.lease is not None:
                attempt.lease.on_lost = None

    def _superseded(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether the handler was cancelled because its lease was lost, and for no other reason."""
        if not self.life.lease_lost:
            return False
        if task is not None:
            if task.cancelling() > 1:
                return False  # someone else has cancelled it too
            task.uncancel()
        return True

    # -- driving flows

    async def perform(self, request: Request) -> Any:
        """Carry out one request of a flow that is driven elsewhere, such as in the thread of a handler."""

        def flow() -> EndpointFlow[Any]:
            return (yield request)

        return await self.drive(flow())

    async def drive(self, flow: EndpointFlow[T], results: Iterable[tuple[Any, BaseException | None]] = ()) -> T:
        """Carry out the requests of a flow and send it the results, until it returns.

        :param results: the results of its first requests, or the errors, if they are known already.
        """
        try:
            request = next(flow)
            for known, trouble in results:
                request = flow.send(known) if trouble is None else flow.throw(trouble)
            result: Any
            while True:
                try:
                    if request is READ_BODY:
                        assert self.body is not None
                        result = await self.body.read_all()
                        self._client_left = not result
                    elif isinstance(request, Call):
                        result = await self._middleware.guard.begin(request)
                    elif request is FIND_TENANT:
                        middleware, scope = self._middleware, self._scope
                        assert middleware.tenant is not None
                        result = middleware.tenant(scope if middleware.request is None else middleware.request(scope))
                        if type(result) is not str or not result:
                            result = await middleware.await_tenant(result)
                    elif isinstance(request, OpenTransaction):
                        result = await open_transaction_async(self._middleware.guard, request.connect, request.call)
                    elif isinstance(request, Pause):
                        await asyncio.sleep(request.seconds)
                        result = None
                    elif isinstance(request, Compensate):
                        assert self.life.attempt is not None
                        result = await self.life.attempt.compensate(request.error)
                    else:
                        attempt = self.life.attempt
                        assert attempt is not None
                        if attempt.lease is not None:
                            attempt.lease.on_lost = None  # the record is settled, which must not be cancelled
                        if isinstance(request, Returned):
                            result = await attempt.complete(request.value)
                        elif isinstance(request, Declined):
                            result = await attempt.decline(request.value)
                        elif isinstance(request, Raised):
                            await attempt.fail(request.error)
                            result = None
                        else:
                            assert isinstance(request, Stopped)
                            result = await attempt.lost()
                except BaseException as error:
                    request = flow.throw(error)
                else:
                    request = flow.send(result)
        except StopIteration as end:
            returned: T = end.value
            return returned

    # -- the answer

    async def send(self, message: Message) -> None:
        """Take a message of the application's answer. This is the ``send`` that the application is called with."""
        life, kind = self.life, message["type"]
        if life.runs_again:
            raise RunAgain  # an application that waits for the end of its answer, as Quart does, would wait for ever
        if self._client_left:
            return
        if life.answer is not None:
            if kind == "http.response.start" and not self._answered:
                await self.send_answer(message.get("headers", ()))
            return
        capture = life.capture
        if capture is None:
            if kind == "http.response.start":
                if life.natural is not None and life.natural.settled(self._scope["method"].upper(), message["status"]):
                    life.answer = SETTLED
                    await self.send_answer(message.get("headers", ()))
                    return
                self._begun = True
            await self._send(message)
            return
        if kind == "http.response.start":
            self._start = message
            capture.start(message["status"], message.get("headers", ()))
            return
        if kind == "http.response.body":
            was_open, body, whole = capture.overflowed, message.get("body", b""), not capture.size
            fits = capture.add(body)
            more = message.get("more_body", False)
            if not fits and not was_open:
                if more:
                    self._begun = True
                    await self._pass_on(self._first_start(capture))
                body = capture.take()
            if not more:
                last: Message = {"type": kind, "body": capture.body if fits and not whole else body, "more_body": False}
            elif fits:
                return
            else:
                await self._pass_on({"type": kind, "body": body, "more_body": True})
                return
        elif kind in FILES:
            capture.overflowed = True
            last, was_open = message, False
        else:
            await self._pass_on(message)
            return
        # The answer is complete: store it, and then send it, or its last part if the rest was sent before.
        await self.drive(life.answered())
        if self.life.runs_again:
            raise RunAgain
        if self.life.answer is None:
            if not was_open:
                await self._send(self._first_start(capture))
            await self._send(last)
        elif was_open:
            raise cut_off()
        else:
            await self.send_answer()

    def _first_start(self, capture: Capture) -> Message:
        """Return the first message of a first answer."""
        assert self._start is not None
        exchange = self.life.exchange
        lines = capture.headers + exchange.echo
        if exchange.scripted or capture.allows_origin:
            lines = exchange.expose(lines, self.life.rule)
        return {**self._start, "headers": lines}

    async def _pass_on(self, message: Message) -> None:
        """Send a part of an answer. If the server raises because the client is gone, the handler continues."""
        try:
            await self._send(message)
        except OSError:
            if self.life.attempt is None:
                raise

    async def send_answer(self, carrier: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send ``life.answer``. ``carrier`` holds the header lines of the answer that it replaces."""
        answer, rule = self.life.answer, self.life.rule
        if answer is None or self._answered:
            return
        self._answered = True
        if self._begun:
            raise cut_off()
        exchange, send = self.life.exchange, self._send
        lines = exchange.with_carrier(answer.headers, carrier, rule) if carrier else answer.headers
        lines = exchange.expose(lines, rule)
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})
