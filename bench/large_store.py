"""A store full of records: what it can be asked, and the record that all of them are copies of."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from bench import job
from bench.processes import cpu_seconds
from semel import AsyncStore
from semel.core.ops import Claim, Claimed, Complete
from semel.core.states import Takeover

__all__ = ["KEY", "LIFE", "SNAPSHOT", "Full", "claim_of", "id_of", "sample"]

KEY: Final = "!" * 36
"""The readable key of the record that is copied; each copy has its number there. As long as a UUID."""
LIFE: Final = 86_400
"""Seconds that a record is kept."""
SNAPSHOT: Final = b'{"id":"pay_1001","amount":4200,"ok":true,"text":"%s"}' % (b"x" * 200)


class Full(ABC):
    """A server of our own with one store in it."""

    name: ClassVar[str]
    sweeps: ClassVar[bool] = True
    """Whether the store's sweep is what removes expired records."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @abstractmethod
    def store(self) -> AsyncStore:
        """A new store, for the running loop."""

    @abstractmethod
    def fill(self, start: int, count: int) -> None:
        """Write finished records of these numbers that live for long."""

    @abstractmethod
    def expire(self, start: int, count: int, rate: float, delay: float) -> None:
        """Write finished records of these numbers, so many of which expire each second, the first in ``delay`` s."""

    @abstractmethod
    def left(self) -> int:
        """Of those that expire: how many have, and are still there."""

    def removing(self) -> float:
        """Seconds that the server itself has spent on removing what has expired, where it tells."""
        return 0.0

    def cpu(self) -> float:
        """Seconds of CPU that the server has used."""
        return cpu_seconds(self._pid)


def id_of(number: int) -> bytes:
    """A record's identity is a hash, so it is here."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()[:16]


def claim_of(id: bytes, key: str = KEY) -> Claim:
    nonce = int.from_bytes(os.urandom(7), "big")
    return Claim(id, nonce, b"f" * 16, 30.0, float(LIFE), Takeover.RETRY, "acme", job.OPERATION, key)


async def sample(store: AsyncStore) -> bytes:
    """Have the store write a finished record; its id."""
    claim = claim_of(os.urandom(16))
    claimed = await store.execute(claim)
    assert isinstance(claimed, Claimed)
    assert await store.execute(Complete(claim.id, claimed.token, SNAPSHOT, float(LIFE)))
    return claim.id
