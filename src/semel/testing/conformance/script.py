"""Scripts, the language of the suite. A *script* is a generator that yields requests and receives their answers.

Scripts are written once, and ``stages.py`` plays them on sync and async stores. A script states what it expects with
``assert``. It knows no threads, no event loops and no particular store. The answer to an Op is its result; a StoreError
is thrown in at the yield. The other requests are the classes below.

With a real clock nobody can test what holds "just before" a lease ends. So a lease that must still be live lasts
``LIVE`` seconds, far longer than any proof. One that must have ended lasts ``SHORT`` seconds, and ``Elapse`` follows.
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
    """Let seconds pass for the store: move its clock if the suite can do that, otherwise sleep."""

    seconds: float


@value
class Linger:
    """Sleep, whatever the store's clock, so that the other parts of a ``Together`` can proceed."""

    seconds: float


@value
class Batch:
    """Send Ops with one ``execute_many``. The answer is its list, with a StoreError for each failed Op."""

    ops: Sequence[Op[Any]]


@value
class WaitForChange:
    """Call the store's ``wait``. The answer is the number of seconds that it really took."""

    id: bytes
    seconds: float


@value
class Elsewhere:
    """Send a request to a second instance of the store on the same records, or to the first if there is no second."""

    request: Op[Any] | Batch | WaitForChange


@value
class Together:
    """Run requests or scripts at the same time, in threads that start at one barrier, or in tasks.

    The answer is the list of their answers. If some fail, the first error is raised after all have ended.
    """

    parts: Sequence[Request | Script]


Request: TypeAlias = "Op[Any] | Elapse | Linger | Batch | WaitForChange | Elsewhere | Together"
Script: TypeAlias = Generator[Request, Any, Any]
"""A generator that yields requests and asserts what it expects of the answers."""

LIVE: Final = 30.0
"""Seconds of a lease that does not end while a proof runs."""
TTL: Final = 3600.0
SHORT: Final = 0.01
"""Seconds of a lease or ttl that has ended after the next ``PAST_SHORT``. Before that it may or may not have ended."""
PAST_SHORT: Final = Elapse(0.025)


@dataclass(frozen=True, slots=True)
class Proof:
    """One script, and what a store must support to be tested with it."""

    family: str
    name: str
    script: Callable[[], Script]
    second: bool
    """Whether it needs a second instance of the store."""
    wakes: bool
    """Whether it applies only to stores that declare ``wakes``."""
    keeps_expired: bool
    """Whether it does not apply to stores that remove expired records by themselves."""
    counts: bool
    """Whether it applies only to stores that declare ``counts``."""
    resumes: bool
    """Whether it applies only to stores that declare ``resumes``."""

    def __str__(self) -> str:
        return self.name


class Family:
    """The proofs of one module. Used as a decorator, it adds a script; the name of the function says what it proves."""

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
    """Return an identity that no other proof uses."""
    return os.urandom(16)


def new_nonce() -> int:
    return int.from_bytes(os.urandom(8), "big") >> 1
