"""The snapshot: the stored outcome of a finished operation, as one versioned string of bytes.

::

    byte 0     version           1, or 2 if the database made the snapshot
    byte 1     kind              VALUE, ERROR, EMPTY or RESPONSE
    byte 2     coding            low four bits: compression (0 none, 1 zlib, 2 zstd); top bit: encrypted;
                                 next bit: the encryption is bound to the entry's name too;
                                 next bit: the payload begins with the trace of the request that made it
    byte 3     length of the serializer's name
    then       the name, ascii
    4 bytes    checksum of all of the above and of the payload: CRC-32, or in version 2 the start of the SHA-256
    then       the payload, to the end

The checksum is there because a later version may read these bytes years after they were written: a snapshot that was
cut or changed is refused, and never decoded into another value. The checksum does not protect from an attacker with
write access. Encryption does. It binds the snapshot to its record and to its place there: the result, or the step of
that name. A codec with a cipher refuses snapshots in clear, which anybody with write access could have made.

Snapshots that were encrypted before the entry's name was part of it lack the second bit. They are still opened: the
bit itself is authenticated, so that no newer snapshot can be passed off as such an older one.

This module knows the envelope and the ``RESPONSE`` payload. It knows no serializer, no cipher and no compression
except zlib: the others are passed in as :class:`Cipher` and :class:`Compressor`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

from semel.errors import PolicyError, SemelError, SnapshotUnreadable

COMPRESS_ABOVE = 1024
"""Compression is tried for payloads of more bytes than this. For smaller ones it saves a few hundred bytes, which
changes neither the pages of a row nor the packets it takes, and costs more than the rest of sealing together.
"""

SIZE_LIMIT = 64 * 1024 * 1024
"""The greatest payload in bytes. A compressed snapshot that expands to more is refused, as a decompression bomb."""

_VERSION = 1
_MADE_BY_DATABASE = 2
"""The version of a snapshot that a statement made on the server. PostgreSQL computes no CRC-32 before version 18."""
_REASON_LIMIT = 200
_ENCRYPTED = 0x80
_BOUND = 0x40
_TRACED = 0x20
_COMPRESSION = 0x0F
TRACE_SIZE = 25
"""Bytes of a trace: the id of the trace, the id of the span, and its flags, as in a traceparent."""


class NotSerializable(TypeError):
    """The result cannot be stored so that it comes back as it is. The message says what to do.

    A user never gets this error: the engine stores that the operation is done and raises ResultNotStored.
    """


class SnapshotTooLarge(NotSerializable):
    """The payload is larger than the codec's ``limit``."""


class Kind(IntEnum):
    """What a snapshot holds. Stores write these numbers: never change one."""

    VALUE = 1
    """A function's result, in the named serializer."""
    ERROR = 2
    """The exception that the handler raised."""
    EMPTY = 3
    """Done, but without a result. The payload is the reason."""
    RESPONSE = 4
    """An HTTP response: status, header lines, body."""


class Snapshot(NamedTuple):
    """An opened envelope: its kind, the serializer that wrote it, and the payload in clear."""

    kind: Kind
    serializer: str
    payload: bytes

    @property
    def reason(self) -> str:
        """Why an ``EMPTY`` snapshot has no result."""
        return self.payload.decode("utf-8", "replace") if self.kind is Kind.EMPTY else ""


_snapshot: Final[Callable[[tuple[Any, ...]], Snapshot]] = partial(tuple.__new__, Snapshot)
"""Creates a Snapshot from all fields in order. ``Snapshot(...)`` is slower: it is a Python function."""


class Cipher(Protocol):
    """Encrypts payloads. It must authenticate ``context`` too, so that no payload can be moved elsewhere."""

    def encrypt(self, plaintext: bytes, context: bytes) -> bytes: ...

    def decrypt(self, ciphertext: bytes, context: bytes) -> bytes:
        """Raises :class:`SnapshotUnreadable` if the ciphertext is not authentic."""
        ...


class Compressor(Protocol):
    """Compresses payloads. ``id`` is the number that is stored in the envelope."""

    @property
    def id(self) -> int: ...

    def compress(self, data: bytes) -> bytes: ...

    def decompress(self, data: bytes, limit: int) -> bytes:
        """Return at most ``limit`` bytes. Raises :class:`SnapshotUnreadable` for more, and for corrupt data."""
        ...


class _Zlib:
    id = 1

    def compress(self, data: bytes) -> bytes:
        return zlib.compress(data, 1)  # level 6 takes twice as long and saves 5 to 10 % more

    def decompress(self, data: bytes, limit: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            plain = stream.decompress(data, limit + 1)
        except zlib.error as exc:
            raise SnapshotUnreadable(f"the stored snapshot is corrupt: zlib says {exc}") from exc
        if len(plain) > limit:
            raise SnapshotUnreadable(f"the stored snapshot expands beyond the codec's limit of {limit} bytes")
        if not stream.eof or stream.unused_data:
            raise SnapshotUnreadable("the stored snapshot is corrupt: its compressed payload is cut or has a tail")
        return plain


ZLIB: Compressor = _Zlib()

_KINDS = {int(kind): kind for kind in Kind}


@lru_cache(maxsize=256)
def _header(kind: int, coding: int, serializer: str) -> bytes:
    if not serializer.isascii() or len(serializer) > 32:
        raise PolicyError(f"a serializer's name is at most 32 ascii characters, not {serializer!r}")
    return bytes((_VERSION, kind, coding, len(serializer))) + serializer.encode("ascii")


@lru_cache(maxsize=256)
def _read_header(header: bytes) -> tuple[int | None, Kind | None, str | None, int]:
    """Return the checksum so far, the kind, the serializer's name and the coding of a snapshot.

    The checksum is None if the database has made it. The kind or the name is None if it cannot be read: a wrong
    checksum says more about that.
    """
    version = header[0]
    if version not in (_VERSION, _MADE_BY_DATABASE):
        raise SnapshotUnreadable(
            f"the stored snapshot has version {version}, this Semel reads versions {_VERSION} and "
            f"{_MADE_BY_DATABASE}: "
            "it was written by a newer Semel (upgrade this process), or it is corrupt"
        )
    begun = zlib.crc32(header) if version == _VERSION else None
    return begun, _KINDS.get(header[1]), header[4:].decode() if header[4:].isascii() else None, header[2]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Seals payloads into snapshots and opens them again. It is immutable, and safe to share between threads.

    Programs use ``semel.Codec``, which chooses the compressors by name.
    """

    cipher: Cipher | None = None
    compression: Compressor | None = ZLIB
    """Used for writing. Snapshots written with it, with zlib or with one of ``readers`` can be read."""
    compress_above: int = COMPRESS_ABOVE
    limit: int = SIZE_LIMIT
    accept_plain: bool = False
    """Open snapshots in clear although there is a cipher, while there are records older than the cipher."""
    readers: Sequence[Compressor] = ()
    _by_id: dict[int, Compressor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.accept_plain and self.cipher is None:
            raise PolicyError("accept_plain=True needs a cipher: without one nothing is encrypted")
        if self.cipher is not None and not callable(getattr(self.cipher, "encrypt", None)):
            raise PolicyError('cipher= is a ring of keys, KeyRing({"2026-11": key}), or encrypts and decrypts like one')
        if self.limit < 1 or self.compress_above < 0:
            raise PolicyError("a codec's limit must be at least 1 byte, and compress_above not negative")
        known = [ZLIB, *self.readers, *([self.compression] if self.compression else [])]
        object.__setattr__(self, "_by_id", {compressor.id: compressor for compressor in known})

    def seal(
        self, kind: Kind, serializer: str, payload: bytes, context: bytes, entry: str = "", trace: bytes = b""
    ) -> bytes:
        """Return the snapshot to store. Raises SnapshotTooLarge.

        ``context`` is the record's id, and ``entry`` the name of the step; none for the result. An encrypted snapshot
        cannot be opened with others. ``trace`` is the trace of the request; ``open_trace`` returns it.
        """
        if len(payload) > self.limit:
            raise SnapshotTooLarge(f"the result takes {len(payload)} bytes; the codec's limit is {self.limit}")
        coding = 0
        if trace:
            payload, coding = trace + payload, _TRACED
        if len(payload) > self.compress_above and self.compression is not None:
            smaller = self.compression.compress(payload)
            if len(smaller) < len(payload):
                payload, coding = smaller, coding | self.compression.id
        if self.cipher is not None:
            coding |= _ENCRYPTED | _BOUND
            payload = self.cipher.encrypt(payload, _place(context, entry) + _header(kind, coding, serializer))
        header = _header(kind, coding, serializer)
        return header + zlib.crc32(payload, zlib.crc32(header)).to_bytes(4, "big") + payload

    def seal_empty(self, reason: str, context: bytes) -> bytes:
        """Return a snapshot that says: done, but there is no result, for this reason."""
        return self.seal(Kind.EMPTY, "", reason[:_REASON_LIMIT].encode("utf-8", "replace"), context)

    def begin_clear(self, kind: Kind, serializer: str) -> bytes | None:
        """Return the header of a snapshot that the database completes: the checksum and the payload follow it.

        None if the payload must be encrypted.
        """
        if self.cipher is not None:
            return None
        return bytes((_MADE_BY_DATABASE,)) + _header(kind, 0, serializer)[1:]

    def open(self, blob: bytes, context: bytes, entry: str = "") -> Snapshot:
        """Return the contents of a snapshot. Raises only :class:`SnapshotUnreadable`, whatever the bytes are."""
        if type(blob) is not bytes:
            blob = bytes(blob)  # some drivers return a memoryview
        if len(blob) < 8:
            raise SnapshotUnreadable(f"the stored snapshot is cut: {len(blob)} bytes are fewer than any snapshot has")
        start = 4 + blob[3]
        header, payload = blob[:start], blob[start + 4 :]
        begun, kind, serializer, coding = _read_header(header)
        if begun is None:
            intact = sha256(header + payload).digest()[:4] == blob[start : start + 4]
        else:
            intact = zlib.crc32(payload, begun) == int.from_bytes(blob[start : start + 4], "big")
        if not intact:
            raise SnapshotUnreadable("the stored snapshot is corrupt or cut: its checksum does not match")
        if kind is None:
            raise SnapshotUnreadable(f"the stored snapshot is of an unknown kind {blob[1]}: upgrade this process")
        if serializer is None:
            raise SnapshotUnreadable("the stored snapshot is corrupt: its serializer's name is not ascii")
        if coding or self.cipher is not None:
            if self.cipher is not None and not coding & _ENCRYPTED and not self.accept_plain and blob != NOT_SEALED:
                raise SnapshotUnreadable(
                    "the stored snapshot is not encrypted, and this codec has a cipher: somebody may have forged it. "
                    "If it is older than the cipher, or of a process without one, set "
                    "Codec(cipher=…, accept_plain=True) until it has expired"
                )
            payload = self._decode(coding, payload, (_place(context, entry) if coding & _BOUND else context) + header)
            if coding & _TRACED:
                payload = payload[TRACE_SIZE:]
        return _snapshot((kind, serializer, payload))

    def open_trace(self, blob: bytes, context: bytes) -> bytes:
        """Return the trace of a result's snapshot; empty if it has none, or cannot be opened."""
        if len(blob) < 8 or not blob[2] & _TRACED:
            return b""
        start = 4 + blob[3]
        place = (_place(context, "") if blob[2] & _BOUND else context) + bytes(blob[:start])
        try:
            return self._decode(blob[2], bytes(blob[start + 4 :]), place)[:TRACE_SIZE]
        except SnapshotUnreadable:
            return b""

    def _decode(self, coding: int, payload: bytes, context: bytes) -> bytes:
        if coding & ~(_ENCRYPTED | _BOUND | _TRACED | _COMPRESSION) or coding & (_ENCRYPTED | _BOUND) == _BOUND:
            raise SnapshotUnreadable(f"the stored snapshot has an unknown coding {coding:#04x}: upgrade this process")
        if coding & _ENCRYPTED:
            if self.cipher is None:
                raise SnapshotUnreadable(
                    "the stored snapshot is encrypted and no cipher is configured: give the guard codec=Codec(cipher=…)"
                )
            payload = self.cipher.decrypt(payload, context)
        if not coding & _COMPRESSION:
            return payload
        compressor = self._by_id.get(coding & _COMPRESSION)
        if compressor is None:
            raise SnapshotUnreadable(
                f"the stored snapshot has compression {coding & _COMPRESSION}, which this codec does not read"
            )
        return compressor.decompress(payload, self.limit + (TRACE_SIZE if coding & _TRACED else 0))


NOT_SEALED: Final = Envelope(compression=None).seal_empty("its result could not be sealed", b"")
"""Stored in clear if the cipher fails: it is done, and its result is lost. Every codec opens these very bytes, because
they say nothing that a forger could choose.
"""


def _place(context: bytes, entry: str) -> bytes:
    """Return what an encrypted snapshot is bound to. Neither an id of fixed length nor a name has a NUL at its end."""
    return b"%b%b\0" % (context, entry.encode())


class StoredResponse(NamedTuple):
    """An HTTP response as it was first sent: header lines in order, repeated ones separate."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    body_omitted: bool = False
    """The body was too large to store, or must not be stored; ``body`` is empty."""


make_response: Final[Callable[[tuple[int, list[tuple[bytes, bytes]], bytes, bool]], StoredResponse]] = partial(
    tuple.__new__, StoredResponse
)
"""Creates a StoredResponse from all fields in order. ``StoredResponse(...)`` is slower: it is a Python function."""

_RESPONSE = struct.Struct("!BHHI")  # flags, status, number of header lines, length of the body
_LINE = struct.Struct("!HI")  # length of the name, length of the value
_RESPONSE_SIZE = _RESPONSE.size
_LINE_SIZE = _LINE.size
_BODY_OMITTED = 0x01


def encode_response(
    status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes, *, body_omitted: bool = False
) -> bytes:
    """Return the payload of a ``RESPONSE`` snapshot. Raises ValueError if this is no HTTP response."""
    if not 100 <= status <= 999:
        raise ValueError(f"an HTTP status has three digits, not {status!r}")
    if body_omitted and body:
        raise ValueError("an omitted body is empty")
    try:
        parts = [_RESPONSE.pack(_BODY_OMITTED if body_omitted else 0, status, len(headers), len(body))]
        for name, value in headers:
            parts += (_LINE.pack(len(name), len(value)), name, value)
    except struct.error as exc:
        raise ValueError("too many header lines, or a header line or body too long to store") from exc
    parts.append(body)
    return b"".join(parts)


def decode_response(payload: bytes) -> StoredResponse:
    """Return the response, byte for byte as it was encoded. Raises SnapshotUnreadable."""
    try:
        flags, status, count, length = _RESPONSE.unpack_from(payload)
        at = len(payload) - length
        block = payload[_RESPONSE_SIZE:at]
        headers = _known_lines(block, count) if len(block) <= _MAX_KNOWN_LINES else _read_lines(block, count)
    except struct.error as exc:
        raise SnapshotUnreadable("the stored response is corrupt: it ends within its header lines") from exc
    if headers is None or at < _RESPONSE_SIZE or flags & ~_BODY_OMITTED:
        raise SnapshotUnreadable("the stored response is corrupt: its parts do not add up")
    return make_response((status, list(headers), payload[at:], flags == _BODY_OMITTED))


def _read_lines(block: bytes, count: int) -> tuple[tuple[bytes, bytes], ...] | None:
    """Return the header lines, which many responses have in common; None if the block goes on behind the last one."""
    lines, at = [], 0
    for _ in range(count):
        name_length, value_length = _LINE.unpack_from(block, at)
        name_at = at + _LINE_SIZE
        value_at = name_at + name_length
        at = value_at + value_length
        lines.append((block[name_at:value_at], block[value_at:at]))
    return tuple(lines) if at == len(block) else None


_known_lines: Final = lru_cache(maxsize=256)(_read_lines)
_MAX_KNOWN_LINES: Final = 1024  # bytes; longer blocks are rare, and would only fill the memory


def outcome_kind(envelope: Envelope, sealed: bytes, context: bytes) -> str:
    """Return what a sealed outcome is: a "failure", a "result", or "unreadable"."""
    try:
        snapshot = envelope.open(sealed, context)
        if snapshot.kind is Kind.RESPONSE:
            return "failure" if decode_response(snapshot.payload).status >= 400 else "result"
    except SemelError:  # also MissingDependency: a codec may lack the package that decompresses it
        return "unreadable"
    return "failure" if snapshot.kind is Kind.ERROR else "result"
