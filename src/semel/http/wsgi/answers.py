"""A WSGI application's answer on its way to the server: held back, let through, or only peeked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from itertools import chain
from types import TracebackType
from typing import TypeAlias

from semel.http.contract.capture import Capture
from semel.http.wsgi.lines import Lines, as_bytes

__all__ = ["HeldAnswer", "LetThrough", "Peeked", "ThenRaised"]


Write: TypeAlias = Callable[[bytes], object]
ExcInfo: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]"


class HeldAnswer:
    """An answer that is held back until it is stored, or is too large for that."""

    def __init__(self, capture: Capture, send: Callable[[str, list[tuple[bytes, bytes]]], Write]) -> None:
        """:param send: gives the server the status line and the header lines."""
        self.capture = capture
        self._send: Callable[[str, list[tuple[bytes, bytes]]], Write] | None = send
        self._status = ""
        """The status line, with the application's own words; empty until it has begun its answer."""
        self._write_on: Write | None = None

    @property
    def begun(self) -> bool:
        """Whether the server has been given the beginning."""
        return self._write_on is not None

    def begin(self) -> Write:
        if self._write_on is None:
            assert self._send is not None
            self._write_on = self._send(self._status, self.capture.headers)
            self._send = None  # the responder's, which has us: else both would wait for the garbage collector
        return self._write_on

    def start(self, status: str, headers: Lines, exc_info: ExcInfo | None) -> Write:
        """The application calls ``start_response``."""
        try:
            if exc_info and exc_info[1] is not None:
                # Bytes that were held back count as sent: an error page after half an answer is no answer.
                if self.begun or self.capture.body:
                    raise exc_info[1].with_traceback(exc_info[2])
            elif self._status:
                raise AssertionError("start_response() was called twice, and without exc_info the second time")
        finally:
            exc_info = None  # a traceback that refers to this frame would keep both alive
        self.capture.start(int(status.split(" ", 1)[0]), as_bytes(headers))
        self._status = status
        return self._write

    def _write(self, chunk: bytes) -> None:
        if not self.capture.add(chunk):
            self.begin()(self.capture.taken() or chunk)

    def take(self, chunks: Iterator[bytes]) -> Iterator[bytes] | None:
        """Take the whole answer; where it is too large, what is to be let through of it."""
        while not self.capture.overflowed:
            chunk = next(chunks, None)
            if not self._status:
                raise AssertionError("the application answered without start_response()")
            if chunk is None:
                return None
            self.capture.add(chunk)
        self.begin()
        return chain([self.capture.taken()], chunks)


class LetThrough:
    """An answer that is too large to be held back, but for its last chunk: that one waits until all is stored.

    When the client goes away meanwhile, it is run to its end all the same.
    """

    def __init__(
        self, chunks: Iterator[bytes], whole: Callable[[], None], broken: Callable[[BaseException], object]
    ) -> None:
        """
        :param whole: called when the last chunk is known.
        :param broken: called with the error of an answer that breaks.
        """
        self._chunks: Iterator[bytes] | None = chunks
        self._whole = whole
        self._broken = broken
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
            self._whole()
        return chunk

    def _take(self) -> bytes | None:
        if self._chunks is None:
            return None
        try:
            chunk = self._context.run(next, self._chunks, None)
        except BaseException as error:
            self._chunks = None
            self._broken(error)
            raise
        if chunk is None:
            self._chunks = None
        return chunk

    def close(self) -> None:
        for _ in self:
            pass


class Peeked:
    """The answer of an application that begins it while it is iterated; its first chunk is taken already."""

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
    """An answer, and then the error that it tells of: the client has the one, and the server's log the other."""

    def __init__(self, answer: Iterable[bytes], error: BaseException) -> None:
        self._chunks = iter(answer)
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        for chunk in self._chunks:
            return chunk
        raise self._error
