"""Header lines, paths and status lines between WSGI, whose texts are bytes in disguise (latin-1), and the contract."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, TypeAlias

__all__ = ["KEY", "Lines", "as_bytes", "as_text", "header_lines", "path_text", "status_line"]

Lines: TypeAlias = list[tuple[str, str]]
KEY: Final = "HTTP_IDEMPOTENCY_KEY"
_PATH: Final = ("SCRIPT_NAME", "PATH_INFO")


def header_lines(environ: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """The header lines of a request. Servers join repeated ones with a comma, and then nobody can tell any more.

    So a key with a comma in it counts as several lines: of two halves of a quoted text, one valid key could be joined.
    """
    lines = [
        # An application may have put a line of its own there, with text that no server would give.
        (_name(name), value.encode("latin-1", "backslashreplace"))
        for name, value in environ.items()
        if name.startswith("HTTP_") and name != KEY and isinstance(value, str)
    ]
    if KEY in environ:
        lines += [(b"idempotency-key", part.encode("latin-1")) for part in environ[KEY].split(",")]
    if environ.get("CONTENT_TYPE"):
        lines.append((b"content-type", environ["CONTENT_TYPE"].encode("latin-1")))
    return lines


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    """Of a header line, from that of its variable; clients send the same few, so they are kept."""
    return name[5:].replace("_", "-").lower().encode("latin-1")


def as_bytes(lines: Lines) -> list[tuple[bytes, bytes]]:
    """Header lines as an application gives them, as they are stored."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines]


def as_text(lines: list[tuple[bytes, bytes]]) -> Lines:
    """Stored header lines, as a server takes them."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in lines]


def path_text(environ: dict[str, Any], *parts: str) -> str:
    """The whole path, percent-decoded. One that is no UTF-8 keeps its bytes as lone surrogates, which no key allows."""
    path = "".join([environ.get(name, "") for name in parts or _PATH])
    return path if path.isascii() else path.encode("latin-1").decode("utf-8", "surrogateescape")


@lru_cache(maxsize=256)
def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"
