"""Each Op as calls of the DynamoDB API: a generator that yields calls and is sent the replies. Knows no driver.

The first call settles the Op in most cases, conditional on what it assumes. If the condition does not hold, the reply
shows the existing item. Then ``core/semantics.py`` says what becomes of it, and that is written on condition that the
item is still the same version of the same record.

Times count from the moment when a call is built. The reply may show that this moment is long past, because the machine
was paused or the call took long. Then the times are written again, counted from now, before the Op is answered.
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
    Listing,
    ListRecords,
    Lookup,
    Measure,
    NotWritten,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
    Size,
    Sweep,
    Swept,
)
from semel.core.semantics import Row
from semel.core.states import State
from semel.core.values import value
from semel.errors import StoreUnavailable, StoreUncertain
from semel.stores.dynamodb.settings import LATE, DynamoDBClock
from semel.stores.dynamodb.table import ATTRIBUTES, Item, check_key, check_size, micros, step_name, to_item, to_row
from semel.stores.dynamodb.transactions import (
    TRANSACT,
    TransactionCancelled,
    TransactionInvalid,
    transaction_parameters,
)

R = TypeVar("R")
TRIES: Final = 10
"""How often an Op that lost a race looks again before it gives up."""
SCAN_PAGES: Final = 8
"""Pages of the table, a megabyte each at most, that one sweep reads; the next sweep continues there."""
MEASURED: Final = 100
"""How many records Measure looks at."""


@value
class ApiCall:
    """One call of the API; with ``once`` it is never sent again, even if its response was lost."""

    action: str
    params: dict[str, Any]
    once: bool = False


@value
class ConditionNotMet:
    """The condition did not hold. Carries the existing item, if there is one."""

    item: Item | None


Reply: TypeAlias = "dict[str, Any] | ConditionNotMet | TransactionCancelled | TransactionInvalid"
CallProgram: TypeAlias = "Generator[ApiCall, Reply, R]"


class DynamoDBPrograms:
    """The programs of the Ops on one table."""

    def __init__(self, table: str, clock: DynamoDBClock) -> None:
        self.table = table
        self.clock = clock
        self._checked = clock.known()
        """Whether the table was found to be ours. That is checked when the first call asks for the time anyway."""
        self._scanned: Item | None = None

    def of(self, op: Op[Any]) -> CallProgram[Any]:
        """Run an Op."""
        if not (self._checked and self.clock.known()):
            reply = yield ApiCall("describe_table", {"TableName": self.table})  # any response has the time
            assert isinstance(reply, dict)
            check_key(self.table, reply["Table"])
            self._checked = True
        return (yield from _PROGRAMS[type(op)](self, op))

    def claim(self, op: Claim) -> CallProgram[Any]:
        now = self.clock.now()
        fresh, _ = semantics.claim(None, op, now)
        assert fresh is not None
        reply = yield self._put(fresh, 1, "attribute_not_exists(#id)", {})
        if isinstance(reply, ConditionNotMet) and not _is_own_write(fresh, reply.item):
            return (yield from self._settle(op, reply.item))
        return (yield from self._claimed(op, fresh, 1, now))

    def _claimed(self, op: Claim, row: Row, version: int, now: float) -> CallProgram[Any]:
        """Answer a claim that was written at ``now``, unless that was long ago.

        In that case its lease is short or over, and another may have taken over: write it again. The token grows as
        well, because an earlier record may have had a later one.
        """
        if self._is_past(now, op.lease):
            now = self.clock.now()
            created = now if row.attempt == 1 else row.created
            again = row._replace(
                token=semantics.next_token(row, now), lease_end=now + op.lease, expires=now + op.ttl, created=created
            )
            reply = yield self._write(row, again, version)
            if isinstance(reply, ConditionNotMet):
                return (yield from self._settle(op, reply.item))
            row = again
            self._must_last(row.lease_end)
        return Claimed(row.token, row.attempt, row.steps)

    def _is_past(self, now: float, span: float) -> bool:
        """Whether a time that should last for ``span`` seconds has lost too much of it since ``now``.

        A tenth does no harm, because a lease is renewed after a third. So a call that was only slow or throttled is
        not written twice.
        """
        return self.clock.earliest() - now > max(LATE, min(span / 10, 60.0))

    def _must_last(self, lease_end: float) -> None:
        if self.clock.earliest() >= lease_end:
            raise StoreUncertain(
                "the lease had ended before the response came: the machine was paused, or the service is too slow"
            )

    def renew(self, op: Renew) -> CallProgram[Any]:
        ends = 0.0
        for _ in range(2):
            now = self.clock.now()
            ends = now + op.lease
            # A lease that outlives the record, or is no longer than the current one, needs the whole item.
            reply = yield self._update(
                op,
                "lease_end = :ends",
                "#state = :running AND lease_end < :ends AND expires > :ends",
                {":ends": {"N": micros(ends)}},
            )
            held: bool = (yield from self._settle(op, reply.item)) if isinstance(reply, ConditionNotMet) else True
            if not held or not self._is_past(now, op.lease):
                return held
        self._must_last(ends)
        return True

    def complete(self, op: Complete) -> CallProgram[Any]:
        check_size(op.snapshot)
        now = self.clock.now()
        reply = yield self._completion(op, now)
        if isinstance(reply, ConditionNotMet):
            return (yield from self._settle(op, reply.item))
        return (yield from self._completed(op, now))

    def _completed(self, op: Complete, now: float) -> CallProgram[bool]:
        """Answer a completion that was written at ``now``. If that was long ago, it would expire too soon."""
        if self._is_past(now, op.ttl):
            values = _done_values(op, self.clock.now())
            # Refused if another owner has come since.
            yield self._update(op, "expires = :expires, #ttl = :ttl", "#state = :done AND expires < :expires", values)
        return True

    def complete_with(self, op: CompleteWith) -> CallProgram[Any]:
        """Write the record and the handler's writes, or neither."""
        for _ in range(TRIES):
            now = self.clock.now()
            stamp = op.id + f"{op.token} {now}".encode()
            transaction = transaction_parameters(self._completion(op, now).params, op.writes, stamp)
            reply = (
                transaction if isinstance(transaction, TransactionInvalid) else (yield ApiCall(TRANSACT, transaction))
            )
            if isinstance(reply, TransactionInvalid):
                return NotWritten(reply.error())
            if not isinstance(reply, TransactionCancelled):
                return (yield from self._completed(op, now))
            # Whatever the reasons say: another owner may have come, or an earlier try may have succeeded although its
            # response was lost. The record shows which.
            item = reply.record() or (yield from self._item(op.id))
            row = to_row(item)[0] if item else None
            if row is None or row.token != op.token:
                return False
            if row.state is State.DONE:
                return True
            error = reply.error(op.writes)
            if error is not None:
                return NotWritten(error)
        raise StoreUnavailable(f"the record changed {TRIES} times while it was being completed")

    def _completion(self, op: Complete, now: float) -> ApiCall:
        values: Item = {
            ":unknown": _number(State.UNKNOWN),
            ":snapshot": {"B": op.snapshot},
            ":now": {"N": micros(now)},
            ":none": {"M": {}},
            **_done_values(op, now),
        }
        return self._update(
            op,
            # The steps go: nobody resumes a finished operation, and an item has to hold them and the result.
            "#state = :done, #snapshot = :snapshot, lease_end = :now, expires = :expires, #ttl = :ttl, #steps = :none",
            "#state IN (:running, :unknown)",
            values,
        )

    def release(self, op: Release) -> CallProgram[Any]:
        return (yield from self._settle(op, (yield from self._item(op.id))))

    def save_step(self, op: SaveStep) -> CallProgram[Any]:
        values: Item = {":step": {"L": [{"N": str(op.position)}, {"B": check_size(op.value)}]}}
        reply = yield self._update(
            op,
            "#steps.#name = if_not_exists(#steps.#name, :step)",
            "#state = :running",
            values,
            {"#name": step_name(op.name)},
        )
        return (yield from self._settle(op, reply.item)) if isinstance(reply, ConditionNotMet) else True

    def lookup(self, op: Lookup) -> CallProgram[Any]:
        item = yield from self._item(op.id)
        row = to_row(item)[0] if item else None
        record = semantics.lookup(row, op, self.clock.earliest())[1]
        return record and _aged(record)

    def resolve(self, op: Resolve) -> CallProgram[State]:
        item = yield from self._item(op.id)
        return (yield from self._settle(op, item, once=True))  # type: ignore[no-any-return]

    def sweep(self, op: Sweep) -> CallProgram[Swept]:
        """Remove expired records, and mark abandoned ones as unknown. The service removes most of them by itself."""
        removed = unknown = 0
        now = self.clock.earliest()
        for _ in range(SCAN_PAGES if op.limit else 0):
            values = {":done": _number(State.DONE), ":running": _number(State.RUNNING), ":now": {"N": micros(now)}}
            page = yield from self._scan(_EXPIRED, self._scanned, ExpressionAttributeValues=values)
            for item in page.get("Items", ()):
                row, version = to_row(item)
                verdict = semantics.sweepable(row, now)
                if removed + unknown < op.limit and verdict is not None:
                    changed = None if verdict is State.ABSENT else row._replace(state=State.UNKNOWN)
                    if not isinstance((yield self._write(row, changed, version)), ConditionNotMet):
                        removed, unknown = removed + (changed is None), unknown + (changed is not None)
            if removed + unknown >= op.limit:
                break  # the page is read again next time
            self._scanned = page.get("LastEvaluatedKey")
            if not self._scanned:
                break
        return Swept(removed, unknown)

    def list_page(self, op: ListRecords) -> CallProgram[Listing]:
        """A page of records, in the order of the table's partitions."""
        start = None
        if op.after is not None:
            place, id = semantics.unpack_place(op.after)
            if place != _PLACE or not id:
                raise semantics.not_a_place(op.after)
            start = {"id": {"B": id}}
        found: list[Record] = []
        looked_at = 0
        while True:
            left = op.look - looked_at
            most = left if semantics.is_filtered(op) else min(left, op.limit - len(found))
            page = yield from self._scan(_LISTED, start, Limit=most)
            items, start = page.get("Items", ()), page.get("LastEvaluatedKey")
            now = self.clock.earliest()
            for at, item in enumerate(items, 1):
                row, _ = to_row({"steps": {"M": {}}, **item})
                record = _aged(semantics.show(row, now))
                looked_at += 1
                if semantics.is_listed(op, record):
                    found.append(record)
                    if len(found) == op.limit and at < len(items):
                        return Listing(tuple(found), semantics.pack_place(_PLACE, row.id), looked_at)
            if not start:
                return Listing(tuple(found), None, looked_at)
            if looked_at >= op.look or len(found) == op.limit:
                return Listing(tuple(found), semantics.pack_place(_PLACE, bytes(start["id"]["B"])), looked_at)

    def measure(self, op: Measure) -> CallProgram[Size]:
        """What the service knows of the table, some hours old. A few records show whether some are overdue."""
        reply = yield ApiCall("describe_table", {"TableName": self.table})
        assert isinstance(reply, dict)
        page = yield from self._scan(_LISTED, None, Limit=MEASURED)
        now = self.clock.earliest()
        rows = [to_row({"steps": {"M": {}}, **item})[0] for item in page.get("Items", ())]
        overdue = [now - max(row.lease_end, row.expires) for row in rows if semantics.sweepable(row, now) is not None]
        described = reply["Table"]
        return Size(described.get("ItemCount", 0), False, described.get("TableSizeBytes"), max(overdue, default=0.0))

    def _settle(self, op: Op[Any], item: Item | None, *, once: bool = False) -> CallProgram[Any]:
        """Write what the table of states makes of the item, if it is still the same version."""
        for _ in range(TRIES):
            row, version = to_row(item) if item else (None, 0)
            # A lease of another owner has ended only when it has ended for everyone; our own times count from now.
            now = self.clock.earliest() if type(op) is Claim and row is not None else self.clock.now()
            changed, answer = semantics.apply(row, op, now)
            if changed == row:
                if type(answer) is Claimed and isinstance(op, Claim) and row is not None:
                    # Our own claim, sent again: it may have been written long ago, so its lease may be short by now.
                    if self._is_past(row.lease_end - op.lease, op.lease):
                        longer = row._replace(lease_end=self.clock.now() + op.lease)
                        reply = yield self._write(row, longer, version)
                        if isinstance(reply, ConditionNotMet):
                            item = reply.item
                            continue
                    return answer
                return Existing(_aged(answer.record)) if type(answer) is Existing else answer
            if type(op) is Release and op.to is State.ABANDONED and changed is not None:
                changed = changed._replace(lease_end=0.0)  # given up: over for everyone, whatever they know of the time
            reply = yield self._write(row, changed, version, once=once)
            if not isinstance(reply, ConditionNotMet):
                if type(answer) is Claimed and type(op) is Claim and changed is not None:
                    return (yield from self._claimed(op, changed, version + 1, now))
                return answer
            item = reply.item
        raise StoreUnavailable(f"the record changed {TRIES} times while it was being read")

    def _write(self, row: Row | None, changed: Row | None, version: int, *, once: bool = False) -> ApiCall:
        if row is None:
            assert changed is not None
            return self._put(changed, 1, "attribute_not_exists(#id)", {}, once=once)
        # The token as well: a record that went and was claimed again has the same low versions, but another owner.
        same: Item = {":version": {"N": str(version)}, ":token": {"N": str(row.token)}}
        if changed is not None:
            return self._put(changed, version + 1, _SAME, same, once=once)
        params = {
            "TableName": self.table, "Key": {"id": {"B": row.id}}, "ConditionExpression": _SAME,
            "ExpressionAttributeValues": same, "ExpressionAttributeNames": {"#version": "version", "#token": "token"},
            **_SHOW,
        }  # fmt: skip
        return ApiCall("delete_item", params, once)

    def _put(self, row: Row, version: int, condition: str, values: Item, *, once: bool = False) -> ApiCall:
        names = {"#version": "version", "#token": "token"} if condition == _SAME else {"#id": "id"}
        params: dict[str, Any] = {
            "TableName": self.table, "Item": to_item(row, version), "ConditionExpression": condition,
            "ExpressionAttributeNames": names, **_SHOW,
        }  # fmt: skip
        if values:
            params["ExpressionAttributeValues"] = values
        return ApiCall("put_item", params, once)

    def _update(
        self, op: Any, changes: str, condition: str, values: Item, names: dict[str, str] | None = None
    ) -> ApiCall:
        """Return an update that only succeeds with the owner's token."""
        expression = f"SET #version = #version + :one, {changes}"
        condition = f"#token = :token AND {condition}"
        all_names = {"#version": "version", "#token": "token", "#state": "state", "#steps": "steps", "#ttl": "ttl",
                 "#snapshot": "snapshot", **(names or {})}  # fmt: skip
        all_values: Item = {
            ":one": {"N": "1"}, ":token": {"N": str(op.token)}, ":running": _number(State.RUNNING), **values,
        }  # fmt: skip
        used = f"{expression} {condition}"
        params = {
            "TableName": self.table,
            "Key": {"id": {"B": op.id}},
            "UpdateExpression": expression,
            "ConditionExpression": condition,
            # The service refuses names and values that are not used.
            "ExpressionAttributeNames": {name: text for name, text in all_names.items() if name in used},
            "ExpressionAttributeValues": {name: text for name, text in all_values.items() if name in used},
            **_SHOW,
        }
        return ApiCall("update_item", params)

    def _item(self, id: bytes) -> CallProgram[Item | None]:
        """Read the item of a record."""
        params = {"TableName": self.table, "Key": {"id": {"B": id}}, "ConsistentRead": True}
        reply = yield ApiCall("get_item", params)
        assert isinstance(reply, dict)
        return reply.get("Item")

    def _scan(self, what: dict[str, Any], after: Item | None, **more: Any) -> CallProgram[dict[str, Any]]:
        """Read a page of the table, from the key on that the page before has returned."""
        begin = {"ExclusiveStartKey": after} if after else {}
        page = yield ApiCall("scan", {"TableName": self.table, "ConsistentRead": True, **what, **begin, **more})
        assert isinstance(page, dict)
        return page


def _number(state: State) -> dict[str, str]:
    return {"N": str(int(state))}


def _done_values(op: Complete, now: float) -> Item:
    return {
        ":done": _number(State.DONE),
        ":expires": {"N": micros(now + op.ttl)},
        ":ttl": {"N": str(int(now + op.ttl) + 1)},
    }


def _is_own_write(row: Row, item: Item | None) -> bool:
    """Whether the item is this row, written by an earlier send whose response was lost."""
    if not item:
        return False
    found, version = to_row(item)
    return (found.nonce, found.token, version) == (row.nonce, row.token, 1)


def _aged(record: Record) -> Record:
    """Return the record with an age of at least 0: the earliest possible time may be before it was created."""
    return record if record.age >= 0 else replace(record, age=0.0)


_SAME: Final = "#version = :version AND #token = :token"
_SHOW: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
_EXPIRED: Final[dict[str, Any]] = {
    "FilterExpression": "expires <= :now AND (#state = :done OR (#state = :running AND lease_end <= :now))",
    "ExpressionAttributeNames": {"#state": "state"},
}

_PLACE: Final = "id"
"""Stands before the id in the cursor of a list."""
_SHOWN: Final = [name for name in ATTRIBUTES if name not in ("steps", "snapshot", "ttl")]
_LISTED: Final[dict[str, Any]] = {
    "ProjectionExpression": ", ".join(f"#{name}" for name in _SHOWN),
    "ExpressionAttributeNames": {f"#{name}": name for name in _SHOWN},
}

_PROGRAMS: Final[dict[type[Op[Any]], Callable[[DynamoDBPrograms, Any], CallProgram[Any]]]] = {
    Claim: DynamoDBPrograms.claim,
    Renew: DynamoDBPrograms.renew,
    Complete: DynamoDBPrograms.complete,
    CompleteWith: DynamoDBPrograms.complete_with,
    Release: DynamoDBPrograms.release,
    SaveStep: DynamoDBPrograms.save_step,
    Lookup: DynamoDBPrograms.lookup,
    Resolve: DynamoDBPrograms.resolve,
    Sweep: DynamoDBPrograms.sweep,
    ListRecords: DynamoDBPrograms.list_page,
    Measure: DynamoDBPrograms.measure,
}
