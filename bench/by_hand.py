"""A finished record without the library: what its two statements on PostgreSQL are sent with, made in few words."""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

from bench import job

__all__ = ["KEEP_FORMAT", "KEEP_NUMBERED", "Record"]

_KEEP: Final = """
    INSERT INTO semel_record (
        id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint,
        tenant, operation, key, snapshot
    ) VALUES (
        $1, 2, $2, 1, 0, 0, $3, now(), now(), now() + interval '1 d', now() + interval '1 d', $4, $5, $6, $7, $8
    )
"""
KEEP_NUMBERED: Final = " ".join(_KEEP.split())
KEEP_FORMAT: Final = re.sub(r"\$\d", "%s", KEEP_NUMBERED)
_SNAPSHOT: Final = b"\x01" * 60
"""About as long as the handler's answer in its envelope."""
_TTL: Final = 86400.0


class Record:
    """One key's, which nobody has had."""

    def __init__(self) -> None:
        self.id = secrets.token_bytes(16)
        self.place = int.from_bytes(self.id[:8], "big", signed=True)
        self.nonce = self.place & (2**63 - 1)
        self.key = job.fresh_key()

    @property
    def guard(self) -> str:
        return rf"semel_guard(E'\\x{self.id.hex()}', '{self.place}')"

    @property
    def keep(self) -> str:
        return (
            rf"CALL semel_keep(E'\\x{self.id.hex()}', '2', '{self.nonce}', '{_TTL}', '', '', '{job.OPERATION}', "
            rf"'{self.key}', E'\\x{_SNAPSHOT.hex()}')"
        )

    @property
    def values(self) -> tuple[Any, ...]:
        return self.id, 2, self.nonce, b"", "", job.OPERATION, self.key, _SNAPSHOT
