"""A request that is run again: what it takes when the transaction of its handler met another one, and nothing was sent.

The database undoes one of two transactions that stand in each other's way, and says that running it again is the cure.
The application is run again from the edge, as if the request had come again: with its body, and with its scope or
environ as they came. The bound is that of ``guard.transaction``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from semel.core.call import Call
from semel.core.transactional import pause_after
from semel.engine.transaction.rules import TRIES

__all__ = ["Kept", "Rerun", "RunAgain"]


class RunAgain(BaseException):
    """Leaves an application that is to be run again. No Exception: whoever makes answers of errors lets it pass."""


class Kept:
    """Whether requests are kept as they came: only where some route has a transaction, for it costs a copy of each."""

    wanted = False


class Rerun:
    """One request, as it came."""

    __slots__ = ("_as_it_came", "_dicts", "_tried", "body", "pause")

    def __init__(self, request: MutableMapping[str, Any], shared: Iterable[Any] = ()) -> None:
        """
        :param request: the scope or environ, which routers change on their way.
        :param shared: the dicts among these are the request's own, and written to by whoever has it in hand: its
            session, its state. They are kept too, one level of them.
        """
        self._as_it_came = dict(request)
        self._dicts = [
            (value, dict(dict.items(value)), dict(getattr(value, "__dict__", ())))
            for value in shared
            if isinstance(value, dict)
        ]
        self._tried = 0
        self.body: list[bytes] | None = None
        """All chunks of the body; None: it is not at hand, or too large to be kept."""
        self.pause: float | None = None
        """The application is to be run again, after so many seconds; None: it is not."""

    def met(self, call: Call) -> float | None:
        """A conflict was met: how long to wait before the next run; None: that was the last."""
        self._tried += 1
        return None if self._tried >= TRIES else pause_after(call, self._tried)

    def plan(self, call: Call) -> bool:
        """Run the application again, if that can be; whether it can."""
        if self.body is not None:
            self.pause = self.met(call)
        return self.planned

    @property
    def planned(self) -> bool:
        """Whether the application is about to be run again."""
        return self.pause is not None

    def restore(self, request: MutableMapping[str, Any]) -> bytes:
        """Make the scope or environ what it was, and what is shared by it; the body."""
        request.clear()
        request.update(self._as_it_came)
        for shared, entries, attributes in self._dicts:  # the same objects: those outside of us have them in hand
            dict.clear(shared)
            dict.update(shared, entries)  # dict's own methods: a session takes note of how it is used
            if hasattr(shared, "__dict__"):
                shared.__dict__.clear()
                shared.__dict__.update(attributes)
        self.pause = None
        assert self.body is not None
        return b"".join(self.body)
