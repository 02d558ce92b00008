"""Measured in DynamoDB, in a new table that is deleted afterwards: the items, weighed as the service bills them."""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

from semel.cli.measuring.samples import Sample
from semel.cli.sizing import Measured

__all__ = ["dynamodb"]

OVERHEAD: Final = 100
"""Bytes that the service adds to each item when it bills storage."""


def dynamodb(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.dynamodb import DynamoDBStore, migrate
    from semel.stores.dynamodb.settings import CONNECT_TIMEOUT, PATIENCE, TIMEOUT, Settings, named
    from semel.stores.dynamodb.sync import _client

    inside = urlsplit(url)._replace(path=f"/semel-size-{secrets.token_hex(6)}").geturl()
    settings = Settings(inside, TIMEOUT, CONNECT_TIMEOUT, PATIENCE, None)
    with closing(_client(settings)) as client:
        try:
            migrate(inside)
            try:
                with closing(DynamoDBStore(inside)) as store:
                    sample.write(store)
                pages = client.get_paginator("scan").paginate(TableName=settings.table, ConsistentRead=True)
                taken = [_weight({"M": item}) - 3 + OVERHEAD for page in pages for item in page["Items"]]
            finally:
                client.delete_table(TableName=settings.table)
        except client.exceptions.ClientError as error:
            raise named(error, settings.table) from error
    return [Measured("dynamodb", "disk", len(taken), sum(taken) / len(taken), None, "the items of a table of its own")]


def _weight(value: dict[str, Any]) -> int:
    """Bytes of an attribute, by the rules of the service: names count, numbers take half a byte a digit."""
    ((kind, given),) = value.items()
    if kind == "M":
        return 3 + sum(len(name.encode()) + 1 + _weight(each) for name, each in given.items())
    if kind == "L":
        return 3 + sum(1 + _weight(each) for each in given)
    if kind == "N":
        return len(given.strip("-0.")) // 2 + 2
    if kind == "S":
        return len(given.encode("utf-8", "surrogatepass"))
    return len(given) if kind == "B" else 1
