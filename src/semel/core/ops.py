"""The Ops: all that a flow can ask of a store, and what it is told.

An Op carries durations, never instants: the store's own server clock decides when a lease or a record ends, so the
clocks of workers do not matter. Every Op is one atomic step. All but Resolve may be sent again when the answer was
lost: a Claim is known by its nonce, the rest by the token.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

from semel.core.states import State, Takeover
from semel.core.values import value
from semel.errors import SemelError

R = TypeVar("R")

FOREVER: Final = 1000.0 * 366 * 86400
"""The ttl, in seconds, of a record that is meant to be kept: a thousand years."""


class Op(Generic[R]):
    """Base of all Ops; ``R`` is the type of its answer."""

    __slots__ = ()
    id: bytes


@value
class Record:
    """A record as a store shows it. Times are seconds from the store's now, so they mean the same everywhere."""

    id: bytes
    state: State
    token: int
    attempt: int
    fingerprint: bytes
    snapshot: bytes | None
    lease_left: float
    """Seconds until the lease ends; zero or less once it has, and of no meaning when nobody runs it."""
    age: float
    """Seconds since the first attempt was claimed."""
    expires_in: float
    """Seconds until the record is forgotten; the time in which an expired key is refused is part of them."""
    tenant: str = ""
    operation: str = ""
    key: str | None = None
    """The readable key, or None where only hashes are kept."""


@value
class Claimed:
    """The claim was won: run, under this token."""

    token: int
    attempt: int
    """1 for a first try; more when an abandoned attempt was taken over."""
    steps: tuple[tuple[str, bytes], ...] = ()
    """What earlier attempts saved, in order."""


@value
class Existing:
    """The claim was not won: this is what stands in its place."""

    record: Record


@value
class Claim(Op["Claimed | Existing"]):
    """Win the right to run, take over an abandoned attempt, or see what is there."""

    id: bytes
    nonce: int
    """Made once per call: the same claim sent twice is answered twice alike."""
    fingerprint: bytes
    """Of the request; empty where the operation has none, which matches everything."""
    lease: float
    ttl: float
    takeover: Takeover
    tenant: str
    operation: str
    key: str | None


@value
class Renew(Op[bool]):
    """Hold the lease for another while, counted from now; it never ends sooner than before."""

    id: bytes
    token: int
    lease: float


@value
class Complete(Op[bool]):
    """The answer: done, remembered for ``ttl`` seconds. Asked twice with one token, it is answered twice alike."""

    id: bytes
    token: int
    snapshot: bytes
    ttl: float


@value
class CompleteWith(Complete):
    """Complete, and make the handler's own writes in the same step: all of it or nothing. Only for stores that accept
    writes; answered with NotWritten too.
    """

    writes: tuple[Any, ...]


@value
class NotWritten:
    """Nothing was written, and sent again it would not be: a condition does not hold, or a write cannot be made."""

    error: SemelError


@value
class Release(Op[bool]):
    """End the attempt without an answer.

    ``to`` is ABSENT (nothing happened), ABANDONED (finished steps stay, the next try resumes; the token is stale from
    then on, so that a renewal still on its way cannot revive the attempt), or UNKNOWN (cannot tell).
    """

    id: bytes
    token: int
    to: State = State.ABSENT


@value
class SaveStep(Op[bool]):
    """Remember the value of one named step of a running attempt. The first value of a name stays."""

    id: bytes
    token: int
    name: str
    value: bytes
    position: int


@value
class Lookup(Op["Record | None"]):
    """The record as it is, unless absent; changes nothing."""

    id: bytes


@value
class Resolve(Op[State]):
    """A person's word on an unknown or abandoned record: done with this snapshot, or (None) it never happened.

    Answers the state it found; ABSENT, DONE and a live RUNNING are left alone, RUNNING only unless ``force``.
    """

    id: bytes
    snapshot: bytes | None
    ttl: float
    force: bool = False


@value
class Swept:
    """What one sweep did."""

    removed: int
    """Records that had expired."""
    unknown: int
    """Records abandoned past their time that may not be run again: now UNKNOWN, and kept."""


@value
class Sweep(Op[Swept]):
    """Remove at most ``limit`` expired records."""

    limit: int
    id: bytes = b""


@value
class Count(Op[int]):
    """How many live records a tenant has, counted no further than ``limit``. Asked only of stores that say ``counts``.

    Live is what is not absent: running, abandoned or done and not expired, or unknown. A store may leave out some whose
    end is near.
    """

    tenant: str
    limit: int
    id: bytes = b""


INPUT: Final = "~input"
"""The step under which an operation keeps what it was called with, where it may be resumed without its caller."""


@value
class Abandoned:
    """An attempt that ended without a word, and what it was called with."""

    record: Record
    input: bytes


@value
class Page:
    """What one look at the inputs found."""

    found: tuple[Abandoned, ...]
    last: bytes | None
    """Go on after this one; None at the end."""


@value
class Resumable(Op[Page]):
    """Abandoned operations of these names that keep their input and may be run again. Only for stores that say
    ``resumes``.

    ``limit`` inputs are looked at, in the order of their ids, after ``after``. Inputs of operations that are done are
    forgotten on the way.
    """

    operations: tuple[str, ...]
    after: bytes
    limit: int
    id: bytes = b""


OPS: Final[tuple[type[Op[Any]], ...]] = (Claim, Renew, Complete, Release, SaveStep, Lookup, Resolve, Sweep)
"""All Ops that every store answers. ``Count``, ``Resumable`` and ``CompleteWith`` are for stores that declare them."""
