"""Records to be measured: finished ones, like those of a service, written by the store itself."""

from __future__ import annotations

import secrets
from typing import Any, Final

from semel.core.ops import Claim, Claimed, Complete
from semel.core.snapshot import Codec, Kind
from semel.core.states import Takeover
from semel.engine.ports import Store
from semel.errors import SemelError

__all__ = ["Sample"]

BATCH: Final = 100
LIFE: Final = 3600.0
"""The ttl of samples: where removing them should fail, they end by themselves."""
_OPERATION: Final = "POST /payments/{id}/captures"
_TENANT: Final = "tenant-00000"


class Sample:
    """Records like those of a service: a UUID as key, an operation, a tenant, a fingerprint, an answer."""

    def __init__(self, answer: bytes, count: int) -> None:
        self.answer = answer
        self.count = count

    def write(self, store: Store) -> list[bytes]:
        """Claim and complete all of them; their ids."""
        codec = Codec()
        ids = [secrets.token_bytes(16) for _ in range(self.count)]
        for first in range(0, len(ids), BATCH):
            some = ids[first : first + BATCH]
            claimed = self._all(store, [self._claim(id) for id in some])
            self._all(
                store,
                [
                    Complete(id, answer.token, codec.seal(Kind.VALUE, "plain", self.answer, id), LIFE)
                    for id, answer in zip(some, claimed, strict=True)
                    if isinstance(answer, Claimed)
                ],
            )
        return ids

    def _claim(self, id: bytes) -> Claim:
        key = f"{id[:4].hex()}-{id[4:6].hex()}-{id[6:8].hex()}-{id[8:10].hex()}-{id[10:].hex()}"
        nonce = int.from_bytes(id[:7], "big")
        return Claim(id, nonce, secrets.token_bytes(16), LIFE, LIFE, Takeover.RETRY, _TENANT, _OPERATION, key)

    def _all(self, store: Store, ops: list[Any]) -> list[Any]:
        answers = store.execute_many(ops)
        for answer in answers:
            if isinstance(answer, SemelError):
                raise answer
        return answers
