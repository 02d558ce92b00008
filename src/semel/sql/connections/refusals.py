"""Ways of "not stored", for whoever tries again: because of others, because of the statement, never reached."""

from __future__ import annotations

from semel.errors import RecordTooLarge, StoreUnavailable

__all__ = ["Contended", "Duplicate", "Held", "Refused", "TooLarge", "Unreachable"]


class Contended(StoreUnavailable):
    """Rolled back because of others; the same statement may simply be sent again."""


class Held(Contended):
    """Another transaction holds what the statement needs; the statement alone was undone."""


class Refused(StoreUnavailable):
    """The statement was refused, by the server or by the driver: something in it is wrong, the connection is fine."""


class TooLarge(Refused, RecordTooLarge):
    """It is more than the server takes: of several at once, each may still be taken by itself."""


class Duplicate(Refused):
    """A row stands where this one was to be; the statement alone was undone."""


class Unreachable(StoreUnavailable):
    """No connection could be opened, so nothing was sent."""
