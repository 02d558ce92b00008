"""The programs of the outbox and its relays. They know the tables of messages, and no driver.

PostgreSQL does each Op in one statement, or in a few that are right one by one. SQLite and MySQL have no such
statements; there an Op is a transaction of small ones, and both share its program: SQLite runs it in the writer's
transaction and gets lists as JSON, MySQL gets the statements of a step in one packet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from semel.core.messaging.messages import (
    LANES,
    MAX_STARTED_BYTES,
    DestinationDepth,
    HeldStream,
    InspectOutbox,
    JoinRelays,
    LeaveRelays,
    LogOwned,
    NewMessage,
    OutboxMode,
    OutboxState,
    Outgoing,
    SettleMessages,
    StartMessages,
    SwitchMode,
    TakeLog,
    lane_of,
)
from semel.core.ops import Op
from semel.errors import ConfigurationError
from semel.sql.connections.adopt import Dialect
from semel.sql.connections.errors import DuplicateRow
from semel.sql.program import Packet, Piece, Program, Rows, Statement, load_queries

_LONGEST: Final = 366 * 86400.0
"""The longest time that a message is put off, in seconds."""
_BYTES: Final = str(MAX_STARTED_BYTES)
read_json: Final = json.JSONDecoder().raw_decode
"""As ``json.loads``, without looking for blanks around: it is called for every message that is sent."""


def outgoing(rows: Rows) -> tuple[Outgoing, ...]:
    """The messages of these rows. Those with equal headers share them, because to read them takes half of the time."""
    found = []
    text, shared = "{}", dict[str, str]()
    for (
        position, starts, id, type, data, source, destination, stream, sequence, subject, content_type, created,
        headers, redrives,
    ) in rows:  # fmt: skip
        if headers != text:
            text, shared = headers, read_json(headers)[0]
        each = Outgoing(
            id, type, bytes(data), source, destination, stream, sequence, subject, content_type, float(created), shared,
            redrives, position, starts,
        )  # fmt: skip
        found.append(each)
    return tuple(found)


# PostgreSQL

_P: Final = load_queries(
    "semel.sql.dialects", "postgres_outbox.sql", now="statement_timestamp()", lanes=str(LANES), bytes=_BYTES
)


def _join(op: JoinRelays) -> Program[tuple[int, ...]]:
    # Three statements, because each has to see what the one before it has done. A crash between them does no harm.
    yield _P["bury"]()
    yield _P["join"](relay=op.relay, lease=op.lease)
    return tuple(row[0] for row in (yield _P["balance"](relay=op.relay)))


def _start(op: StartMessages) -> Program[tuple[Outgoing, ...] | None]:
    if op.ahead:
        return outgoing((yield _P["ahead"](relay=op.relay, after=op.after, most=op.limit)))
    rows = yield _P["start"](relay=op.relay, after=op.after, most=op.limit, lease=op.lease)
    if not rows:
        return None
    return () if rows[0][0] is None else outgoing(rows)


def settle(op: SettleMessages) -> Program[bool | None]:
    """Settle messages that a relay has started (PostgreSQL)."""
    if not op.failed and not op.dead:
        return _settled((yield _P["settle_sent"](relay=op.relay, sent=op.sent, next=op.then, lease=op.lease)))
    rows = yield _P["settle"](
        relay=op.relay,
        sent=op.sent,
        failed=[failure.position for failure in op.failed],
        failures=[failure.reason for failure in op.failed],
        afters=[min(failure.after, _LONGEST) for failure in op.failed],
        counts=[int(failure.counts) for failure in op.failed],
        dead=[letter.position for letter in op.dead],
        causes=[letter.reason for letter in op.dead],
        parks=[int(letter.park) for letter in op.dead],
        next=op.then,
        lease=op.lease,
    )
    return _settled(rows)


def _settled(rows: Rows) -> bool | None:
    """The answer of a row that says whether all that was read ahead is still there; no row: the lease has ended."""
    return (rows[0][0] or None) if rows else False


def _leave(op: LeaveRelays) -> Program[None]:
    yield _P["leave"](relay=op.relay)


def _inspect(op: InspectOutbox) -> Program[OutboxState]:
    ((mode, retained),) = yield _P["mode"]()
    depths = yield _P["depths"](most=op.look + 1)
    held = yield _P["held"](most=op.limit, look=op.look)
    return _state(op, depths, held, (yield _P["owners"]()), mode, retained)


def _state(
    op: InspectOutbox, depths: Rows, held: Rows, owners: Rows, mode: OutboxMode = "queue", retained: int | None = None
) -> OutboxState:
    return OutboxState(
        tuple(DestinationDepth(name, count, failing, float(age)) for name, count, failing, age in depths),
        tuple(
            HeldStream(stream, count, None if left is None else max(0.0, float(left)), reason)
            for stream, count, left, reason in held
        ),
        relays=owners[0][0],
        lanes=owners[0][1],
        mode=mode,
        retained=retained,
        more=sum(row[1] for row in depths) > op.look,
    )


POSTGRES_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any], Program[Any]]]] = {
    JoinRelays: _join,
    StartMessages: _start,
    SettleMessages: settle,
    LeaveRelays: _leave,
    InspectOutbox: _inspect,
}


# SQLite and MySQL: transactions of small statements

_Step = tuple[str, Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]
"""A statement's name, its list of rows if it has one, and its other parameters."""


def _step(name: str, rows: Sequence[Mapping[str, Any]] | None = None, /, **params: Any) -> _Step:
    return name, rows, params


class _Transaction(Protocol):
    """Runs steps in a transaction, and returns the rows of the last one. Steps with an empty list are left out."""

    def __call__(self, *steps: _Step, begins: bool = False, ends: bool = False) -> Program[Rows]: ...


_S: Final = load_queries("semel.sql.dialects", "sqlite_outbox.sql", bytes=_BYTES)
_M: Final = load_queries("semel.sql.dialects", "mysql_outbox.sql", now="UTC_TIMESTAMP(6)", bytes=_BYTES)


def _in_sqlite(clock: Callable[[], int]) -> _Transaction:
    def run(*steps: _Step, begins: bool = False, ends: bool = False) -> Program[Rows]:
        found: Rows = ()
        for name, rows, params in steps:
            if rows is None:
                found = yield _S[name](now=clock(), **params)
            elif rows:
                found = yield _S[name](now=clock(), rows=json.dumps(rows), **params)
        return found

    return run


def _in_mysql(*steps: _Step, begins: bool = False, ends: bool = False) -> Program[Rows]:
    pieces = [Piece(_M[name], rows or (), **params) for name, rows, params in steps if rows is None or rows]
    return (yield Packet(*pieces, begins=begins, ends=ends))


def _micros(seconds: float) -> int:
    return round(min(seconds, _LONGEST) * 1_000_000)


def _join_in(op: JoinRelays, run: _Transaction) -> Program[tuple[int, ...]]:
    lanes = yield from run(_step("lock_lanes"), begins=True)
    if len(lanes) < LANES:
        lanes = yield from run(_step("add_lanes", [{"lane": lane} for lane in range(LANES)]), _step("lock_lanes"))
    relays = yield from run(_step("relays"))
    living = {bytes(relay) for relay, alive, _ in relays if alive}
    mine = [lane for lane, relay in lanes if relay == op.relay and op.relay in living]
    free = [lane for lane, relay in lanes if relay not in living]
    share = -(-LANES // len(living | {op.relay}))
    taken, surplus = free[: max(0, share - len(mine))], mine[share:]
    yield from run(
        _step("count_starts", [{"position": p} for _, alive, s in relays if not alive for p in json.loads(s)]),
        _step("remove_relays", [{"relay": bytes(relay).hex().upper()} for relay, alive, _ in relays if not alive]),
        _step("join", relay=op.relay, lease=_micros(op.lease)),
        _step("free_lanes", [{"lane": lane} for lane in free + surplus if lane not in taken]),
        _step("take_lanes", [{"lane": lane} for lane in taken], relay=op.relay),
        ends=True,
    )
    return tuple(sorted(mine[:share] + taken))


def _start_in(op: StartMessages, run: _Transaction) -> Program[tuple[Outgoing, ...] | None]:
    search = _step("found", relay=op.relay, after=op.after, most=op.limit)
    if op.ahead:
        return outgoing((yield from run(search)))
    found = outgoing((yield from run(_step("renew", relay=op.relay, lease=_micros(op.lease)), search, begins=True)))
    if not found and not (yield from run(_step("lock", relay=op.relay))):
        yield from run(ends=True)
        return None
    started = json.dumps([one.position for one in found])
    yield from run(_step("started", relay=op.relay, started=started), ends=True)
    return found


def _settle_in(op: SettleMessages, run: _Transaction) -> Program[bool | None]:
    # The lease is renewed first: it may end while messages are deleted, and the next ones are sent under a new one.
    renewal = [_step("renew", relay=op.relay, lease=_micros(op.lease))] if op.then else []
    rows = yield from run(*renewal, _step("lock", relay=op.relay), begins=True)
    if not rows:
        yield from run(ends=True)
        return False
    # Only what the relay has started is settled. A repeat finds nothing there.
    started = set(json.loads(rows[0][0]))
    sent = [{"position": position} for position in op.sent if position in started]
    failed = {failure.position: failure for failure in op.failed if failure.position in started}
    dead = {letter.position: letter for letter in op.dead if letter.position in started}
    steps = [_step("release_holds", sent), _step("delete", sent)]
    if failed or dead:
        given = [{"position": position} for position in (*failed, *dead)]
        rows = yield from run(*steps, _step("streams", given))
        steps, streams = [], {position: (stream, id) for position, stream, id in rows}
        failed = {position: failure for position, failure in failed.items() if position in streams}
        waits = {p: {"position": p, "after": _micros(f.after), "reason": f.reason} for p, f in failed.items()}
        # In reverse, because the first message of a stream says how long and why it waits.
        holds = {streams[p][0]: row for p, row in sorted(waits.items(), reverse=True) if streams[p][0]}
        parked = {streams[p][0]: p for p in sorted(dead, reverse=True) if p in streams and dead[p].park}
        parked.pop("", None)
        letters = [{"position": position, "reason": letter.reason} for position, letter in dead.items()]
        for stream, position in parked.items():
            reason = f"its stream is parked since {streams[position][1]}"
            rows = yield from run(_step("followers", stream=stream, position=position))
            letters += [{"position": row[0], "reason": reason} for row in rows if row[0] not in dead]
        steps = [
            _step("count_starts", [{"position": position} for position, failure in failed.items() if failure.counts]),
            _step("put_off", [row for position, row in waits.items() if not streams[position][0]]),
            _step("hold", [{"stream": stream, **row} for stream, row in holds.items()]),
            _step("park", [{"stream": stream, "reason": dead[position].reason} for stream, position in parked.items()]),
            _step("bury", letters),
            _step("delete", letters),
        ]
    then = op.then
    if then:
        rows = yield from run(*steps, _step("count", [{"position": position} for position in then]))
        steps, then = [], then if rows[0][0] == len(then) else ()
    yield from run(*steps, _step("started", relay=op.relay, started=json.dumps(then)), ends=True)
    return True if then == op.then else None


def _leave_in(op: LeaveRelays, run: _Transaction) -> Program[None]:
    yield from run(_step("free_lanes_of", relay=op.relay), _step("leave", relay=op.relay), begins=True, ends=True)


def _inspect_in(op: InspectOutbox, run: _Transaction) -> Program[OutboxState]:
    depths = yield from run(_step("depths", most=op.look + 1))
    held = yield from run(_step("held", most=op.limit, look=op.look))
    return _state(op, depths, held, (yield from run(_step("owners"))))


def _take_in(op: TakeLog, run: _Transaction) -> Program[LogOwned]:
    yield from ()
    return LogOwned("queue")


def _switch_in(op: SwitchMode, run: _Transaction) -> Program[bool]:
    yield from ()
    if op.mode != "queue":
        raise ConfigurationError(f"the mode {op.mode!r} of an outbox needs PostgreSQL; here it is always a queue")
    return True


_IN_TRANSACTION: Final[dict[type[Op[Any]], Callable[[Any, _Transaction], Program[Any]]]] = {
    JoinRelays: _join_in,
    StartMessages: _start_in,
    SettleMessages: _settle_in,
    LeaveRelays: _leave_in,
    InspectOutbox: _inspect_in,
    TakeLog: _take_in,
    SwitchMode: _switch_in,
}


def sqlite_program(op: Op[Any], clock: Callable[[], int]) -> Program[Any]:
    """The program of one Op, for the writer of a SQLite file."""
    return _IN_TRANSACTION[type(op)](op, _in_sqlite(clock))


def mysql_program(op: Op[Any]) -> Program[Any]:
    """The program of one Op, for a connection of our own to MySQL."""
    return _IN_TRANSACTION[type(op)](op, _in_mysql)


# The caller's connection: add a message


def add_message(dialect: Dialect, message: NewMessage, prepares: bool) -> Program[None]:
    """Add a message to the outbox. It is not added if its id is there already.

    :param prepares: whether the driver prepares each statement.
    """
    params = {
        "id": message.id, "type": message.type, "data": message.data, "source": message.source,
        "destination": message.destination, "stream": message.stream, "subject": message.subject,
        "content_type": message.content_type, "headers": json.dumps(message.headers) if message.headers else "{}",
        "lane": lane_of(message.stream, message.id), "delay": message.delay,
    }  # fmt: skip
    if dialect == "postgresql":
        params["fresh"] = message.fresh
        if prepares and message.fresh:
            rows = yield Statement(_P["add_fresh_to_stream" if message.stream else "add_fresh"], params)
            if rows:
                return
        yield Statement(_P["add"], params)
        return
    params["delay"] = round(message.delay * 1_000_000)
    # The row of the stream is locked before the insert takes a position.
    queries = _S if dialect == "sqlite" else _M
    if message.stream:
        yield queries["bump"](stream=message.stream)
    try:
        if dialect == "sqlite":
            new = bool((yield _S["add"](**params, now=time.time_ns() // 1000)))
        else:
            yield _M["add_to_stream" if message.stream else "add"](**params)
            new = True
    except DuplicateRow:
        new = False
    if message.stream and not new:
        yield queries["unbump"](stream=message.stream)


RELAY_OPS: Final[tuple[type[Op[Any]], ...]] = tuple(_IN_TRANSACTION)
