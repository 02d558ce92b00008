"""The transactional mode on PostgreSQL: its Ops as programs for the caller's connection."""

from __future__ import annotations

from struct import Struct
from typing import Final

from semel.core.semantics import Row
from semel.core.states import State, Takeover
from semel.core.transactional import Keep, Lock, Occupied
from semel.sql.dialects.postgres import CHANNEL, save_step
from semel.sql.program import Program, Statement, load_queries

__all__ = ["keep", "lock", "save_step", "step_saved"]

_Q: Final = load_queries(
    "semel.sql.dialects",
    "postgres_transaction.sql",
    now="statement_timestamp()",
    token="(extract(epoch FROM statement_timestamp()) * 1000000)::bigint",
    notify=f"pg_notify('{CHANNEL}', encode(id, 'hex'))::text",
)
_LOCK: Final = _Q["lock"]
_KEEP: Final = _Q["keep"]
_COLUMN: Final = Struct("!ii").unpack_from
"""Before each value of a record in binary form: the number of its type, and its length, or -1 for NULL."""
_NUMBERS: Final = {2: Struct("!h"), 4: Struct("!i"), 8: Struct("!q")}


def place(id: bytes) -> int:
    """The advisory lock of a record: 64 bits of its identity."""
    return int.from_bytes(id[:8], "big", signed=True)


def lock(op: Lock) -> Program[Row | Occupied | None]:
    rows = yield Statement(_LOCK, {"id": op.id, "place": place(op.id)})
    found = rows[0][0] if rows else None
    if found is None:
        return None
    packed = bytes(found)
    if not packed:
        return Occupied()
    now = _number(packed[:8])
    # In the order that the table has them; a column of a later version comes after these.
    (
        _, state, takeover, _, attempt, steps, token, origin, nonce, lease_end, created, expires, _, fingerprint,
        _, _, _, snapshot,
    ) = _columns(packed)[:18]  # fmt: skip
    saved = (yield _Q["steps"](id=op.id, origin=_number(origin))) if _number(steps) else ()
    return Row(
        op.id, State(_number(state)), _number(token), _number(attempt), _number(nonce), Takeover(_number(takeover)),
        fingerprint or b"", _seconds(lease_end, now), _seconds(created, now), _seconds(expires, now), "", "", None,
        snapshot, tuple((name, bytes(step)) for name, step in saved),
    )  # fmt: skip


def _columns(packed: bytes) -> list[bytes | None]:
    """The values of a record in PostgreSQL's binary form, which stands behind eight bytes of time."""
    (count,) = _NUMBERS[4].unpack_from(packed, 8)
    found: list[bytes | None] = []
    at = 12
    for _ in range(count):
        _, length = _COLUMN(packed, at)
        at += 8
        found.append(None if length < 0 else packed[at : at + length])
        at += max(length, 0)
    return found


def _number(value: bytes | None) -> int:
    assert value is not None, "the column is NOT NULL"
    number: int = _NUMBERS[len(value)].unpack(value)[0]
    return number


def _seconds(moment: bytes | None, now: int) -> float:
    """From now to a moment; both are microseconds."""
    return (_number(moment) - now) / 1e6


def keep(op: Keep) -> Program[bool]:
    values = {
        "id": op.id, "takeover": int(op.takeover), "nonce": op.nonce, "ttl": op.ttl, "fingerprint": op.fingerprint,
        "tenant": op.tenant, "operation": op.operation, "key": op.key, "snapshot": op.snapshot,
    }  # fmt: skip
    if op.instead_of is None:
        yield Statement(_KEEP, values)
    else:
        yield _Q["keep_instead"](**values, attempt=op.attempt, token=op.instead_of.token)
    return True


def step_saved(id: bytes, name: str) -> Program[bool]:
    return bool((yield _Q["step_saved"](id=id, name=name)))
