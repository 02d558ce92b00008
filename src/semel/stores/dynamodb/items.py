"""A record as an item of the table, and back. Times are microseconds since 1970 by the service's clock.

``version`` grows with every write, so that a change can be conditional on the version that was read. ``ttl`` is for the
service, which removes the item some time after it. Only items that count as absent from then on have one, so a record
whose outcome is unknown never goes. Empty fields are left out: the service does not take an empty value as the key of
an index, and somebody may want such an index.
"""

from __future__ import annotations

from math import ceil
from typing import Any, Final, TypeAlias

from semel.core.semantics import Row
from semel.core.states import State, Takeover
from semel.errors import RecordTooLarge, SchemaDrift

__all__ = ["LARGEST_ITEM", "Item", "check_size", "micros", "step_name", "to_item", "to_row", "ttl_of"]

Item: TypeAlias = dict[str, dict[str, Any]]
"""An item as the service has it: each value under the letter of its type."""

LARGEST_ITEM: Final = 400 * 1024
_NUMBERS: Final = ("token", "attempt", "nonce")
_STEP: Final = "step:"
_TEXTS: Final = ("tenant", "operation")
_TIMES: Final = ("lease_end", "created", "expires")


def check_size(data: bytes) -> bytes:
    """Return the data, or raise RecordTooLarge if no item could hold it. The service judges everything else."""
    if len(data) > LARGEST_ITEM:
        raise RecordTooLarge(
            f"too large for an item of DynamoDB, which is 400 KB at most: {len(data):,} bytes; store less"
        )
    return data


def micros(seconds: float) -> str:
    return str(round(seconds * 1_000_000))


def step_name(name: str) -> str:
    """Return the attribute of a step. It has a prefix, so that no name looks like the letter of a type."""
    return _STEP + name


def ttl_of(row: Row) -> int | None:
    """Return the second after which the service may remove the item, or None if that would lose something."""
    if row.state is State.DONE:
        return ceil(row.expires)
    if row.state is State.RUNNING and row.takeover is Takeover.RETRY:
        return ceil(max(row.expires, row.lease_end))
    return None


def to_item(row: Row, version: int) -> Item:
    """Return the item. If it is done, its steps are left out: nobody resumes it, and they may take up the room."""
    steps = () if row.state is State.DONE else row.steps
    item: Item = {
        "id": {"B": row.id},
        "version": {"N": str(version)},
        "state": {"N": str(int(row.state))},
        "takeover": {"N": str(int(row.takeover))},
        "steps": {
            "M": {step_name(name): {"L": [{"N": str(at)}, {"B": value}]} for at, (name, value) in enumerate(steps)},
        },
    }
    item |= {name: {"N": str(getattr(row, name))} for name in _NUMBERS}
    item |= {name: {"N": micros(getattr(row, name))} for name in _TIMES}
    if row.fingerprint:
        item["fingerprint"] = {"B": row.fingerprint}
    item |= {name: {"S": text} for name in _TEXTS if (text := getattr(row, name))}
    if row.key is not None:
        item["key"] = {"S": row.key}
    if row.snapshot is not None:
        item["snapshot"] = {"B": check_size(row.snapshot)}
    ttl = ttl_of(row)
    if ttl is not None:
        item["ttl"] = {"N": str(ttl)}
    return item


def to_row(item: Item) -> tuple[Row, int]:
    """Return the record and the version of its item; raise SchemaDrift if the item is no record."""
    try:
        return _to_row(item)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        # Name the attribute that is missing, but none of the values: they may be secret.
        why = f"has no {error}" if isinstance(error, KeyError) else "has a value that no record has"
        raise SchemaDrift(
            f"an item of the table is not one of Semel's records, and was left as it is: it {why}. Somebody else "
            "writes to this table; name another one, of Semel's own"
        ) from (error if isinstance(error, KeyError) else None)  # other errors quote the values


def _to_row(item: Item) -> tuple[Row, int]:
    steps = sorted(
        (int(step["L"][0]["N"]), name.removeprefix(_STEP), bytes(step["L"][1]["B"]))
        for name, step in item["steps"]["M"].items()
    )
    numbers: dict[str, Any] = {name: int(item[name]["N"]) for name in _NUMBERS}
    numbers |= {name: int(item[name]["N"]) / 1_000_000 for name in _TIMES}
    row = Row(
        id=bytes(item["id"]["B"]),
        state=State(int(item["state"]["N"])),
        takeover=Takeover(int(item["takeover"]["N"])),
        fingerprint=bytes(item["fingerprint"]["B"]) if "fingerprint" in item else b"",
        tenant=item["tenant"]["S"] if "tenant" in item else "",
        operation=item["operation"]["S"] if "operation" in item else "",
        key=item["key"]["S"] if "key" in item else None,
        snapshot=bytes(item["snapshot"]["B"]) if "snapshot" in item else None,
        steps=tuple((name, value) for _, name, value in steps),
        **numbers,
    )
    return row, int(item["version"]["N"])
