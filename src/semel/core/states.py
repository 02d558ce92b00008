"""The life of a record, as one table. Read this file first.

Theory of operation ------------------- A *record* stands for one operation that must happen once. It is found by a
16-byte identity and is in one of five states:

``ABSENT``     nobody has asked, or what was known has expired: the next call is a first call.
``RUNNING``    an owner holds it by a *lease* that ends unless it is renewed. The owner is known by its *token*.
``ABANDONED``  the lease ended and the owner said nothing. Never written down: it is what a RUNNING record looks like
               after its lease. Whether the owner is dead, paused or slow cannot be known.
``DONE``       finished; the *snapshot* holds the answer, which is replayed until the record expires. It never changes.
``UNKNOWN``    an attempt was abandoned and the policy forbids another: nobody can say whether the effect happened. It
               stays, without expiring, until someone resolves it, or the lost owner reports after all.

Every change is a *move*, and ``TRANSITIONS`` lists all moves there are: a move that is not in the table does not
happen, and the store answers STALE, or shows the record as it is. Two rules make the table safe to run from many
machines at once. A move is one atomic step of the store, so of two rivals one wins. And moves of an owner carry its
token, which grows with every attempt: an owner that was replaced while it was paused finds its token stale and can
change nothing.

The memory store and the model that tests every other store are both run from this table (``core/semantics.py``), and
the diagram in the documentation is drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final

__all__ = ["OWNER_MOVES", "STORED", "TRANSITIONS", "Move", "State", "Takeover", "follow", "mermaid"]


class State(IntEnum):
    """Where a record is in its life. The numbers are what stores write."""

    ABSENT = 0
    RUNNING = 1
    DONE = 2
    UNKNOWN = 3
    ABANDONED = 4


ABSENT: Final = State.ABSENT
RUNNING: Final = State.RUNNING
DONE: Final = State.DONE
UNKNOWN: Final = State.UNKNOWN
ABANDONED: Final = State.ABANDONED
# By short names, for code that runs in every call: Python 3.11 takes a tenth of a microsecond to find a member in its
# class, and a call looks at a dozen.


class Takeover(IntEnum):
    """What may happen to a record whose owner fell silent. The numbers are what stores write."""

    RETRY = 0
    REJECT = 1
    RECOVER = 2


class Move(Enum):
    """What can happen to a record; the value says it in words for the diagram."""

    CLAIM = "claim"
    RENEW = "renew"
    SAVE_STEP = "save step"
    COMPLETE = "complete"
    RELEASE = "release, nothing happened"
    YIELD = "release, keep the steps"
    GIVE_UP = "release, cannot tell"
    LEASE_ENDS = "lease ends"
    TAKE_OVER = "claim, take over"
    REFUSE = "claim, may not take over"
    EXPIRE = "expires"
    RESOLVE_DONE = "resolve, it happened"
    RESOLVE_ABSENT = "resolve, it did not"

    __hash__ = (
        object.__hash__
    )  # members are single; Enum's own hash is a Python function, and moves are looked up a lot


TRANSITIONS: Final[Mapping[tuple[State, Move], State]] = MappingProxyType(
    {
        (State.ABSENT, Move.CLAIM): State.RUNNING,
        # The owner's moves; each carries the token.
        (State.RUNNING, Move.RENEW): State.RUNNING,
        (State.RUNNING, Move.SAVE_STEP): State.RUNNING,
        (State.RUNNING, Move.COMPLETE): State.DONE,
        (State.RUNNING, Move.RELEASE): State.ABSENT,
        (State.RUNNING, Move.YIELD): State.ABANDONED,
        (State.RUNNING, Move.GIVE_UP): State.UNKNOWN,
        # Silence.
        (State.RUNNING, Move.LEASE_ENDS): State.ABANDONED,
        (State.ABANDONED, Move.TAKE_OVER): State.RUNNING,
        (State.ABANDONED, Move.REFUSE): State.UNKNOWN,
        (State.ABANDONED, Move.EXPIRE): State.ABSENT,
        # An owner that was only slow, and whom nobody replaced, still holds the newest token: its word is the truth.
        (State.ABANDONED, Move.RENEW): State.RUNNING,
        (State.ABANDONED, Move.SAVE_STEP): State.ABANDONED,
        (State.ABANDONED, Move.COMPLETE): State.DONE,
        (State.ABANDONED, Move.RELEASE): State.ABSENT,
        (State.ABANDONED, Move.YIELD): State.ABANDONED,
        (State.ABANDONED, Move.GIVE_UP): State.UNKNOWN,
        (State.UNKNOWN, Move.COMPLETE): State.DONE,
        (State.UNKNOWN, Move.RELEASE): State.ABSENT,
        (State.UNKNOWN, Move.GIVE_UP): State.UNKNOWN,
        # People, or a program that looked at the other side.
        (State.ABANDONED, Move.RESOLVE_DONE): State.DONE,
        (State.ABANDONED, Move.RESOLVE_ABSENT): State.ABSENT,
        (State.UNKNOWN, Move.RESOLVE_DONE): State.DONE,
        (State.UNKNOWN, Move.RESOLVE_ABSENT): State.ABSENT,
        # The end.
        (State.DONE, Move.EXPIRE): State.ABSENT,
    }
)

OWNER_MOVES: Final = frozenset({Move.RENEW, Move.SAVE_STEP, Move.COMPLETE, Move.RELEASE, Move.YIELD, Move.GIVE_UP})
"""Moves that carry a token and are refused as STALE when it is not the newest."""

STORED: Final = frozenset({State.RUNNING, State.DONE, State.UNKNOWN})
"""States that are written down; the others follow from what is missing and from the clock."""


def follow(state: State, move: Move) -> State | None:
    """The state that ``move`` leads to, or None where the table has no such move."""
    return TRANSITIONS.get((state, move))


def mermaid() -> str:
    """The table as a Mermaid state diagram, for the documentation. Moves that change nothing are left out."""
    lines = ["stateDiagram-v2", "    [*] --> absent"]
    for (state, move), target in TRANSITIONS.items():
        if state is not target:
            lines.append(f"    {state.name.lower()} --> {target.name.lower()}: {move.value}")
    return "\n".join(lines)
