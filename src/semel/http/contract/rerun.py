"""Running a request again after its handler's transaction conflicted with another one.

When two transactions conflict, the database rolls one of them back and asks for it to be run again. Nothing was sent
then, so the application is run again from the edge, as if the request had come again: with its body, and with its scope
or environ as they came. The number of runs is bounded as in ``guard.run_in_transaction``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from semel.core.call import Call
from semel.core.transactional import pause_after
from semel.engine.transaction.rules import TRIES

__all__ = ["Rerun", "Reruns", "RunAgain"]


class RunAgain(BaseException):
    """Leaves an application that is to be run again. Not an Exception, so that error handlers let it pass."""


class Reruns:
    """Whether requests are copied as they come. Only if some route has a transaction, since it costs a copy of each."""

    possible = False


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
