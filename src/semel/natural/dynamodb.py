"""The natural helpers on a DynamoDB table, for a client of boto3 or aiobotocore that the caller has.

Programs are generators that yield a call and are sent its answer; ``run`` and ``run_async`` make it on the client.
Values are plain Python: numbers that are whole come back as int, others as Decimal.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias, TypeVar

from semel.errors import ConfigurationError, SemelError
from semel.natural.results import Applied, Change, Inserted
from semel.stores.dynamodb.programs import Call, Occupied
from semel.stores.dynamodb.settings import answered, named, public

__all__ = ["compare_and_set", "insert_once", "is_client", "run", "run_async"]

R = TypeVar("R")
Program: TypeAlias = "Generator[Call, dict[str, Any] | Occupied, R]"
Typed: TypeAlias = dict[str, dict[str, Any]]

_CLIENTS: Final = {"botocore.client.BaseClient": False, "aiobotocore.client.AioBaseClient": True}
_SHOW: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}


def is_client(connection: Any, *, awaited: bool) -> bool:
    """Whether this is a client of DynamoDB; ConfigurationError for one of the other kind, or of another service."""
    cls = type(connection)
    if cls.__module__.partition(".")[0] not in ("boto3", "botocore", "aiobotocore"):
        return False
    if cls.__module__.startswith("boto3."):
        raise ConfigurationError('a resource or table of boto3 is not taken: give boto3.client("dynamodb")')
    kinds = [_CLIENTS[name] for each in cls.__mro__ if (name := f"{each.__module__}.{each.__qualname__}") in _CLIENTS]
    if not kinds:
        return False
    if connection.meta.service_model.service_name != "dynamodb":
        raise ConfigurationError(f"this client is one of another service, {cls.__name__}, and not of DynamoDB")
    if kinds[0] is not awaited:
        there = "semel.natural.aio" if kinds[0] else "semel.natural"
        raise ConfigurationError(
            f"this client is {'async' if kinds[0] else 'sync'}: from {there} import insert_once, …"
        )
    return True


def insert_once(
    table: str, values: Mapping[str, Any], key: str | Iterable[str], returning: Iterable[str] | None
) -> Program[Inserted]:
    # An UpdateItem, which makes the item that is not there: unlike PutItem it is refused where the key named here is
    # not the key of the table, and the condition would be one on another item.
    keys = (key,) if isinstance(key, str) else tuple(key)
    missing = [name for name in keys if name not in values]
    if not keys or missing:
        raise ConfigurationError(f"key= names the attributes that are the table's key; {missing or keys} are not given")
    rest = {name: value for name, value in values.items() if name not in keys}
    params = {
        "TableName": table,
        "Key": _typed({name: values[name] for name in keys}),
        "ConditionExpression": "attribute_not_exists(#k)",
        "ExpressionAttributeNames": {"#k": keys[0]} | {f"#s{at}": name for at, name in enumerate(rest)},
        "ReturnValues": "ALL_NEW",
        **_SHOW,
    }
    if rest:
        params["UpdateExpression"] = "SET " + ", ".join(f"#s{at} = :s{at}" for at in range(len(rest)))
        params["ExpressionAttributeValues"] = {f":s{at}": of for at, of in enumerate(_typed(rest).values())}
    reply = yield Call("update_item", params)
    new = not isinstance(reply, Occupied)
    item = _plain((reply.item if isinstance(reply, Occupied) else reply.get("Attributes")) or {})
    wanted = tuple(values) if returning is None else (returning,) if isinstance(returning, str) else tuple(returning)
    return Inserted({name: item.get(name) for name in wanted}, new)


def compare_and_set(
    table: str,
    where: Mapping[str, Any],
    version: int,
    values: Mapping[str, Any],
    column: str,
    marker: tuple[str, Any] | None,
) -> Program[Change]:
    changes = dict(values) if marker is None else {**values, marker[0]: marker[1]}
    if not where or not changes:
        raise ConfigurationError("where is the item's whole key, and values what is to be set: neither may be empty")
    if column in changes:
        raise ConfigurationError(f"{column} is the version: it grows by itself, leave it out of the values")
    sets = ", ".join(f"#s{at} = :s{at}" for at in range(len(changes)))
    reply = yield Call(
        "update_item",
        {
            "TableName": table,
            "Key": _typed(where),
            "UpdateExpression": f"SET #version = #version + :one, {sets}",
            "ConditionExpression": "#version = :version",
            "ExpressionAttributeNames": {"#version": column} | {f"#s{at}": name for at, name in enumerate(changes)},
            "ExpressionAttributeValues": {":one": {"N": "1"}, ":version": _letter(version)}
            | {f":s{at}": of for at, of in enumerate(_typed(changes).values())},
            **_SHOW,
        },
    )
    if not isinstance(reply, Occupied):
        return Change(Applied.NOW)
    if reply.item is None:
        return Change(Applied.ABSENT)
    found = _plain(reply.item)
    current = found.get(column)
    mine = changes if marker is None else {marker[0]: marker[1]}
    # With a marker a later version may have come on top of ours; without, only the very next one can be known as ours.
    later = current is not None and (current > version if marker is not None else current == version + 1)
    same = later and {name: found[name] for name in mine if name in found} == _plain(_typed(mine))
    return Change(Applied.ALREADY if same else Applied.LOST, current)


def run(client: Any, program: Program[R]) -> R:
    try:
        call = next(program)
        while True:
            try:
                reply: dict[str, Any] | Occupied = getattr(client, call.action)(**call.params)
            except Exception as error:
                reply = _told(error, call)
            call = program.send(reply)
    except StopIteration as stop:
        answer: R = stop.value
        return answer


async def run_async(client: Any, program: Program[R]) -> R:
    try:
        call = next(program)
        while True:
            try:
                reply: dict[str, Any] | Occupied = await getattr(client, call.action)(**call.params)
            except Exception as error:
                reply = _told(error, call)
            call = program.send(reply)
    except StopIteration as stop:
        answer: R = stop.value
        return answer


def _told(error: Exception, call: Call) -> Occupied:
    """What a condition that did not hold shows; raises all other errors, in our words."""
    occupied = answered(error, call)
    if isinstance(occupied, Occupied):
        return occupied
    table = call.params["TableName"]
    code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code")
    if code in ("ValidationException", "ResourceNotFoundException"):
        raise ConfigurationError(f"{table}: DynamoDB refused ({code}): {error}") from error
    found: SemelError = public(named(error, table))
    raise found from error


def _typed(values: Mapping[str, Any]) -> Typed:
    return {name: _letter(value) for name, value in values.items()}


def _letter(value: Any) -> dict[str, Any]:
    """A value under the letter of its type."""
    if value is None:
        return {"NULL": True}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, str):
        return {"S": str.__str__(value)}  # an Enum's text is its value, not its name
    if isinstance(value, int):
        return {"N": int.__repr__(value)}
    if isinstance(value, Decimal):
        return {"N": str(value)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"B": bytes(value)}
    if isinstance(value, Mapping):
        return {"M": _typed(value)}
    if isinstance(value, (list, tuple)):
        return {"L": [_letter(each) for each in value]}
    if isinstance(value, (set, frozenset)) and value:
        (kind, *others) = {next(iter(_letter(each))) for each in value}
        if not others and kind in ("S", "N", "B"):
            return {f"{kind}S": sorted(next(iter(_letter(each).values())) for each in value)}
    hint = "; a float is not exact, give a Decimal" if isinstance(value, float) else ""
    raise ConfigurationError(f"a {type(value).__name__} is no value of DynamoDB{hint}")


def _plain(item: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _value(*next(iter(typed.items()))) for name, typed in item.items()}


def _value(letter: str, value: Any) -> Any:
    if letter == "N":
        number = Decimal(value)
        return int(number) if number == number.to_integral_value() else number
    if letter == "NULL":
        return None
    if letter == "B":
        return bytes(value)
    if letter == "M":
        return _plain(value)
    if letter == "L":
        return [_value(*next(iter(each.items()))) for each in value]
    if letter in ("SS", "NS", "BS"):
        return {_value(letter[0], each) for each in value}
    return value
