"""PostgreSQL's SQLSTATEs in our words, for every driver."""

from __future__ import annotations

from semel.errors import NotMigrated, SemelError, StoreUnavailable, StoreUncertain
from semel.sql.connections.refusals import Contended, Refused

__all__ = ["Contended", "Refused", "from_sqlstate"]

_CONTENDED = ("40001", "40P01", "55P03")  # serialization failure, deadlock, lock timeout
_LOST = ("57P01", "57P02", "08", "57P05")  # the server is going down, or the connection is gone


def from_sqlstate(sqlstate: str | None, text: str) -> SemelError:
    """The error of our tree for a SQLSTATE; without one the connection broke and nobody knows."""
    text = " ".join(text.split())[:300]
    if sqlstate is None or sqlstate.startswith(_LOST):
        return StoreUncertain(f"the connection to PostgreSQL was lost: {text}")
    if sqlstate in ("42P01", "42703") or (sqlstate == "42883" and "semel_" in text):
        return NotMigrated(
            f"the database has no Semel tables of this version ({text}): run `semel migrate postgresql://…`"
        )
    if sqlstate == "53100":
        return StoreUnavailable(f"PostgreSQL's disk is full; nothing was stored: {text}")
    if sqlstate == "25006":
        return StoreUnavailable(f"PostgreSQL is read-only here (a replica?): {text}")
    if sqlstate == "57P03":
        return StoreUnavailable(f"PostgreSQL does not accept connections now: {text}")
    if sqlstate == "57014":
        return StoreUnavailable(f"PostgreSQL took too long and was stopped; nothing was stored: {text}")
    if sqlstate in _CONTENDED:
        return Contended(f"PostgreSQL could not finish because of others ({sqlstate}): {text}")
    return Refused(f"PostgreSQL refused ({sqlstate}): {text}")
