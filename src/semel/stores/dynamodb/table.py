"""The table: its definition, checks that a table is ours, and templates for IAM, CloudFormation and Terraform."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from semel.errors import ConfigurationError, SchemaDrift

__all__ = [
    "RIGHTS",
    "check_items",
    "check_key",
    "cloudformation",
    "compare",
    "create_table_parameters",
    "has_ttl",
    "iam_policy",
    "template",
    "terraform",
    "ttl_specification",
]

RIGHTS: Final = (
    "dynamodb:DeleteItem",
    "dynamodb:DescribeTable",
    "dynamodb:GetItem",
    "dynamodb:PutItem",
    "dynamodb:Scan",
    "dynamodb:UpdateItem",
)
"""The rights that a store needs at run time. The sweep needs ``Scan``, to mark records as unknown."""


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
            f"the table {name!r} has no time to live, so nothing that expires would go: it should be on, "
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


def iam_policy(table: str, *, region: str = "*", account: str = "*") -> str:
    """Return an IAM policy with the rights that a store needs on the table, as JSON."""
    statement = {
        "Effect": "Allow",
        "Action": list(RIGHTS),
        "Resource": f"arn:aws:dynamodb:{region}:{account}:table/{table}",
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, indent=2)


def cloudformation(table: str) -> str:
    """Return the table as a CloudFormation template, as JSON."""
    properties = {**create_table_parameters(table), "TimeToLiveSpecification": ttl_specification()}
    resource = {"Type": "AWS::DynamoDB::Table", "DeletionPolicy": "Retain", "Properties": properties}
    return json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": {"Semel": resource}}, indent=2)


def terraform(table: str) -> str:
    """Return the table as a Terraform resource."""
    return f"""resource "aws_dynamodb_table" "semel" {{
  name         = {json.dumps(table)}
  billing_mode = "PAY_PER_REQUEST"
  hash_key     = "id"

  attribute {{
    name = "id"
    type = "B"
  }}

  ttl {{
    attribute_name = "ttl"
    enabled        = true
  }}
}}
"""


def template(what: str, table: str, region: str) -> str:
    """Return the template that ``semel migrate --print`` prints: ``iam``, ``cloudformation`` or ``terraform``."""
    texts = {
        "iam": lambda: iam_policy(table, region=region),
        "cloudformation": lambda: cloudformation(table),
        "terraform": lambda: terraform(table),
    }
    if what not in texts:
        raise ConfigurationError(f"nothing is printed as {what[:40]!r}; there are: {', '.join(texts)}")
    return texts[what]().rstrip("\n")
