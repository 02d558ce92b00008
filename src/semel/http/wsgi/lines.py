"""Header lines, paths and status lines, converted between WSGI, which has them as latin-1 text, and bytes."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from semel.http.contract.exchange import KEY_HEADER, KeyHeader

__all__ = ["Lines", "as_bytes", "as_text", "header_lines", "path_text", "status_line"]

Lines: TypeAlias = list[tuple[str, str]]
_PATH: Final = ("SCRIPT_NAME", "PATH_INFO")


def header_lines(environ: dict[str, Any], key_header: KeyHeader = KEY_HEADER) -> list[tuple[bytes, bytes]]:
    """Return the header lines of a request.

    Servers join repeated lines with a comma. So a key with a comma in it counts as several lines: otherwise two halves
    of a quoted text could be joined to a valid key.
    """
    key = key_header.variable
    lines = [
        # A middleware may have added a line of its own, with text that no server would pass on.
        (_name(name), value.encode("latin-1", "backslashreplace"))
        for name, value in environ.items()
        if name.startswith("HTTP_") and name != key and isinstance(value, str)
    ]
    if key in environ:
        lines += [(key_header.name, part.encode("latin-1")) for part in environ[key].split(",")]
    if environ.get("CONTENT_TYPE"):
        lines.append((b"content-type", environ["CONTENT_TYPE"].encode("latin-1")))
    return lines


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    """The name of a header line, from that of its variable in the environ."""
    return name[5:].replace("_", "-").lower().encode("latin-1")


def as_bytes(lines: Lines) -> list[tuple[bytes, bytes]]:
    """Convert header lines of an application to bytes, with lower-case names."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines]


def as_text(lines: list[tuple[bytes, bytes]]) -> Lines:
    """Convert header lines from bytes to what a server accepts."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in lines]


def path_text(environ: dict[str, Any], *parts: str) -> str:
    """Return the whole path, percent-decoded. Bytes that are not UTF-8 become lone surrogates."""
    path = "".join([environ.get(name, "") for name in parts or _PATH])
    return path if path.isascii() else path.encode("latin-1").decode("utf-8", "surrogateescape")


@lru_cache(maxsize=256)
def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"
