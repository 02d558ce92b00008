"""The body of a WSGI request: told to the fingerprint as it is read, by the application or, at a claim, by us.

What a claim reads ahead is spooled, in memory up to a size and in a file above it, and given to the application as if
it came from the server.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Final

from semel.errors import SemelError
from semel.http.contract.rules import MAX_REQUEST_BODY

__all__ = ["RequestBody"]

SPOOL_LIMIT: Final = 1024 * 1024
"""Bytes of a body that are spooled in memory; more go to a temporary file."""
_STEP: Final = 64 * 1024
_log = logging.getLogger("semel.http")


class RequestBody:
    """A ``wsgi.input``."""

    def __init__(self, environ: dict[str, Any], fed: Callable[[bytes], None]) -> None:
        self._raw: Any = environ["wsgi.input"]
        self._fed = fed
        self._left = _length(environ)
        """Bytes the client announced and has not sent so far; None where the server knows the end."""
        self._ended = self._left == 0
        self._broken = False
        self._taken = 0
        self._spool: IO[bytes] | None = None

    @property
    def cut(self) -> bool:
        """Whether the client went away, or sent nonsense, before its request was whole; known once it was spooled."""
        return self._broken or (self._ended and bool(self._left))

    def spool(self, longest: int = MAX_REQUEST_BODY) -> bool:
        """Read what is still to come, and keep it for the application; False where all is more than ``longest``."""
        left = longest - self._taken
        if (self._left or 0) > left:  # said by the client, so nothing is read
            return False
        if self._ended or self._spool is not None:
            return left >= 0
        spool: IO[bytes]
        if self._left is not None and self._left <= SPOOL_LIMIT:
            spool = io.BytesIO()
        else:
            spool = tempfile.SpooledTemporaryFile(SPOOL_LIMIT)  # noqa: SIM115 (closed with the request)
        self._spool = spool
        while left >= 0 and (chunk := self._take(self._unbroken, min(_STEP, left + 1))):
            left -= len(chunk)
            spool.write(chunk)
        spool.seek(0)
        return left >= 0

    def again(self, body: bytes) -> None:
        """Have the application read the whole body once more."""
        self._spool = io.BytesIO(body)

    def close(self) -> None:
        """Let go of the spooled part; the server's stream is the server's."""
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
        """A server's stream fails with the connection, or with a chunk that cannot be read: the request ends there."""
        try:
            chunk: bytes = self._raw.read(size)
        except SemelError:
            raise
        except Exception as error:  # each server has its own
            _log.info("a request ended before it was whole: %r", error)
            self._broken = True
            return b""
        return chunk

    def _take(self, read: Callable[[int], bytes], size: int) -> bytes:
        """Ask the server's stream for at most ``size`` bytes, and never for more than the client announced."""
        if self._left is not None:
            size = min(size, self._left)
        if self._ended or size == 0:
            return b""
        chunk = read(size)
        if chunk:
            self._fed(chunk)
            self._taken += len(chunk)
            if self._left is not None:
                self._left -= len(chunk)
                self._ended = self._left == 0
        else:
            self._ended = True
        return chunk


def _length(environ: dict[str, Any]) -> int | None:
    """The length of the body, or None where it ends by itself (``Transfer-Encoding: chunked``)."""
    try:
        length = int(environ.get("CONTENT_LENGTH") or -1)
    except ValueError:
        length = -1
    if length >= 0:
        return length
    return None if environ.get("wsgi.input_terminated") else 0
