"""The table: how it is made and told from others, and the same in the words of IAM, CloudFormation and Terraform."""

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
    "iam_policy",
    "made",
    "removes",
    "terraform",
    "text",
    "ttl",
]

RIGHTS: Final = (
    "dynamodb:DeleteItem",
    "dynamodb:DescribeTable",
    "dynamodb:GetItem",
    "dynamodb:PutItem",
    "dynamodb:Scan",
    "dynamodb:UpdateItem",
)
"""What a store needs at run time; ``Scan`` for the sweep, which marks what is in doubt."""


ATTRIBUTES: Final = {
    "id": "B", "version": "N", "state": "N", "takeover": "N", "fingerprint": "B", "tenant": "S", "operation": "S",
    "steps": "M", "token": "N", "attempt": "N", "nonce": "N", "lease_end": "N", "created": "N", "expires": "N",
    "key": "S", "snapshot": "B", "ttl": "N",
}  # fmt: skip
"""What an item of ours has, by type. The service refuses an item whose attribute is no good as the key of an index."""
_LONG: Final = frozenset({"snapshot"})


def made(table: str) -> dict[str, Any]:
    """The parameters of CreateTable."""
    return {
        "TableName": table,
        "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "B"}],
        "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
        "BillingMode": "PAY_PER_REQUEST",
    }


def ttl() -> dict[str, Any]:
    """By which attribute the service removes what has expired."""
    return {"AttributeName": "ttl", "Enabled": True}


def check_key(name: str, real: dict[str, Any]) -> None:
    """Raise SchemaDrift where the table, as the service describes it, has not the key of ours: it is somebody else's.

    An index that was added is no harm, unless the service would refuse our items for it.
    """
    wanted, found = _key(made(name)), _key(real)
    if found != wanted:
        raise SchemaDrift(
            f"the table {name!r} is not one of Semel's, and was left as it is: its key is {_shown(found)}, "
            f"and should be {_shown(wanted)}. Name another table, one of Semel's own: "
            "`semel migrate dynamodb://region/table` makes it"
        )
    types = _types(real)
    for index in real.get("GlobalSecondaryIndexes") or ():
        for attribute in (each["AttributeName"] for each in index.get("KeySchema", ())):
            ours, kind = ATTRIBUTES.get(attribute), types.get(attribute)
            if ours is not None and (kind != ours or attribute in _LONG):
                why = "it may be longer than such a key" if kind == ours else f"it is of type {ours}, and not {kind}"
                raise SchemaDrift(
                    f"the table {name!r} has an index {index.get('IndexName')!r} by the attribute {attribute!r}, for "
                    f"which DynamoDB would refuse every record: {why}. Delete the index, or name another table"
                )


def check_items(name: str, items: Iterable[Mapping[str, Any]]) -> None:
    """Raise SchemaDrift where an item is none of ours, though the key of its table is the same."""
    for item in items:
        lacking = [each for each in ("version", "token", "state") if each not in item]
        if lacking:
            raise SchemaDrift(
                f"the table {name!r} is not one of Semel's, and was left as it is: it has an item without "
                f"{', '.join(map(repr, lacking))}. Name another table, one of Semel's own"
            )


def removes(name: str, told: dict[str, Any]) -> bool:
    """Whether the service removes by our attribute; SchemaDrift where it does by another, for a table has one only."""
    on = told.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
    by = told.get("AttributeName")
    if on and by != ttl()["AttributeName"]:
        raise SchemaDrift(
            f"the table {name!r} has its time to live by the attribute {by!r}, and was left as it is: it should be by "
            f"'ttl'. Switch it off (`aws dynamodb update-time-to-live --table-name {name} --time-to-live-specification "
            f"Enabled=false,AttributeName={by}`) and run `semel migrate` again, or name a table of Semel's own"
        )
    return on


def compare(name: str, real: dict[str, Any], told: dict[str, Any]) -> None:
    """Raise SchemaDrift where the table and its time to live, as the service describes them, are not as made here."""
    check_key(name, real)
    if not removes(name, told):
        raise SchemaDrift(
            f"the table {name!r} has no time to live, so nothing that expires would go: it should be on, "
            "by the attribute 'ttl'. Run `semel migrate`"
        )


def _types(table: dict[str, Any]) -> dict[str, str]:
    return {each["AttributeName"]: each["AttributeType"] for each in table.get("AttributeDefinitions", ())}


def _key(table: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The attributes of the key: name, part, type."""
    types = _types(table)
    return [
        (each["AttributeName"], each["KeyType"], types.get(each["AttributeName"], "?"))
        for each in table.get("KeySchema", ())
    ]


def _shown(key: list[tuple[str, str, str]]) -> str:
    return ", ".join(f"{name!r} ({part}, of type {kind})" for name, part, kind in key) or "not told"


def iam_policy(table: str, *, region: str = "*", account: str = "*") -> str:
    """An IAM policy with the rights that a store needs on the table, as JSON."""
    statement = {
        "Effect": "Allow",
        "Action": list(RIGHTS),
        "Resource": f"arn:aws:dynamodb:{region}:{account}:table/{table}",
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, indent=2)


def cloudformation(table: str) -> str:
    """The table as a CloudFormation template, as JSON."""
    properties = {**made(table), "TimeToLiveSpecification": ttl()}
    resource = {"Type": "AWS::DynamoDB::Table", "DeletionPolicy": "Retain", "Properties": properties}
    return json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": {"Semel": resource}}, indent=2)


def terraform(table: str) -> str:
    """The table as a Terraform resource."""
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


def text(what: str, table: str, region: str) -> str:
    """What ``semel migrate --print`` prints: ``iam``, ``cloudformation`` or ``terraform``."""
    texts = {
        "iam": lambda: iam_policy(table, region=region),
        "cloudformation": lambda: cloudformation(table),
        "terraform": lambda: terraform(table),
    }
    if what not in texts:
        raise ConfigurationError(f"nothing is printed as {what[:40]!r}; there are: {', '.join(texts)}")
    return texts[what]().rstrip("\n")
