"""Each Op as calls of the DynamoDB API: a generator that yields Calls and is sent their answers. Knows no driver.

First comes the call that settles the Op in most cases, conditional on what it assumes. If the condition does not hold
the answer shows the item that stands there: ``core/semantics.py`` says what becomes of it, and that is written on
condition that the item is still the same version of the same record.

Times are counted from the moment when a call is made up. The answer may show that this moment is long past: the machine
was paused, or the call took long. Then they are counted anew and written again before anything is said.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from semel.core import semantics
from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    CompleteWith,
    Existing,
    Lookup,
    NotWritten,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
    Sweep,
    Swept,
)
from semel.core.semantics import Row
from semel.core.states import State
from semel.core.values import value
from semel.errors import StoreUnavailable, StoreUncertain
from semel.stores.dynamodb.clock import LATE, Clock
from semel.stores.dynamodb.items import Item, fitting, micros, step_name, to_item, to_row
from semel.stores.dynamodb.table import check_key
from semel.stores.dynamodb.transactions import TRANSACT, Cancelled, Invalid, carrying

__all__ = ["Call", "Occupied", "Program", "Programs", "Reply"]

R = TypeVar("R")
TRIES: Final = 10
"""How often an Op that lost a race looks again before it gives up."""
SCAN_PAGES: Final = 8
"""Pages of the table, a megabyte each at most, that one sweep reads; the next one goes on where it ended."""


@value
class Call:
    """One call of the API; ``once``: never sent again when its answer was lost."""

    action: str
    params: dict[str, Any]
    once: bool = False


@value
class Occupied:
    """The condition did not hold: this stands there, or nothing."""

    item: Item | None


Reply: TypeAlias = "dict[str, Any] | Occupied | Cancelled | Invalid"
Program: TypeAlias = "Generator[Call, Reply, R]"


class Programs:
    """The Ops on one table."""

    def __init__(self, table: str, clock: Clock) -> None:
        self.table = table
        self.clock = clock
        self._checked = clock.known()
        """That the table is ours: looked at where the first call asks for the time anyway."""
        self._scanned: Item | None = None

    def of(self, op: Op[Any]) -> Program[Any]:
        """The program of an Op."""
        if not (self._checked and self.clock.known()):
            reply = yield Call("describe_table", {"TableName": self.table})  # any answer tells the time
            assert isinstance(reply, dict)
            check_key(self.table, reply["Table"])
            self._checked = True
        return (yield from _PROGRAMS[type(op)](self, op))

    def claim(self, op: Claim) -> Program[Any]:
        now = self.clock.now()
        fresh, _ = semantics.claim(None, op, now)
        assert fresh is not None
        reply = yield self._put(fresh, 1, "attribute_not_exists(#id)", {})
        if isinstance(reply, Occupied) and not _written_before(fresh, reply.item):
            return (yield from self._settle(op, reply.item))
        return (yield from self._won(op, fresh, 1, now))

    def _won(self, op: Claim, row: Row, version: int, now: float) -> Program[Any]:
        """The claim that was written at ``now``, unless that was long ago: then its lease is short, or over already,
        and another may have come. The token grows with it, for an earlier record may have had a later one.
        """
        if self._is_past(now, op.lease):
            now = self.clock.now()
            created = now if row.attempt == 1 else row.created
            again = row._replace(
                token=semantics.next_token(row, now), lease_end=now + op.lease, expires=now + op.ttl, created=created
            )
            reply = yield self._written(row, again, version)
            if isinstance(reply, Occupied):
                return (yield from self._settle(op, reply.item))
            row = again
            self._must_last(row.lease_end)
        return Claimed(row.token, row.attempt, row.steps)

    def _is_past(self, now: float, span: float) -> bool:
        """Whether what was to last for ``span`` from then on is short by more than is no harm: a tenth, for a lease is
        renewed after a third. So what was merely slow, or throttled, is not written twice."""
        return self.clock.earliest() - now > max(LATE, min(span / 10, 60.0))

    def _must_last(self, lease_end: float) -> None:
        if self.clock.earliest() >= lease_end:
            raise StoreUncertain("the lease had ended before the answer came: the machine stands still, or calls do")

    def renew(self, op: Renew) -> Program[Any]:
        ends = 0.0
        for _ in range(2):
            now = self.clock.now()
            ends = now + op.lease
            # One that outlives the record, or is no longer than the lease it has, is settled by the whole item.
            reply = yield self._update(
                op,
                "lease_end = :ends",
                "#state = :running AND lease_end < :ends AND expires > :ends",
                {":ends": {"N": micros(ends)}},
            )
            held: bool = (yield from self._settle(op, reply.item)) if isinstance(reply, Occupied) else True
            if not held or not self._is_past(now, op.lease):
                return held
        self._must_last(ends)
        return True

    def complete(self, op: Complete) -> Program[Any]:
        fitting(op.snapshot)
        now = self.clock.now()
        reply = yield self._completion(op, now)
        if isinstance(reply, Occupied):
            return (yield from self._settle(op, reply.item))
        return (yield from self._kept(op, now))

    def _kept(self, op: Complete, now: float) -> Program[bool]:
        """It is done, as of ``now``; if that was long ago it would be forgotten too soon."""
        if self._is_past(now, op.ttl):
            values = _kept_for(op, self.clock.now())
            # Refused where another has come since.
            yield self._update(op, "expires = :expires, #ttl = :ttl", "#state = :done AND expires < :expires", values)
        return True

    def complete_with(self, op: CompleteWith) -> Program[Any]:
        """The record and the handler's writes, or neither."""
        for _ in range(TRIES):
            now = self.clock.now()
            stamp = op.id + f"{op.token} {now}".encode()
            transaction = carrying(self._completion(op, now).params, op.writes, stamp)
            reply = transaction if isinstance(transaction, Invalid) else (yield Call(TRANSACT, transaction))
            if isinstance(reply, Invalid):
                return NotWritten(reply.error())
            if not isinstance(reply, Cancelled):
                return (yield from self._kept(op, now))
            # Whatever else was in the way: another owner may have come, or an earlier try, whose answer was lost, have
            # made it. Of that the record knows.
            item = reply.record() or _found((yield Call("get_item", self._key(op.id))))
            row = to_row(item)[0] if item else None
            if row is None or row.token != op.token:
                return False
            if row.state is State.DONE:
                return True
            error = reply.error(op.writes)
            if error is not None:
                return NotWritten(error)
        raise StoreUnavailable(f"the record changed {TRIES} times while it was being completed")

    def _completion(self, op: Complete, now: float) -> Call:
        values: Item = {
            ":unknown": _number(State.UNKNOWN),
            ":snapshot": {"B": op.snapshot},
            ":now": {"N": micros(now)},
            ":none": {"M": {}},
            **_kept_for(op, now),
        }
        return self._update(
            op,
            # The steps go: nobody resumes what is done, and an item has to hold them and the result.
            "#state = :done, #snapshot = :snapshot, lease_end = :now, expires = :expires, #ttl = :ttl, #steps = :none",
            "#state IN (:running, :unknown)",
            values,
        )

    def release(self, op: Release) -> Program[Any]:
        reply = yield Call("get_item", self._key(op.id))
        return (yield from self._settle(op, _found(reply)))

    def save_step(self, op: SaveStep) -> Program[Any]:
        values: Item = {":step": {"L": [{"N": str(op.position)}, {"B": fitting(op.value)}]}}
        reply = yield self._update(
            op,
            "#steps.#name = if_not_exists(#steps.#name, :step)",
            "#state = :running",
            values,
            {"#name": step_name(op.name)},
        )
        return (yield from self._settle(op, reply.item)) if isinstance(reply, Occupied) else True

    def lookup(self, op: Lookup) -> Program[Any]:
        item = _found((yield Call("get_item", self._key(op.id))))
        row = to_row(item)[0] if item else None
        record = semantics.lookup(row, op, self.clock.earliest())[1]
        return record and _aged(record)

    def resolve(self, op: Resolve) -> Program[State]:
        reply = yield Call("get_item", self._key(op.id))
        found: State = yield from self._settle(op, _found(reply), once=True)
        return found

    def sweep(self, op: Sweep) -> Program[Swept]:
        """The service removes most of what has expired by itself; what is in doubt only we can mark."""
        removed = unknown = 0
        now = self.clock.earliest()
        for _ in range(SCAN_PAGES if op.limit else 0):
            begin = {"ExclusiveStartKey": self._scanned} if self._scanned else {}
            page = yield Call("scan", {**_EXPIRED, "TableName": self.table, **begin,
                                       "ExpressionAttributeValues": {**_EXPIRED["ExpressionAttributeValues"],
                                                                     ":now": {"N": micros(now)}}})  # fmt: skip
            assert isinstance(page, dict)
            for item in page.get("Items", ()):
                row, version = to_row(item)
                verdict = semantics.sweepable(row, now)
                if removed + unknown < op.limit and verdict is not None:
                    changed = None if verdict is State.ABSENT else row._replace(state=State.UNKNOWN)
                    if not isinstance((yield self._written(row, changed, version)), Occupied):
                        removed, unknown = removed + (changed is None), unknown + (changed is not None)
            if removed + unknown >= op.limit:
                break  # the page is read again next time
            self._scanned = page.get("LastEvaluatedKey")
            if not self._scanned:
                break
        return Swept(removed, unknown)

    def _settle(self, op: Op[Any], item: Item | None, *, once: bool = False) -> Program[Any]:
        """What the table of states makes of the item, written if it is still the same version."""
        for _ in range(TRIES):
            row, version = to_row(item) if item else (None, 0)
            # What is another's has ended only when it has for everyone; what is ours is counted from now.
            now = self.clock.earliest() if type(op) is Claim and row is not None else self.clock.now()
            changed, answer = semantics.apply(row, op, now)
            if changed == row:
                if type(answer) is Claimed and isinstance(op, Claim) and row is not None:
                    # A claim of ours, sent again: it may have been made long ago, and its lease be short by now.
                    if self._is_past(row.lease_end - op.lease, op.lease):
                        longer = row._replace(lease_end=self.clock.now() + op.lease)
                        reply = yield self._written(row, longer, version)
                        if isinstance(reply, Occupied):
                            item = reply.item
                            continue
                    return answer
                return Existing(_aged(answer.record)) if type(answer) is Existing else answer
            if type(op) is Release and op.to is State.ABANDONED and changed is not None:
                changed = changed._replace(lease_end=0.0)  # given up: over for all, however well they know the time
            reply = yield self._written(row, changed, version, once=once)
            if not isinstance(reply, Occupied):
                if type(answer) is Claimed and type(op) is Claim and changed is not None:
                    return (yield from self._won(op, changed, version + 1, now))
                return answer
            item = reply.item
        raise StoreUnavailable(f"the record changed {TRIES} times while it was being asked for")

    def _written(self, row: Row | None, changed: Row | None, version: int, *, once: bool = False) -> Call:
        if row is None:
            assert changed is not None
            return self._put(changed, 1, "attribute_not_exists(#id)", {}, once=once)
        # The token as well: a record that went and was claimed anew has the same low versions, and is another's.
        same: Item = {":version": {"N": str(version)}, ":token": {"N": str(row.token)}}
        if changed is not None:
            return self._put(changed, version + 1, _SAME, same, once=once)
        params = {
            **self._key(row.id), "ConditionExpression": _SAME, "ExpressionAttributeValues": same,
            "ExpressionAttributeNames": {"#version": "version", "#token": "token"}, **_SHOW,
        }  # fmt: skip
        del params["ConsistentRead"]
        return Call("delete_item", params, once)

    def _put(self, row: Row, version: int, condition: str, values: Item, *, once: bool = False) -> Call:
        names = {"#version": "version", "#token": "token"} if condition == _SAME else {"#id": "id"}
        params: dict[str, Any] = {
            "TableName": self.table, "Item": to_item(row, version), "ConditionExpression": condition,
            "ExpressionAttributeNames": names, **_SHOW,
        }  # fmt: skip
        if values:
            params["ExpressionAttributeValues"] = values
        return Call("put_item", params, once)

    def _update(self, op: Any, changes: str, condition: str, values: Item, names: dict[str, str] | None = None) -> Call:
        """A move of an owner, by its token."""
        expression = f"SET #version = #version + :one, {changes}"
        condition = f"#token = :token AND {condition}"
        known = {"#version": "version", "#token": "token", "#state": "state", "#steps": "steps", "#ttl": "ttl",
                 "#snapshot": "snapshot", **(names or {})}  # fmt: skip
        given: Item = {
            ":one": {"N": "1"}, ":token": {"N": str(op.token)}, ":running": _number(State.RUNNING), **values,
        }  # fmt: skip
        used = f"{expression} {condition}"
        params = {
            "TableName": self.table,
            "Key": {"id": {"B": op.id}},
            "UpdateExpression": expression,
            "ConditionExpression": condition,
            # The service refuses names and values that are not used.
            "ExpressionAttributeNames": {name: known[name] for name in known if name in used},
            "ExpressionAttributeValues": {name: given[name] for name in given if name in used},
            **_SHOW,
        }
        return Call("update_item", params)

    def _key(self, id: bytes) -> dict[str, Any]:
        return {"TableName": self.table, "Key": {"id": {"B": id}}, "ConsistentRead": True}


def _number(state: State) -> dict[str, str]:
    return {"N": str(int(state))}


def _kept_for(op: Complete, now: float) -> Item:
    return {
        ":done": _number(State.DONE),
        ":expires": {"N": micros(now + op.ttl)},
        ":ttl": {"N": str(int(now + op.ttl) + 1)},
    }


def _written_before(row: Row, item: Item | None) -> bool:
    """Whether this is the row as it was sent: its answer was lost, and it met itself."""
    if not item:
        return False
    found, version = to_row(item)
    return (found.nonce, found.token, version) == (row.nonce, row.token, 1)


def _aged(record: Record) -> Record:
    """Not younger than nothing: the earliest time that it can be may lie before the moment when it was made."""
    return record if record.age >= 0 else replace(record, age=0.0)


def _found(reply: Reply) -> Item | None:
    assert isinstance(reply, dict)
    return reply.get("Item")


_SAME: Final = "#version = :version AND #token = :token"
_SHOW: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
_EXPIRED: Final[dict[str, Any]] = {
    "FilterExpression": "expires <= :now AND (#state = :done OR (#state = :running AND lease_end <= :now))",
    "ExpressionAttributeNames": {"#state": "state"},
    "ExpressionAttributeValues": {":done": _number(State.DONE), ":running": _number(State.RUNNING)},
    "ConsistentRead": True,
}

_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Programs, Any], Program[Any]]]] = {
    Claim: Programs.claim,
    Renew: Programs.renew,
    Complete: Programs.complete,
    CompleteWith: Programs.complete_with,
    Release: Programs.release,
    SaveStep: Programs.save_step,
    Lookup: Programs.lookup,
    Resolve: Programs.resolve,
    Sweep: Programs.sweep,
}
