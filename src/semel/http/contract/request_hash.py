"""The fingerprint of an HTTP request, made while its body streams by.

Every part is preceded by its length, so that no part can pass for two, nor two for one. With a secret it is a MAC: see
``core/encoding/fingerprint.py``. The hashes are copied from blank ones, which is half the price of making them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from semel.core.encoding.fingerprint import DIGEST_SIZE, hash_key

__all__ = ["RequestHash"]


@lru_cache(maxsize=16)
def _blanks(secret: bytes | None) -> tuple[blake2b, blake2b]:
    """A hash for the request and one for its body, with nothing in them; a program has as many secrets as guards."""
    key = hash_key(secret)
    return (
        blake2b(digest_size=DIGEST_SIZE, key=key, person=b"semel.request.2"),
        blake2b(digest_size=32, key=key, person=b"semel.body.2"),
    )


class RequestHash:
    """Fed with the body; asked once it is through."""

    __slots__ = ("_body", "_request", "_size")

    def __init__(self, secret: bytes | None) -> None:
        self._request, self._body = _blanks(secret)
        self._size = 0

    def fed(self, chunk: bytes) -> None:
        """A chunk of the body; how the body is cut into chunks does not matter."""
        if self._size == 0:
            self._body = self._body.copy()
        self._body.update(chunk)
        self._size += len(chunk)

    def digest(
        self, method: str, path: str, query: bytes, lines: Iterable[tuple[bytes, bytes]], document: bytes | None
    ) -> bytes:
        """Of the whole request; with a ``document``, that counts and not the body's bytes."""
        word, target = method.encode(), path.encode("utf-8", "surrogatepass")
        said = b"%d:%b%d:%b%d:%b" % (len(word), word, len(target), target, len(query), query)
        for name, value in lines:
            said += b"h%d:%b%d:%b" % (len(name), name, len(value), value)
        if document is None:
            said += b"b%d:%b" % (self._size, self._body.digest())
        else:
            said += b"d%d:%b" % (len(document), document)
        whole = self._request.copy()
        whole.update(said)
        return whole.digest()
