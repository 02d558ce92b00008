"""A request's body, read to its end before the handler runs: small ones in memory, large ones in a temporary file."""

from __future__ import annotations

from collections import deque
from tempfile import TemporaryFile
from typing import IO, Final

__all__ = ["HeldBody"]

IN_MEMORY: Final = 1024 * 1024
CHUNK: Final = 256 * 1024


class HeldBody:
    """All chunks in, and then the same bytes out, in their order. Empty chunks are kept: they end a body."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._file: IO[bytes] | None = None
        self._written = 0
        self._read = 0

    def __bool__(self) -> bool:
        """Whether there is more to take."""
        return bool(self._chunks) or self._read < self._written

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= self._in_memory:
            self._chunks.append(chunk)
            return
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 (closed with the request)
        self._file.write(chunk)
        self._written += len(chunk)

    def take(self) -> bytes:
        """The next chunk."""
        if self._chunks:
            return self._chunks.popleft()
        assert self._file is not None
        self._file.seek(self._read)
        chunk = self._file.read(CHUNK)
        self._read += len(chunk)
        if self._read == self._written:
            self._file.close()
        return chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._read = self._written
