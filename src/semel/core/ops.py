"""The Ops, which are all the requests that a flow can send to a store, and the store's answers.

Every Op is one atomic step. An Op carries durations, never instants: the clock of the store's server decides when a
lease or a record ends, so the clocks of workers do not matter. Every Op but Resolve may be sent again if its answer was
lost: the store recognises a repeated Claim by its nonce, and the others by their token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from semel.core.states import State, Takeover
from semel.core.values import value
from semel.errors import SemelError

R = TypeVar("R")

FOREVER: Final = 1000.0 * 366 * 86400
"""The ttl of a record that does not expire, in seconds: a thousand years."""


class Op(Generic[R]):
    """The base of all Ops. ``R`` is the type of the answer."""

    __slots__ = ()
    id: bytes


class StoreOp(Op[R]):
    """The base of Ops about the store as a whole. They name no record."""

    __slots__ = ()
    id: bytes = b""


@value
class Record:
    """A record as a store shows it. Times are relative to the store's clock, so they mean the same on every machine."""

    id: bytes
    state: State
    token: int
    attempt: int
    fingerprint: bytes
    snapshot: bytes | None
    lease_left: float
    """Seconds until the lease ends; zero or less after that. Meaningless unless the record is RUNNING or ABANDONED."""
    age: float
    """Seconds since the first attempt was claimed."""
    expires_in: float
    """Seconds until the record is removed. They include the time in which an expired key is rejected."""
    tenant: str = ""
    operation: str = ""
    key: str | None = None
    """The readable key; None if the guard stores only hashes."""
    root: str | None = None
    """The key at the start of the chain of services, as the caller named it; None if it named none. ``lookup`` sets it.
    """
    parent: str | None = None
    """The key of the caller's operation, likewise."""


class Claimed(NamedTuple):
    """The claim was won: run the operation under this token."""

    token: int
    attempt: int
    """1 for a first try; more when an abandoned attempt was taken over."""
    steps: tuple[tuple[str, bytes], ...] = ()
    """The steps that earlier attempts saved, in order."""


class Existing(NamedTuple):
    """The claim was not won, because this record exists."""

    record: Record


make_claimed: Final[Callable[[tuple[int, int, tuple[tuple[str, bytes], ...]]], Claimed]] = partial(
    tuple.__new__, Claimed
)
make_existing: Final[Callable[[tuple[Record]], Existing]] = partial(tuple.__new__, Existing)
"""They create the answers from all fields in order. The classes are slower: their constructors are Python functions."""


@value
class Claim(Op["Claimed | Existing"]):
    """Claim the right to run the operation, or to take it over if it is abandoned."""

    id: bytes
    nonce: int
    """A random number for each call. By its nonce a repeated claim is recognised and gets the same answer."""
    fingerprint: bytes
    """The fingerprint of the request. An empty one matches every other."""
    lease: float
    ttl: float
    takeover: Takeover
    tenant: str
    operation: str
    key: str | None


@value
class Renew(Op[bool]):
    """Extend the lease to ``lease`` seconds from now. The answer is False if the token is stale.

    A renewal never shortens the lease.
    """

    id: bytes
    token: int
    lease: float


@value
class Complete(Op[bool]):
    """Store the result for ``ttl`` seconds. The answer is False if the token is stale.

    A repeated completion with the same token gets the same answer.
    """

    id: bytes
    token: int
    snapshot: bytes
    ttl: float


@value
class CompleteWith(Complete):
    """Complete, and make the handler's own writes in the same atomic step. Only for stores that accept writes.

    The answer may also be NotWritten.
    """

    writes: tuple[Any, ...]


@value
class NotWritten:
    """Nothing was written, because a condition does not hold or a write is impossible. A retry would not help."""

    error: SemelError


@value
class Release(Op[bool]):
    """End the attempt without a result. The answer is False if the token is stale.

    ``to`` is ABSENT (nothing happened), ABANDONED (the steps stay; the next attempt continues after them) or UNKNOWN
    (nobody can tell what happened). After a release to ABANDONED the token is stale, so that a renewal that is still on
    its way cannot revive the attempt.
    """

    id: bytes
    token: int
    to: State = State.ABSENT


@value
class SaveStep(Op[bool]):
    """Store the value of one named step of a running attempt. The first value stored under a name stays. The answer is
    False if the token is stale.
    """

    id: bytes
    token: int
    name: str
    value: bytes
    position: int


@value
class Lookup(Op["Record | None"]):
    """Return the record, or None if it is absent. Changes nothing."""

    id: bytes


@value
class WatchRecord(Op["float | None"]):
    """Ask for a message when the attempt that is running ends. The answer is the seconds left of its lease, or None if
    none is running. ``wait`` of a store sends it, if the store's server sends such messages.
    """

    id: bytes


@value
class Resolve(Op[State]):
    """Settle an unknown or abandoned record: it is done with this snapshot, or it never happened (None).

    The answer is the state that the record was in. An absent or finished record stays as it is, and so does a running
    one unless ``force`` is set.
    """

    id: bytes
    snapshot: bytes | None
    ttl: float
    force: bool = False
    token: int | None = None
    """With the snapshot None: free the record also if it is finished. If it has another token, it is not the one that
    the caller has seen: it stays as it is, and the answer is ABSENT."""
    states: tuple[State, ...] = ()
    """Change the record only in one of these states; empty for all. They allow nothing that the other fields forbid. In
    another state it stays as it is. An owner keeps its token when it finishes, gives up or loses its lease, so only the
    token and the state together say that the record is still what the caller has seen."""


@value
class Swept:
    """The result of one sweep."""

    removed: int
    """How many expired records were removed."""
    unknown: int
    """How many abandoned records became UNKNOWN, because they are past their time and may not be run again."""


@value
class Sweep(Op[Swept]):
    """Remove at most ``limit`` expired records."""

    limit: int
    id: bytes = b""


@value
class Count(StoreOp[int]):
    """Count a tenant's live records, up to ``limit``. Only for stores that declare ``counts``.

    Live means not absent: running, abandoned, done and not expired, or unknown. A store may leave out records that are
    about to expire.
    """

    tenant: str
    limit: int


INPUT: Final = "~input"
"""The name of the step in which a resumable operation stores its arguments."""


@value
class Abandoned:
    """An abandoned operation, and the arguments it was called with."""

    record: Record
    input: bytes


@value
class Page:
    """The answer to Resumable."""

    found: tuple[Abandoned, ...]
    last: bytes | None
    """Continue after this id; None at the end."""


@value
class Resumable(StoreOp[Page]):
    """List abandoned operations of these names that have stored their arguments and may be run again. Only for stores
    that declare ``resumes``.

    The store looks at ``limit`` stored arguments in the order of their ids, starting after ``after``. It deletes the
    arguments of finished operations that it finds.
    """

    operations: tuple[str, ...]
    after: bytes
    limit: int


@value
class Listing:
    """One page of records: the answer to ListRecords."""

    records: tuple[Record, ...]
    """Without their snapshots. The newest come first where the store has an order, and in no order elsewhere."""
    after: str | None
    """Where the next page continues; None at the end."""
    looked_at: int
    """How many records the store has looked at for this page."""


@value
class ListRecords(StoreOp[Listing]):
    """List records that are not absent, page by page. Only for stores that declare ``lists``.

    The store looks at no more than ``look`` records for a page, whatever the filters are, so a page may be empty
    although others follow. All pages together show each record once that was there from the first page to the last.
    One that was claimed, or has ended, in the meantime may be shown or not.
    """

    states: tuple[State, ...] = ()
    """Only records in these states; empty for all."""
    operation: str | None = None
    tenant: str | None = None
    older: float = 0.0
    """Only records whose first attempt was claimed at least this many seconds ago."""
    limit: int = 50
    look: int = 5000
    after: str | None = None
    """``Listing.after`` of the page before."""


@value
class Size:
    """The answer to Measure."""

    records: int
    """How many records there are, including expired ones that nobody has swept."""
    exact: bool
    """Whether they were counted. Otherwise it is the estimate of the server's statistics."""
    bytes: int | None
    """How much room the records take, as the server's statistics say; None if the store cannot tell."""
    sweep_lag: float
    """Seconds since the oldest record that a sweep should remove has expired; 0 if there is none."""


@value
class Measure(StoreOp[Size]):
    """Say how many records there are, and how long the expired ones wait for a sweep. Only for stores that declare
    ``lists``.

    The store never counts a whole table for that.
    """
