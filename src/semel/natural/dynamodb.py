"""The natural helpers on a DynamoDB table, as programs for the caller's client of boto3 or aiobotocore.

A program is a generator that yields calls and is sent their replies. Values are plain Python: whole numbers are
returned as int, others as Decimal.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias, TypeVar

from semel.errors import ConfigurationError, SemelError
from semel.natural.programs import Applied, Change, Inserted, changes_of
from semel.stores.dynamodb.failures import answer_of, error_of
from semel.stores.dynamodb.programs import ApiCall, ConditionNotMet
from semel.stores.retries import public_error

R = TypeVar("R")
Reply: TypeAlias = "dict[str, Any] | ConditionNotMet"
Program: TypeAlias = Generator[ApiCall, Reply, R]
Typed: TypeAlias = dict[str, dict[str, Any]]

_CLIENTS: Final = {"botocore.client.BaseClient": False, "aiobotocore.client.AioBaseClient": True}
_SHOW: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}


def is_client(client: Any, *, awaited: bool) -> bool:
    """Whether this is a client of DynamoDB.

    Raises ConfigurationError if it is one of another service, or if it is sync where an async one is needed or vice
    versa.
    """
    cls = type(client)
    if cls.__module__.partition(".")[0] not in ("boto3", "botocore", "aiobotocore"):
        return False
    if cls.__module__.startswith("boto3."):
        raise ConfigurationError('a resource or table of boto3 is not supported: use boto3.client("dynamodb")')
    kinds = [_CLIENTS[name] for each in cls.__mro__ if (name := f"{each.__module__}.{each.__qualname__}") in _CLIENTS]
    if not kinds:
        return False
    if client.meta.service_model.service_name != "dynamodb":
        raise ConfigurationError(f"this client is for another service, {cls.__name__}, not for DynamoDB")
    if kinds[0] is not awaited:
        module = "semel.natural.aio" if kinds[0] else "semel.natural"
        raise ConfigurationError(f"this client is {'async' if kinds[0] else 'sync'}: use the functions of {module}")
    return True


def insert_once(
    table: str, values: Mapping[str, Any], key: str | Iterable[str], returning: Iterable[str] | None
) -> Program[Inserted]:
    # UpdateItem creates the item if it does not exist. Unlike PutItem it is refused if the attributes in key= are not
    # the table's key, in which case the condition would be about another item.
    keys = (key,) if isinstance(key, str) else tuple(key)
    missing = [name for name in keys if name not in values]
    if not keys or missing:
        raise ConfigurationError(f"key= names the attributes that are the table's key; {missing or keys} are missing")
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
    reply = yield ApiCall("update_item", params)
    new = not isinstance(reply, ConditionNotMet)
    item = _plain((reply.item if isinstance(reply, ConditionNotMet) else reply.get("Attributes")) or {})
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
    changes = changes_of(values, column, marker)
    if not where or not changes:
        raise ConfigurationError("where must be the item's whole key, and values must not be empty")
    sets = ", ".join(f"#s{at} = :s{at}" for at in range(len(changes)))
    reply = yield ApiCall(
        "update_item",
        {
            "TableName": table,
            "Key": _typed(where),
            "UpdateExpression": f"SET #version = #version + :one, {sets}",
            "ConditionExpression": "#version = :version",
            "ExpressionAttributeNames": {"#version": column} | {f"#s{at}": name for at, name in enumerate(changes)},
            "ExpressionAttributeValues": {":one": {"N": "1"}, ":version": _typed_value(version)}
            | {f":s{at}": of for at, of in enumerate(_typed(changes).values())},
            **_SHOW,
        },
    )
    if not isinstance(reply, ConditionNotMet):
        return Change(Applied.NOW)
    if reply.item is None:
        return Change(Applied.ABSENT)
    found = _plain(reply.item)
    current = found.get(column)
    mine = changes if marker is None else {marker[0]: marker[1]}
    # With a marker the change is recognised under any later version; without, only under the next one.
    later = current is not None and (current > version if marker is not None else current == version + 1)
    same = later and {name: found[name] for name in mine if name in found} == _plain(_typed(mine))
    return Change(Applied.ALREADY if same else Applied.LOST, current)


def failed_condition(error: Exception, call: ApiCall) -> ConditionNotMet:
    """The item that a failed condition shows. Raises every other error as one of ours."""
    occupied = answer_of(error, call)
    if isinstance(occupied, ConditionNotMet):
        return occupied
    table = call.params["TableName"]
    code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code")
    if code in ("ValidationException", "ResourceNotFoundException"):
        raise ConfigurationError(f"{table}: DynamoDB refused ({code}): {error}") from error
    found: SemelError = public_error(error_of(error, table))
    raise found from error


def _typed(values: Mapping[str, Any]) -> Typed:
    return {name: _typed_value(value) for name, value in values.items()}


def _typed_value(value: Any) -> dict[str, Any]:
    """A value as DynamoDB writes it: ``{"N": "7"}``."""
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
        return {"L": [_typed_value(each) for each in value]}
    if isinstance(value, (set, frozenset)) and value:
        (kind, *others) = {next(iter(_typed_value(each))) for each in value}
        if not others and kind in ("S", "N", "B"):
            return {f"{kind}S": sorted(next(iter(_typed_value(each).values())) for each in value)}
    hint = "; a float is not exact, use a Decimal" if isinstance(value, float) else ""
    raise ConfigurationError(f"DynamoDB cannot store a {type(value).__name__}{hint}")


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
