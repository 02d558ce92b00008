"""The ways out of each state: what may be done to a record, what each act would do, and doing it.

An act is judged again when it is done: the record may have changed since the page was shown. The store changes only a
record that has the token and the state that were judged. The answer says what changed, or that nothing did, and why.
Every act, and every act that was refused, is a line of the logger ``semel.audit``.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final, Literal, NamedTuple

from semel.console.gate import Access
from semel.console.watched import COUNTED, WatchedStore
from semel.console.words import capped
from semel.core.messaging.messages import LetterFilter
from semel.core.ops import Record
from semel.core.states import State
from semel.engine.audit_log import log_act
from semel.errors import KeyInvalid, NotResolvable, PolicyError, SemelError
from semel.messaging.aio_deadletters import describe_filter

LONGEST_RESULT: Final = 8192
MOST_LETTERS: Final = 1000
"""Dead letters that one act moves or deletes."""


class Way(NamedTuple):
    """Something that can be done to a record."""

    name: str
    title: str
    effect: str
    """What it would do."""
    caution: str = ""
    """What to be sure of before."""
    asks_result: bool = False


RELEASE: Final = Way(
    "release",
    "It did not happen: free the key",
    "The record is removed. The next call with this key runs the operation.",
    "Be sure that the effect did not happen: look where it would be seen. If it did, it will happen twice.",
)
RESOLVE: Final = Way(
    "resolve",
    "It did happen: store its result",
    "The record is done. Every further call with this key gets this result, and nothing runs.",
    "Be sure that the effect happened. If it did not, it never will.",
    asks_result=True,
)
FORCE: Final = Way(
    "force",
    "Free the key although it runs",
    "The record is removed while its owner runs. The owner's outcome will be refused, and the next call runs it.",
    "Only if the owner is known to be dead, or its effect can be undone: it may still be at work.",
)
FORGET: Final = Way(
    "forget",
    "Drop the stored answer",
    "The stored answer is removed. The next call with this key runs the operation again.",
    "The effect that this answer reports stays. A second run may repeat it.",
)
_WAYS: Final = {
    State.RUNNING: (FORCE,),
    State.ABANDONED: (RELEASE, RESOLVE),
    State.UNKNOWN: (RELEASE, RESOLVE),
    State.DONE: (FORGET,),
    State.ABSENT: (),
}
_REASONS: Final = {
    State.RUNNING: "Its owner holds the lease and is at work. Duplicates wait, or are turned away.",
    State.ABANDONED: "Its lease has ended and its owner has not reported: it died, hangs, or is cut off. The next call "
    "with this key takes over, if the policy allows it.",
    State.UNKNOWN: "An attempt was lost, and the policy forbids another one: nobody can tell whether the effect "
    "happened. It stays so until somebody finds out.",
    State.DONE: "It is finished. Duplicates get the stored answer until it expires.",
    State.ABSENT: "There is no record. The next call with this key is a first call.",
}


class Done(NamedTuple):
    """What came of an act."""

    changed: bool
    text: str


def ways_out(state: State) -> tuple[Way, ...]:
    """Return what may be done to a record in this state."""
    return _WAYS[state]


def reason(state: State) -> str:
    """Return why a record is in this state, and what comes next."""
    return _REASONS[state]


def find_way(name: str) -> Way | None:
    """Return the way of this name."""
    return next((way for ways in _WAYS.values() for way in ways if way.name == name), None)


async def act(
    watched: WatchedStore, access: Access, way: Way, id: bytes, token: int | None, result: str, key: str | None = None
) -> Done:
    """Do it, if the record is still the one that the page showed.

    :param token: that of the record on the page.
    :param key: the key, if the record does not have a readable one.
    """
    record = await watched.lookup(id)
    if record is None or record.token != token or way not in ways_out(record.state):
        done = _changed(record)
    else:
        done = await _act(watched, way, record, result, key)
    _audit(access, way.name, watched, done, id=id.hex(), operation="" if record is None else record.operation)
    return done


def _changed(record: Record | None) -> Done:
    """What to say of a record that is not the one on the page any more."""
    if record is None:
        return Done(False, "There is no such record any more: it was released, or it has expired. Look at it again.")
    return Done(
        False,
        f"The record has changed since the page was shown. It is {record.state.name.lower()} now, in attempt "
        f"{record.attempt}. Look at it again.",
    )


async def _act(watched: WatchedStore, way: Way, record: Record, result: str, key: str | None) -> Done:
    guard = watched.guard
    name = record.key or key
    tenant = record.tenant or None
    if name is None:
        return Done(False, "Nothing was changed: the key of the record is stored as a hash only, so name the key.")
    try:
        # The store compares the record with this one when it changes it, because others may act at the same time.
        if way is RESOLVE:
            await guard.resolve(record.operation, name, json.loads(result), tenant=tenant, expected=record)
            return Done(True, "The record is done. Further calls with this key get the result that you gave.")
        stored: Literal["any"] | None = "any" if way is FORGET else None
        await guard.release(record.operation, name, tenant=tenant, force=way is FORCE, stored=stored, expected=record)
    except NotResolvable:
        return _changed(await watched.lookup(record.id))
    except (PolicyError, KeyInvalid) as error:
        return Done(False, f"Nothing was changed: {error}")
    except ValueError as error:
        return Done(False, f'Nothing was changed: the result is not JSON ({error}). A text needs its quotes: "paid"')
    return Done(True, "The key is free. The next call with it runs the operation.")


async def move_letters(watched: WatchedStore, access: Access, what: str, filter: LetterFilter, limit: int) -> Done:
    """Redrive or purge dead letters, up to a limit."""
    verb = "moved back into the outbox" if what == "redrive" else "deleted"
    try:
        moved = await watched.move_letters(what == "purge", filter, min(limit, MOST_LETTERS))
        left = await watched.count_letters(filter)
    except SemelError as error:
        done = Done(False, f"The store failed, and it is not known how many were {verb}: {error}")
    else:
        text = f"{moved} dead {'letter was' if moved == 1 else 'letters were'} {verb}."
        if not moved:
            text += " Somebody else was faster, or none fits."
        elif what == "redrive":
            text += " A relay sends them again; a consumer that has applied one already does nothing."
        if left:
            text += f" {capped(left, COUNTED)} that fit are left."
        done = Done(moved > 0, text)
    _audit(access, what, watched, done, filter=describe_filter(filter))
    return done


def refuse(access: Access, what: str, why: str) -> None:
    """Write down that an act was refused before it was tried."""
    log_act(what, access.who, "console", changed=False, refused=why)


def _audit(access: Access, what: str, watched: WatchedStore, done: Done, **about: Any) -> None:
    level = logging.WARNING if done.changed else logging.INFO
    log_act(what, access.who, "console", changed=done.changed, level=level, store=watched.name, **about)
