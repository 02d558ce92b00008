"""Create the table of a URL, check it, and print it for those who create it themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from semel.errors import ConfigurationError, SemelError
from semel.stores.dynamodb.failures import error_of
from semel.stores.dynamodb.settings import DynamoDBSettings
from semel.stores.dynamodb.sync import open_client
from semel.stores.dynamodb.table import (
    check_items,
    check_key,
    compare,
    create_table_parameters,
    has_ttl,
    ttl_specification,
)
from semel.stores.retries import public_error

RIGHTS: Final = (
    "dynamodb:DeleteItem",
    "dynamodb:DescribeTable",
    "dynamodb:GetItem",
    "dynamodb:PutItem",
    "dynamodb:Scan",
    "dynamodb:UpdateItem",
)
"""The rights that a store needs at run time. The sweep needs ``Scan``, to mark records as unknown."""


@contextmanager
def _connected(settings: DynamoDBSettings) -> Iterator[Any]:
    client = open_client(settings)
    try:
        yield client
    except SemelError:
        raise
    except Exception as error:
        raise public_error(error_of(error, settings.table)) from error
    finally:
        client.close()


def migrate(url: str) -> list[str]:
    """Create the table, and have the service remove expired items. Returns what was done."""
    settings = DynamoDBSettings(url)
    name, done = settings.table, []
    with _connected(settings) as client:
        try:
            client.create_table(**create_table_parameters(name))
            done.append(f"table {name}")
        except client.exceptions.ResourceInUseException:
            pass  # it exists, or another process is creating it
        client.get_waiter("table_exists").wait(TableName=name)
        # Check before anything is changed: if this is the name of another table, its items would be removed.
        check_key(name, client.describe_table(TableName=name)["Table"])
        time_to_live = client.describe_time_to_live(TableName=name)["TimeToLiveDescription"]
        if not has_ttl(name, time_to_live):
            if not done:
                page = client.scan(TableName=name, Limit=1, ConsistentRead=True)
                check_items(name, page.get("Items", ()))
            client.update_time_to_live(TableName=name, TimeToLiveSpecification=ttl_specification())
            done.append("time to live")
    return done


def check(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the table is the one that ``migrate`` creates."""
    settings = DynamoDBSettings(url)
    with _connected(settings) as client:
        description = client.describe_table(TableName=settings.table)["Table"]
        time_to_live = client.describe_time_to_live(TableName=settings.table)["TimeToLiveDescription"]
    compare(settings.table, description, time_to_live)


def render_template(what: str, url: str) -> str:
    """Return the table of this URL for ``cloudformation`` or ``terraform``, or its rights for ``iam``. Does no I/O."""
    settings = DynamoDBSettings(url)
    texts = {
        "iam": iam_policy(settings.table, region=settings.region),
        "cloudformation": cloudformation(settings.table),
        "terraform": terraform(settings.table),
    }
    if what not in texts:
        raise ConfigurationError(f"unknown format {what[:40]!r}; there are: {', '.join(texts)}")
    return texts[what].rstrip("\n")


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
