"""Snapshots encrypted at rest: AES-256-GCM with a ring of keys, so that keys can be changed without losing records.

::

    byte 0    format           1
    byte 1    length of the key's id
    then      the key's id     in clear: it says which key opens this
    12 bytes  nonce            random
    then      ciphertext and tag

All of the prefix and the context (the record's id and the snapshot's header) are authenticated: a ciphertext cannot be
moved to another record, nor be passed off as another kind of snapshot. Nonces are random, so one key is good for some
2³² snapshots: change it well before.

Needs ``semel[encryption]``, imported when a ring is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from semel.core.encoding.snapshot import SnapshotUnreadable
from semel.errors import MissingDependency, PolicyError

__all__ = ["KEY_BYTES", "KeyRing"]

KEY_BYTES = 32
_FORMAT = 1
_NONCE_BYTES = 12
_ID_LIMIT = 64


class KeyRing:
    """Encrypts with the active key and decrypts with whichever key the snapshot names. Safe to share by threads.

    ::

        KeyRing({"2026-11": new, "2026-10": old}, active="2026-11")

    To rotate: add the new key to every process, then make it active; drop the old one once its records have expired.
    With one key, ``active`` may be left out.
    """

    __slots__ = ("_active", "_ciphers")

    def __init__(self, keys: Mapping[str, bytes], active: str | None = None) -> None:
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
                f"the snapshot does not open with the key {name!r}: it was changed or cut, belongs to another record, "
                "or another key has that id"
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
