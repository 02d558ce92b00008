"""The programs of an outbox that is a log (PostgreSQL). They know the tables of messages, and no driver.

In the mode ``log`` it is a table of ours. In the mode ``wal`` it is the database's own log: messages are written to it
by ``pg_logical_emit_message`` and read from a replication slot, over plain SQL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final, TypeVar

from semel.core.messaging.messages import (
    MAX_STARTED_BYTES,
    LogOwned,
    OutboxMode,
    Outgoing,
    PassLog,
    ReadLog,
    SettleMessages,
    SwitchMode,
    TakeLog,
    lane_of,
)
from semel.core.ops import Op
from semel.errors import ConfigurationError, StoreUnavailable
from semel.sql.connections.errors import Contention, sqlstate
from semel.sql.outbox import outgoing, read_json, settle
from semel.sql.program import Program, Rows, Statement, in_transaction, load_queries

R = TypeVar("R")
QUERIES: Final = load_queries(
    "semel.sql.dialects",
    "postgres_log.sql",
    now="statement_timestamp()",
    bytes=str(MAX_STARTED_BYTES),
    slot="'semel_outbox_' || (SELECT oid FROM pg_database WHERE datname = current_database())",
)
_IDLE: Final = 1024 * 1024
"""Move the slot forward when the database's log has this many bytes without a message."""
_FEWEST_CHANGES: Final = 1500
"""A read of the slot decodes at least so many changes, because not all of them are ours."""
_SLOT_READS: Final = 100
"""How often the slot is read if none of its changes is ours, before the relay looks into the queue."""
_BATCH_CHANGES: Final = 6000
"""How many changes of the slot are moved to the queue at a time, before the mode is left."""
_SLOT_TRIES: Final = 100
"""How often the slot is tried while another session uses it, every 10 ms."""
_SLOT_IN_USE: Final = "55006"
_POSITION: Final = itemgetter(0)


def _take(op: TakeLog) -> Program[LogOwned]:
    found = yield QUERIES["take"](relay=op.relay)
    if not found:
        return LogOwned("queue")
    mode, same_cluster = found[0]
    if not same_cluster:  # the database was restored: the cursor's snapshots are those of another server
        yield QUERIES["switch"](mode=mode)
        return LogOwned("queue")
    if mode == "log":
        yield QUERIES["trim"]()
        return LogOwned("log")
    ((_, slot, lost, retained),) = yield QUERIES["slot"]()
    if slot is None or lost:
        raise ConfigurationError(
            "the outbox is in the mode 'wal', and its replication slot is gone: messages that were added since then "
            "cannot be read any more. Make a new slot: semel outbox URL --mode wal; or leave the mode: --mode log"
        )
    return LogOwned("wal", retained)


def _read(op: ReadLog) -> Program[tuple[Outgoing, ...] | None]:
    found = yield from (_read_log(op) if op.mode == "log" else _read_wal(op))
    if not found:
        return found
    streams = {each.stream for each in found}
    waiting = {row[0] for row in (yield QUERIES["waiting"](streams=list(streams - {""})))}
    if waiting:
        return tuple(replace(each, queued=each.stream in waiting) for each in found)
    return found


def _read_log(op: ReadLog) -> Program[tuple[Outgoing, ...] | None]:
    if op.ahead:
        rows = yield QUERIES["ahead"](relay=op.relay, most=op.limit)
        return _in_order(rows)
    ((low, _),) = yield QUERIES["low"]()
    read = {"relay": op.relay, "most": op.limit, "lease": op.lease, "low": low}
    rows = yield QUERIES["read"](**read)
    if rows and rows[0][:2] == (None, 1):
        rows = yield QUERIES["read"](**read)
    if not rows:
        return None
    return () if rows[0][0] is None else _in_order(rows)


def _in_order(rows: Rows) -> tuple[Outgoing, ...]:
    return outgoing(sorted(rows, key=_POSITION))


def _read_wal(op: ReadLog) -> Program[tuple[Outgoing, ...] | None]:
    most = max(3 * op.limit, _FEWEST_CHANGES)
    for _ in range(_SLOT_READS):
        rows = yield from _use_slot(QUERIES["peek"](most=most))
        upto, messages, end, _ = _decoded(rows)
        if len(messages) > 3 * op.limit:  # whole transactions
            end = messages[3 * op.limit - 1][1]
            messages = [each for each in messages if each[1] <= end]
        last = messages[-1][0].position if messages else 0
        noted = yield QUERIES["note"](relay=op.relay, lease=op.lease, started=end, last=last)
        if not noted:
            return None
        passed, crashed = noted[0]
        # After a crash of the server, or if the last advance has failed, the slot shows again what was passed.
        found = [each for each, commit in messages if commit > passed]
        if found:
            return tuple(replace(each, starts=1) if each.position <= crashed else each for each in found)
        # Ours may stand behind many changes that are not: those must be passed, or they are all that is ever read.
        more = rows[-1][2] is not None and rows[-1][2] >= most
        last = end or upto
        if more or last > passed + _IDLE:
            yield QUERIES["note"](relay=op.relay, lease=op.lease, started=last, last=last)
            yield _passed(PassLog(op.relay, op.lease, "wal", last))
        yield from _use_slot(QUERIES["advance"](relay=op.relay))
        if not more:
            break
    return ()


def _use_slot(statement: Statement) -> Program[Rows]:
    """Run a statement on the slot, when it is free."""

    def use() -> Program[Rows]:
        return (yield statement)

    return (yield from _when_slot_is_free(use))


def _when_slot_is_free(use: Callable[[], Program[R]]) -> Program[R]:
    """Run a program that uses the slot, which only one session can do at a time.

    A relay may be reading it, or the last statement of a relay that has lost the cursor still runs. Wait for its end.
    """
    for _ in range(_SLOT_TRIES):
        try:
            return (yield from use())
        except StoreUnavailable as error:
            if error.__cause__ is None or sqlstate(error.__cause__) != _SLOT_IN_USE:
                raise
        yield QUERIES["pause"]()
    return (yield from use())


def _decoded(rows: Rows) -> tuple[int, list[tuple[Outgoing, int]], int, bool]:
    """What ``peek`` returned: where it stopped; each message and its commit; where the last commit ends; whether it was
    cut off at its limit of bytes.
    """
    messages: list[tuple[Outgoing, int]] = []
    transaction: list[Outgoing] = []
    end = size = 0
    for packed in [bytes(data) for _, data, _ in rows if data is not None]:
        size += len(packed)
        if packed[0] == 67:  # C: flags, place, end, time
            end = int.from_bytes(packed[10:18], "big")
            messages += [(each, end) for each in transaction]
            transaction = []
        else:  # M: flags, position, prefix and a zero, length, content
            transaction.append(_unpacked(packed[27:], int.from_bytes(packed[2:10], "big")))
    return rows[0][0], messages, end, size >= MAX_STARTED_BYTES


def _unpacked(content: bytes, position: int) -> Outgoing:
    """The message that ``semel_add`` has written."""
    head, _, data = content.partition(b"\n")
    id, type, source, destination, stream, sequence, subject, content_type, created, headers = read_json(head.decode())[
        0
    ]
    return Outgoing(
        id, type, data, source, destination, stream, sequence, subject, content_type, created, read_json(headers)[0],
        position=position,
    )  # fmt: skip


def _pass(op: PassLog) -> Program[bool]:
    if op.moved:
        owned = yield from in_transaction(_move(op))
    else:
        owned = bool((yield _passed(op)))
    if owned and op.mode == "wal":  # not before the commit: what has moved must be in the queue
        yield from _use_slot(QUERIES["advance"](relay=op.relay))
    return owned


def _move(op: PassLog) -> Program[bool]:
    """Move messages to the queue and settle those that have failed, in one transaction: they have no owner there."""
    rows = yield QUERIES["lock"](relay=op.relay)
    if not rows:
        return False
    started, high = rows[0]
    # Otherwise it is done already, and this is a repeat.
    if started is not None and op.last == (high if op.mode == "wal" else started):
        positions = yield from _move_messages(op.relay, op.moved)
        queued = {each.position: positions.get(each.id, 0) for each in op.moved}
        failed = tuple(replace(failure, position=queued[failure.position]) for failure in op.failed)
        dead = tuple(replace(letter, position=queued[letter.position]) for letter in op.dead)
        yield from settle(SettleMessages(op.relay, (), failed, dead))
    return bool((yield _passed(op)))


def _passed(op: PassLog) -> Statement:
    wal = op.mode == "wal"
    return QUERIES["pass"](relay=op.relay, lease=op.lease, last=op.last, wal=wal, stays=op.stays, next=op.then)


def _move_messages(relay: bytes, moved: Sequence[Outgoing]) -> Program[dict[str, int]]:
    """Move messages to the queue. Returns their positions there, by their ids."""
    rows = yield QUERIES["move"](
        relay=relay,
        starts=[each.starts for each in moved],
        lanes=[lane_of(each.stream, each.id) for each in moved],
        createds=[each.time for each in moved],
        headers=[json.dumps(dict(each.headers)) for each in moved],
        **{
            f"{name}s": [getattr(each, name) for each in moved]
            for name in ("sequence", "id", "type", "source", "destination", "stream", "subject", "content_type", "data")
        },
    )
    return {row[0]: row[1] for row in rows}


def _switch(op: SwitchMode) -> Program[bool]:
    try:
        if op.mode == "wal":
            yield from _make_slot()
        elif (yield from _empty_slot()):
            return False
        # If a relay is reading the slot, the whole transaction is repeated. Nobody waits for it meanwhile.
        if not (yield from _when_slot_is_free(lambda: in_transaction(_switch_locked(op.mode)))):
            return False
    except Contention as error:
        raise StoreUnavailable(
            "a transaction that has added a message is still open, and others would wait behind this change, so it was "
            f"given up, and nothing was changed. Try again when that one has ended ({error})"
        ) from error.__cause__
    if op.mode != "wal":  # a slot that nobody reads would fill the disk
        yield from _use_slot(QUERIES["drop_slot"]())
    return True


def _empty_slot() -> Program[bool]:
    """Move a batch from the database's log to the queue. Returns whether there may be more than a small rest.

    All who add messages wait while the mode changes, and one statement cannot return all that a relay has left behind.
    """
    ((_, slot, lost, _),) = yield QUERIES["slot"]()
    if slot is None or lost:
        return False

    def move() -> Program[bool]:
        ((mode, passed),) = yield QUERIES["lock_cursor"]()
        if mode != "wal":
            return False
        rows = yield QUERIES["peek"](most=_BATCH_CHANGES)
        _, messages, end, full = _decoded(rows)
        yield from _move_messages(b"", [each for each, commit in messages if commit > passed])
        yield QUERIES["skip"](passed=end)
        return full or (rows[-1][2] is not None and rows[-1][2] >= _BATCH_CHANGES)

    more = yield from _when_slot_is_free(lambda: in_transaction(move()))
    yield from _use_slot(QUERIES["advance"](relay=None))
    return more


def _make_slot() -> Program[None]:
    ((level, slot, lost, _),) = yield QUERIES["slot"]()
    if level != "logical":
        raise ConfigurationError(
            f"the mode 'wal' needs wal_level = logical, and this server has {level}: set it (ALTER SYSTEM SET "
            "wal_level = 'logical') and restart the server; or use the mode 'log', which needs no setting"
        )
    if not (yield QUERIES["publication"]()):
        yield QUERIES["create_publication"]()
    if lost:
        yield from _use_slot(QUERIES["drop_slot"]())
    if lost or slot is None:
        yield QUERIES["create_slot"]()
        yield QUERIES["forget"]()


def _switch_locked(mode: OutboxMode) -> Program[bool]:
    """Change the mode. Returns False, and changes nothing, if too much is left in the database's log."""
    yield QUERIES["lock_timeout"]()
    yield QUERIES["lock_mode"]()
    ((now, passed),) = yield QUERIES["lock_cursor"]()
    ((_, slot, lost, _),) = yield QUERIES["slot"]()
    if now == mode == "wal":
        return True
    if now == "wal" and slot is not None and not lost:
        # What was not read yet moves to the queue, as semel_switch does with the log.
        _, messages, _, full = _decoded((yield QUERIES["peek"](most=None)))
        if full:
            return False
        yield from _move_messages(b"", [each for each, commit in messages if commit > passed])
    yield QUERIES["switch"](mode=mode)
    return True


LOG_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any], Program[Any]]]] = {
    TakeLog: _take,
    ReadLog: _read,
    PassLog: _pass,
    SwitchMode: _switch,
}
