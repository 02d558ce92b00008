"""The completion and the handler's own writes as one TransactWriteItems: all of it, or nothing. Knows no driver.

The record is the first of the items, on condition that the owner's token is still the newest. So the record itself says
whether a transaction whose answer was lost was made: sent again, it is refused where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from hashlib import blake2b
from typing import Any, Final

from semel.core.values import value
from semel.errors import ConditionFailed, ConfigurationError, RecordTooLarge, SemelError, StoreUnavailable
from semel.stores.dynamodb.items import LARGEST_ITEM, Item

__all__ = ["TRANSACT", "Cancelled", "Invalid", "accept", "cancelled", "carrying"]

TRANSACT: Final = "transact_write_items"
MOST_WRITES: Final = 99
"""The service takes 100 in one transaction, and the record is one of them."""
LARGEST: Final = 4 * 1024 * 1024
BARE_RECORD: Final = 4096
"""More than a record without its result has."""
_NO_ITEM: Final = "the result is too large for an item of DynamoDB, which is 400 KB at most; return less"
_SUBJECTS: Final = {"Put": "Item", "Update": "Key", "Delete": "Key", "ConditionCheck": "Key"}
_FAILED: Final = "ConditionalCheckFailed"
_PASSING: Final = frozenset(
    {"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError", "ThrottlingException", "None"}
)
"""Reasons that are gone in a moment."""


@value
class Cancelled:
    """The transaction was not made: why, item by item; the first is the record."""

    reasons: tuple[Mapping[str, Any], ...]

    def record(self) -> Item | None:
        """The record as it stands, where its condition did not hold and it was shown."""
        return self.reasons[0].get("Item") or None

    def error(self, writes: tuple[Any, ...]) -> SemelError | None:
        """Why the writes cannot be made; None where only the record was in the way. RecordTooLarge is raised where it
        is the record that does not fit: without the result the writes may be made."""
        codes = [_code(reason) for reason in self.reasons]
        failed = tuple(at for at, code in enumerate(codes[1:]) if code == _FAILED)
        if failed:
            named = "; ".join(_named(writes, at) for at in failed)
            return ConditionFailed(
                f"the condition does not hold of {named}. Nothing was written",
                failed,
                tuple(self.reasons[at + 1].get("Item") or None for at in failed),
            )
        for at, code in enumerate(codes):
            if code not in _PASSING and code != _FAILED:
                said = f"{code}: {self.reasons[at].get('Message', '')}"
                if at == 0 and "size" in said.lower():
                    raise RecordTooLarge(f"{_NO_ITEM}: {said}")
                if at == 0:
                    return StoreUnavailable(f"the record cannot be written, and so nothing was: {said}")
                return ConfigurationError(f"{_named(writes, at - 1)} cannot be made, and so nothing was: {said}")
        return None


@value
class Invalid:
    """The service, or the driver, refused the transaction as it is."""

    text: str

    def error(self) -> SemelError:
        return ConfigurationError(f"these writes cannot be made, and so nothing was written: {self.text}")


def accept(kept: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Writes of a handler, with those it has asked for before; copied, for a handler may use a dict again."""
    for write in new:
        _check(write)
    writes = (*kept, *deepcopy(new))
    if len(writes) > MOST_WRITES:
        raise ConfigurationError(
            f"{len(writes)} writes: a transaction of DynamoDB takes {MOST_WRITES} beside the record"
        )
    size = sum(map(_weight, writes))
    if size > LARGEST:
        raise ConfigurationError(f"the writes are {size:,} bytes: a transaction of DynamoDB has 4 MB at most")
    return writes


def carrying(update: Mapping[str, Any], writes: tuple[Any, ...], stamp: bytes) -> dict[str, Any] | Invalid:
    """The parameters of the transaction. ``stamp`` is what the update depends on: the same one, sent again, is known
    to the service by it. Raises RecordTooLarge where it would fit without the result.
    """
    items = [{"Update": update}, *writes]
    record = _weight(items[0])
    if record > LARGEST_ITEM:
        raise RecordTooLarge(_NO_ITEM)
    size = record + sum(map(_weight, writes))
    if size > LARGEST:
        said = f"with the result the writes are {size:,} bytes, and a transaction of DynamoDB has 4 MB at most"
        if size - record + BARE_RECORD <= LARGEST:
            raise RecordTooLarge(said)
        return Invalid(said)
    return {"TransactItems": items, "ClientRequestToken": blake2b(stamp, digest_size=16).hexdigest()}


def cancelled(response: Mapping[str, Any], text: str) -> Cancelled | Invalid | None:
    """What a refused transaction says; None where it may simply be sent again, or nothing is known of it."""
    code = response.get("Error", {}).get("Code", "")
    if code == "TransactionCanceledException":
        reasons = tuple(response.get("CancellationReasons") or ())
        if reasons and _code(reasons[0]) in _PASSING - {"None"}:
            return None  # a transaction holds the record, perhaps an earlier send of ours: nothing can be told yet
        return Cancelled(reasons) if any(_code(reason) not in _PASSING for reason in reasons) else None
    if code in ("ValidationException", "ResourceNotFoundException"):  # the claim was made, so the record has its table
        return Invalid(text)
    return None


def _code(reason: Mapping[str, Any]) -> str:
    return reason.get("Code") or "None"


def _named(writes: tuple[Any, ...], at: int) -> str:
    kind, parameters = next(iter(writes[at].items()))
    return f"write {at + 1} of {len(writes)} ({kind}, table {parameters.get('TableName')!r})"


def _check(write: object) -> None:
    """That it looks like an element of TransactItems; the rest the driver and the service judge."""
    if not isinstance(write, Mapping) or len(write) != 1 or next(iter(write)) not in _SUBJECTS:
        raise ConfigurationError(
            f"a write is a dict with one of {', '.join(_SUBJECTS)}, as in TransactItems of boto3's client, "
            f"not {_shown(write)}"
        )
    ((kind, parameters),) = write.items()
    subject = _SUBJECTS[kind]
    if not isinstance(parameters, Mapping) or not parameters.get("TableName") or not parameters.get(subject):
        raise ConfigurationError(f"a {kind} has a TableName and {subject}: {_shown(write)} has not")
    typed = parameters[subject]
    if not isinstance(typed, Mapping) or not all(
        isinstance(each, Mapping) and len(each) == 1 for each in typed.values()
    ):
        raise ConfigurationError(
            f'the {subject} of a {kind} has values under the letters of their types, such as {{"id": {{"S": "o-1"}}}}'
        )
    size = _size(typed)
    if size > LARGEST_ITEM:
        raise ConfigurationError(f"an item of {size:,} bytes: DynamoDB takes 400 KB at most")


def _shown(write: object) -> str:
    """Its shape alone: values may be secret."""
    if isinstance(write, Mapping):
        inner = {name: sorted(map(str, of)) if isinstance(of, Mapping) else "…" for name, of in write.items()}
        return f"a dict of {inner}"
    return f"a {type(write).__name__}"


def _weight(write: Mapping[str, Any]) -> int:
    ((kind, parameters),) = write.items()
    given = parameters.get("ExpressionAttributeValues") or {}
    return _size(parameters[_SUBJECTS[kind]]) + sum(map(_size, given.values()))


def _size(part: object) -> int:
    """No more than what the service counts: names, texts and bytes as they are, numbers by two digits a byte."""
    if isinstance(part, Mapping):
        return sum(
            len(str(value)) // 2 + 1 if name == "N" and isinstance(value, str)
            else _size(value) if name in _TYPES
            else len(str(name).encode()) + _size(value)
            for name, value in part.items()
        )  # fmt: skip
    if isinstance(part, (list, tuple, set, frozenset)):
        return sum(map(_size, part))
    if isinstance(part, str):
        return len(part.encode("utf-8", "replace"))
    return len(part) if isinstance(part, (bytes, bytearray, memoryview)) else 1


_TYPES: Final = frozenset({"S", "N", "B", "SS", "NS", "BS", "M", "L", "NULL", "BOOL"})
