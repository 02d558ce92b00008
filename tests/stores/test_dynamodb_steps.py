"""DynamoDB: an item has 400 KB for the steps of an operation and then for its result, one after the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from semel import (
    INJECTED,
    AsyncDynamoDBStore,
    AsyncOperation,
    AsyncSemel,
    DynamoDBStore,
    Operation,
    Semel,
    StoreUnavailable,
)
from semel.core.ops import Claim, Claimed, Complete, Op, Resolve, SaveStep
from semel.core.states import State, Takeover
from semel.errors import RecordTooLarge
from semel.stores.dynamodb import migrate
from semel.stores.dynamodb.failures import CallRetry, error_of
from semel.stores.dynamodb.settings import DynamoDBSettings
from semel.stores.dynamodb.table import LARGEST_ITEM
from tests.servers import DynamoDBServer

LARGE = 250_000
"""Two of it do not fit into an item. Random, so that it cannot be compressed."""


class Shelf:
    """A table of records, seen from outside, and one of parcels beside it."""

    def __init__(self, url: str) -> None:
        self.url = url
        migrate(url)
        settings = DynamoDBSettings(url, 5, 5, 5, None)
        self.client = boto3.client(**settings.client())
        self.name = settings.table
        self.parcels = f"{settings.table}_parcels"
        self.client.create_table(
            TableName=self.parcels,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )

    @property
    def item(self) -> dict[str, Any]:
        """The only one."""
        found: list[dict[str, Any]] = self.client.scan(TableName=self.name, ConsistentRead=True)["Items"]
        (item,) = found
        return item

    @property
    def state(self) -> State:
        return State(int(self.item["state"]["N"]))

    @property
    def steps(self) -> list[str]:
        return list(self.item["steps"]["M"])

    def parcel(self, key: str) -> dict[str, Any]:
        return {"Put": {"TableName": self.parcels, "Item": {"id": {"S": key}}}}


@pytest.fixture
def shelf(dynamodb: DynamoDBServer) -> Iterator[Shelf]:
    shelf = Shelf(dynamodb.table())
    yield shelf
    shelf.client.close()


@pytest.mark.parametrize("writes", [False, True], ids=["alone", "with writes"])
def test_a_large_step_makes_room_for_a_large_result(shelf: Shelf, writes: bool) -> None:
    seen: list[list[str]] = []
    with Semel(DynamoDBStore(shelf.url), sweep_every=None) as guard:

        @guard.once(key="key")
        def ship(key: str, op: Operation = INJECTED) -> bytes:
            op.step("label", lambda: os.urandom(LARGE))
            seen.append(shelf.steps)
            if writes:
                op.write(shelf.parcel(key))
            return os.urandom(LARGE)

        first = ship("1")
        assert len(first) == LARGE
        assert ship("1") == first
    assert [len(steps) for steps in seen] == [1], "kept while it runs, and it ran once"
    assert (shelf.state, shelf.steps) == (State.DONE, [])
    assert shelf.client.scan(TableName=shelf.parcels)["Count"] == int(writes)


@pytest.mark.parametrize("writes", [False, True], ids=["alone", "with writes"])
def test_awaited_it_makes_room_too(shelf: Shelf, writes: bool) -> None:
    async def main() -> None:
        async with AsyncSemel(AsyncDynamoDBStore(shelf.url), sweep_every=None) as guard:

            @guard.once(key="key")
            async def ship(key: str, op: AsyncOperation = INJECTED) -> bytes:
                async def label() -> bytes:
                    return os.urandom(LARGE)

                await op.step("label", label)
                if writes:
                    op.write(shelf.parcel(key))
                return os.urandom(LARGE)

            first = await ship("1")
            assert await ship("1") == first

    asyncio.run(main())
    assert (shelf.state, shelf.steps) == (State.DONE, [])


def test_what_a_person_resolves_makes_room_as_well(shelf: Shelf) -> None:
    claim = Claim(b"k" * 16, 1, b"", 30.0, 60.0, Takeover.RETRY, "", "ship", "1")
    store = DynamoDBStore(shelf.url)
    won = store.execute(claim)
    assert isinstance(won, Claimed)
    assert store.execute(SaveStep(claim.id, won.token, "label", os.urandom(LARGE), 0)) is True
    assert store.execute(Resolve(claim.id, os.urandom(LARGE), 60.0, force=True)) is State.RUNNING
    assert (shelf.state, shelf.steps) == (State.DONE, [])
    store.close()


@pytest.mark.parametrize("size", [LARGEST_ITEM - 1, 500_000, 3_000_000])
def test_what_is_larger_than_an_item_is_said_by_its_own_name(shelf: Shelf, size: int) -> None:
    """By the service where it is only with the rest of the item, or before it is sent. A flow knows by that name that
    it must not be offered again as it is.
    """
    claim = Claim(b"k" * 16, 1, b"", 30.0, 60.0, Takeover.RETRY, "", "ship", "1")
    data = os.urandom(size)
    store = DynamoDBStore(shelf.url)
    won = store.execute(claim)
    assert isinstance(won, Claimed)
    ops: list[Op[Any]] = [
        Complete(claim.id, won.token, data, 60.0),
        SaveStep(claim.id, won.token, "label", data, 0),
        Resolve(claim.id, data, 60.0, force=True),
    ]
    for op in ops:
        with pytest.raises(RecordTooLarge, match="400 KB"):
            store.execute(op)
    store.close()

    async def awaited() -> None:
        store = AsyncDynamoDBStore(shelf.url)
        for op in ops:
            with pytest.raises(RecordTooLarge, match="400 KB"):
                await store.execute(op)
        await store.close()

    asyncio.run(awaited())
    assert (shelf.state, shelf.steps) == (State.RUNNING, [])


def test_it_is_too_large_also_where_an_earlier_answer_was_lost() -> None:
    import botocore.exceptions as boto

    said = {"Error": {"Code": "ValidationException", "Message": "Item size has exceeded the maximum allowed size"}}
    too_large = error_of(boto.ClientError(said, "UpdateItem"), "semel")
    tries = CallRetry(10.0)
    tries.pause_after(error_of(boto.ReadTimeoutError(endpoint_url="http://x"), "semel"), once=False)
    with pytest.raises(StoreUnavailable) as told:
        tries.pause_after(too_large, once=False)
    assert isinstance(told.value, RecordTooLarge)
