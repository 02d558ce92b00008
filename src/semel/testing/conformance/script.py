"""The language of the suite: a *script* is a generator that yields requests and is sent their answers.

Scripts are written once; ``stages.py`` plays them on sync and on async stores. A script says what it expects by
``assert`` and knows neither threads nor event loops nor any store. An Op is answered with its result, or the StoreError
is thrown in at the yield; the other requests are the classes below.

A store with a real clock cannot be asked what holds "just before" a lease ends. So what must still be alive lasts
``LIVE`` seconds, far longer than any proof; what must have ended lasts ``SHORT``, and a ``Elapse`` follows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from semel.core.ops import Op
from semel.core.values import value

__all__ = [
    "LIVE",
    "PAST_SHORT",
    "SHORT",
    "TTL",
    "Batch",
    "Elapse",
    "Elsewhere",
    "Family",
    "Linger",
    "Proof",
    "Request",
    "Script",
    "Together",
    "WaitForChange",
    "new_id",
    "new_nonce",
]

F = TypeVar("F", bound="Callable[[], Script]")


@value
class Elapse:
    """So many seconds pass for the store: its clock is moved where the suite can do that, otherwise we sleep."""

    seconds: float


@value
class Linger:
    """So many seconds really pass, whatever the store's clock: the others of a ``Together`` get on with their work."""

    seconds: float


@value
class Batch:
    """Ops for one ``execute_many``; answered with its list, in which a failed Op is its StoreError."""

    ops: Sequence[Op[Any]]


@value
class WaitForChange:
    """The store's ``wait``; answered with the seconds that really passed."""

    id: bytes
    seconds: float


@value
class Elsewhere:
    """The same through a second instance of the store on the same records; where there is none, through the first."""

    request: Op[Any] | Batch | WaitForChange


@value
class Together:
    """Requests or scripts at the same time: threads that start at one barrier, or tasks. Answered with the list.

    When some fail, all are awaited and the first error is raised.
    """

    parts: Sequence[Request | Script]


Request: TypeAlias = "Op[Any] | Elapse | Linger | Batch | WaitForChange | Elsewhere | Together"
Script: TypeAlias = Generator[Request, Any, Any]
"""A proof: a generator that yields requests and asserts what it expects of the answers."""

LIVE: Final = 30.0
"""A lease that does not end while a proof runs."""
TTL: Final = 3600.0
SHORT: Final = 0.01
"""A lease or ttl that is over after the next ``PAST_SHORT``. Nothing may be expected of it before."""
PAST_SHORT: Final = Elapse(0.025)


@dataclass(frozen=True, slots=True)
class Proof:
    """One script, and what a store must have for it."""

    family: str
    name: str
    script: Callable[[], Script]
    second: bool
    """Pointless without a second instance."""
    wakes: bool
    """Only for stores that declare a wake-up."""
    keeps_expired: bool
    """Not for stores that remove expired records by themselves."""
    counts: bool
    """Only for stores that declare that they count."""
    resumes: bool
    """Only for stores that declare that they list what can be resumed."""

    def __str__(self) -> str:
        return self.name


class Family:
    """The proofs of one module. It is a decorator that adds a script; the function's name says what it proves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.proofs: list[Proof] = []

    def __call__(
        self,
        *,
        second: bool = False,
        wakes: bool = False,
        keeps_expired: bool = False,
        counts: bool = False,
        resumes: bool = False,
    ) -> Callable[[F], F]:
        def add(script: F) -> F:
            needs = (second, wakes, keeps_expired, counts, resumes)
            self.proofs.append(Proof(self.name, script.__name__, script, *needs))
            return script

        return add


def new_id() -> bytes:
    """An identity that no other proof uses."""
    return os.urandom(16)


def new_nonce() -> int:
    return int.from_bytes(os.urandom(8), "big") >> 1
