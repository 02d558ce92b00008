"""Measure in DynamoDB, in a new table that is deleted afterwards. Items are weighed by the rules of billing."""

from __future__ import annotations

import math
import secrets
import time
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

from semel.cli.measuring.samples import Measured, Sample, Work
from semel.errors import SemelError, StoreUnavailable, StoreUncertain

OVERHEAD: Final = 100
"""Bytes that the service adds to each item when it bills storage."""
WRITE_UNIT: Final = 1024
READ_UNIT: Final = 4096
PAGE: Final = 1024 * 1024
MAKING: Final = 120.0
"""Seconds for creating a table, or until it can be deleted. The service needs about ten."""
AWAY: Final = 10.0
"""Seconds for which the deletion is retried when the service does not answer."""
PAUSE: Final = 1.0
_NOT_YET: Final = ("ResourceInUseException", "LimitExceededException", "ThrottlingException", "InternalServerError")
"""Error codes for a table that cannot be deleted yet, because it is still being created."""


def dynamodb(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.dynamodb import DynamoDBStore
    from semel.stores.dynamodb.failures import error_of, public_error
    from semel.stores.dynamodb.programs import SCAN_PAGES
    from semel.stores.dynamodb.settings import DynamoDBSettings
    from semel.stores.dynamodb.sync import open_client

    DynamoDBSettings(url)  # checks the URL; the table is another one
    inside = urlsplit(url)._replace(path=f"/semel-size-{secrets.token_hex(6)}").geturl()
    settings = DynamoDBSettings(inside)
    with closing(open_client(settings)) as client:
        table = _Table(client, settings.table, sample)
        with sample.interrupts.place(table.remove, f"the table {settings.table}"):
            try:
                table.make()
                with closing(DynamoDBStore(inside)) as store:
                    sample.write(store)
                items = table.items()
            except SemelError:
                raise
            except Exception as error:
                raise public_error(error_of(error, settings.table)) from error
    begun, done = (sum(map(_weight, some)) / len(items) for some in (map(_claimed, items), items))
    largest = max(map(_weight, items))
    # A write is billed by the larger item, before or after it. A claim that finds a record is billed as a write of it.
    finished = math.ceil(largest / WRITE_UNIT)
    work = (
        Work("write capacity units", first=math.ceil(begun / WRITE_UNIT) + finished, again=finished),
        Work("read capacity units", first=0, again=0, sweep=SCAN_PAGES * PAGE // READ_UNIT),
    )
    how = "the items of a table of its own"
    return [Measured("dynamodb", "disk", len(items), done + OVERHEAD, None, how, work=work)]


class _Table:
    """A table for the samples. It has no time to live, because it is deleted as a whole."""

    def __init__(self, client: Any, name: str, sample: Sample) -> None:
        self._client = client
        self._name = name
        self._check = sample.interrupts.check
        self._refused = False

    def make(self) -> None:
        from semel.stores.dynamodb import table
        from semel.stores.dynamodb.failures import error_of

        self._check()
        try:
            self._client.create_table(**table.create_table_parameters(self._name))
        except Exception as error:
            self._refused = not isinstance(error_of(error, self._name), StoreUncertain)
            raise
        ends = time.monotonic() + MAKING
        while not self._is_there():
            self._check()
            if time.monotonic() > ends:
                raise StoreUnavailable(f"the table {self._name} was not made within {MAKING:.0f} s")
            time.sleep(PAUSE)

    def _is_there(self) -> bool:
        try:
            found = self._client.describe_table(TableName=self._name)
        except self._client.exceptions.ResourceNotFoundException:  # it may be unknown for a moment after its creation
            return False
        return bool(found["Table"]["TableStatus"] == "ACTIVE")

    def items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for page in self._client.get_paginator("scan").paginate(TableName=self._name, ConsistentRead=True):
            found += page["Items"]
            self._check()
        return found

    def remove(self) -> None:
        begun = time.monotonic()
        while not self._refused:
            try:
                self._client.delete_table(TableName=self._name)
                return
            except self._client.exceptions.ResourceNotFoundException:
                return
            except Exception as error:
                code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code")
                patience = MAKING if code in _NOT_YET else AWAY if code is None else 0.0
                if time.monotonic() - begun >= patience:
                    raise
            time.sleep(PAUSE)


def _claimed(item: dict[str, Any]) -> dict[str, Any]:
    """The item as the claim wrote it."""
    return {name: value for name, value in item.items() if name != "snapshot"}


def _weight(item: dict[str, Any]) -> int:
    """Bytes of an item, by the rules of billing."""
    return _taken({"M": item}) - 3


def _taken(value: dict[str, Any]) -> int:
    """Bytes of an attribute. Names count; a number takes half a byte per digit."""
    ((kind, given),) = value.items()
    if kind == "M":
        return 3 + sum(len(name.encode()) + 1 + _taken(each) for name, each in given.items())
    if kind == "L":
        return 3 + sum(1 + _taken(each) for each in given)
    if kind == "N":
        return len(given.strip("-0.")) // 2 + 2
    if kind == "S":
        return len(given.encode("utf-8", "surrogatepass"))
    return len(given) if kind == "B" else 1
