"""One ASGI request under the contract: its body on the way in, its answer on the way out, and the attempt between.

The claim is asked for by whoever knows the rule: the middleware at the edge, or a decorated endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from semel.core.call import Outcome
from semel.engine.drive.waiting import start_task
from semel.engine.operation.operation import running
from semel.errors import ConfigurationError, LeaseLost, NotUndone, PreconditionError, SemelError
from semel.http.asgi.messages import Receive, Scope, Send, has_key, without_files
from semel.http.asgi.outgoing import Outgoing, is_lost
from semel.http.contract.capture import Capture
from semel.http.contract.conditional import Preconditions, hold, let_go
from semel.http.contract.exchange import CLAIMED, FAILED, Exchange
from semel.http.contract.rerun import Rerun, RunAgain
from semel.http.contract.rules import Idempotent, Natural, Rule
from semel.http.in_transaction import open_async_transaction

if TYPE_CHECKING:
    from semel.http.asgi.middleware import ASGIMiddleware

__all__ = ["Responder"]


class Responder(Outgoing):
    """One request: its body on the way in, its answer on the way out, and the attempt between."""

    def __init__(self, middleware: ASGIMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        Outgoing.__init__(self, scope, receive, send)  # super() would cost as much as all of this
        self._middleware = middleware
        self._over: asyncio.Future[None] | None = None
        """What our caller waits for while the application's task runs."""
        self.loop = asyncio.get_running_loop()
        self.preconditions: Preconditions | None = None

    @property
    def exchange(self) -> Exchange:
        if self._exchange is None:
            scope = self._scope
            self._exchange = Exchange(
                scope["method"],
                scope["path"],
                scope.get("query_string", b""),
                scope["headers"],
                secret=self._middleware.guard.secret,
                docs=self._middleware.docs,
            )
        return self._exchange

    async def respond(self, rule: Rule | None) -> None:
        """Run the application; ``rule`` is the one to be claimed here, at the edge."""
        if not has_key(self._scope):
            await self._unkeyed(rule)
            return
        without_files(self._scope)
        if self._middleware.kept.wanted:
            self._rerun = Rerun(self._scope, self._scope.values())
        if rule is not None and not await self._claimed_here(rule):
            return
        # A task of its own: when the client hangs up and the server cancels us, the handler still finishes, and its
        # answer is stored for the retry. A bare future is half the price of asyncio.shield().
        task = start_task(self._run(rule), self.loop)
        if task.done():  # it never waited
            task.result()
            return
        self._over = self.loop.create_future()
        try:
            await self._over
        except asyncio.CancelledError:
            if not task.done():
                if self.attempt is None and not self.runs_again:
                    task.cancel()
                self._middleware.leave(task)
            raise

    async def _claimed_here(self, rule: Rule) -> bool:
        claimed = False
        try:
            claimed = await self.claim(rule)
        finally:
            if not claimed:
                self._close()
        if not claimed:
            await self._say()
        return claimed

    async def _unkeyed(self, rule: Rule | None) -> None:
        if rule is not None and not await self.claim(rule):
            await self._say()
            return
        held = hold(self.preconditions)
        try:
            await self._middleware.app(self._scope, self._receive, self.send)
        except PreconditionError as error:
            if rule is None or self._begun:
                raise
            await self.refuse(error)
            await self._say()
        finally:
            let_go(held)

    async def _run(self, rule: Rule | None) -> None:
        """The application, in a task of its own."""
        try:
            while True:
                try:
                    if rule is not None:
                        self.watch(asyncio.current_task(self.loop))
                        hold(self.preconditions)
                        if self.attempt is not None:
                            running.set(self.attempt.operation)  # for this task alone, which ends with the request
                    await self._middleware.app(self._scope, self.receive, self.send)
                    if self.attempt is not None:
                        raise RuntimeError("the application ended without an answer")
                except BaseException as error:
                    if not await self._broken(error, asyncio.current_task(self.loop)):
                        raise
                finally:
                    self._close()
                if self._rerun is None or not await self._starts_over(self._rerun, rule):
                    break
            if self._answer is not None:
                await self._say()
        except asyncio.CancelledError:
            if self._over is not None:
                self._over.cancel()
            raise
        except BaseException as error:
            if self._over is None or self._over.done():  # nobody waits yet, or any more
                raise
            self._over.set_exception(error)
        else:
            if self._over is not None and not self._over.done():
                self._over.set_result(None)

    # -- the attempt

    def watch(self, task: asyncio.Task[Any] | None) -> None:
        """Stop this task, which runs the handler, when the lease is lost."""
        if self.attempt is not None and self.attempt.lease is not None and task is not None:
            self.attempt.lease.on_lost = task.cancel

    def unwatch(self) -> None:
        """From here on only the record is settled, which must not be cancelled."""
        if self.attempt is not None and self.attempt.lease is not None:
            self.attempt.lease.on_lost = None

    async def superseded(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether the handler was cancelled because its lease was lost; then its successor's answer is ours."""
        attempt = self.attempt
        if attempt is None or not is_lost(attempt):
            return False
        if task is not None:
            if task.cancelling() > 1:
                return False  # someone else wants it stopped as well
            task.uncancel()
        await self._settle(attempt.lost())
        return True

    async def claim(self, declared: Rule) -> bool:
        """Claim the request's key; whether the handler is to run. If not, what to answer is known."""
        if self._rule is not None or self._natural is not None or CLAIMED in self._scope:
            raise ConfigurationError(
                "this request was claimed already: one rule for one request, and one middleware of Semel"
            )
        if not isinstance(declared, Idempotent):
            self._natural = declared if isinstance(declared, Natural) else None
            return True
        rule = self._rule = self._middleware.rule(declared)
        exchange, guard = self.exchange, self._middleware.guard
        try:
            key = exchange.read_key(rule)
            self.preconditions = exchange.preconditions(rule)
            if key is None:
                exchange.tell_unprotected(guard, rule)
                return True
            longest = rule.max_request_body
            assert longest is not None  # the middleware's, where the route has none
            if not rule.reads_json and rule.connection is None:
                exchange.body = None
            if not await self._read_to_its_end(longest):  # half a request is none
                self._silent = True
                return False
            tenant = self._middleware.whose(self._scope)
            if tenant is not None and not isinstance(tenant, str):
                tenant = await tenant
            call = exchange.call(guard, rule, key, tenant)
            if rule.connection is None:
                begun = await guard.begin(call)
            else:
                if self._rerun is not None:
                    self._rerun.body = exchange.body
                opening = open_async_transaction(guard, rule.connection, call, self._rerun)
                begun = await opening
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
        self._scope[CLAIMED] = True
        self._capture = Capture(rule)
        return True

    async def refuse(self, error: PreconditionError | NotUndone) -> None:
        """The handler found that the precondition does not hold: nothing was done, and the key is free again.

        Or it failed, and its steps could not be undone: then nobody may run it again.
        """
        attempt = self.attempt
        if attempt is not None and isinstance(error, NotUndone):
            try:
                await attempt.fail(error)
            finally:
                self._release()
        elif attempt is not None:
            await self._settle(attempt.lost() if is_lost(attempt) else attempt.decline(None))
        if self._answer is None:
            self._answer = self.exchange.refusal(error, self._rule)

    async def _settle(self, end: Awaitable[Outcome[Any] | None]) -> None:
        """End the attempt. When it had been replaced, or cannot be stored, the answer is another one."""
        rule, attempt = self._rule, self.attempt
        assert rule is not None
        if attempt is not None and attempt.lease is not None:
            attempt.lease.on_lost = None  # as unwatch()
        try:
            outcome = await end
        except SemelError as error:
            if not self._plans_again(error, let_through=self._capture is not None and self._capture.overflowed):
                self._answer = self.exchange.refusal(error, rule)
        else:
            if outcome is not None and outcome.replayed:
                self._answer = self.exchange.replay(outcome.value, rule)
        finally:
            self._release()

    def _release(self) -> None:
        self.attempt = None
        self._capture = None
        self._scope.pop(CLAIMED, None)
        self._tell_settled()

    async def _broken(self, error: BaseException, task: asyncio.Task[Any] | None) -> bool:
        """The application raised. Whether that is dealt with, and an answer known."""
        attempt, rule = self.attempt, self._rule
        if self.runs_again:
            return isinstance(error, (Exception, BaseExceptionGroup, RunAgain))
        if attempt is None or rule is None:
            return False
        self.unwatch()
        if isinstance(error, asyncio.CancelledError) and await self.superseded(task):
            return True
        if isinstance(error, PreconditionError):
            await self.refuse(error)
            return True
        if self.conflicts(error):  # of an application that is claimed at the edge, as all that follows
            await self.give_way(error)
            return True
        error = await attempt.compensate(error)
        if isinstance(error, NotUndone):
            await self.refuse(error)
            return True
        remembered = isinstance(error, rule.policy.remembered) or (isinstance(error, Exception) and rule.stores(500))
        if remembered and not isinstance(error, LeaseLost):
            await self._settle(attempt.complete(FAILED))
            if self._silent:
                return True  # another call came between
            if self._answer is None:
                self._answer = self.exchange.failed()
            if not self._begun:
                await self._say()
            return False  # the client has its answer, and the server's log the error
        try:
            await attempt.fail(error)
        finally:
            self._release()
        if isinstance(error, LeaseLost):  # what the handler wanted to save was refused
            self._answer = self.exchange.refusal(error, rule)
            return True
        return False
