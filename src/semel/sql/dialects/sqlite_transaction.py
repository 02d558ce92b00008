"""The transactional mode on SQLite: its Ops as programs for the caller's connection.

The key's lock is the file's: from the guard on there is one writer. So a duplicate waits for the file as any writer
does, as long as the connection's busy timeout says, and then sees the record.
"""

from __future__ import annotations

import time
from typing import Final

from semel.core.ops import SaveStep
from semel.core.semantics import Row
from semel.core.states import State, Takeover
from semel.core.transactional import Keep, Lock, Occupied
from semel.sql.dialects import sqlite
from semel.sql.program import Program, load_queries

__all__ = ["keep", "lock", "save_step", "step_saved"]

_Q: Final = load_queries("semel.sql.dialects", "sqlite_transaction.sql")


def _now() -> int:
    return time.time_ns() // 1000


def lock(op: Lock) -> Program[Row | Occupied | None]:
    rows = yield _Q["lock"](id=op.id)
    if not rows:
        return None
    state, takeover, attempt, token, nonce, origin, steps, fingerprint, snapshot, lease_end, created, expires = rows[0]
    saved = (yield _Q["steps"](id=op.id, origin=origin)) if steps else ()
    now = _now()
    return Row(
        op.id, State(state), token, attempt, nonce, Takeover(takeover), fingerprint, (lease_end - now) / 1e6,
        (created - now) / 1e6, (expires - now) / 1e6, "", "", None, snapshot,
        tuple((name if isinstance(name, str) else bytes(name).decode(), step) for name, step in saved),
    )  # fmt: skip


def keep(op: Keep) -> Program[bool]:
    values = {
        "id": op.id, "takeover": int(op.takeover), "attempt": op.attempt, "nonce": op.nonce,
        "ttl": int(op.ttl * 1_000_000), "fingerprint": op.fingerprint, "tenant": op.tenant, "operation": op.operation,
        "key": op.key, "snapshot": op.snapshot, "now": _now(),
    }  # fmt: skip
    if op.instead_of is None:
        yield _Q["keep"](**values)
        return True
    return bool((yield _Q["keep_instead"](**values, token=op.instead_of.token)))


def save_step(op: SaveStep) -> Program[bool]:
    return sqlite.save_step(op, _now)


def step_saved(id: bytes, name: str) -> Program[bool]:
    return bool((yield _Q["step_saved"](id=id, name=name)))
