"""Records in a DynamoDB table, by boto3 (sync) or aiobotocore (async). Create the table with ``semel migrate URL``."""

from semel.stores.dynamodb.aio import AsyncDynamoDBStore
from semel.stores.dynamodb.migrations import check, cloudformation, iam_policy, migrate, render_template, terraform
from semel.stores.dynamodb.sync import DynamoDBStore

__all__ = [
    "AsyncDynamoDBStore",
    "DynamoDBStore",
    "check",
    "cloudformation",
    "iam_policy",
    "migrate",
    "render_template",
    "terraform",
]
