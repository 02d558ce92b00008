"""The body of a WSGI request: hashed for the fingerprint as it is read, by the application or by a claim.

A claim reads the rest of the body ahead. It is spooled, in memory up to a size and in a file above it, and the
application reads it as if it came from the server.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Final

from semel.errors import SemelError
from semel.http.contract.rules import IN_MEMORY

_STEP: Final = 64 * 1024
_log = logging.getLogger("semel.http")


class RequestBody:
    """The ``wsgi.input`` that the application reads."""

    def __init__(self, environ: dict[str, Any], feed: Callable[[bytes], None]) -> None:
        """
        :param feed: called with each chunk that is read.
        """
        self._raw: Any = environ["wsgi.input"]
        self._feed = feed
        self._left = content_length(environ)
        """Bytes that the client announced and has not sent yet; None if the server finds the end itself."""
        self._ended = self._left == 0
        self._broken = False
        self._taken = 0
        self._spool: IO[bytes] | None = None

    @property
    def incomplete(self) -> bool:
        """Whether the client went away, or sent nonsense, before the end of its request. Known after ``spool``."""
        return self._broken or (self._ended and bool(self._left))

    def spool(self, longest: int) -> bool:
        """Read the rest of the body and keep it for the application.

        Returns False if the body is longer than ``longest`` bytes.
        """
        left = longest - self._taken
        if (self._left or 0) > left:  # the client announced it, so nothing is read
            return False
        if self._ended or self._spool is not None:
            return left >= 0
        spool: IO[bytes]
        if self._left is not None and self._left <= IN_MEMORY:
            spool = io.BytesIO()
        else:
            spool = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 (closed with the request)
        self._spool = spool
        while left >= 0 and (chunk := self._take(self._unbroken, min(_STEP, left + 1))):
            left -= len(chunk)
            spool.write(chunk)
        spool.seek(0)
        return left >= 0

    def rewind(self, body: bytes) -> None:
        """Let the application read the whole body once more."""
        self._spool = io.BytesIO(body)

    def close(self) -> None:
        """Close the spooled part; the server closes its own stream."""
        if self._spool is not None:
            self._spool.close()

    # -- what the application calls

    def read(self, size: int | None = -1) -> bytes:
        if self._spool is not None:
            return self._spool.read(-1 if size is None else size)
        if size is not None and size >= 0:
            return self._take(self._raw.read, size)
        return b"".join(iter(lambda: self._take(self._raw.read, _STEP), b""))

    def readline(self, size: int | None = -1) -> bytes:
        if self._spool is not None:
            return self._spool.readline(-1 if size is None else size)
        if size is not None and size >= 0:
            return self._take(self._raw.readline, size)
        pieces: list[bytes] = []
        while piece := self._take(self._raw.readline, _STEP):
            pieces.append(piece)
            if piece.endswith(b"\n"):
                break
        return b"".join(pieces)

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _unbroken(self, size: int) -> bytes:
        """Read from the server's stream. If that fails, by a lost connection or a malformed chunk, the request ends."""
        try:
            chunk: bytes = self._raw.read(size)
        except SemelError:
            raise
        except Exception as error:  # each server has its own
            _log.info("a request ended before it was complete: %r", error)
            self._broken = True
            return b""
        return chunk

    def _take(self, read: Callable[[int], bytes], size: int) -> bytes:
        """Read at most ``size`` bytes from the server's stream, and never more than the client announced."""
        if self._left is not None:
            size = min(size, self._left)
        if self._ended or size == 0:
            return b""
        chunk = read(size)
        if chunk:
            self._feed(chunk)
            self._taken += len(chunk)
            if self._left is not None:
                self._left -= len(chunk)
                self._ended = self._left == 0
        else:
            self._ended = True
        return chunk


def content_length(environ: dict[str, Any]) -> int | None:
    """Return the length of the body, or None if it ends by itself (``Transfer-Encoding: chunked``)."""
    try:
        length = int(environ.get("CONTENT_LENGTH") or -1)
    except ValueError:
        length = -1
    if length >= 0:
        return length
    return None if environ.get("wsgi.input_terminated") else 0
