"""The programs of the history of events. They know its two tables, and no driver.

Every dialect has statements of the same names, so that each program is written once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from semel.core.ops import Op
from semel.core.trail.minutes import Minute, sum_rows
from semel.core.trail.moments import (
    FindLinked,
    ForgetTrail,
    KeepTrail,
    Moment,
    ReadMinutes,
    ReadRecent,
    ReadStories,
    when,
)
from semel.sql.connections.adopt import Dialect
from semel.sql.program import Packet, Piece, Program, Rows, load_queries

_NOW: Final[Mapping[Dialect, str]] = {
    "postgresql": "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint",
    "sqlite": "",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
}
_FILES: Final[Mapping[Dialect, str]] = {"postgresql": "postgres", "sqlite": "sqlite", "mysql": "mysql"}


class _TrailTables:
    """The statements of one dialect, and how it takes lists of rows."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._queries = load_queries("semel.sql.dialects", f"{_FILES[dialect]}_trail.sql", now=_NOW[dialect])

    def ask(self, name: str, rows: Sequence[Mapping[str, Any]] = (), /, **params: Any) -> Program[Rows]:
        """Run a statement with a list of rows: all at once, or one after the other on SQLite."""
        query = self._queries[name]
        if self.dialect == "mysql":
            return (yield Packet(Piece(query, [{**params, **row} for row in rows], **params)))
        if self.dialect == "postgresql":
            for column in rows[0] if rows else ():
                params[f"{column}s"] = [row[column] for row in rows]
            return (yield query(**params))
        found: list[Sequence[Any]] = []
        for row in rows or ({},):
            found += yield query(**params, **row)
        return found

    def count(self, rows: Rows) -> int:
        """How many rows a statement with ``RETURNING 1`` has changed; MySQL says it without."""
        return int(rows[0][0]) if self.dialect == "mysql" else len(rows)


_TABLES: Final[Mapping[Dialect, _TrailTables]] = {dialect: _TrailTables(dialect) for dialect in _FILES}


def _row(moment: Moment) -> dict[str, Any]:
    return {
        "at": round(moment.at * 1e6), "number": moment.number, "id": moment.id, "root": moment.root,
        "attempt": moment.attempt, "kind": moment.kind, "route": moment.route, "who": moment.who,
        "detail": json.dumps(moment.details),
    }  # fmt: skip


def _moment(row: Sequence[Any]) -> Moment:
    at, id, kind, route, who, attempt, root, details, number = row
    return Moment(
        at / 1e6, bytes(id), kind, route, who, attempt, bytes(root), json.loads(details), bytes(number)
    )  # fmt: skip


def _keep(op: KeepTrail, tables: _TrailTables) -> Program[None]:
    # Both statements may be sent again, so they need no transaction around them.
    if op.moments:
        yield from tables.ask("add_moments", [_row(moment) for moment in op.moments])
    if op.minutes:
        rows = [
            {"at": row.at, "writer": op.writer, "route": row.route, "count": row.count, "kind": row.kinds}
            for row in op.minutes
        ]
        yield from tables.ask("add_minutes", rows)


def _forget(op: ForgetTrail, tables: _TrailTables) -> Program[int]:
    # Only SQLite, which has no clock of a server, needs the time.
    now = {"now": time.time_ns() // 1000} if tables.dialect == "sqlite" else {}
    moments = yield from tables.ask("forget_moments", older=round(op.older * 1e6), most=op.limit, **now)
    minutes = yield from tables.ask("forget_minutes", older=round(op.older_minutes), most=op.limit, **now)
    return tables.count(moments) + tables.count(minutes)


def _linked(op: FindLinked, tables: _TrailTables) -> Program[tuple[bytes, ...]]:
    return tuple(bytes(row[0]) for row in (yield from tables.ask("linked", root=op.root, most=op.limit)))


def _stories(op: ReadStories, tables: _TrailTables) -> Program[tuple[Moment, ...]]:
    if not op.ids:
        return ()
    rows = yield from tables.ask("stories", [{"id": id} for id in op.ids], most=op.limit)
    return tuple(sorted(map(_moment, rows), key=when)[: op.limit])


def _recent(op: ReadRecent, tables: _TrailTables) -> Program[tuple[Moment, ...]]:
    params = {"route": op.route, "look": op.limit if op.route is None else op.look, "most": op.limit}
    rows: list[Sequence[Any]] = []
    if not op.kinds:
        rows += yield from tables.ask("newest", **params)
    for kind in op.kinds:
        rows += yield from tables.ask("newest_of_kind", kind=kind, **params)
    return tuple(sorted(map(_moment, rows), key=when, reverse=True)[: op.limit])


def _minutes(op: ReadMinutes, tables: _TrailTables) -> Program[tuple[Minute, ...]]:
    rows = yield from tables.ask("minutes", since=op.since, until=op.until)
    return sum_rows((at, route, kinds) for at, route, kinds in rows)


_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any, _TrailTables], Program[Any]]]] = {
    KeepTrail: _keep,
    ForgetTrail: _forget,
    FindLinked: _linked,
    ReadStories: _stories,
    ReadRecent: _recent,
    ReadMinutes: _minutes,
}


def trail_program(dialect: Dialect, op: Op[Any], clock: object = None) -> Program[Any]:
    """The program of one Op of a trail, for a store of this dialect.

    :param clock: the clock of SQLite's writer, which it gives to every program.
    """
    return _PROGRAMS[type(op)](op, _TABLES[dialect])
