"""``Codec`` and ``KeyRing``: how what is stored is compressed and encrypted.

A codec reads what any other codec wrote, whichever compression it uses itself, so that setting can be changed at any
time. zstd is smaller and faster than zlib and needs ``semel[zstd]``; encryption needs ``semel[encryption]``. Both
packages are imported when they are first used. The envelope around the payload is described in
``core/encoding/snapshot.py``.

An encrypted payload (AES-256-GCM)::

    byte 0    format           1
    byte 1    length of the key's id
    then      the key's id     in clear: it says which key decrypts this
    12 bytes  nonce            random
    then      ciphertext and tag

The whole prefix and the context (the record's id, the name of the step and the snapshot's header) are authenticated: a
ciphertext cannot be moved to another record or step, nor be passed off as another kind of snapshot. Nonces are random,
so one key is good for some 2³² snapshots: change it well before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Final, Literal

from semel.core.encoding.snapshot import COMPRESS_ABOVE, SIZE_LIMIT, ZLIB, Cipher, Compressor, Envelope
from semel.errors import MissingDependency, PolicyError, SnapshotUnreadable

Compression = Literal["zlib", "zstd"] | None

KEY_BYTES: Final = 32
_FORMAT: Final = 1
_NONCE_BYTES: Final = 12
_ID_LIMIT: Final = 64


class Codec(Envelope):
    """How a guard stores results: ``Semel(store, codec=Codec(compression="zstd", cipher=KeyRing(...)))``.

    A payload is compressed, where that makes it smaller, and then encrypted. A compressed length tells a little about
    the content: set ``compression=None`` where strangers choose part of a result that also holds a secret and can
    watch the size of the stored row.
    """

    __slots__ = ()

    def __init__(
        self,
        cipher: Cipher | None = None,
        *,
        compression: Compression = "zlib",
        compress_above: int = COMPRESS_ABOVE,
        limit: int = SIZE_LIMIT,
        accept_plain: bool = False,
    ) -> None:
        """Raise PolicyError for settings that contradict each other, MissingDependency if zstd is not installed.

        :param cipher: encrypts what is stored, usually a ``KeyRing``; ``None`` stores it in clear.
        :param compression: ``"zlib"``, ``"zstd"`` or ``None``. It applies to what is written; all three can be read.
        :param compress_above: bytes of payload above which compression is tried.
        :param limit: bytes that a payload may have, and that a stored one may expand to.
        :param accept_plain: with a cipher, also read what is stored in clear. Set it when you add a cipher to a store
            in use, until the older records have expired. Meanwhile whoever can write to the store can forge results.
        """
        super().__init__(cipher, _compressor(compression), compress_above, limit, accept_plain, (ZSTD,))


class _Zstd:
    """Zstandard at its default level. Safe to share between threads."""

    id = 2

    def __init__(self) -> None:
        self._local = threading.local()  # a zstandard context must not be used by two threads at a time

    def compress(self, data: bytes) -> bytes:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = _zstandard().ZstdCompressor()
        compressed: bytes = compressor.compress(data)
        return compressed

    def decompress(self, data: bytes, limit: int) -> bytes:
        zstandard = _zstandard()
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            # A frame that declares its size is not held to max_output_size; -1 is a frame that declares none.
            size = zstandard.frame_content_size(data)
            if size > limit:
                raise SnapshotUnreadable(f"the stored snapshot expands beyond the codec's limit of {limit} bytes")
            plain: bytes = decompressor.decompress(data, max_output_size=limit, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as exc:
            raise SnapshotUnreadable(f"the stored snapshot is corrupt: zstd says {exc}") from exc
        return plain


ZSTD: Final = _Zstd()


def _compressor(compression: Compression) -> Compressor | None:
    if compression is None:
        return None
    if compression == "zlib":
        return ZLIB
    if compression == "zstd":
        _zstandard()  # raise now, rather than at the first large result
        return ZSTD
    raise PolicyError(f'compression is "zlib", "zstd" or None, not {compression!r}')


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise MissingDependency("zstandard", "zstd") from exc
    return zstandard


class KeyRing:
    """Encrypts with the active key and decrypts with whichever key the snapshot names. Safe to share between threads.

    ::

        KeyRing({"2026-11": new, "2026-10": old}, active="2026-11")

    To rotate: add the new key to every process, then make it active; drop the old one once its records have expired.
    With one key, ``active`` may be left out.
    """

    __slots__ = ("_active", "_ciphers")

    def __init__(self, keys: Mapping[str, bytes], active: str | None = None) -> None:
        """
        :param keys: the keys by their names, 32 bytes each.
        :param active: the name of the key that encrypts; with one key it may be left out.
        """
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as exc:
            raise MissingDependency("cryptography", "encryption") from exc
        for name, key in keys.items():
            _check(name, key)
        if active is None and len(keys) == 1:
            active = next(iter(keys))
        if active is None or active not in keys:
            raise PolicyError(f"the active key {active!r} is not in the ring: it has {sorted(keys)}")
        self._active = active
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}

    @staticmethod
    def generate_key() -> bytes:
        """A new random key: keep it where secrets are kept."""
        return os.urandom(KEY_BYTES)

    @property
    def active(self) -> str:
        """The id of the key that encrypts."""
        return self._active

    def encrypt(self, plaintext: bytes, context: bytes) -> bytes:
        prefix = bytes((_FORMAT, len(self._active))) + self._active.encode("ascii")
        nonce = os.urandom(_NONCE_BYTES)
        return prefix + nonce + self._ciphers[self._active].encrypt(nonce, plaintext, prefix + context)

    def decrypt(self, ciphertext: bytes, context: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        if len(ciphertext) < 2 or ciphertext[0] != _FORMAT:
            raise SnapshotUnreadable("the encrypted snapshot is cut, corrupt, or of a newer Semel")
        start = 2 + ciphertext[1]
        prefix, nonce = ciphertext[:start], ciphertext[start : start + _NONCE_BYTES]
        name = prefix[2:].decode("ascii", "replace")
        cipher = self._ciphers.get(name)
        if cipher is None:
            raise SnapshotUnreadable(
                f"the snapshot is encrypted with the key {name[:_ID_LIMIT]!r}, which is not in the ring: "
                "add that key until the records written with it have expired"
            )
        try:
            return cipher.decrypt(nonce, ciphertext[start + _NONCE_BYTES :], prefix + context)
        except (InvalidTag, ValueError) as exc:
            raise SnapshotUnreadable(
                f"the snapshot does not open with the key {name!r}: it was changed or cut, belongs to another record "
                "or step, or another key has that id"
            ) from exc

    def __repr__(self) -> str:
        return f"KeyRing(ids={sorted(self._ciphers)}, active={self._active!r})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a KeyRing is not pickled: its keys stay in this process")


def _check(name: Any, key: Any) -> None:
    if not isinstance(name, str) or not name.isascii() or not 1 <= len(name) <= _ID_LIMIT:
        raise PolicyError(f"a key's id is 1 to {_ID_LIMIT} ascii characters, not {name!r}")
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise PolicyError(f"the key {name!r} must be {KEY_BYTES} bytes: make one with KeyRing.generate_key()")
