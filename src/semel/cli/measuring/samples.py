"""Sample records to measure: finished ones, like those of a service, written through the store."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

from semel.cli.measuring.interrupts import Interrupts
from semel.codec import Codec
from semel.core.encoding.snapshot import Kind
from semel.core.ops import Claim, Claimed, Complete
from semel.core.states import Takeover
from semel.engine.ports import Store
from semel.errors import SemelError

__all__ = ["Sample"]

BATCH: Final = 100
LIFE: Final = 3600.0
"""The ttl of samples: if removing them fails, they expire."""
ENOUGH: Final = 20_000_000
"""Bytes after which the pages of a database are small beside what was written, however few the records."""
_OPERATION: Final = "POST /payments/{id}/captures"
_TENANT: Final = "tenant-00000"


class Sample:
    """Records like those of a service: a UUID as key, an operation, a tenant, a fingerprint, an answer."""

    def __init__(self, answer: bytes, count: int, interrupts: Interrupts | None = None) -> None:
        self.answer = answer
        self.count = count
        self.interrupts = interrupts or Interrupts()
        self.ids: list[bytes] = []
        """The ids of all samples. An id is added before its record is written, so that it can always be removed."""

    def again(self) -> Sample:
        """The same for another store."""
        return Sample(self.answer, self.count, self.interrupts)

    def stored(self) -> int:
        """Bytes of the answer in the form that a store gets."""
        return len(Codec().seal(Kind.VALUE, "plain", self.answer, b""))

    def write(self, store: Store, count: int | None = None, *, after: Callable[[], None] | None = None) -> list[bytes]:
        """Claim and complete the records. Returns the ids of all records written so far.

        :param after: called after each batch.
        """
        codec = Codec()
        left = self.count if count is None else count
        while left > 0:
            self.interrupts.check()
            some = [secrets.token_bytes(16) for _ in range(min(BATCH, left))]
            left -= len(some)
            self.ids += some
            claimed = self._all(store, [self._claim(id) for id in some])
            self._all(
                store,
                [
                    Complete(id, answer.token, codec.seal(Kind.VALUE, "plain", self.answer, id), LIFE)
                    for id, answer in zip(some, claimed, strict=True)
                    if isinstance(answer, Claimed)
                ],
            )
            if after is not None:
                after()
        self.interrupts.check()
        return self.ids

    def fill(self, store: Store, floor: int, grown: Callable[[], float]) -> None:
        """Write the records, and more if they are too few for a database that allocates whole pages.

        :param floor: enough records in any case.
        :param grown: returns the bytes that they take now.
        """
        self.write(store)
        while len(self.ids) < floor and grown() < ENOUGH:
            self.write(store, min(len(self.ids), floor - len(self.ids)))

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
