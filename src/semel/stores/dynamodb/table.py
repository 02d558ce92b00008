"""The table: its definition, a record as an item and back, and checks that a table is ours.

Times are microseconds since 1970 by the service's clock. ``version`` grows with every write, so that a change can be
conditional on the version that was read. ``ttl`` is for the service, which removes the item some time after it. Only
items that count as absent from then on have one, so a record whose outcome is unknown never goes. Empty fields are left
out: the service does not take an empty value as the key of an index, and somebody may want such an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, Final, TypeAlias

from semel.core.semantics import Row
from semel.core.states import State, Takeover
from semel.errors import RecordTooLarge, SchemaDrift

ATTRIBUTES: Final = {
    "id": "B", "version": "N", "state": "N", "takeover": "N", "fingerprint": "B", "tenant": "S", "operation": "S",
    "steps": "M", "token": "N", "attempt": "N", "nonce": "N", "lease_end": "N", "created": "N", "expires": "N",
    "key": "S", "snapshot": "B", "ttl": "N",
}  # fmt: skip
"""The attributes of our items, by type. The service refuses an item if one of them cannot be the key of an index."""
_LONG: Final = frozenset({"snapshot"})


def create_table_parameters(table: str) -> dict[str, Any]:
    """Return the parameters of CreateTable."""
    return {
        "TableName": table,
        "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "B"}],
        "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
        "BillingMode": "PAY_PER_REQUEST",
    }


def ttl_specification() -> dict[str, Any]:
    """Return which attribute the service removes expired items by."""
    return {"AttributeName": "ttl", "Enabled": True}


def check_key(name: str, table: dict[str, Any]) -> None:
    """Raise SchemaDrift if the key of the table, as the service describes it, is not ours: it is another table.

    An index that was added does no harm, unless the service would refuse our items because of it.
    """
    wanted, found = _key(create_table_parameters(name)), _key(table)
    if found != wanted:
        raise SchemaDrift(
            f"the table {name!r} is not one of Semel's, and was left as it is: its key is {_key_text(found)}, "
            f"and should be {_key_text(wanted)}. Name another table, one of Semel's own: "
            "`semel migrate dynamodb://region/table` makes it"
        )
    types = _types(table)
    for index in table.get("GlobalSecondaryIndexes") or ():
        for attribute in (each["AttributeName"] for each in index.get("KeySchema", ())):
            ours, kind = ATTRIBUTES.get(attribute), types.get(attribute)
            if ours is not None and (kind != ours or attribute in _LONG):
                why = "it may be longer than such a key" if kind == ours else f"it is of type {ours}, and not {kind}"
                raise SchemaDrift(
                    f"the table {name!r} has an index {index.get('IndexName')!r} by the attribute {attribute!r}, for "
                    f"which DynamoDB would refuse every record: {why}. Delete the index, or name another table"
                )


def check_items(name: str, items: Iterable[Mapping[str, Any]]) -> None:
    """Raise SchemaDrift if an item is not ours, although its table has the same key."""
    for item in items:
        missing = [each for each in ("version", "token", "state") if each not in item]
        if missing:
            raise SchemaDrift(
                f"the table {name!r} is not one of Semel's, and was left as it is: it has an item without "
                f"{', '.join(map(repr, missing))}. Name another table, one of Semel's own"
            )


def has_ttl(name: str, description: dict[str, Any]) -> bool:
    """Whether the service removes items by our attribute. Raises SchemaDrift if it does so by another one."""
    on = description.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
    by = description.get("AttributeName")
    if on and by != ttl_specification()["AttributeName"]:
        raise SchemaDrift(
            f"the table {name!r} has its time to live by the attribute {by!r}, and was left as it is: it should be by "
            f"'ttl'. Switch it off (`aws dynamodb update-time-to-live --table-name {name} --time-to-live-specification "
            f"Enabled=false,AttributeName={by}`) and run `semel migrate` again, or name a table of Semel's own"
        )
    return on


def compare(name: str, table: dict[str, Any], time_to_live: dict[str, Any]) -> None:
    """Raise SchemaDrift unless the table and its time to live, as the service describes them, are ours."""
    check_key(name, table)
    if not has_ttl(name, time_to_live):
        raise SchemaDrift(
            f"the table {name!r} has no time to live, so expired records would stay: it should be on, "
            "by the attribute 'ttl'. Run `semel migrate`"
        )


def _types(table: dict[str, Any]) -> dict[str, str]:
    return {each["AttributeName"]: each["AttributeType"] for each in table.get("AttributeDefinitions", ())}


def _key(table: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the attributes of the key: name, part, type."""
    types = _types(table)
    return [
        (each["AttributeName"], each["KeyType"], types.get(each["AttributeName"], "?"))
        for each in table.get("KeySchema", ())
    ]


def _key_text(key: list[tuple[str, str, str]]) -> str:
    return ", ".join(f"{name!r} ({part}, of type {kind})" for name, part, kind in key) or "unknown"


# -- items --

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
    if row.state is State.DONE or (row.state is State.RUNNING and row.takeover is Takeover.RETRY):
        # The lease of a record that was freed: the service ignores a time as long ago as its "expires".
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
