"""A WSGI request whose handler's transaction met another one: rolled back, and its application run again.

The same names in the same order as ``asgi_rerun.py``. What is decided is in ``rerun.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semel.core.call import Outcome
from semel.core.encoding.snapshot import StoredResponse
from semel.engine.drive.attempts import Attempt
from semel.errors import SemelError, TransactionConflict
from semel.http.contract.conditional import Preconditions
from semel.http.contract.rerun import Rerun
from semel.http.contract.rules import Idempotent
from semel.http.wsgi.answers import Held
from semel.http.wsgi.body import RequestBody

if TYPE_CHECKING:
    from semel.http.contract.exchange import Exchange

__all__ = ["Rerunning"]


class Rerunning:
    """What the ``Responder`` has for it."""

    attempt: Attempt | None
    preconditions: Preconditions | None
    _environ: dict[str, Any]
    _body: RequestBody | None
    _rule: Idempotent | None
    _rerun: Rerun | None = None
    _held: Held | None
    _answer: StoredResponse | None
    _started: bool
    _raises: bool
    _carrier: list[tuple[bytes, bytes]]

    @property
    def exchange(self) -> Exchange:
        raise NotImplementedError

    @property
    def runs_again(self) -> bool:
        """Whether the application is about to be run again, and what it said is for nobody."""
        return self._rerun is not None and self._rerun.planned

    def conflicts(self, error: BaseException) -> bool:
        """Whether this is the database's word that the handler's transaction met another one."""
        return self.attempt is not None and self.attempt.conflicts(error)

    def give_way(self, error: BaseException) -> bool:
        """Roll back. Whether the application is run again; else 503 is its answer."""
        attempt, self.attempt = self.attempt, None
        assert attempt is not None
        self._settle(attempt, lambda: attempt.fail(error))
        return self.runs_again

    def _plans_again(self, error: SemelError, attempt: Attempt, *, let_through: bool) -> bool:
        """An attempt ended in this error: whether the application is to be run again. Not once a part was sent."""
        if isinstance(error, TransactionConflict) and self._rerun is not None and not let_through:
            return self._rerun.plan(attempt.call)
        return False

    def _starts_over(self) -> bool:
        """Whether the application is to be run again. Nothing was stored or sent, so the request is what it was."""
        if self._rerun is None or self._rerun.pause is None:
            return False
        time.sleep(self._rerun.pause)
        assert self._body is not None
        self._body.again(self._rerun.restore(self._environ))
        self._environ["wsgi.input"] = self._body
        self.exchange.body = self._rerun.body
        self._rule = self._held = self._answer = self.preconditions = None
        self._started = self._raises = False
        self._carrier = []
        return True

    def _settle(self, attempt: Attempt, end: Callable[[], Outcome[Any] | None]) -> None:
        raise NotImplementedError
