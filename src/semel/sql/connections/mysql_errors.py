"""The error numbers of MySQL and MariaDB in our words, for every driver."""

from __future__ import annotations

from typing import Final

from semel.errors import NotMigrated, SemelError, StoreUnavailable, StoreUncertain
from semel.sql.connections.refusals import Contended, Duplicate, Held, Refused, Unreachable

__all__ = ["CONFLICTS", "error_number", "from_number", "unreachable"]

CONFLICTS: Final = frozenset({1213, 1020})
"""Deadlock; changed since it was read. The whole transaction was rolled back, and running it again is the cure."""

_HELD: Final = frozenset({1205, 3572})  # lock wait time-out; NOWAIT
_DUPLICATE: Final = frozenset({1062, 1586})
_LOST: Final = frozenset({
    0,  # the drivers' own: the connection is closed
    2006, 2013, 2014, 2055,  # gone away, lost, out of sync
    1053, 1077, 1078, 1079,  # the server is going down
    1152, 1158, 1159, 1160, 1161, 1184, 4031,  # aborted, net errors, disconnected for being idle
    1927, 3169,  # someone ended the connection
})  # fmt: skip
_READ_ONLY: Final = frozenset({1290, 1836, 1792})
_FULL: Final = frozenset({1021, 1114, 1030, 3675})
_TOO_LONG: Final = frozenset({1969, 3024, 1317})  # the server's time limit, or someone stopped the statement


def from_number(number: int | None, text: str) -> SemelError:
    """The error of our tree for an error number; without one the connection broke and nobody knows."""
    text = " ".join(text.split())[:300]
    if number is None or number in _LOST:
        return StoreUncertain(f"the connection to MySQL was lost: {text}")
    if number == 1180:
        return StoreUncertain(f"MySQL does not say whether it committed: {text}")
    if number in (1146, 1054):
        return NotMigrated(f"the database has no Semel tables of this version ({text}): run `semel migrate mysql://…`")
    if number in _HELD:
        return Held(f"MySQL could not finish because of others ({number}): {text}")
    if number in _DUPLICATE:
        return Duplicate(f"MySQL refused ({number}): {text}")
    if number in CONFLICTS:
        return Contended(f"MySQL could not finish because of others ({number}): {text}")
    if number in _READ_ONLY:
        return StoreUnavailable(f"MySQL is read-only here (a replica?): {text}")
    if number in _FULL:
        return StoreUnavailable(f"MySQL's disk or table space is full; nothing was stored: {text}")
    if number in _TOO_LONG:
        return StoreUnavailable(f"MySQL took too long and was stopped; nothing was stored: {text}")
    if number == 1047:
        return StoreUnavailable(f"this node of the cluster does not accept statements now: {text}")
    return Refused(f"MySQL refused ({number}): {text}")


def error_number(error: BaseException) -> int | None:
    """The number that an error of a MySQL driver carries; all of them call its class MySQLError."""
    if any(cls.__name__ == "MySQLError" for cls in type(error).__mro__) and error.args:
        return error.args[0] if isinstance(error.args[0], int) else None
    return None


def unreachable(error: BaseException) -> StoreUnavailable:
    """No connection could be opened."""
    text = " ".join(str(error.args[1] if len(error.args) > 1 else error).split())[:300] or type(error).__name__
    return Unreachable(f"MySQL cannot be reached: {text}")
