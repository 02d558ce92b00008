"""The transactional mode on MySQL and MariaDB: its Ops as programs for the caller's connection.

Neither has a lock that ends with the transaction and is no row, so the key is taken by inserting its row, which is
finished when the handler is done: two statements, and the primary key is the judge. What was there before is looked at
only where that insert fails.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

from semel.core.semantics import Row, state_of
from semel.core.states import State, Takeover
from semel.core.transactional import Keep, Lock, Occupied
from semel.sql.connections.refusals import Contended, Duplicate, Held
from semel.sql.dialects.mysql import save_step
from semel.sql.program import Program, load_queries

__all__ = ["keep", "lock", "save_step", "step_saved"]

_Q: Final = load_queries(
    "semel.sql.dialects",
    "mysql_transaction.sql",
    token="GREATEST(token + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {{now}}))",
    now="UTC_TIMESTAMP(6)",
)


def lock(op: Lock) -> Program[Row | Occupied | None]:
    began = time.monotonic()
    try:
        yield _Q["lock"](id=op.id)
        return None
    except Duplicate:
        pass
    except Held as error:
        if int((yield _Q["undone"]())[0][0]):
            raise Contended(f"{error}; this server undoes all of a transaction then") from error.__cause__
        return Occupied(waited=time.monotonic() - began)
    rows = yield _Q["look"](id=op.id)
    if not rows:
        raise Contended("the record went away while it was looked at")
    row = yield from _row(op.id, rows[0])
    if op.waits and not op.own and state_of(row, 0.0) is State.RUNNING:
        # Whoever runs under a lease needs the row that this transaction now keeps from being written: waiting for it
        # here would be waiting for ourselves.
        return Occupied(waited=math.inf)
    return row


def _row(id: bytes, found: Any) -> Program[Row]:
    # Numbers are read as such: the caller's converters may have left them as text.
    state, takeover, attempt, token, nonce, origin, steps = (int(value) for value in found[:7])
    fingerprint, snapshot = found[7:9]
    lease_left, age, expires_in = (int(value) / 1e6 for value in found[9:12])
    saved = (yield _Q["steps"](id=id, origin=origin)) if steps else ()
    return Row(
        id, State(state), token, attempt, nonce, Takeover(takeover), bytes(fingerprint), lease_left, age, expires_in,
        "", "", None, None if snapshot is None else bytes(snapshot),
        tuple((bytes(name).decode(), bytes(step)) for name, step in saved),
    )  # fmt: skip


def keep(op: Keep) -> Program[bool]:
    rows = yield _Q["keep"](
        id=op.id, takeover=int(op.takeover), attempt=op.attempt, nonce=op.nonce, ttl=round(op.ttl * 1_000_000),
        fingerprint=op.fingerprint, tenant=op.tenant, operation=op.operation, key=op.key, snapshot=op.snapshot,
        token=0 if op.instead_of is None else op.instead_of.token,
    )  # fmt: skip
    return bool(rows[0][0])


def step_saved(id: bytes, name: str) -> Program[bool]:
    return bool((yield _Q["step_saved"](id=id, name=name.encode())))
