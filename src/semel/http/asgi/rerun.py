"""An ASGI request whose handler's transaction met another one: rolled back, and its application run again.

When the database says so, the answer, if there is one, is still held back. What is decided is in ``rerun.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from semel.core.call import Outcome
from semel.core.encoding.snapshot import StoredResponse
from semel.errors import SemelError, TransactionConflict
from semel.http.asgi.incoming import Incoming
from semel.http.asgi.messages import Receive, Scope
from semel.http.contract.rerun import Rerun, RunAgain
from semel.http.contract.rules import Idempotent, Rule

__all__ = ["Rerunning"]


class Rerunning(Incoming):
    """What the ``Responder`` has for it."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        Incoming.__init__(self, receive)
        self._scope = scope
        self._rule: Idempotent | None = None
        self._rerun: Rerun | None = None
        self._answer: StoredResponse | None = None
        self._silent = False
        """Whether what the application says is for nobody: the client has left, or it is about to be run again."""

    @property
    def runs_again(self) -> bool:
        """Whether the application is about to be run again, and what it said is for nobody."""
        return self._rerun is not None and self._rerun.planned

    def conflicts(self, error: BaseException) -> bool:
        """Whether this is the database's word that the handler's transaction met another one."""
        return self.attempt is not None and self.attempt.conflicts(error)

    async def give_way(self, error: BaseException, abort: Callable[[int], Exception] | None = None) -> BaseException:
        """Roll back. What leaves the endpoint: 503 is its answer, or, for nobody, that of a run that is not the last.

        ``abort`` makes a plain Exception: there are those that clean up after a handler for nothing else.
        """
        assert self.attempt is not None
        await self._settle(self.attempt.fail(error))
        return RunAgain() if abort is None else abort(TransactionConflict.status)

    def _plans_again(self, error: SemelError, *, let_through: bool) -> bool:
        """An attempt ended in this error: whether the application is to be run again. Not once a part was sent."""
        if isinstance(error, TransactionConflict) and self._rerun is not None and not let_through:
            assert self.attempt is not None
            self._silent = self._rerun.plan(self.attempt.call)
        return self._silent

    async def _starts_over(self, rerun: Rerun, rule: Rule | None) -> bool:
        """Whether the application is to be run again. Nothing was stored or sent, so the request is what it was."""
        if rerun.pause is None:
            return False
        await asyncio.sleep(rerun.pause)
        self._read_again(rerun.restore(self._scope))
        self.exchange.body = rerun.body
        self._rule = self._answer = None
        self._silent = False
        return rule is None or await self.claim(rule)

    async def claim(self, declared: Rule) -> bool:
        raise NotImplementedError

    async def _settle(self, end: Awaitable[Outcome[Any] | None]) -> None:
        raise NotImplementedError
