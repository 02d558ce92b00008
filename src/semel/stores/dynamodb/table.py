"""The table: how it is made, and the same in the words of IAM, CloudFormation and Terraform."""

from __future__ import annotations

import json
from typing import Any, Final

from semel.errors import SchemaDrift

__all__ = ["RIGHTS", "cloudformation", "compare", "iam_policy", "made", "terraform", "ttl"]

RIGHTS: Final = (
    "dynamodb:DeleteItem",
    "dynamodb:DescribeTable",
    "dynamodb:GetItem",
    "dynamodb:PutItem",
    "dynamodb:Scan",
    "dynamodb:UpdateItem",
)
"""What a store needs at run time; ``Scan`` for the sweep, which marks what is in doubt."""


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


def compare(name: str, real: dict[str, Any], told: dict[str, Any]) -> None:
    """Raise SchemaDrift where the table and its time to live, as the service describes them, are not as made here."""
    wanted = made(name)
    differences = [
        f"{part}: is {real.get(part)!r}, should be {wanted[part]!r}"
        for part in ("KeySchema", "AttributeDefinitions")
        if real.get(part) != wanted[part]
    ]
    if told.get("AttributeName") != "ttl" or told.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        differences.append("time to live: should be on, by the attribute 'ttl'")
    if differences:
        raise SchemaDrift(f"the table {name!r} is not the one that is wanted:\n  " + "\n  ".join(differences))


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
