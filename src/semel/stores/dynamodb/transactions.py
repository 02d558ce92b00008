"""The completion and the handler's own writes as one TransactWriteItems: all of it, or nothing. Knows no driver.

The record is the first of the items, on condition that the owner's token is still the newest. So the record itself says
whether a transaction whose response was lost was carried out: if it was, it is refused when it is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from hashlib import blake2b
from typing import Any, Final

from semel.core.values import value
from semel.errors import ConditionFailed, ConfigurationError, RecordTooLarge, SemelError, StoreUnavailable
from semel.stores.dynamodb.table import LARGEST_ITEM, Item

TRANSACT: Final = "transact_write_items"
MAX_WRITES: Final = 99
"""The service takes 100 in one transaction, and the record is one of them."""
LARGEST: Final = 4 * 1024 * 1024
BARE_RECORD: Final = 4096
"""More bytes than a record has without its result."""
_NO_ITEM: Final = "the result is too large for an item of DynamoDB, which is 400 KB at most; return less"
_SUBJECTS: Final = {"Put": "Item", "Update": "Key", "Delete": "Key", "ConditionCheck": "Key"}
_FAILED: Final = "ConditionalCheckFailed"
_PASSING: Final = frozenset(
    {"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError", "ThrottlingException", "None"}
)
"""Reasons that pass in a moment."""


@value
class TransactionCancelled:
    """The transaction was not carried out: the reasons, item by item. The first item is the record."""

    reasons: tuple[Mapping[str, Any], ...]

    def record(self) -> Item | None:
        """Return the record as it is, if its condition did not hold and the service shows it."""
        return self.reasons[0].get("Item") or None

    def error(self, writes: tuple[Any, ...]) -> SemelError | None:
        """Return why the writes cannot be made, or None if only the record was in the way.

        Raises RecordTooLarge if the record does not fit: without the result the writes may still be made.
        """
        codes = [_code(reason) for reason in self.reasons]
        failed = tuple(at for at, code in enumerate(codes[1:]) if code == _FAILED)
        if failed:
            names = "; ".join(_describe(writes, at) for at in failed)
            return ConditionFailed(
                f"the condition does not hold of {names}. Nothing was written",
                failed,
                tuple(self.reasons[at + 1].get("Item") or None for at in failed),
            )
        for at, code in enumerate(codes):
            if code not in _PASSING and code != _FAILED:
                reason = f"{code}: {self.reasons[at].get('Message', '')}"
                if at == 0 and "size" in reason.lower():
                    raise RecordTooLarge(f"{_NO_ITEM}: {reason}")
                if at == 0:
                    return StoreUnavailable(f"the record cannot be written, so nothing was written: {reason}")
                return ConfigurationError(
                    f"{_describe(writes, at - 1)} cannot be made, so nothing was written: {reason}"
                )
        return None


@value
class TransactionInvalid:
    """The service or the driver refused the transaction as it is."""

    text: str

    def error(self) -> SemelError:
        return ConfigurationError(f"these writes cannot be made, so nothing was written: {self.text}")


def accept(writes: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a handler's writes together with its new ones. They are copied, because a handler may reuse a dict."""
    for write in new:
        _check(write)
    writes = (*writes, *deepcopy(new))
    if len(writes) > MAX_WRITES:
        raise ConfigurationError(
            f"{len(writes)} writes: a transaction of DynamoDB takes {MAX_WRITES} beside the record"
        )
    size = sum(map(_bytes_of, writes))
    if size > LARGEST:
        raise ConfigurationError(f"the writes are {size:,} bytes: a transaction of DynamoDB has 4 MB at most")
    return writes


def transaction_parameters(
    update: Mapping[str, Any], writes: tuple[Any, ...], stamp: bytes
) -> dict[str, Any] | TransactionInvalid:
    """Return the parameters of the transaction. Raises RecordTooLarge if it would fit without the result.

    :param stamp: what the update depends on. By it the service recognises a transaction that is sent again.
    """
    items = [{"Update": update}, *writes]
    record = _bytes_of(items[0])
    if record > LARGEST_ITEM:
        raise RecordTooLarge(_NO_ITEM)
    size = record + sum(map(_bytes_of, writes))
    if size > LARGEST:
        message = f"with the result the writes are {size:,} bytes, and a transaction of DynamoDB has 4 MB at most"
        if size - record + BARE_RECORD <= LARGEST:
            raise RecordTooLarge(message)
        return TransactionInvalid(message)
    return {"TransactItems": items, "ClientRequestToken": blake2b(stamp, digest_size=16).hexdigest()}


def answer_of_transaction(response: Mapping[str, Any], text: str) -> TransactionCancelled | TransactionInvalid | None:
    """Return what a refused transaction says, or None if it may simply be sent again."""
    code = response.get("Error", {}).get("Code", "")
    if code == "TransactionCanceledException":
        reasons = tuple(response.get("CancellationReasons") or ())
        if reasons and _code(reasons[0]) in _PASSING - {"None"}:
            return None  # another transaction holds the record, perhaps an earlier try of ours: its outcome is open
        return TransactionCancelled(reasons) if any(_code(reason) not in _PASSING for reason in reasons) else None
    if code in ("ValidationException", "ResourceNotFoundException"):  # not our table: the claim was made in it
        return TransactionInvalid(text)
    return None


def _code(reason: Mapping[str, Any]) -> str:
    return reason.get("Code") or "None"


def _describe(writes: tuple[Any, ...], at: int) -> str:
    kind, parameters = next(iter(writes[at].items()))
    return f"write {at + 1} of {len(writes)} ({kind}, table {parameters.get('TableName')!r})"


def _check(write: object) -> None:
    """Check that a write looks like an element of TransactItems. The driver and the service judge everything else."""
    if not isinstance(write, Mapping) or len(write) != 1 or next(iter(write)) not in _SUBJECTS:
        raise ConfigurationError(
            f"a write is a dict with one of {', '.join(_SUBJECTS)}, as in TransactItems of boto3's client, "
            f"not {_shape_of(write)}"
        )
    ((kind, parameters),) = write.items()
    subject = _SUBJECTS[kind]
    if not isinstance(parameters, Mapping) or not parameters.get("TableName") or not parameters.get(subject):
        raise ConfigurationError(f"a {kind} has a TableName and {subject}: {_shape_of(write)} has not")
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


def _shape_of(write: object) -> str:
    """Return the shape of a write without its values, which may be secret."""
    if isinstance(write, Mapping):
        inner = {name: sorted(map(str, of)) if isinstance(of, Mapping) else "…" for name, of in write.items()}
        return f"a dict of {inner}"
    return f"a {type(write).__name__}"


def _bytes_of(write: Mapping[str, Any]) -> int:
    ((kind, parameters),) = write.items()
    values = parameters.get("ExpressionAttributeValues") or {}
    return _size(parameters[_SUBJECTS[kind]]) + sum(map(_size, values.values()))


def _size(part: object) -> int:
    """Return a lower bound of the size that the service counts: two digits of a number are one byte."""
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
