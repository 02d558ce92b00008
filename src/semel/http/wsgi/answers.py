"""The answers of a WSGI application: held back, let through, or read ahead.

And WSGI's header lines and paths, which are latin-1 text, as bytes and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from functools import lru_cache
from http import HTTPStatus
from itertools import chain
from types import TracebackType
from typing import Any, Final, TypeAlias

from semel.http.contract.endpoint import Capture
from semel.http.contract.exchange import KEY_HEADER, KeyHeader

Lines: TypeAlias = list[tuple[str, str]]
_PATH: Final = ("SCRIPT_NAME", "PATH_INFO")
Write: TypeAlias = Callable[[bytes], object]
ExcInfo: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]"


class HeldAnswer:
    """An answer that is held back until it is stored, or until it is too large for that."""

    def __init__(self, capture: Capture, send: Callable[[str, list[tuple[bytes, bytes]]], Write]) -> None:
        """:param send: passes the status line and the header lines to the server."""
        self.capture = capture
        self._send: Callable[[str, list[tuple[bytes, bytes]]], Write] | None = send
        self._status = ""
        """The status line of the application; empty until it has called ``start_response``."""
        self._write_on: Write | None = None

    @property
    def begun(self) -> bool:
        """Whether the beginning has been passed to the server."""
        return self._write_on is not None

    def begin(self) -> Write:
        if self._write_on is None:
            assert self._send is not None
            self._write_on = self._send(self._status, self.capture.headers)
            # It is a method of the responder, which refers to us: both would wait for the garbage collector.
            self._send = None
        return self._write_on

    def start(self, status: str, headers: Lines, exc_info: ExcInfo | None) -> Write:
        """Take the status and the header lines with which the application calls ``start_response``."""
        try:
            if exc_info and exc_info[1] is not None:
                # Bytes that were held back count as sent: no error page may follow half an answer.
                if self.begun or self.capture.body:
                    raise exc_info[1].with_traceback(exc_info[2])
            elif self._status:
                raise AssertionError("start_response() was called twice, and without exc_info the second time")
        finally:
            exc_info = None  # its traceback refers to this frame, so both would stay alive
        self.capture.start(int(status.split(" ", 1)[0]), as_bytes(headers))
        self._status = status
        return self._write

    def _write(self, chunk: bytes) -> None:
        if not self.capture.add(chunk):
            self.begin()(self.capture.take() or chunk)

    def take(self, chunks: Iterator[bytes]) -> Iterator[bytes] | None:
        """Take the whole answer. If it is too large, return the part that is to be let through."""
        while not self.capture.overflowed:
            chunk = next(chunks, None)
            if not self._status:
                raise AssertionError("the application answered without start_response()")
            if chunk is None:
                return None
            self.capture.add(chunk)
        self.begin()
        return chain([self.capture.take()], chunks)


class LetThrough:
    """An answer that is too large to be held back. Only its last chunk waits until the answer is stored.

    If the client goes away meanwhile, the application is run to its end all the same.
    """

    def __init__(
        self, chunks: Iterator[bytes], on_end: Callable[[], None], on_error: Callable[[BaseException], object]
    ) -> None:
        """
        :param on_end: called before the last chunk is sent.
        :param on_error: called with the error if the application raises.
        """
        self._chunks: Iterator[bytes] | None = chunks
        self._on_end = on_end
        self._on_error = on_error
        self._context = copy_context()
        self._ahead = self._take()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk = self._ahead
        if chunk is None:
            raise StopIteration
        self._ahead = None
        self._ahead = self._take()
        if self._ahead is None:
            self._on_end()
        return chunk

    def _take(self) -> bytes | None:
        if self._chunks is None:
            return None
        try:
            chunk = self._context.run(next, self._chunks, None)
        except BaseException as error:
            self._chunks = None
            self._on_error(error)
            raise
        if chunk is None:
            self._chunks = None
        return chunk

    def close(self) -> None:
        for _ in self:
            pass


class Peeked:
    """The answer of a generator, which calls ``start_response`` when it is iterated: its first chunk is read ahead."""

    def __init__(self, answer: Iterable[bytes]) -> None:
        self._answer = answer
        rest = iter(answer)
        first = next(rest, None)
        self._chunks = rest if first is None else chain([first], rest)

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        if hasattr(self._answer, "close"):
            self._answer.close()


class ThenRaised:
    """An answer followed by the error that caused it, for the client and for the server's log."""

    def __init__(self, answer: Iterable[bytes], error: BaseException) -> None:
        self._chunks = iter(answer)
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        for chunk in self._chunks:
            return chunk
        raise self._error


# -- header lines, paths and status lines


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
    return f"{status} {reason_phrase(status)}"


def reason_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
