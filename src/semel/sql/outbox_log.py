"""The programs of an outbox that is a log (PostgreSQL). They know the tables of messages, and no driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from semel.core.messaging.messages import (
    MAX_STARTED_BYTES,
    OutboxMode,
    Outgoing,
    PassLog,
    ReadLog,
    SwitchMode,
    TakeLog,
    lane_of,
)
from semel.core.ops import Op
from semel.errors import SemelError, StoreUnavailable
from semel.sql.connections.errors import Contention
from semel.sql.outbox import outgoing, settle_messages
from semel.sql.program import Program, Query, load_queries

_Q: Final = load_queries(
    "semel.sql.dialects", "postgres_log.sql", now="statement_timestamp()", bytes=str(MAX_STARTED_BYTES)
)
_BEGIN, _COMMIT, _ROLLBACK = (Query(word.lower(), word, True) for word in ("BEGIN", "COMMIT", "ROLLBACK"))


def _take(op: TakeLog) -> Program[OutboxMode]:
    found = yield _Q["take"](relay=op.relay)
    if not found:
        return "queue"
    mode, same_cluster = found[0]
    if not same_cluster:  # the database was restored: the cursor's snapshots are those of another server
        yield _Q["switch"](mode=mode)
        return "queue"
    yield _Q["trim"]()
    return mode  # type: ignore[no-any-return]


def _read(op: ReadLog) -> Program[tuple[Outgoing, ...] | None]:
    rows = yield _Q["read"](relay=op.relay, most=op.limit, lease=op.lease)
    if rows and rows[0][:2] == (None, 1):
        rows = yield _Q["read"](relay=op.relay, most=op.limit, lease=op.lease)
    if not rows:
        return None
    if rows[0][0] is None:
        return ()
    found = list(map(outgoing, rows))
    streams = {each.message.stream for each in found}
    waiting = {row[0] for row in (yield _Q["waiting"](streams=list(streams - {""})))}
    if waiting:
        found = [Outgoing(each.position, each.message, each.starts, each.message.stream in waiting) for each in found]
    return tuple(found)


def _pass(op: PassLog) -> Program[bool]:
    if not op.moved:
        return bool((yield _Q["pass"](relay=op.relay, stays=op.stays)))
    yield _BEGIN()
    try:
        owned = yield from _move(op)
        yield _COMMIT()
    except SemelError:
        yield _ROLLBACK()
        raise
    return owned


def _move(op: PassLog) -> Program[bool]:
    """Move messages to the queue and settle those that have failed, in one transaction: they have no owner there."""
    rows = yield _Q["lock"](relay=op.relay)
    if not rows:
        return False
    if rows[0][0] is not None:  # otherwise it is done already, and this is a repeat
        messages = [each.message for each in op.moved]
        rows = yield _Q["move"](
            relay=op.relay,
            starts=[each.starts for each in op.moved],
            lanes=[lane_of(one.stream, one.id) for one in messages],
            createds=[one.time for one in messages],
            headers=[json.dumps(dict(one.headers)) for one in messages],
            **{
                f"{name}s": [getattr(one, name) for one in messages]
                for name in (
                    "sequence", "id", "type", "source", "destination", "stream", "subject", "content_type", "data",
                )
            },
        )  # fmt: skip
        positions = {row[0]: row[1] for row in rows}
        queued = {each.position: positions.get(each.message.id, 0) for each in op.moved}
        yield from settle_messages(op.relay, (), op.failed, op.dead, queued.__getitem__)
    return bool((yield _Q["pass"](relay=op.relay, stays=False)))


def _switch(op: SwitchMode) -> Program[None]:
    try:
        yield _Q["switch"](mode=op.mode)
    except Contention as error:
        raise StoreUnavailable(
            "a transaction that has added a message is still open, and others would wait behind this change, so it was "
            f"given up, and nothing was changed. Try again when that one has ended ({error})"
        ) from error.__cause__


LOG_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any], Program[Any]]]] = {
    TakeLog: _take,
    ReadLog: _read,
    PassLog: _pass,
    SwitchMode: _switch,
}
