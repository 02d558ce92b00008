"""An answer that is held back until it is stored, or let through once it is too large for that."""

from __future__ import annotations

from collections.abc import Iterable

from semel.core.encoding.snapshot import StoredResponse, make_response
from semel.http.contract.rules import Idempotent

__all__ = ["Capture", "cut_off"]


class Capture:
    """One answer: its status, its header lines, and its body up to ``max_stored_body``."""

    rule: Idempotent
    key_name: bytes
    """The header of the key, which Semel sets itself."""
    status = 0
    size = 0
    """Bytes of the body so far."""
    overflowed = False
    headers: list[tuple[bytes, bytes]]
    """All header lines except those that Semel sets itself."""
    _replayed: list[tuple[bytes, bytes]]
    _chunks: list[bytes]

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers, self._replayed, self._chunks = [], [], []
        wanted, mark = self.rule.replay_header_names, self.rule.replay_marker_name
        for name, value in headers:
            line = bytes(name).lower(), bytes(value)
            if line[0] == self.key_name or line[0] == mark:
                continue
            if line[0] in wanted:
                self._replayed.append(line)
            self.headers.append(line)

    def add(self, chunk: bytes) -> bool:
        """Add a chunk. Returns False once the answer is too large to be stored: it is let through then."""
        if self.overflowed:
            return False
        self.size += len(chunk)
        self._chunks.append(bytes(chunk))  # the application may reuse its buffer
        self.overflowed = self.size > self.rule.max_stored_body
        return not self.overflowed

    def take(self) -> bytes:
        """Remove and return what was held back so far."""
        body = b"".join(self._chunks)
        self._chunks = []
        return body

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks) if self.size else b""

    def to_store(self) -> StoredResponse:
        """Return the answer as it is stored."""
        if self.overflowed or (self.size and not self.rule.keep_body):
            return make_response((self.status, self._replayed, b"", True))
        return make_response((self.status, self._replayed, b"".join(self._chunks), False))


def cut_off() -> ConnectionError:
    """It is too late to send another answer. The missing end tells the client that this one is not valid."""
    return ConnectionError("the answer was let through, and could not be stored")
