"""Scripts, the language of the suite, and what they share: claims, records in a given state, comparisons of records.

A *script* is a generator that yields requests and receives their answers.

Scripts are written once, and ``suite.py`` plays them on sync and async stores. A script states what it expects with
``assert``. It knows no threads, no event loops and no particular store. The answer to an Op is its result; a StoreError
is thrown in at the yield. The other requests are the classes below.

With a real clock nobody can test what holds "just before" a lease ends. So a lease that must still be live lasts
``LIVE`` seconds, far longer than any proof. One that must have ended lasts ``SHORT`` seconds, and ``Elapse`` follows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Op, Record, Release, Renew, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.core.values import value

F = TypeVar("F", bound="Callable[[], Script]")


class MovableClock(Protocol):
    """A clock of a store that the suite can move."""

    def advance(self, seconds: float) -> None: ...


class ManualClock:
    """A clock that moves only when told to. Pass it to the store as its source of the time."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the time. Each call returns one that is a microsecond later, as on a real clock."""
        with self._lock:
            self._now += 0.000_001
            return self._now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


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
    second: bool = False
    """Whether it needs a second instance of the store."""
    wakes: bool = False
    """Whether it applies only to stores that declare ``wakes``."""
    keeps_expired: bool = False
    """Whether it does not apply to stores that remove expired records by themselves."""
    counts: bool = False
    """Whether it applies only to stores that declare ``counts``."""
    resumes: bool = False
    """Whether it applies only to stores that declare ``resumes``."""
    lists: bool = False
    """Whether it applies only to stores that declare ``lists``."""
    lists_once: bool = False
    """Whether it does not apply to stores whose pages may show a record twice."""

    def __str__(self) -> str:
        return self.name


class Family:
    """The proofs of one behaviour. Used as a decorator, it adds a script; the function's name says what it proves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.proofs: list[Proof] = []

    def __call__(self, **needs: bool) -> Callable[[F], F]:
        """:param needs: what a store must support for the script, by the names of ``Proof``."""

        def add(script: F) -> F:
            self.proofs.append(Proof(self.name, script.__name__, script, **needs))
            return script

        return add


def new_id() -> bytes:
    """Return an identity that no other proof uses."""
    return os.urandom(16)


def new_nonce() -> int:
    return int.from_bytes(os.urandom(8), "big") >> 1


def claim(
    id: bytes,
    *,
    nonce: int | None = None,
    fingerprint: bytes = b"",
    lease: float = LIVE,
    ttl: float = TTL,
    takeover: Takeover = Takeover.RETRY,
    tenant: str = "acme",
    operation: str = "conformance",
    key: str | None = "key",
) -> Claim:
    """Return a Claim. The nonce defaults to a new one."""
    nonce = new_nonce() if nonce is None else nonce
    return Claim(id, nonce, fingerprint, lease, ttl, takeover, tenant, operation, key)


def won(request: Claim | Elsewhere) -> Generator[Request, Any, Claimed]:
    """Send a claim that must be won. Returns the answer."""
    answer = yield request
    assert type(answer) is Claimed, answer
    return answer


def shown(request: Claim | Elsewhere, state: State) -> Generator[Request, Any, Record]:
    """Send a claim that must be answered with a record in this state. Returns the record."""
    answer = yield request
    assert type(answer) is Existing, answer
    record: Record = answer.record
    assert record.state is state
    return record


def running(**settings: Any) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a record with a live lease. Returns its id and the answer to the claim, which has the given settings."""
    id = new_id()
    return id, (yield from won(claim(id, **settings)))


def several(count: int, **settings: Any) -> Generator[Request, Any, dict[bytes, Claimed]]:
    """Make records with a live lease. Returns the answers to their claims by id."""
    made = {}
    for _ in range(count):
        id, claimed = yield from running(**settings)
        made[id] = claimed
    return made


def abandoned(**settings: Any) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a record whose lease has ended, and its ttl too if that is SHORT."""
    id, claimed = yield from running(lease=SHORT, **settings)
    yield PAST_SHORT
    return id, claimed


def charged(**settings: Any) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a running record that has saved the step ``charge`` with the value 1."""
    id, claimed = yield from running(**settings)
    assert (yield SaveStep(id, claimed.token, "charge", b"1", 0)) is True
    return id, claimed


def next_attempt(id: bytes, owner: Claimed) -> Generator[Request, Any, Claimed]:
    """Let the owner go, with its steps, and claim the record again. Returns the answer to that claim."""
    assert (yield Release(id, owner.token, State.ABANDONED)) is True
    return (yield from won(claim(id)))


def abandoned_many(count: int, **settings: Any) -> Generator[Request, Any, list[bytes]]:
    made = yield from several(count, lease=SHORT, **settings)
    yield PAST_SHORT
    return list(made)


def replaced() -> Generator[Request, Any, tuple[bytes, Claimed, Claimed]]:
    """Make a record that was abandoned and taken over. Returns its id, the old owner and the new one."""
    id, old = yield from abandoned()
    return id, old, (yield from won(claim(id)))


def done(
    snapshot: bytes = b"answer", *, ttl: float = TTL, answer_ttl: float | None = None, **settings: Any
) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a finished record.

    :param ttl: that of the claim.
    :param answer_ttl: the ttl of the completion, if it is another one.
    """
    id, claimed = yield from running(ttl=ttl, **settings)
    assert (yield Complete(id, claimed.token, snapshot, ttl if answer_ttl is None else answer_ttl)) is True
    return id, claimed


def unknown(**settings: Any) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a record that its owner released to UNKNOWN."""
    id, claimed = yield from running(**settings)
    assert (yield Release(id, claimed.token, State.UNKNOWN)) is True
    return id, claimed


def assert_unchanged(id: bytes, before: Record | None) -> Script:
    """Check that the record is the same, except for the time that has passed.

    An Op that must not change the record carries far longer times, so a change of the times would show.
    """
    after = yield Lookup(id)
    if before is None:
        assert after is None
        return
    assert after is not None
    assert (after.state, after.token, after.attempt) == (before.state, before.token, before.attempt)
    assert (after.fingerprint, after.snapshot) == (before.fingerprint, before.snapshot)
    assert (after.tenant, after.operation, after.key) == (before.tenant, before.operation, before.key)
    assert before.lease_left - LIVE < after.lease_left <= before.lease_left + 0.001
    assert before.expires_in - LIVE < after.expires_in <= before.expires_in + 0.001
    assert before.age - 0.001 <= after.age < before.age + LIVE


def owner_moves(id: bytes, token: int) -> list[Op[bool]]:
    """Return every Op of an owner, with times so long that a change would show."""
    return [
        Renew(id, token, 50 * TTL),
        SaveStep(id, token, "stale", b"stale", 99),
        Complete(id, token, b"stale", 50 * TTL),
        Release(id, token, State.ABANDONED),
        Release(id, token, State.UNKNOWN),
        Release(id, token, State.ABSENT),
    ]


def assert_owner_is_refused(id: bytes, token: int, *, elsewhere: bool = False) -> Script:
    """Check that every Op with this token is answered with False and changes nothing."""
    before = yield Lookup(id)
    for move in owner_moves(id, token):
        answer = yield Elsewhere(move) if elsewhere else move
        assert answer is False, f"{type(move).__name__} with a stale token was not refused"
        yield from assert_unchanged(id, before)


def drained() -> Script:
    """Sweep until nothing is left, also of other proofs, so that later counts are exact."""
    yield PAST_SHORT
    for _ in range(1000):
        swept = yield Sweep(1000)
        if not swept.removed + swept.unknown:
            return
    raise AssertionError("the sweep never ends: it does not remove what it counts")
