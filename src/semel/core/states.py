"""The life of a record, as one table. Read this file first.

**The record.** A *record* stands for one operation that must happen once, such as one payment. A client names the
operation by a key, and the store finds its record by a 16-byte identity made from that key. A record is in one of five
states:

``ABSENT``     Nobody has called yet, or the record has expired. The next call is a first call.
``RUNNING``    A caller, the *owner*, runs the operation. It holds the record by a *lease* that ends unless the owner
               renews it. The owner is identified by its *token*.
``ABANDONED``  The lease has ended and the owner has not reported. Nobody can know whether it is dead, paused or slow.
               This state is never written: it is how a RUNNING record looks after its lease has ended.
``DONE``       The operation is finished. The record holds a *snapshot* of the result, which every further call gets
               until the record expires. A finished record never changes. It only goes: when it expires, or when a
               person frees it.
``UNKNOWN``    An attempt was abandoned, and the policy forbids another one: nobody can say whether the effect happened.
               The record stays until someone resolves it, or until the lost owner reports after all.

**The moves.** Every change of state is a *move*, and ``TRANSITIONS`` lists them all. A move that is not in the table
does not happen: the store answers that the token is stale, or shows the record as it is. Two rules make the table safe
with many machines. First, a move is one atomic step of the store, so only one of two rivals wins. Second, an owner's
moves carry its token, and the token grows with every attempt: an owner that was replaced while it was paused finds that
its token is stale, and can change nothing.

**What uses the table.** ``core/semantics.py`` applies it to records. The memory store runs on that module, and so does
the model against which every other store is tested. The diagram in the documentation is drawn from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final


class State(IntEnum):
    """The state of a record. Stores write these numbers: never change one."""

    ABSENT = 0
    RUNNING = 1
    DONE = 2
    UNKNOWN = 3
    ABANDONED = 4


# Aliases for code that runs in every call: looking up a member of an Enum class is slow on Python 3.11.
ABSENT: Final = State.ABSENT
RUNNING: Final = State.RUNNING
DONE: Final = State.DONE
UNKNOWN: Final = State.UNKNOWN
ABANDONED: Final = State.ABANDONED


class Takeover(IntEnum):
    """What may happen to an abandoned record. Stores write these numbers: never change one."""

    RETRY = 0
    """Run it again."""
    REJECT = 1
    """Never run it again: the record becomes UNKNOWN."""
    RECOVER = 2
    """Take over, and ask the recover hook what the lost owner did."""


class Move(Enum):
    """What can happen to a record. The values are the labels in the diagram."""

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
    FREE = "release, drop the outcome"

    # Members are singletons. Enum's own __hash__ is a Python function, which is slow in every lookup of the table.
    __hash__ = object.__hash__


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
        # The lease ends without a report.
        (State.RUNNING, Move.LEASE_ENDS): State.ABANDONED,
        (State.ABANDONED, Move.TAKE_OVER): State.RUNNING,
        (State.ABANDONED, Move.REFUSE): State.UNKNOWN,
        (State.ABANDONED, Move.EXPIRE): State.ABSENT,
        # An owner that was only slow, and was not replaced, still holds the newest token. Its report counts.
        (State.ABANDONED, Move.RENEW): State.RUNNING,
        (State.ABANDONED, Move.SAVE_STEP): State.ABANDONED,
        (State.ABANDONED, Move.COMPLETE): State.DONE,
        (State.ABANDONED, Move.RELEASE): State.ABSENT,
        (State.ABANDONED, Move.YIELD): State.ABANDONED,
        (State.ABANDONED, Move.GIVE_UP): State.UNKNOWN,
        (State.UNKNOWN, Move.COMPLETE): State.DONE,
        (State.UNKNOWN, Move.RELEASE): State.ABSENT,
        (State.UNKNOWN, Move.GIVE_UP): State.UNKNOWN,
        # A person or a program has found out what happened.
        (State.ABANDONED, Move.RESOLVE_DONE): State.DONE,
        (State.ABANDONED, Move.RESOLVE_ABSENT): State.ABSENT,
        (State.UNKNOWN, Move.RESOLVE_DONE): State.DONE,
        (State.UNKNOWN, Move.RESOLVE_ABSENT): State.ABSENT,
        # The ttl has ended.
        (State.DONE, Move.EXPIRE): State.ABSENT,
        # A person drops the outcome, mostly a failure whose cause is gone, so that the operation runs again.
        (State.DONE, Move.FREE): State.ABSENT,
    }
)
"""The state that each move leads to from each state. A move that is not in the table does not happen."""

OWNER_MOVES: Final = frozenset({Move.RENEW, Move.SAVE_STEP, Move.COMPLETE, Move.RELEASE, Move.YIELD, Move.GIVE_UP})
"""Moves that carry a token. They are refused if it is not the newest."""


def mermaid() -> str:
    """Return the table as a Mermaid state diagram. Moves that do not change the state are left out."""
    lines = ["stateDiagram-v2", "    [*] --> absent"]
    for (state, move), target in TRANSITIONS.items():
        if state is not target:
            lines.append(f"    {state.name.lower()} --> {target.name.lower()}: {move.value}")
    return "\n".join(lines)
