"""DynamoDB: the table. Made once, told from others, and left alone where it is not Semel's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from semel import AsyncSemel, ConfigurationError, NotMigrated, SchemaDrift, Semel, StoreUnavailable
from semel.cli import main
from semel.core.ops import Claim, Lookup
from semel.core.states import Takeover
from semel.errors import StoreURLError
from semel.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore, check, migrate, render_template
from semel.stores.dynamodb.settings import DynamoDBSettings
from tests.servers import DynamoDBServer


class Table:
    """A table of somebody else's, beside the URL that names it."""

    def __init__(self, url: str) -> None:
        settings = DynamoDBSettings(url, 5, 5, 5, None)
        self.url = url
        self.name = settings.table
        self.client = boto3.client(**settings.client())

    def make(self, *key: tuple[str, str, str], indexed: tuple[str, str] | None = None) -> Table:
        """By name, part and type of each attribute of the key."""
        defined = [(name, kind) for name, _, kind in key] + ([indexed] if indexed else [])
        index = {
            "IndexName": "more",
            "KeySchema": [{"AttributeName": indexed[0] if indexed else "", "KeyType": "HASH"}],
            "Projection": {"ProjectionType": "KEYS_ONLY"},
        }
        self.client.create_table(
            TableName=self.name,
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": kind} for name, kind in defined],
            KeySchema=[{"AttributeName": name, "KeyType": part} for name, part, _ in key],
            BillingMode="PAY_PER_REQUEST",
            **({"GlobalSecondaryIndexes": [index]} if indexed else {}),
        )
        return self

    def removes_by(self, attribute: str, on: bool = True) -> Table:
        self.client.update_time_to_live(
            TableName=self.name, TimeToLiveSpecification={"AttributeName": attribute, "Enabled": on}
        )
        return self

    @property
    def ttl(self) -> tuple[str, str | None]:
        told = self.client.describe_time_to_live(TableName=self.name)["TimeToLiveDescription"]
        return told["TimeToLiveStatus"], told.get("AttributeName")


@pytest.fixture
def table(dynamodb: DynamoDBServer) -> Iterator[Table]:
    table = Table(dynamodb.table())
    yield table
    table.client.close()


FOREIGN = [
    [("pk", "HASH", "S")],
    [("id", "HASH", "S")],
    [("id", "HASH", "B"), ("at", "RANGE", "N")],
]
"""Another name, another type, another part beside it."""


@pytest.mark.parametrize("key", FOREIGN, ids=lambda key: "+".join(f"{name}:{kind}" for name, _, kind in key))
def test_a_table_of_somebody_elses_is_left_as_it_is(table: Table, key: list[tuple[str, str, str]]) -> None:
    """Its time to live above all: with that on, items of theirs that have such an attribute would begin to go."""
    table.make(*key)
    for ask in (migrate, check):
        with pytest.raises(SchemaDrift, match=r"not one of Semel's.*Name another table") as refused:
            ask(table.url)
        assert all(f"'{name}' ({part}, of type {kind})" in str(refused.value) for name, part, kind in key)
        assert "'id' (HASH, of type B)" in str(refused.value)
    assert table.ttl == ("DISABLED", None)


def test_the_command_line_says_so_too(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    table.make(("pk", "HASH", "S"))
    assert main(["migrate", table.url]) == 2
    assert main(["migrate", "--check", table.url]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("is not one of Semel's") == 2
    assert table.ttl == ("DISABLED", None)


def test_a_store_on_a_table_of_somebody_elses_runs_nothing(table: Table) -> None:
    table.make(("id", "HASH", "S"))
    ran: list[int] = []
    with Semel(DynamoDBStore(table.url), sweep_every=None) as guard:
        for _ in range(2):  # and not the first time only: an open policy would run it unprotected
            with pytest.raises(SchemaDrift, match="Name another"):
                guard.run("ship", key=1, call=lambda: ran.append(1), on_store_error="open")

    async def awaited() -> None:
        async def call() -> None:
            ran.append(1)

        async with AsyncSemel(AsyncDynamoDBStore(table.url), sweep_every=None) as guard:
            for _ in range(2):
                with pytest.raises(SchemaDrift, match="Name another"):
                    await guard.run("ship", key=1, call=call, on_store_error="open")

    asyncio.run(awaited())
    assert ran == []
    assert table.client.scan(TableName=table.name)["Count"] == 0


@pytest.mark.parametrize(
    "indexed", [("tenant", "S"), ("fingerprint", "B"), ("operation", "S"), ("key", "S"), ("ttl", "N"), ("other", "S")]
)
def test_an_index_that_was_added_is_no_harm(table: Table, indexed: tuple[str, str]) -> None:
    """Also where a record has nothing to show by it: the service takes no empty value for the key of an index."""
    table.make(("id", "HASH", "B"), indexed=indexed)
    assert migrate(table.url) == ["time to live"]
    assert migrate(table.url) == []
    check(table.url)
    with Semel(DynamoDBStore(table.url), sweep_every=None) as guard:
        for tenant in ("acme", None):
            assert [guard.run("ship", key=1, call=lambda: 7, tenant=tenant) for _ in range(2)] == [7, 7]
        record = guard.lookup("ship", 1)
        assert record is not None
        assert (record.tenant, record.operation) == ("", "ship")


@pytest.mark.parametrize(("indexed", "why"), [(("tenant", "B"), "of type S, and not B"), (("snapshot", "B"), "longer")])
def test_an_index_for_which_every_record_would_be_refused_is_named(
    table: Table, indexed: tuple[str, str], why: str
) -> None:
    table.make(("id", "HASH", "B"), indexed=indexed)
    for ask in (migrate, check):
        with pytest.raises(
            SchemaDrift, match=rf"index 'more' by the attribute '{indexed[0]}'.*{why}.*Delete the index"
        ):
            ask(table.url)
    assert table.ttl == ("DISABLED", None)
    with Semel(DynamoDBStore(table.url), sweep_every=None) as guard, pytest.raises(SchemaDrift, match="index 'more'"):
        guard.run("ship", key=1, call=lambda: 7)


def test_items_of_somebody_elses_under_the_same_key_are_left_to_them(table: Table) -> None:
    """With the time to live on, those that have such an attribute would begin to go."""
    theirs = {"id": {"B": b"user-1"}, "email": {"S": "a@b"}, "ttl": {"N": "1700000000"}}
    table.make(("id", "HASH", "B")).client.put_item(TableName=table.name, Item=theirs)
    with pytest.raises(SchemaDrift, match=r"an item without 'version', 'token', 'state'. Name another table"):
        migrate(table.url)
    assert table.ttl == ("DISABLED", None)
    with contextlib.closing(DynamoDBStore(table.url)) as store:
        for op in (Lookup(b"user-1"), Claim(b"user-1", 1, b"", 5.0, 60.0, Takeover.RETRY, "", "ship", "1")):
            with pytest.raises(SchemaDrift, match=r"not one of Semel's records.*name another") as told:
                store.execute(op)
            assert "a@b" not in str(told.value)
    assert table.client.scan(TableName=table.name)["Items"] == [theirs]


def test_records_of_an_earlier_run_are_ours(table: Table) -> None:
    """Somebody made the table by hand, and only forgot the time to live."""
    table.make(("id", "HASH", "B"))
    with Semel(DynamoDBStore(table.url), sweep_every=None) as guard:
        guard.run("ship", key=1, call=lambda: 7)
    assert migrate(table.url) == ["time to live"]


def test_what_keeps_a_table_from_being_made_is_told_by_a_known_name() -> None:
    nowhere = "dynamodb://eu-west-1/shop?endpoint=http://127.0.0.1:1"
    for ask in (migrate, check):
        with pytest.raises(StoreUnavailable) as told:
            ask(nowhere)
        assert type(told.value) is StoreUnavailable


def test_a_time_to_live_by_another_attribute_is_not_taken_for_ours(table: Table) -> None:
    table.make(("id", "HASH", "B")).removes_by("gone_at")
    for ask in (migrate, check):
        with pytest.raises(SchemaDrift, match=r"by the attribute 'gone_at'.*Enabled=false,AttributeName=gone_at"):
            ask(table.url)
    assert table.ttl == ("ENABLED", "gone_at")
    table.removes_by("gone_at", on=False)
    assert migrate(table.url) == ["time to live"]
    assert table.ttl == ("ENABLED", "ttl")
    check(table.url)


def test_without_a_time_to_live_the_check_says_what_to_run(table: Table) -> None:
    table.make(("id", "HASH", "B"))
    with pytest.raises(SchemaDrift, match=r"time to live.*Run `semel migrate`"):
        check(table.url)


def test_several_ops_at_once_are_each_answered_with_their_error(table: Table) -> None:
    ops = [Lookup(bytes(16)), Lookup(b"x" * 16)]
    with contextlib.closing(DynamoDBStore(table.url)) as store:
        assert list(map(type, store.execute_many(ops))) == [NotMigrated, NotMigrated]

    async def awaited() -> None:
        store = AsyncDynamoDBStore(table.url)
        assert list(map(type, await store.execute_many(ops))) == [NotMigrated, NotMigrated]
        await store.close()

    asyncio.run(awaited())


# For those who make it themselves


def _actions(text: str) -> Any:
    return json.loads(text)["Statement"][0]


@pytest.mark.parametrize(
    ("what", "shows"),
    [
        ("iam", lambda text: _actions(text)["Resource"] == "arn:aws:dynamodb:eu-west-1:*:table/shop"),
        (
            "cloudformation",
            lambda text: json.loads(text)["Resources"]["Semel"]["Properties"]["TableName"] == "shop",
        ),
        ("terraform", lambda text: 'name         = "shop"' in text and text.endswith("}")),
    ],
)
def test_the_text_of_a_url_is_printed_without_asking_anybody(what: str, shows: Callable[[str], bool]) -> None:
    assert shows(render_template(what, "dynamodb://eu-west-1/shop?endpoint=http://127.0.0.1:1"))


def test_what_cannot_be_printed_says_what_can() -> None:
    with pytest.raises(ConfigurationError, match="iam, cloudformation, terraform"):
        render_template("pulumi", "dynamodb://eu-west-1/shop")
    with pytest.raises(StoreURLError, match="dynamodb://region/table"):
        render_template("iam", "redis://localhost")
