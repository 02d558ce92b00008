"""The programs of the inbox and the dead letters. They know the tables of messages, and no driver.

The programs for one message run on the caller's connection, in the caller's transaction. The others answer Ops of a
store. Every dialect has statements of the same names, so that each program is written once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from math import ceil
from typing import Any, Final, TypeAlias, TypeVar

from semel.core.messaging.messages import (
    BuryMessage,
    CountLetters,
    CountStart,
    ForgetStarts,
    Letter,
    LetterFilter,
    ListLetters,
    Message,
    PurgeInbox,
    PurgeLetters,
    ReadOffsets,
    RedriveLetters,
    SeeMessages,
    lane_of,
)
from semel.core.ops import Op
from semel.sql.connections.adopt import Dialect
from semel.sql.connections.errors import Contention, DuplicateRow
from semel.sql.program import Packet, Piece, Program, Query, Rows, in_transaction, load_queries

R = TypeVar("R")
Row: TypeAlias = Mapping[str, Any]
_TRIES: Final = 10
_OFFSETS: Final = "~"
"""The prefix of a consumer whose streams are the partitions of a log. No consumer's own name begins so."""
_KEEP: Final = "~"
"""The streams of this consumer are the names of the others, and their sequences how many seconds those remember."""


class _Tables:
    """The statements of one dialect, and how it takes lists, times and transactions."""

    def __init__(self, dialect: Dialect, file: str, now: str, second: int) -> None:
        """:param second: how durations count one."""
        self.dialect = dialect
        self._queries = load_queries("semel.sql.dialects", f"{file}_inbox.sql", now=now)
        self._second = second

    def span(self, seconds: float) -> float:
        return seconds if self._second == 1 else round(seconds * self._second)

    def ask(self, name: str, rows: Sequence[Row] | None = None, /, **params: Any) -> Program[Rows]:
        """Run a statement for a list of rows.

        In PostgreSQL and SQLite each column is a list: ``ids`` of ``id``. In MySQL each row has the other parameters,
        too, because a statement may repeat them with it.
        """
        query = self._queries[name]
        if self.dialect == "mysql":
            return (yield Packet(Piece(query, [{**params, **row} for row in rows or ()], **params)))
        if rows:
            for column in rows[0]:
                values: Any = [row[column] for row in rows]
                params[f"{column}s"] = values if self.dialect == "postgresql" else json.dumps(values)
        if self.dialect == "sqlite":
            params["now"] = _now()
        return (yield query(**params))

    def transaction(self, program: Program[R]) -> Program[R]:
        """Run a program of several statements in a transaction of its own. SQLite's writer has one already."""
        if self.dialect == "sqlite":
            return (yield from program)
        if self.dialect == "mysql":
            yield Packet(begins=True)  # its connection rolls back when a packet fails
            result = yield from program
            yield Packet(ends=True)
            return result
        return (yield from in_transaction(program))

    def count(self, rows: Rows) -> int:
        """How many rows a statement with ``RETURNING 1`` has changed; MySQL says it without."""
        return int(rows[0][0]) if self.dialect == "mysql" else len(rows)


def _now() -> int:
    return time.time_ns() // 1000


_TABLES: Final[dict[Dialect, _Tables]] = {
    "postgresql": _Tables("postgresql", "postgres", "statement_timestamp()", 1),
    "sqlite": _Tables("sqlite", "sqlite", "", 1_000_000),
    "mysql": _Tables("mysql", "mysql", "UTC_TIMESTAMP(6)", 1_000_000),
}


# In the caller's transaction


def apply_messages(dialect: Dialect, consumer: str, ids: Sequence[str]) -> Program[set[str]]:
    """Write down that the consumer applies these messages. Returns the ids of those that it had not applied yet.

    Waits for a transaction that applies one of them now, because only a committed row is a proof.
    """
    tables = _TABLES[dialect]
    # Rows are locked in this order. It is the same for all, so that two batches cannot deadlock.
    new = sorted(set(ids))
    if dialect != "mysql":
        if len(new) == 1:
            return set(new) if (yield from tables.ask("insert", consumer=consumer, id=new[0])) else set()
        rows = (yield from tables.ask("insert_many", _rows("id", new), consumer=consumer)) if new else ()
        return {row[0] for row in rows}
    for _ in range(_TRIES):
        if not new:
            return set()
        try:
            yield from tables.ask("insert", _rows("id", new), consumer=consumer)
            return set(new)
        except DuplicateRow:
            if len(new) == 1:
                return set()
            known = {_text(row[0]) for row in (yield from tables.ask("known", _rows("id", new), consumer=consumer))}
            new = [id for id in new if id not in known]
    raise Contention("other transactions have applied messages of this batch")


def set_savepoint(depth: int) -> Program[None]:
    """Mark the place in the transaction that ``undo_savepoint`` goes back to.

    It comes after the first statement. If it came first, SQLite would open a transaction with it, and release it with a
    COMMIT.

    :param depth: how many of these savepoints enclose this one. In MySQL one of the same name would replace them.
    """
    yield _savepoint(depth, "SAVEPOINT")()


def release_savepoint(depth: int) -> Program[None]:
    yield _savepoint(depth, "RELEASE SAVEPOINT")()


def undo_savepoint(depth: int) -> Program[None]:
    """Undo what was done since ``set_savepoint``. Fails if the transaction has ended, and its savepoints with it."""
    yield _savepoint(depth, "ROLLBACK TO SAVEPOINT")()
    yield from release_savepoint(depth)


def forget_messages(dialect: Dialect, consumer: str, ids: Collection[str]) -> Program[None]:
    """Undo what ``apply_messages`` wrote. Only in the same transaction: later the rows may be those of a rival."""
    yield from _TABLES[dialect].ask("forget_messages", _rows("id", sorted(ids)), consumer=consumer)


@lru_cache(maxsize=64)
def _savepoint(depth: int, verb: str) -> Query:
    query = Query("savepoint", f"{verb} semel_inbox_{depth}", True)
    query.as_text = query  # psycopg then needs no cursor, which would take longer than the statement
    return query


def _rows(column: str, values: Iterable[Any]) -> list[Row]:
    return [{column: value} for value in values]


def lock_streams(dialect: Dialect, consumer: str, streams: Collection[str]) -> Program[dict[str, int]]:
    """Lock streams for the rest of the transaction. Returns the sequence that the consumer has applied last, or 0.

    A negative number means that the stream is parked: its message of this sequence is in the dead letters.
    """
    tables, rows = _TABLES[dialect], _rows("stream", sorted(streams))
    if dialect == "mysql":
        yield from tables.ask("add_places", rows, consumer=consumer)
    found = yield from tables.ask("lock_places", rows, consumer=consumer)
    return {_text(row[0]): int(row[1]) for row in found}


def move_streams(
    dialect: Dialect, consumer: str, messages: Sequence[Message], before: Mapping[str, int]
) -> Program[None]:
    """Write down that the messages are the last ones of their streams that were applied.

    :param before: what ``lock_streams`` returned. While a stream is parked, only its first dead letter changes that.
    """
    tables, after = _TABLES[dialect], dict[str, int]()
    for message in messages:
        stream, sequence = message.stream, message.sequence
        last = before.get(stream, 0)
        if last < 0 and sequence == -last:
            yield from tables.ask("leave_parked", consumer=consumer, stream=stream, sequence=sequence)
        elif last >= 0 and stream in before and sequence > 0:
            after[stream] = sequence
    if after:
        yield from _move(tables, consumer, after)


def move_offsets(dialect: Dialect, consumer: str, offsets: Mapping[str, int]) -> Program[None]:
    """Write down where the consumer goes on at each place. An offset that is behind the stored one changes nothing: the
    place belongs to another process by now.
    """
    yield from _move(_TABLES[dialect], _OFFSETS + consumer, offsets)


def _move(tables: _Tables, consumer: str, places: Mapping[str, int]) -> Program[None]:
    rows = [{"stream": stream, "sequence": places[stream]} for stream in sorted(places)]
    yield from tables.ask("move_streams", rows, consumer=consumer)


# Ops


def _see(op: SeeMessages, tables: _Tables) -> Program[frozenset[str]]:
    ids = _rows("id", sorted(set(op.ids)))
    if not ids:
        return frozenset()
    seen = yield from tables.ask("seen", ids, consumer=op.consumer)
    if len(seen) < len(ids):
        yield from tables.ask("see", ids, consumer=op.consumer)
    return frozenset(row[0] for row in seen)


def _count_start(op: CountStart, tables: _Tables) -> Program[int]:
    rows = yield from tables.ask("start", consumer=op.consumer, id=op.message)
    if tables.dialect == "mysql":
        rows = yield from tables.ask("starts", consumer=op.consumer, id=op.message)
    return int(rows[0][0])


def _forget_starts(op: ForgetStarts, tables: _Tables) -> Program[None]:
    if op.ids:
        name = "take_back_starts" if op.only_last else "forget_starts"
        yield from tables.ask(name, _rows("id", sorted(set(op.ids))), consumer=op.consumer)


def _read_offsets(op: ReadOffsets, tables: _Tables) -> Program[dict[str, int]]:
    found: Rows = ()
    if op.places:
        found = yield from tables.ask("places", _rows("stream", op.places), consumer=_OFFSETS + op.consumer)
    return {row[0]: int(row[1]) for row in found}


def _purge_inbox(op: PurgeInbox, tables: _Tables) -> Program[int]:
    if op.consumer:
        yield from tables.ask("note_keep", consumer=_KEEP, stream=op.consumer, sequence=ceil(op.keep))
    # Rows are forgotten by their age, whoever has applied them, so the consumer with the longest memory decides.
    longest = (yield from tables.ask("longest_keep", consumer=_KEEP))[0][0]
    keep, gone = tables.span(max(op.keep, float(longest))), None
    if tables.dialect == "postgresql":
        gone = (yield from tables.ask("tend", keep=keep, most=op.limit))[0][0]
    if gone is None:  # the inbox is not divided by time
        gone = tables.count((yield from tables.ask("purge", keep=keep, most=op.limit)))
    yield from tables.ask("purge_starts", keep=keep)
    return gone


def _bury(op: BuryMessage, tables: _Tables) -> Program[None]:
    message = op.message

    def write() -> Program[None]:
        yield from tables.ask(
            "bury", origin=op.consumer, reason=op.reason, sequence=message.sequence, created=tables.span(message.time),
            starts=op.starts, redrives=message.redrives, id=message.id, type=message.type, source=message.source,
            destination=message.destination, stream=message.stream, subject=message.subject,
            content_type=message.content_type, headers=json.dumps(dict(message.headers), ensure_ascii=False),
            data=message.data,
        )  # fmt: skip
        if not op.park:
            return
        # Another process may have applied the message. Then a redrive is a repeat, and nothing would free the stream.
        # Lock it before the look: whoever applies a message has the lock until the commit.
        yield from lock_streams(tables.dialect, op.consumer, (message.stream,))
        if not (yield from tables.ask("applied", consumer=op.consumer, id=message.id)):
            yield from tables.ask("park", consumer=op.consumer, stream=message.stream, sequence=message.sequence)

    return (yield from tables.transaction(write()) if op.park else write())


def _letters(op: ListLetters, tables: _Tables) -> Program[tuple[Letter, ...]]:
    rows = yield from tables.ask("letters", after=op.after, most=op.limit, **_chosen(op.filter, tables))
    return tuple(map(_letter, rows))


def _letter(row: Sequence[Any]) -> Letter:
    position, origin, died, reason, starts, *rest = row
    (
        id, type, data, source, destination, stream, sequence, subject, content_type, created, headers, redrives,
    ) = rest  # fmt: skip
    message = Message(
        id, type, bytes(data), source, destination, stream, sequence, subject, content_type, float(created),
        json.loads(headers), redrives,
    )  # fmt: skip
    return Letter(position, origin, float(died), reason, starts, message)


def _chosen(filter: LetterFilter, tables: _Tables) -> dict[str, Any]:
    return {**asdict(filter), "older": tables.span(filter.older)}


def _count(op: CountLetters, tables: _Tables) -> Program[tuple[int, int]]:
    found = (yield from tables.ask("count", **_chosen(op.filter, tables), most=op.most))[0]
    return int(found[0]), int(found[1])


def _redrive(op: RedriveLetters, tables: _Tables) -> Program[int]:
    def move() -> Program[int]:
        letters = list((yield from _choose(op, tables)))
        if not letters:
            return 0
        streams = _rows("stream", sorted({row[2] for row in letters} - {""}))
        if streams:
            if tables.dialect != "sqlite":  # it has one writer
                yield from tables.ask("lock_streams", streams)
            if tables.dialect == "postgresql":
                yield from tables.ask("lock_cursor")
            yield from tables.ask("stage", streams)
        yield from tables.ask("stage_copies", _rows("id", sorted({row[1] for row in letters})))
        if tables.dialect != "postgresql":
            yield from tables.ask("delete_staged")
        back = [*letters, *(yield from tables.ask("staged"))]
        lanes = [{"position": row[0], "lane": lane_of(row[2], row[1])} for row in back]
        positions = _rows("position", (row[0] for row in back))
        yield from tables.ask("return_letters", lanes)
        yield from tables.ask("forget_starts_of", positions)
        yield from tables.ask("delete_letters", positions)
        if streams:
            yield from tables.ask("unpark", streams)
        return len(letters)

    return (yield from tables.transaction(move()))


def _purge(op: PurgeLetters, tables: _Tables) -> Program[int]:
    def remove() -> Program[int]:
        letters = yield from _choose(op, tables)
        if not letters:
            return 0
        yield from tables.ask("delete_letters", _rows("position", (row[0] for row in letters)))
        streams = _rows("stream", sorted({row[2] for row in letters} - {""}))
        if streams:
            yield from tables.ask("unpark", streams)
        freed = {(row[4], row[2], row[3]) for row in letters if row[2] and row[4]}
        # A consumer may wait for a message that was redriven, and that the relay has given up then.
        lost = {(row[2], row[3]) for row in letters if row[2] and not row[4]}
        if lost:
            rows = yield from tables.ask("parked", _rows("stream", sorted({stream for stream, _ in lost})))
            freed |= {(consumer, stream, -at) for consumer, stream, at in rows if (stream, -at) in lost}
        for consumer, stream, sequence in sorted(freed):
            place = {"consumer": consumer, "stream": stream, "sequence": sequence}
            # A statement of its own, so that the next one sees the letters of those for whom it had to wait.
            if tables.dialect == "sqlite" or (yield from tables.ask("lock_parked", **place)):
                yield from tables.ask("leave_parked", **place)
        return len(letters)

    return (yield from tables.transaction(remove()))


def _choose(op: RedriveLetters | PurgeLetters, tables: _Tables) -> Program[Rows]:
    return (yield from tables.ask("choose", last=op.last, most=op.limit, **_chosen(op.filter, tables)))


def _text(value: Any) -> str:
    """The caller's converters may have left text as bytes."""
    return value if isinstance(value, str) else bytes(value).decode()


_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any, _Tables], Program[Any]]]] = {
    SeeMessages: _see,
    CountStart: _count_start,
    ForgetStarts: _forget_starts,
    ReadOffsets: _read_offsets,
    PurgeInbox: _purge_inbox,
    BuryMessage: _bury,
    ListLetters: _letters,
    CountLetters: _count,
    RedriveLetters: _redrive,
    PurgeLetters: _purge,
}


INBOX_OPS: Final = tuple(_PROGRAMS)


def inbox_program(dialect: Dialect, op: Op[Any], clock: object = None) -> Program[Any]:
    """The program of one Op of the inbox or the dead letters, for a store of this dialect.

    :param clock: the clock of SQLite's writer, which it gives to every program.
    """
    return _PROGRAMS[type(op)](op, _TABLES[dialect])
