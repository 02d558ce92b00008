"""Which compression a codec writes, and zstd: smaller and quicker than zlib, with ``semel[zstd]``.

Every codec made here reads what any other wrote, so the setting can be changed at any time.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

from semel.core.encoding.snapshot import COMPRESS_ABOVE, SIZE_LIMIT, ZLIB, Cipher, Codec, Compressor, SnapshotUnreadable
from semel.errors import MissingDependency, PolicyError

__all__ = ["Codec", "Compression", "Zstd"]

Compression = Literal["zlib", "zstd"] | None


def Codec(
    *,
    cipher: Cipher | None = None,
    compression: Compression = "zlib",
    compress_above: int = COMPRESS_ABOVE,
    limit: int = SIZE_LIMIT,
    require_encryption: bool = False,
) -> Codec:
    """The codec of an engine. ``compression="zstd"`` needs ``semel[zstd]``, and says so now if it is missing."""
    zstd = Zstd()
    chosen: Compressor | None
    if compression == "zstd":
        _zstandard()
        chosen = zstd
    elif compression == "zlib" or compression is None:
        chosen = ZLIB if compression else None
    else:
        raise PolicyError(f'compression is "zlib", "zstd" or None, not {compression!r}')
    return Codec(cipher, chosen, compress_above, limit, require_encryption, (zstd,))


class Zstd:
    """Zstandard at its default level; the package is imported when first used."""

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


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise MissingDependency("zstandard", "zstd") from exc
    return zstandard
