"""Natural idempotency on DynamoDB: a repeat changes nothing, and says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import Enum
from typing import Any

import aiobotocore.session
import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from semel import natural
from semel.errors import ConfigurationError, StoreUnavailable, StoreUncertain
from semel.natural import Applied, Change, aio
from tests.servers import DynamoDBServer, MotoServer

pytestmark = pytest.mark.server

Server = DynamoDBServer | MotoServer
WHERE = {
    "region_name": "eu-central-1",
    "aws_access_key_id": "test",
    "aws_secret_access_key": "test",
}


class Desk:
    """The helpers on one table, on a client of boto3; and what the client was asked."""

    def __init__(self, server: Server, name: str) -> None:
        self.where = {**WHERE, "endpoint_url": server.url, "config": Config(retries={"total_max_attempts": 1})}
        self.client: Any = boto3.client("dynamodb", **self.where)
        self.table = name
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.client.meta.events.register("before-call.dynamodb", self._note, unique_id="note")
            return getattr(natural, name)(self.client, self.table, *args, **kwargs)

        return call

    def _note(self, model: Any, **rest: Any) -> None:
        self.asked.append(model.name)

    def item(self, **key: Any) -> Any:
        typed = {name: {"N": str(value)} for name, value in key.items()}
        return self.client.get_item(TableName=self.table, Key=typed, ConsistentRead=True).get("Item")


class AsyncDesk(Desk):
    """The same on a client of aiobotocore, a fresh one for each call."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def work(*args: Any, **kwargs: Any) -> Any:
            async with aiobotocore.session.get_session().create_client("dynamodb", **self.where) as client:
                client.meta.events.register("before-call.dynamodb", self._note)
                return await getattr(aio, name)(client, self.table, *args, **kwargs)

        return lambda *args, **kwargs: asyncio.run(work(*args, **kwargs))


def made(server: Server, *key: str) -> str:
    """A fresh table with such a key of numbers."""
    name = server.table().partition("?")[0].rpartition("/")[2] + "_natural"
    client = boto3.client("dynamodb", **WHERE, endpoint_url=server.url)
    client.create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": part, "AttributeType": "N"} for part in key],
        KeySchema=[
            {"AttributeName": part, "KeyType": kind} for part, kind in zip(key, ("HASH", "RANGE"), strict=False)
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    client.close()
    return name


@pytest.fixture(
    params=[
        pytest.param(("dynamodb", Desk), marks=pytest.mark.dynamodb, id="boto3"),
        pytest.param(("dynamodb", AsyncDesk), marks=pytest.mark.dynamodb, id="aiobotocore"),
        pytest.param(("moto", Desk), marks=pytest.mark.moto, id="moto"),
    ]
)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    kind, of = request.param
    server = request.getfixturevalue(kind)
    desk = of(server, made(server, "id"))
    yield desk
    desk.client.close()


def test_an_item_is_inserted_once_and_found_after_in_one_call_each(desk: Desk) -> None:
    first = desk.insert_once({"id": 7, "amount": 5, "label": None}, key="id")
    again = desk.insert_once({"id": 7, "amount": 9, "label": "other"}, key="id")
    row, new = first
    assert (dict(row), new) == ({"id": 7, "amount": 5, "label": None}, True)
    assert (dict(again.row), again.new) == ({"id": 7, "amount": 5, "label": None}, False)
    assert desk.asked == ["UpdateItem"] * 2
    assert desk.item(id=7)["amount"] == {"N": "5"}


def test_other_attributes_of_the_item_can_be_asked_for(desk: Desk) -> None:
    desk.insert_once({"id": 7, "amount": 5, "note": "n"}, key=["id"])
    found = desk.insert_once({"id": 7}, key="id", returning=("note", "missing"))
    assert (dict(found.row), found.new) == ({"note": "n", "missing": None}, False)


def test_values_of_every_kind_come_back_as_they_were(desk: Desk) -> None:
    values = {
        "id": 1,
        "size": "reserved words, and :text #names",
        "data": b"\x00\xff",
        "price": Decimal("12.50"),
        "large": 10**30,
        "yes": True,
        "nothing": None,
        "list": [1, "two", [b"three"]],
        "map": {"a": {"b": False}},
        "names": {"x", "y"},
        "numbers": {1, Decimal("2.5")},
    }
    assert dict(desk.insert_once(values, key="id").row) == values
    again = desk.insert_once({"id": 1}, key="id", returning=list(values))
    assert dict(again.row) == values
    assert type(again.row["id"]) is int


def test_an_enum_is_its_value(desk: Desk) -> None:
    class Status(str, Enum):  # noqa: UP042  it shows its name, unlike StrEnum
        PAID = "paid"

    class Kind(int, Enum):
        CARD = 3

    desk.insert_once({"id": 5, "status": Status.PAID, "kind": Kind.CARD}, key="id")
    assert (desk.item(id=5)["status"], desk.item(id=5)["kind"]) == ({"S": "paid"}, {"N": "3"})


def test_compare_and_set_tells_a_repeat_from_a_lost_race_in_one_call_each(desk: Desk) -> None:
    desk.insert_once({"id": 1, "version": 4}, key="id")
    desk.asked.clear()
    change = {"where": {"id": 1}, "version": 4, "values": {"note": "mine", "tags": {"a", "b"}}}
    assert desk.compare_and_set(**change) == Change(Applied.NOW)
    assert desk.compare_and_set(**change) == Change(Applied.ALREADY, 5)
    lost = desk.compare_and_set({"id": 1}, version=4, values={"note": "another's"})
    assert lost == Change(Applied.LOST, 5)
    assert not lost
    assert desk.compare_and_set({"id": 9}, version=4, values={"note": "x"}) == Change(Applied.ABSENT)
    assert desk.asked == ["UpdateItem"] * 4
    assert desk.item(id=1)["note"] == {"S": "mine"}
    assert desk.item(id=9) is None


def test_a_version_by_another_name_and_none_at_all(desk: Desk) -> None:
    desk.insert_once({"id": 1, "rev": 1}, key="id")
    assert desk.compare_and_set({"id": 1}, version=1, values={"a": 1}, column="rev") == Change(Applied.NOW)
    assert desk.compare_and_set({"id": 1}, version=1, values={"a": 1}) == Change(Applied.LOST)


def test_with_a_marker_a_repeat_is_known_by_it_and_by_nothing_else(desk: Desk) -> None:
    desk.insert_once({"id": 1, "version": 4}, key="id")

    def change(marker: str) -> Change:
        return desk.compare_and_set(  # type: ignore[no-any-return]
            {"id": 1}, version=4, values={"note": "same"}, marker=("changed_by", marker)
        )

    assert change("me") == Change(Applied.NOW)
    assert change("me") == Change(Applied.ALREADY, 5)
    assert change("other") == Change(Applied.LOST, 5), "equal values, and yet another's change"
    assert desk.compare_and_set({"id": 1}, version=5, values={"note": "later"}) == Change(Applied.NOW)
    assert change("me") == Change(Applied.ALREADY, 6), "also when others have changed it since"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("insert_once", {"values": {"id": 1, "mail": "x"}, "key": "mail"}, "ValidationException"),
        ("insert_once", {"values": {"mail": "x"}, "key": "id"}, "key= names"),
        ("insert_once", {"values": {"id": 1, "price": 1.5}, "key": "id"}, "Decimal"),
        ("insert_once", {"values": {"id": 1, "x": {1, "a"}}, "key": "id"}, "cannot store a set"),
        ("insert_once", {"values": {"id": 1, "x": object()}, "key": "id"}, "cannot store a object"),
        ("compare_and_set", {"where": {"mail": "x"}, "version": 1, "values": {"a": 1}}, "ValidationException"),
        ("compare_and_set", {"where": {"id": 1}, "version": 1, "values": {"version": 2}}, "grows by itself"),
        ("compare_and_set", {"where": {}, "version": 1, "values": {"a": 1}}, "whole key"),
        ("transition", {"where": {}, "column": "a", "before": 1, "after": 2}, "insert_once and compare_and_set"),
    ],
)
def test_what_cannot_be_meant_is_said(desk: Desk, name: str, arguments: dict[str, Any], words: str) -> None:
    """Above all a key that is not the table's: the condition would be one on another item, and each insert be new."""
    with pytest.raises(ConfigurationError, match=words):
        getattr(desk, name)(**arguments)
    assert desk.item(id=1) is None


def test_a_key_may_be_all_there_is(dynamodb: DynamoDBServer) -> None:
    desk = Desk(dynamodb, made(dynamodb, "id"))
    assert [desk.insert_once({"id": 1}, key="id") for _ in range(2)] == [({"id": 1}, True), ({"id": 1}, False)]
    desk.client.close()


def test_a_key_of_two_parts_is_one_key(dynamodb: DynamoDBServer) -> None:
    desk = Desk(dynamodb, made(dynamodb, "order", "line"))
    assert desk.insert_once({"order": 1, "line": 1, "x": 1}, key=("order", "line")).new is True
    assert desk.insert_once({"order": 1, "line": 2, "x": 2}, key=("order", "line")).new is True
    found = desk.insert_once({"order": 1, "line": 1, "x": 3}, key=("line", "order"))
    assert (found.row["x"], found.new) == (1, False)
    desk.client.close()


def test_of_rivals_one_inserts_and_one_changes(dynamodb: DynamoDBServer) -> None:
    desk = Desk(dynamodb, made(dynamodb, "id"))
    start = threading.Barrier(6)
    inserted: list[Any] = []
    changed: list[Any] = []

    def work(number: int) -> None:
        start.wait()
        inserted.append(desk.insert_once({"id": 1, "by": number, "version": 1}, key="id"))
        start.wait()
        changed.append(desk.compare_and_set({"id": 1}, version=1, values={"by": -number}))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.new for each in inserted) == [False] * 5 + [True]
    assert len({each.row["by"] for each in inserted}) == 1
    assert sorted(each.applied.name for each in changed) == ["LOST"] * 5 + ["NOW"]
    desk.client.close()


def test_clients_of_the_wrong_kind_are_told_so(dynamodb: DynamoDBServer) -> None:
    desk = Desk(dynamodb, "any")

    async def on_sync() -> None:
        await aio.insert_once(desk.client, "any", {"id": 1}, key="id")

    with pytest.raises(ConfigurationError, match=r"is sync: use the functions of semel\.natural$"):
        asyncio.run(on_sync())
    with pytest.raises(ConfigurationError, match="another service"):
        natural.insert_once(boto3.client("sts", **WHERE), "any", {"id": 1}, key="id")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match=r"boto3\.client"):
        natural.insert_once(boto3.resource("dynamodb", **WHERE).Table("any"), "any", {"id": 1}, key="id")  # type: ignore[call-overload]
    desk.client.close()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ProvisionedThroughputExceededException", 400, StoreUnavailable),
        ("AccessDeniedException", 400, StoreUnavailable),
        ("InternalServerError", 500, StoreUncertain),
        ("ResourceNotFoundException", 400, ConfigurationError),
    ],
)
def test_what_the_service_says_comes_in_our_words(
    dynamodb: DynamoDBServer, code: str, status: int, kind: type[Exception]
) -> None:
    desk = Desk(dynamodb, "any")
    said = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}

    def refuse(**params: Any) -> None:
        raise ClientError(said, "UpdateItem")  # type: ignore[arg-type]

    desk.client.update_item = refuse
    with pytest.raises(kind) as failed:
        desk.insert_once({"id": 1}, key="id")
    assert isinstance(failed.value.__cause__, ClientError)
    desk.client.close()
