"""An answer on its way out: held back until it is stored, or, when it outgrows the limit, let through."""

from __future__ import annotations

from collections.abc import Iterable

from semel.core.encoding.snapshot import StoredResponse
from semel.http.contract.exchange import KEY
from semel.http.contract.rules import Idempotent

__all__ = ["Capture", "cut_off"]


class Capture:
    """One answer: its status and lines, and as much of its body as is kept."""

    __slots__ = ("_chunks", "_kept", "_rule", "_size", "headers", "overflowed", "status")

    def __init__(self, rule: Idempotent) -> None:
        self._rule = rule
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """All lines but those that are ours to say."""
        self._kept: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self.overflowed = False

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers, self._kept = [], []
        wanted, mark = self._rule.replay_header_names, self._rule.replay_marker_name
        for name, value in headers:
            line = bytes(name).lower(), bytes(value)
            if line[0] == KEY or line[0] == mark:
                continue
            if line[0] in wanted:
                self._kept.append(line)
            self.headers.append(line)

    def add(self, chunk: bytes) -> bool:
        """Keep a chunk; False once the answer is larger than may be kept, and should be let through."""
        if self.overflowed:
            return False
        self._size += len(chunk)
        self._chunks.append(bytes(chunk))  # a buffer of the application's may change after this
        self.overflowed = self._size > self._rule.max_stored_body
        return not self.overflowed

    def taken(self) -> bytes:
        """What was held back so far, handed over."""
        body = b"".join(self._chunks)
        self._chunks = []
        return body

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks)

    def stored(self) -> StoredResponse:
        """What is remembered of the answer."""
        if self.overflowed or (self._size and not self._rule.keep_body):
            return StoredResponse(self.status, self._kept, b"", True)
        return StoredResponse(self.status, self._kept, b"".join(self._chunks))


def cut_off() -> ConnectionError:
    """Too late for another answer. An end that is missing tells the client that this one does not hold."""
    return ConnectionError("the answer was let through, and could not be stored")
