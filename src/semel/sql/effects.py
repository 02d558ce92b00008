"""Effects that are one SQL statement of the caller's: what kind of statement it is, and its text with the record added.

On PostgreSQL a statement can write its own record: it becomes a part of a WITH query whose main part inserts the record
with the result. The result is made by the server, as JSON. Elsewhere the statement runs as it is, and ``as_plain``
makes the same plain data of what the driver returns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from semel.core.transactional import Keep, SQLEffect
from semel.errors import ConfigurationError
from semel.sql.program import Query, load_queries

EffectStyle: TypeAlias = Literal["format", "numeric", "named", "native"]
"""How a kind of connection writes parameters: ``%s`` or ``%(name)s``, ``$1``, ``:name``; native is sqlite3's own."""


class QueryResult(NamedTuple):
    """What a driver returned for a statement of the caller's."""

    names: Sequence[str] | None
    """The columns, or None if the statement returns no rows."""
    rows: Sequence[Sequence[Any]]
    changed: int
    """How many rows the statement changed, if it returns none."""


# What kind of statement it is

_CACHED: Final = 512
"""How many statements are remembered: a program has as many as it has calls of ``execute_once``."""
_OPAQUE: Final = re.compile(
    r"""--[^\n]*|/\*.*?\*/|\$(\w*)\$.*?\$\1\$|[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`""",
    re.DOTALL,
)
"""Comments, literals and quoted names: words in them mean nothing."""
_BRACKETS: Final = re.compile(r"\([^()]*\)")
_VERB: Final = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|MERGE|REPLACE|VALUES|CALL)\b", re.IGNORECASE)
_RETURNING: Final = re.compile(r"\bRETURNING\b", re.IGNORECASE)


class _Kind(NamedTuple):
    verb: str
    returning: bool
    nested: bool
    """Whether it begins with a WITH clause of its own."""


@lru_cache(maxsize=_CACHED)
def _kind(statement: str) -> _Kind:
    bare = _OPAQUE.sub(" ", statement.strip().rstrip(";"))
    flat = ""
    while flat != bare:
        flat, bare = bare, _BRACKETS.sub(" ", bare)
    verb = _VERB.search(flat)
    if verb is None or ";" in flat:
        raise ConfigurationError(
            "statement= is one SQL statement: an INSERT, UPDATE or DELETE, or a SELECT of a function with the effect"
        )
    return _Kind(verb[0].upper(), _RETURNING.search(flat) is not None, flat.split(None, 1)[0].upper() == "WITH")


def returns_rows(statement: str) -> bool:
    """Whether the statement returns rows. Raises ConfigurationError if it is not one statement with an effect."""
    kind = _kind(statement)
    return kind.returning or kind.verb in ("SELECT", "VALUES")


def stands_in_with(statement: str) -> bool:
    """Whether PostgreSQL accepts the statement as a part of a WITH query."""
    kind = _kind(statement)
    return not kind.nested and kind.verb in ("INSERT", "UPDATE", "DELETE", "SELECT", "VALUES")


# The statement with its record, on PostgreSQL


def _record(result: str, snapshot: str) -> Query:
    """The main part of the statement: it inserts the record.

    :param result: a column of the effect's result.
    :param snapshot: the stored result, from the columns of ``record``.
    """
    return load_queries("semel.sql.dialects", "postgres_effect.sql", result=result, snapshot=snapshot)["record"]


def _sealed(payload: str) -> str:
    return f"record.header || substr(sha256(record.header || {payload}), 1, 4) || {payload}"


_WITH_ROWS: Final = _record(
    "convert_to(coalesce(CAST(json_agg(semel_effect.*) AS text), '[]'), 'UTF8') AS payload", _sealed("record.payload")
)
_CHANGED: Final = "convert_to(CAST(record.changed AS text), 'UTF8')"
# Most statements change one row. The snapshot that says so is sent along: the server spends a tenth of its time for the
# whole statement on the checksum.
_WITH_COUNT: Final = _record(
    "count(*) AS changed",
    f"CASE record.changed WHEN 1 THEN CAST(:one AS bytea) ELSE {_sealed(_CHANGED)} END",
)


@lru_cache(maxsize=_CACHED)
def _one_row(header: bytes) -> bytes:
    """The snapshot for one changed row, as the server would make it."""
    return header + sha256(header + b"1").digest()[:4] + b"1"


def bind_record(effect: SQLEffect, keep: Keep, style: EffectStyle) -> tuple[str, Any]:
    """Return the text of the effect with its record, and the parameters of both."""
    parameters = effect.parameters
    named = isinstance(parameters, Mapping)
    text, names = _record_text(effect.statement, style, -1 if named else len(parameters))
    id = keep.id
    values = {
        "id": id, "header": keep.snapshot, "place": int.from_bytes(id[:8], "big", signed=True),
        "takeover": int(keep.takeover), "nonce": keep.nonce, "ttl": keep.ttl, "fingerprint": keep.fingerprint,
        "tenant": keep.tenant, "operation": keep.operation, "key": keep.key, "one": _one_row(keep.snapshot),
    }  # fmt: skip
    if not named:
        return text, [*parameters, *[values[name] for name in names]]
    return text, {**parameters, **{f"semel_{name}": values[name] for name in names}}


@lru_cache(maxsize=_CACHED)
def _record_text(statement: str, style: EffectStyle, count: int) -> tuple[str, tuple[str, ...]]:
    """:param count: how many parameters the statement has by position; -1 if they have names."""
    rows = returns_rows(statement)
    statement = with_count(statement)
    if style == "format" and count == 0:
        statement = statement.replace("%", "%%")  # the driver leaves the text alone only if there are no parameters
    fragments = list((_WITH_ROWS if rows else _WITH_COUNT).fragments)
    names: list[str] = []
    for at in range(1, len(fragments), 2):
        name = fragments[at]
        if name not in names or style == "format":
            names.append(name)
        if count >= 0 and style in ("format", "numeric"):
            fragments[at] = "%s" if style == "format" else f"${count + names.index(name) + 1}"
        else:
            fragments[at] = f"%(semel_{name})s" if style == "format" else f":semel_{name}"
    record = " ".join("".join(fragments).split())
    # On a line of its own, because the statement may end in a comment.
    return f"WITH semel_effect AS (\n{statement}\n) {record}", tuple(names)


def with_count(statement: str) -> str:
    """The statement for PostgreSQL, without a semicolon; it returns a row for each row that it changes."""
    statement = statement.strip().rstrip(";")
    return statement if returns_rows(statement) else f"{statement}\nRETURNING 1"


# Results that the driver returned


def as_plain(found: QueryResult) -> list[dict[str, Any]] | int:
    """The rows as dicts of plain data, or how many rows were changed."""
    if found.names is None:
        return max(found.changed, 0)
    return [{name: _plain(value) for name, value in zip(found.names, row, strict=True)} for row in found.rows]


def _plain(value: Any) -> Any:
    """A value as PostgreSQL writes it in JSON."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else float(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "\\x" + bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    return str(value)
