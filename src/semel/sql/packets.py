"""Statements for databases without arrays: a statement is repeated row by row, and several travel in one packet.

In a .sql file ``[[…]]`` stands once for every Op of the batch: ``VALUES [[(:id, :nonce)]]``, ``CASE id [[WHEN :id THEN
:token]] END``. A *packet* is one or more such statements that are sent together, and answered by the rows of the last
that has some or else by how many rows the first one touched. One that ``begins`` and ``ends`` is a transaction of its
own; on a connection whose transaction is the caller's these two words are left out: the step is the caller's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from semel.sql.program import Query, Statement, Style

__all__ = ["Packet", "Piece"]

_GROUP: Final = re.compile(r"\[\[(.*?)\]\]")
_BETWEEN: Final = {"WHEN": " ", "SELECT": " UNION ALL "}
"""What stands between the repetitions of a group, by its first word; of all others, a comma."""
_SIZES: Final = 1024
"""Texts that are remembered: one for each statement and size of batch."""


class Piece:
    """One statement of a packet: a query, a row of parameters for each Op, and parameters that all of them share."""

    __slots__ = ("params", "query", "rows")

    def __init__(self, query: Query, rows: Sequence[Mapping[str, Any]] = (), /, **params: Any) -> None:
        self.query = query
        self.rows = rows
        self.params = params

    def __repr__(self) -> str:
        return f"<Piece {self.query.name} of {len(self.rows)}>"

    def filled(self) -> tuple[str, list[Any]]:
        """The text with ``%s`` for each value, and the values in order."""
        text, order = _written(self.query, len(self.rows))
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
    def whole(cls, *pieces: Piece) -> Packet:
        """All of them or none."""
        return cls(*pieces, begins=True, ends=True)

    def __repr__(self) -> str:
        return f"<Packet {', '.join(piece.query.name for piece in self.pieces)}>"

    def values(self, style: Style) -> tuple[str, list[Any]]:
        """For a driver that takes several statements at once; without the transaction's words."""
        assert style == "format", "databases without arrays have drivers of this style"
        filled = [piece.filled() for piece in self.pieces]
        return "; ".join(text for text, _ in filled), [value for _, values in filled for value in values]


_NOTHING: Final = Query("nothing", "", False)


@lru_cache(maxsize=_SIZES)
def _written(query: Query, size: int) -> tuple[str, list[tuple[int, str]]]:
    """The text for so many rows, and where each value comes from: the number of the row (-1: shared), and the name."""
    texts: list[str] = []
    order: list[tuple[int, str]] = []
    for at, part in enumerate(_GROUP.split(query.sql)):
        # Every other part stands in brackets.
        text, names = Query("part", part, False).rendered("format")
        if at % 2:
            texts.append(_BETWEEN.get(part.partition(" ")[0], ", ").join([text] * size))
            order += [(row, name) for row in range(size) for name in names]
        else:
            texts.append(text)
            order += [(-1, name) for name in names]
    return "".join(texts), order
