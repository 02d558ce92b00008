"""A SQL program is a generator that yields Statements and is sent their rows, or thrown what refused them. It runs on
any connection.

Statements are written once, in ``.sql`` files with named entries and named parameters (``:id``), and rendered to each
driver's own style when first used there. A program knows neither driver nor event loop; what runs it is at the bottom.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from importlib import resources
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

from semel.errors import StoreUnavailable

__all__ = [
    "AsyncConnection",
    "Connection",
    "Program",
    "Query",
    "Rows",
    "Statement",
    "Style",
    "load_queries",
    "run",
    "run_async",
]

R = TypeVar("R")
Rows: TypeAlias = Sequence[Sequence[Any]]
Style: TypeAlias = Literal["named", "numeric", "format"]

_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_ARRAY: Final = re.compile(r"(?<![:\w]):([a-z_]+)::(\w+)\[\]")
_ENTRY: Final = re.compile(r"^-- name: (\w+)(?: \((reads|writes)(?:, as text (\w+))?\))?\s*$", re.MULTILINE)


class Query:
    """One named entry of a .sql file."""

    __slots__ = ("_rendered", "arrays", "as_text", "name", "sql", "writes")

    def __init__(self, name: str, sql: str, writes: bool) -> None:
        self.name = name
        self.sql = sql
        self.writes = writes
        self.as_text: Query | None = None
        """How the same is said where it travels as text, with its values: in words that are soon read and planned."""
        self.arrays: Mapping[str, str] = dict(_ARRAY.findall(sql))
        """Parameters that are arrays, by the type of their elements."""
        self._rendered: dict[Style, tuple[str, tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        return f"<Query {self.name}>"

    def rendered(self, style: Style) -> tuple[str, tuple[str, ...]]:
        """The text in a driver's style, and the names of its parameters in order.

        ``named`` keeps ``:id`` (sqlite3), ``numeric`` writes ``$1`` (asyncpg), ``format`` writes ``%s`` (psycopg,
        PyMySQL).
        """
        known = self._rendered.get(style)
        if known is None:
            known = self._rendered[style] = _render(self.sql, style)
        return known

    def __call__(self, **params: Any) -> Statement:
        return Statement(self, params)


class Statement:
    """A query and its parameters: what a program yields."""

    __slots__ = ("params", "query")

    def __init__(self, query: Query, params: Mapping[str, Any]) -> None:
        self.query = query
        self.params = params

    def __repr__(self) -> str:
        return f"<Statement {self.query.name}>"

    def values(self, style: Style) -> tuple[str, list[Any]]:
        """Text and positional values for a driver of this style."""
        text, names = self.query.rendered(style)
        return text, [self.params[name] for name in names]


Program: TypeAlias = Generator[Statement, Rows, R]


def _render(sql: str, style: Style) -> tuple[str, tuple[str, ...]]:
    names: list[str] = []

    def numeric(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    def positional(match: re.Match[str]) -> str:
        names.append(match[1])
        return "%s"

    if style == "named":
        return sql, tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    if style == "numeric":
        return _PARAMETER.sub(numeric, sql), tuple(names)
    return _PARAMETER.sub(positional, sql.replace("%", "%%")), tuple(names)


def load_queries(package: str, file: str, **replacements: str) -> dict[str, Query]:
    """The entries of a .sql file. ``-- name: claim (writes)`` begins one; ``{{word}}`` is replaced.

    ``(writes, as text other)``: where it travels as text, that entry is sent for it.
    """
    text = resources.files(package).joinpath(file).read_text("utf-8")
    for word, replacement in replacements.items():
        text = text.replace("{{" + word + "}}", replacement)
    parts = _ENTRY.split(text)[1:]
    entries: dict[str, Query] = {}
    for name, kind, body in zip(parts[::4], parts[1::4], parts[3::4], strict=True):
        lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
        # Short texts matter: drivers cache what they prepare by text, and some not beyond a length.
        sql = " ".join(" ".join(lines).split()).rstrip(";")
        entries[name] = Query(name, sql, kind != "reads")
    for name, other in zip(parts[::4], parts[2::4], strict=True):
        entries[name].as_text = entries[other] if other else None
    return entries


class Connection(Protocol):
    """One driver's connection, wrapped: runs one statement. Errors come out as StoreErrors."""

    def execute(self, statement: Statement) -> Rows: ...


class AsyncConnection(Protocol):
    async def execute(self, statement: Statement) -> Rows: ...


def run(program: Program[R], connection: Connection) -> R:
    """Run a program to its end on a sync connection."""
    try:
        statement = next(program)
        while True:
            try:
                rows = connection.execute(statement)
            except StoreUnavailable as error:
                statement = program.throw(error)
            else:
                statement = program.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def run_async(program: Program[R], connection: AsyncConnection) -> R:
    """Run a program to its end on an async connection."""
    try:
        statement = next(program)
        while True:
            try:
                rows = await connection.execute(statement)
            except StoreUnavailable as error:
                statement = program.throw(error)
            else:
                statement = program.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
