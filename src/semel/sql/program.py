"""SQL programs: generators that yield Statements and receive their rows. They run on any connection.

A program knows neither driver nor event loop. ``sync.py`` and ``aio.py`` run it: they execute each statement and send
the rows back, or throw the error into the program when the statement was refused.

Statements are written once, in ``.sql`` files with named entries and named parameters (``:id``), and rendered to each
driver's own style when first used there.

For databases without arrays (MySQL) a statement repeats a part of its text for each Op of a batch. In the .sql file
that part stands in double brackets: ``VALUES [[(:id, :nonce)]]``, ``CASE id [[WHEN :id THEN :token]] END``. A *packet*
is one or more such statements that are sent together. Its result is the rows of the last statement that returns rows,
otherwise the number of rows that the first one changed. A packet that ``begins`` and ``ends`` is a transaction of its
own. In a transaction of the caller, BEGIN and COMMIT are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

from semel.core.ops import Op, SaveStep
from semel.core.semantics import Row
from semel.core.transactional import Keep, Lock, Occupied
from semel.errors import SemelError

R = TypeVar("R")
Rows: TypeAlias = Sequence[Sequence[Any]]
Style: TypeAlias = Literal["numeric", "format"]

_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_ARRAY: Final = re.compile(r"(?<![:\w]):([a-z_]+)::(\w+)\[\]")
_ENTRY: Final = re.compile(r"^-- name: (\w+)(?: \((reads|writes)(?:, as text (\w+))?\))?\s*$", re.MULTILINE)
_GROUP: Final = re.compile(r"\[\[(.*?)\]\]")
_SEPARATORS: Final = {"WHEN": " ", "SELECT": " UNION ALL "}
"""What separates the repetitions of a group, by its first word; by default a comma."""
_CACHED_TEXTS: Final = 1024
"""The size of the cache of repeated texts: one for each statement and batch size."""


class Query:
    """One named entry of a .sql file."""

    __slots__ = ("_rendered", "arrays", "as_text", "fragments", "name", "sql", "writes")

    def __init__(self, name: str, sql: str, writes: bool) -> None:
        self.name = name
        self.sql = sql
        self.writes = writes
        self.as_text: Query | None = None
        """The entry to send instead if the driver sends statements as text that includes the values. It is shorter, so
        the server parses and plans it faster."""
        self.arrays: Mapping[str, str] = dict(_ARRAY.findall(sql))
        """The parameters that are arrays, with the type of their elements."""
        self.fragments: Sequence[str] = _PARAMETER.split(sql)
        """The text cut at its parameters: SQL and names of parameters in turn."""
        self._rendered: dict[Style, tuple[str, tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        return f"<Query {self.name}>"

    def rendered(self, style: Style) -> tuple[str, tuple[str, ...]]:
        """Return the text in a driver's style, and the names of its parameters in order.

        ``numeric`` writes ``$1`` (asyncpg), ``format`` writes ``%s`` (psycopg, PyMySQL). sqlite3 needs no rendering.
        """
        known = self._rendered.get(style)
        if known is None:
            known = self._rendered[style] = _render(self.sql, style)
        return known

    def __call__(self, **params: Any) -> Statement:
        return Statement(self, params)


class Statement:
    """A query and its parameters. Programs yield these."""

    __slots__ = ("params", "query")

    def __init__(self, query: Query, params: dict[str, Any]) -> None:
        self.query = query
        self.params = params

    def __repr__(self) -> str:
        return f"<Statement {self.query.name}>"

    def values(self, style: Style) -> tuple[str, list[Any]]:
        """Return the text and the positional values for a driver of this style."""
        query = self.query
        text, names = query._rendered.get(style) or query.rendered(style)
        return text, list(map(self.params.__getitem__, names))


Program: TypeAlias = Generator[Statement, Rows, R]


class TransactionPrograms(Protocol):
    """The programs of a dialect for the transactional mode. They run on the caller's connection."""

    def lock(self, op: Lock) -> Program[Row | Occupied | None]:
        """Lock the key for the rest of the transaction. Returns the record, if there is one."""
        ...

    def keep(self, op: Keep) -> Program[bool]:
        """Write the finished record with one statement. Returns False if the record has changed in the meantime."""
        ...

    def save_step(self, op: SaveStep) -> Program[bool]:
        """Save a step. Returns False if another attempt owns the record by now."""
        ...

    def step_saved(self, id: bytes, name: str) -> Program[bool]:
        """Whether this step is saved."""
        ...


def _render(sql: str, style: Style) -> tuple[str, tuple[str, ...]]:
    names: list[str] = []

    def numeric(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    def positional(match: re.Match[str]) -> str:
        names.append(match[1])
        return "%s"

    if style == "numeric":
        return _PARAMETER.sub(numeric, sql), tuple(names)
    return _PARAMETER.sub(positional, sql.replace("%", "%%")), tuple(names)


def load_queries(package: str, file: str, **replacements: str) -> dict[str, Query]:
    """Return the entries of a .sql file. ``-- name: claim (writes)`` starts one; ``{{word}}`` is replaced, also by an
    earlier entry of that name.

    ``(writes, as text other)``: if the driver sends text with values, the entry ``other`` is sent instead.
    """
    text = resources.files(package).joinpath(file).read_text("utf-8")
    for word, replacement in replacements.items():
        text = text.replace("{{" + word + "}}", replacement)
    parts = _ENTRY.split(text)[1:]
    entries: dict[str, Query] = {}
    for name, kind, body in zip(parts[::4], parts[1::4], parts[3::4], strict=True):
        lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
        # Drivers cache prepared statements by their text, some only up to a certain length: remove spare blanks.
        sql = " ".join(" ".join(lines).split()).rstrip(";")
        for part in entries.values():
            sql = sql.replace("{{" + part.name + "}}", part.sql)
        entries[name] = Query(name, sql, kind != "reads")
    for name, other in zip(parts[::4], parts[2::4], strict=True):
        entries[name].as_text = entries[other] if other else None
    return entries


_BEGIN, _COMMIT, _ROLLBACK = (Query(word.lower(), word, True) for word in ("BEGIN", "COMMIT", "ROLLBACK"))


def in_transaction(program: Program[R]) -> Program[R]:
    """Run a program of several statements in a transaction of its own, in PostgreSQL."""
    yield _BEGIN()
    try:
        result = yield from program
        yield _COMMIT()
    except SemelError:
        yield _ROLLBACK()
        raise
    return result


# Packets, for databases without arrays


class Piece:
    """One statement of a packet: a query, a row of parameters for each Op, and shared parameters."""

    __slots__ = ("params", "query", "rows")

    def __init__(self, query: Query, rows: Sequence[Mapping[str, Any]] = (), /, **params: Any) -> None:
        self.query = query
        self.rows = rows
        self.params = params

    def __repr__(self) -> str:
        return f"<Piece {self.query.name} of {len(self.rows)}>"

    def values(self) -> tuple[str, list[Any]]:
        """Return the text with ``%s`` for each value, and the values in order."""
        text, order = _repeated(self.query, len(self.rows))
        rows, shared = self.rows, self.params
        return text, [shared[name] if at < 0 else rows[at][name] for at, name in order]


class Packet(Statement):
    """Pieces that are sent together."""

    __slots__ = ("begins", "ends", "pieces")

    def __init__(self, *pieces: Piece, begins: bool = False, ends: bool = False) -> None:
        super().__init__(pieces[-1].query if pieces else _NOTHING, {})
        self.pieces = pieces
        self.begins = begins
        self.ends = ends

    @classmethod
    def transaction(cls, *pieces: Piece) -> Packet:
        """Return a packet that is a transaction."""
        return cls(*pieces, begins=True, ends=True)

    def __repr__(self) -> str:
        return f"<Packet {', '.join(piece.query.name for piece in self.pieces)}>"

    def values(self, style: Style) -> tuple[str, list[Any]]:
        """Return the text and values for a driver that accepts several statements at once, without BEGIN and COMMIT."""
        assert style == "format", "all drivers of databases without arrays have this style"
        parts = [piece.values() for piece in self.pieces]
        return "; ".join(text for text, _ in parts), [value for _, values in parts for value in values]


_NOTHING: Final = Query("nothing", "", False)


@lru_cache(maxsize=_CACHED_TEXTS)
def _repeated(query: Query, size: int) -> tuple[str, list[tuple[int, str]]]:
    """Return the text for ``size`` rows, and the source of each value: its row, or -1 if shared, and its name."""
    texts: list[str] = []
    order: list[tuple[int, str]] = []
    for at, part in enumerate(_GROUP.split(query.sql)):
        text, names = _render(part, "format")
        if at % 2:  # every second part was in brackets
            texts.append(_SEPARATORS.get(part.partition(" ")[0], ", ").join([text] * size))
            order += [(row, name) for row in range(size) for name in names]
        else:
            texts.append(text)
            order += [(-1, name) for name in names]
    return "".join(texts), order


# Batches of Ops

PENDING: Final = object()
"""A placeholder for an answer that has not arrived."""


def batch(
    ops: Sequence[Op[Any]],
    answers: list[Any] | None,
    programs: Mapping[type[Op[Any]], Callable[[Any], Program[list[Any]]]],
) -> Program[list[Any]]:
    """Run a batch of Ops as one program. Ops of one kind share a statement; Ops on one record keep their order.

    :param answers: filled in as the answers arrive, so that if the program fails, it holds those that are committed.
    :param programs: for each kind of Op, the program for a list of them.
    """
    if answers is None:
        answers = [PENDING] * len(ops)
    for group in _groups(ops):
        # Rows are locked in this order. It is the same for all, so that two batches cannot deadlock.
        group.sort(key=lambda i: ops[i].id)
        found = yield from programs[type(ops[group[0]])]([ops[i] for i in group])
        for i, answer in zip(group, found, strict=True):
            answers[i] = answer
    return answers


def _groups(ops: Sequence[Op[Any]]) -> list[list[int]]:
    """Group the positions of Ops of one kind. No id occurs twice in a group: a statement changes a row only once."""
    groups: list[list[int]] = []
    open_group: dict[type[Op[Any]], int] = {}
    last_seen: dict[bytes, int] = {}
    for i, op in enumerate(ops):
        kind = type(op)
        at = open_group.get(kind, -1)
        if at <= last_seen.get(op.id, -1):
            at = open_group[kind] = len(groups)
            groups.append([])
        groups[at].append(i)
        last_seen[op.id] = at
    return groups
