"""DynamoDB: writes of the handler's own, in one transaction with the completion. All of it happens, or nothing does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest

from semel import (
    INJECTED,
    AsyncDynamoDBStore,
    AsyncOperation,
    AsyncSemel,
    ConditionFailed,
    ConfigurationError,
    DynamoDBStore,
    LeaseLost,
    MemoryStore,
    Operation,
    OutcomeUnknown,
    PolicyError,
    ResultNotStored,
    Semel,
    StoreUnavailable,
    StoreUncertain,
    current_operation,
)
from semel.core.messaging.messages import Message
from semel.core.ops import Claim, Claimed, Complete, CompleteWith, Lookup, NotWritten, Release
from semel.core.states import State, Takeover
from semel.errors import RecordTooLarge
from semel.messaging.dynamodb import put_message, read_item
from semel.stores.dynamodb import migrate
from semel.stores.dynamodb.settings import DynamoDBSettings
from semel.stores.dynamodb.transactions import LARGEST, MAX_WRITES
from tests.servers import DynamoDBServer, MotoServer


class Shop:
    """A table of accounts beside the one of the records, and what an operation does to it."""

    def __init__(self, server: DynamoDBServer | MotoServer) -> None:
        self.url = server.table()
        migrate(self.url)
        settings = DynamoDBSettings(self.url, 5, 5, 5, None)
        self.client = boto3.client(**settings.client())
        self.accounts = f"{settings.table}_accounts"
        self.client.create_table(
            TableName=self.accounts,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )

    def open(self, name: str, balance: int) -> None:
        self.client.put_item(TableName=self.accounts, Item={"id": {"S": name}, "balance": {"N": str(balance)}})

    def balance(self, name: str) -> int | None:
        item = self.client.get_item(TableName=self.accounts, Key={"id": {"S": name}}, ConsistentRead=True).get("Item")
        return None if item is None else int(item["balance"]["N"])

    def add(self, name: str, amount: int) -> dict[str, Any]:
        """A change that a repeat would make again: nothing but the transaction keeps it from happening twice."""
        return {
            "Update": {
                "TableName": self.accounts,
                "Key": {"id": {"S": name}},
                "UpdateExpression": "ADD balance :amount",
                "ExpressionAttributeValues": {":amount": {"N": str(amount)}},
            }
        }

    def take(self, name: str, amount: int) -> dict[str, Any]:
        """A change on condition that there is enough."""
        write = self.add(name, -amount)
        write["Update"]["ConditionExpression"] = "balance >= :least"
        write["Update"]["ExpressionAttributeValues"][":least"] = {"N": str(amount)}
        write["Update"]["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
        return write


@pytest.fixture
def shop(dynamodb: DynamoDBServer) -> Iterator[Shop]:
    shop = Shop(dynamodb)
    yield shop
    shop.client.close()


@pytest.fixture(params=["local", pytest.param("moto", marks=pytest.mark.moto)])
def any_shop(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Shop]:
    """On both implementations of the service."""
    if request.param == "local":
        yield shop
    else:
        other = Shop(request.getfixturevalue("moto"))
        yield other
        other.client.close()


@pytest.fixture
def store(shop: Shop) -> Iterator[DynamoDBStore]:
    with contextlib.closing(DynamoDBStore(shop.url)) as opened:
        yield opened


class Told:
    """What a store sends: counted, and changed on the way where a test wants to."""

    def __init__(self, store: Any) -> None:
        self.sent: list[Any] = []
        self.after: Callable[[Any], None] = lambda call: None
        self.before: Callable[[Any], None] = lambda call: None
        if isinstance(store, AsyncDynamoDBStore):
            real_async = store._send

            async def sent_async(call: Any, tries: Any) -> Any:
                self.sent.append(call)
                self.before(call)
                answer = await real_async(call, tries)
                self.after(call)
                return answer

            store._send = sent_async  # type: ignore[method-assign]
        else:
            real = store._send

            def sent(call: Any, tries: Any) -> Any:
                self.sent.append(call)
                self.before(call)
                answer = real(call, tries)
                self.after(call)
                return answer

            store._send = sent

    @property
    def actions(self) -> list[str]:
        return [call.action for call in self.sent]


def pay(shop: Shop, guard: Semel, key: str = "1", **policy: Any) -> Any:
    """Ten from one account to another."""

    def transfer() -> str:
        op = current_operation()
        assert op is not None
        op.write(shop.take("anna", 10), shop.add("bert", 10))
        return "paid"

    return guard.run("pay", key=key, call=transfer, **policy)


def accounts(shop: Shop) -> tuple[int | None, int | None]:
    return shop.balance("anna"), shop.balance("bert")


# What is promised


def test_the_writes_and_the_completion_are_one_call(any_shop: Shop) -> None:
    any_shop.open("anna", 100)
    with Semel(DynamoDBStore(any_shop.url), sweep_every=None) as guard:
        told = Told(guard.store)
        assert [pay(any_shop, guard) for _ in range(3)] == ["paid"] * 3
        assert told.actions == ["describe_table", "put_item", "transact_write_items", "put_item", "put_item"]
    assert accounts(any_shop) == (90, 10)


def test_awaited_they_are_one_call_too(any_shop: Shop) -> None:
    any_shop.open("anna", 100)

    async def main() -> None:
        store = AsyncDynamoDBStore(any_shop.url)
        told = Told(store)
        async with AsyncSemel(store, sweep_every=None) as guard:

            @guard.once(key="order", operation="transfer")
            async def transfer(order: str, op: AsyncOperation = INJECTED) -> str:
                op.write(any_shop.take("anna", 10))
                await asyncio.sleep(0)
                op.write(any_shop.add("bert", 10))
                return order

            assert [await transfer("1") for _ in range(3)] == ["1"] * 3
        assert told.actions == ["describe_table", "put_item", "transact_write_items", "put_item", "put_item"]

    asyncio.run(main())
    assert accounts(any_shop) == (90, 10)


def test_an_async_function_under_a_sync_guard_has_them_too(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        async def transfer(order: str, op: AsyncOperation = INJECTED) -> str:
            op.write(shop.add("bert", 10))
            return order

        async def main() -> list[str]:
            return [await transfer("1"), await transfer("1")]

        assert asyncio.run(main()) == ["1", "1"]
    assert shop.balance("bert") == 10


def test_a_handler_that_raises_writes_nothing(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer", remember_errors=(KeyError,), exclude=("error",))
        def fail(order: str, error: type[Exception], op: Operation = INJECTED) -> None:
            op.write(shop.add("bert", 10))
            raise error(order)

        for error in (ValueError, KeyError):
            with pytest.raises(error):
                fail(error.__name__, error)
        assert guard.lookup("transfer", "ValueError") is None
        kept = guard.lookup("transfer", "KeyError")
        assert kept is not None
        assert kept.state is State.DONE
    assert shop.balance("bert") is None


def test_of_rivals_for_one_account_all_get_through(shop: Shop, store: DynamoDBStore) -> None:
    """Transactions on one item stand in each other's way: those that were cancelled for it are sent again."""
    shop.open("anna", 100)
    start = threading.Barrier(6)
    with Semel(store, sweep_every=None) as guard:

        def work(key: str) -> None:
            start.wait()
            pay(shop, guard, key)

        threads = [threading.Thread(target=work, args=(str(key),)) for key in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert accounts(shop) == (40, 60)


# A condition of the handler's own


def test_a_condition_that_does_not_hold_is_named_and_nothing_is_written(any_shop: Shop) -> None:
    any_shop.open("anna", 5)
    with Semel(DynamoDBStore(any_shop.url), sweep_every=None) as guard:
        with pytest.raises(ConditionFailed, match=r"write 1 of 2 \(Update, table '.*_accounts'\)") as failed:
            pay(any_shop, guard)
        assert (failed.value.status, failed.value.retryable, failed.value.writes) == (409, False, (0,))
        assert failed.value.items[0]["balance"] == {"N": "5"}, "what stood there, since the write asked for it"
        assert guard.lookup("pay", "1") is None, "the key is free again"
        assert accounts(any_shop) == (5, None)
        any_shop.open("anna", 50)
        assert pay(any_shop, guard) == "paid"
    assert accounts(any_shop) == (40, 10)


def test_awaited_a_condition_that_does_not_hold_is_named_too(shop: Shop) -> None:
    async def main() -> None:
        async with AsyncSemel(AsyncDynamoDBStore(shop.url), sweep_every=None) as guard:

            @guard.once(key="order", operation="transfer")
            async def transfer(order: str, op: AsyncOperation = INJECTED) -> str:
                check = {"TableName": shop.accounts, "Key": {"id": {"S": "anna"}}}
                op.write(
                    shop.add("bert", 10),
                    {"ConditionCheck": {**check, "ConditionExpression": "attribute_exists(id)"}},
                )
                return order

            with pytest.raises(ConditionFailed, match=r"write 2 of 2 \(ConditionCheck") as failed:
                await transfer("1")
            assert (failed.value.writes, failed.value.items) == ((1,), (None,))
            assert await guard.lookup("transfer", "1") is None

    asyncio.run(main())
    assert accounts(shop) == (None, None)


def test_a_failed_condition_is_remembered_where_the_policy_says_so(shop: Shop, store: DynamoDBStore) -> None:
    shop.open("anna", 5)
    with Semel(store, sweep_every=None) as guard:
        for _ in range(2):
            with pytest.raises(ConditionFailed, match="write 1 of 2"):
                pay(shop, guard, remember_errors=(ConditionFailed,))
            shop.open("anna", 50)  # too late: the first answer stands
    assert accounts(shop) == (50, None)


def test_steps_stay_for_the_next_try(shop: Shop, store: DynamoDBStore) -> None:
    shop.open("anna", 5)
    made: list[int] = []
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> int:
            number = op.capture("number", lambda: made.append(1) or len(made))
            op.write(shop.take("anna", 10))
            return number

        with pytest.raises(ConditionFailed):
            transfer("1")
        shop.open("anna", 50)
        assert transfer("1") == 1
    assert (made, shop.balance("anna")) == ([1], 40)


# The record's condition


def test_an_owner_that_was_replaced_writes_nothing(any_shop: Shop) -> None:
    any_shop.open("anna", 100)
    with contextlib.closing(DynamoDBStore(any_shop.url)) as store:
        guard = Semel(store, sweep_every=None)
        told = Told(store)

        def fence(call: Any) -> None:
            if call.action == "transact_write_items":
                guard.release("pay", "1", force=True)  # someone takes the operation away just before it is completed

        told.before = fence
        with pytest.raises(LeaseLost):
            pay(any_shop, guard)
        assert accounts(any_shop) == (100, None)
        told.before = lambda call: None
        assert pay(any_shop, guard) == "paid"
        guard.close()
    assert accounts(any_shop) == (90, 10)


def test_an_owner_that_was_replaced_gets_the_answer_of_its_successor(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard, Semel(DynamoDBStore(shop.url), sweep_every=None) as other:
        told = Told(store)

        def overtake(call: Any) -> None:
            if call.action == "transact_write_items":
                told.before = lambda call: None
                other.release("pay", "1", force=True)
                assert other.run("pay", key="1", call=lambda: "theirs") == "theirs"

        told.before = overtake
        shop.open("anna", 100)
        assert pay(shop, guard) == "theirs"
    assert accounts(shop) == (100, None)


# Lost answers, and a service that is busy


def test_a_lost_answer_is_found_out_and_nothing_is_written_twice(any_shop: Shop) -> None:
    """The transaction was made, and nobody was told; what is sent again meets its own record."""
    any_shop.open("anna", 10)  # after the first there is too little for another, and that must not be the answer
    with Semel(DynamoDBStore(any_shop.url), sweep_every=None) as guard:
        told = Told(guard.store)

        def lose(call: Any) -> None:
            if call.action == "transact_write_items":
                told.after = lambda call: None
                raise StoreUncertain("lost on purpose")

        told.after = lose
        assert pay(any_shop, guard) == "paid"
        assert told.actions.count("transact_write_items") == 2
    assert accounts(any_shop) == (0, 10)


def test_what_is_sent_again_is_known_to_the_service_as_the_same(shop: Shop, store: DynamoDBStore) -> None:
    shop.open("anna", 10)
    tokens: list[str] = []
    lost: list[int] = []
    client = store._open()
    real = client.transact_write_items

    def lossy(**params: Any) -> Any:
        tokens.append(params["ClientRequestToken"])
        answer = real(**params)
        if not lost:
            lost.append(1)
            raise ConnectionResetError("lost on purpose")
        return answer

    client.transact_write_items = lossy
    with Semel(store, sweep_every=None) as guard:
        assert pay(shop, guard) == "paid"
    assert len(tokens) == 2
    assert len(set(tokens)) == 1
    assert accounts(shop) == (0, 10)


def test_a_lost_answer_that_stays_lost_is_uncertain_and_the_next_call_knows(shop: Shop) -> None:
    shop.open("anna", 10)
    with Semel(DynamoDBStore(shop.url), sweep_every=None) as guard:
        told = Told(guard.store)

        def lose(call: Any) -> None:
            if call.action == "transact_write_items":
                raise StoreUncertain("lost on purpose")

        told.after = lose
        with pytest.raises(StoreUncertain) as uncertain:
            pay(shop, guard, completion_timeout=0)
        assert uncertain.value.result == "paid"
        assert pay(shop, guard) == "paid", "a replay"
    assert accounts(shop) == (0, 10)


class Refusing:
    """A client's method that the service refuses for a while, as it would."""

    def __init__(self, client: Any, response: dict[str, Any], times: int) -> None:
        self.real, self.left, self.asked = client.transact_write_items, times, 0
        self.response, self.error = response, client.exceptions.ClientError
        client.transact_write_items = self

    def __call__(self, **params: Any) -> Any:
        self.asked += 1
        if self.left > 0:
            self.left -= 1
            raise self.error(self.response, "TransactWriteItems")
        return self.real(**params)


def busy(*codes: str) -> dict[str, Any]:
    return {
        "Error": {"Code": "TransactionCanceledException", "Message": "cancelled"},
        "CancellationReasons": [{"Code": code} for code in codes],
        "ResponseMetadata": {"HTTPStatusCode": 400},
    }


@pytest.mark.parametrize("code", ["TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"])
def test_a_transaction_that_met_others_is_sent_again(shop: Shop, store: DynamoDBStore, code: str) -> None:
    shop.open("anna", 10)
    refusing = Refusing(store._open(), busy("None", code, "None"), 2)
    with Semel(store, sweep_every=None) as guard:
        assert pay(shop, guard) == "paid"
    assert refusing.asked == 3
    assert accounts(shop) == (0, 10)


def test_nothing_is_told_while_a_transaction_holds_the_record(shop: Shop, store: DynamoDBStore) -> None:
    """It may be an earlier send of ours, half of it seen already: our condition would seem to have failed."""
    shop.open("anna", 10)
    refusing = Refusing(store._open(), busy("TransactionConflict", "ConditionalCheckFailed", "None"), 2)
    with Semel(store, sweep_every=None) as guard:
        assert pay(shop, guard) == "paid"
    assert refusing.asked == 3
    assert accounts(shop) == (0, 10)


def test_a_service_that_stays_busy_has_certainly_written_nothing(shop: Shop) -> None:
    shop.open("anna", 10)
    with Semel(DynamoDBStore(shop.url, retry_for="100ms"), sweep_every=None) as guard:
        store: Any = guard.store
        Refusing(store._open(), busy("TransactionConflict", "None", "None"), 1000)
        with pytest.raises(StoreUnavailable) as failed:
            pay(shop, guard, completion_timeout=0, on_store_error="open")  # also an open policy makes no answer of it
        assert failed.value.result == "paid"
    assert accounts(shop) == (10, None)


def test_one_that_is_still_at_it_is_asked_again_and_uncertain_in_the_end(shop: Shop) -> None:
    shop.open("anna", 10)
    still = {
        "Error": {"Code": "TransactionInProgressException", "Message": "in progress"},
        "ResponseMetadata": {"HTTPStatusCode": 400},
    }
    with Semel(DynamoDBStore(shop.url, retry_for="100ms"), sweep_every=None) as guard:
        store: Any = guard.store
        refusing = Refusing(store._open(), still, 1000)
        with pytest.raises(StoreUncertain):
            pay(shop, guard, completion_timeout=0)
        assert refusing.asked > 1


# What cannot be sent


def item(**values: str) -> dict[str, Any]:
    return {name: {"S": text} for name, text in values.items()}


@pytest.mark.parametrize(
    ("writes", "words"),
    [
        ([{"Put": {"TableName": "x", "Item": item(id=str(at))}} for at in range(MAX_WRITES + 1)], "100 writes"),
        ([{"Put": {"TableName": "x", "Item": item(id="1", text="x" * 410_000)}}], "400 KB"),
        ([{"Put": {"TableName": "x", "Item": item(id=str(at), text="x" * 400_000)}} for at in range(11)], "4 MB"),
        ([{"put": {"TableName": "x", "Item": item(id="1")}}], "one of Put, Update, Delete, ConditionCheck"),
        ([{"Put": {"Item": item(id="1")}}], "TableName and Item"),
        ([{"Put": {"TableName": "x", "Item": {"id": "1"}}}], "letters of their types"),
        (["Put"], "a str"),
        ([{"Put": 1}], "TableName and Item"),
    ],
    ids=["too many", "too large an item", "too large", "no such write", "no table", "untyped", "no dict", "no params"],
)
def test_what_the_service_would_refuse_is_refused_before_anything_is_sent(
    store: DynamoDBStore, writes: list[Any], words: str
) -> None:
    told = Told(store)
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            for write in writes:
                op.write(write)

        with pytest.raises(ConfigurationError, match=words):
            transfer("1")
        assert "transact_write_items" not in told.actions
        assert guard.lookup("transfer", "1") is None


def test_as_many_as_the_service_takes_are_written(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            write = shop.add("", 1)
            for at in range(MAX_WRITES):
                write["Update"]["Key"]["id"]["S"] = f"c{at}"  # the same dict each time: it is copied
                op.write(write)

        transfer("1")
    assert [shop.balance(f"c{at}") for at in (0, MAX_WRITES - 1)] == [1, 1]


def puts(total: int) -> tuple[Any, ...]:
    """Writes of so many bytes together."""
    sizes = [400_000] * (total // 400_000)
    sizes.append(total - sum(sizes))
    # Of each item its key and the names of its attributes count as well.
    return tuple(
        {"Put": {"TableName": "x", "Item": item(id=f"{at:02}", text="x" * (size - 8))}} for at, size in enumerate(sizes)
    )


def test_with_the_result_they_may_be_too_large(store: DynamoDBStore) -> None:
    """Then it is the result that does not fit; but where they leave no room for a record at all, it is they."""
    told = Told(store)
    with pytest.raises(RecordTooLarge, match="4 MB"):
        store.execute(CompleteWith(b"i" * 16, 1, b"x" * 390_000, 60.0, puts(4_000_000)))
    answer: Any = store.execute(CompleteWith(b"i" * 16, 1, b"x" * 50, 60.0, puts(LARGEST)))
    assert isinstance(answer, NotWritten)
    assert type(answer.error) is ConfigurationError
    assert "4 MB" in str(answer.error)
    assert "transact_write_items" not in told.actions


def test_a_result_that_does_not_fit_does_not_keep_the_writes_back(shop: Shop, store: DynamoDBStore) -> None:
    """The effect is what matters: it happens, once, and only the result is lost."""
    size = 450_000
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> bytes:
            op.write(shop.add("bert", 1))
            return os.urandom(size)

        with pytest.raises(ResultNotStored) as told:
            transfer("1")
        assert len(told.value.result) == size
        with pytest.raises(ResultNotStored):
            transfer("1")
        record = guard.lookup("transfer", "1")
        assert record is not None
        assert record.state is State.DONE
    assert shop.balance("bert") == 1


@pytest.mark.parametrize("beside", [-100, 1, 10_000])
def test_a_record_that_does_not_fit_is_told_by_one_name(shop: Shop, store: DynamoDBStore, beside: int) -> None:
    """With writes or without, whether we see it or the service says so: and not by a name of Semel's own insides."""
    for number, sort in enumerate((Complete, CompleteWith)):
        id = os.urandom(16)
        claimed = store.execute(Claim(id, 1, b"", 30.0, 60.0, Takeover.RETRY, "", "pay", "k" * 255))
        assert isinstance(claimed, Claimed)
        op = sort(id, claimed.token, b"x" * (400 * 1024 + beside), 60.0, *[(shop.add("bert", 1),)] * number)
        with pytest.raises(RecordTooLarge, match="400 KB") as told:
            store.execute(op)
        assert type(told.value) is RecordTooLarge
        assert not told.value.retryable
        assert store.execute(Release(id, claimed.token))
    assert shop.balance("bert") is None


def test_a_write_that_the_service_finds_too_large_is_not_made(shop: Shop, store: DynamoDBStore) -> None:
    """An update adds to what stands there, so only the service can tell; here it is no use to drop the result."""
    text = "x" * 390_000
    shop.client.put_item(TableName=shop.accounts, Item={"id": {"S": "anna"}, "text": {"S": text}})
    grow = {
        "TableName": shop.accounts,
        "Key": {"id": {"S": "anna"}},
        "UpdateExpression": "SET more = :more",
        "ExpressionAttributeValues": {":more": {"S": text}},
    }
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            op.write(shop.add("bert", 1), {"Update": grow})

        with pytest.raises(ConfigurationError, match=r"write 2 of 2 .* cannot be made"):
            transfer("1")
        assert guard.lookup("transfer", "1") is None
    assert shop.balance("bert") is None


def test_what_else_the_service_has_against_the_record_is_told_by_a_known_name(shop: Shop, store: DynamoDBStore) -> None:
    Refusing(store._open(), busy("ValidationError", "None", "None"), 1)
    shop.open("anna", 10)
    with Semel(store, sweep_every=None) as guard:
        with pytest.raises(StoreUnavailable, match="the record cannot be written") as told:
            pay(shop, guard)
        assert type(told.value) is StoreUnavailable


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"TableName": "no_such_table"}, "cannot be made"),
        ({"UpdateExpression": "MAKE balance :amount"}, "cannot be made"),
        ({"Key": {"id": {"S": "a"}, "other": {"S": "b"}}}, "cannot be made"),
        ({"Expression": "x"}, "cannot be made"),
    ],
    ids=["no table", "no expression", "no key", "no parameter"],
)
def test_what_only_the_service_can_judge_ends_the_operation_at_once(
    shop: Shop, store: DynamoDBStore, change: dict[str, Any], words: str
) -> None:
    told = Told(store)
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            write = shop.add("anna", 1)
            write["Update"] |= change
            op.write(shop.add("bert", 1), write)

        with pytest.raises(ConfigurationError, match=words):
            transfer("1")
        assert told.actions.count("transact_write_items") == 1, "it is not offered again"
        assert guard.lookup("transfer", "1") is None
    assert shop.balance("bert") is None


def test_two_writes_on_one_item_are_the_services_to_refuse(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            op.write(shop.add("anna", 1), shop.add("anna", 1))

        with pytest.raises(ConfigurationError, match="one item"):
            transfer("1")


def test_a_result_that_cannot_be_kept_does_not_keep_the_writes_back(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> object:
            op.write(shop.add("anna", 1))
            return object()

        for _ in range(2):
            with pytest.raises(ResultNotStored):
                transfer("1")
    assert shop.balance("anna") == 1


# Where they have no place


def test_a_store_that_cannot_says_which_can() -> None:
    with Semel(MemoryStore()) as guard, pytest.raises(ConfigurationError, match="needs a DynamoDBStore"):
        guard.run("pay", key="1", call=lambda: current_operation().write())  # type: ignore[union-attr]


def test_after_the_operation_they_are_refused(shop: Shop, store: DynamoDBStore) -> None:
    handles: list[Any] = []
    with Semel(store, sweep_every=None) as guard:
        guard.run("pay", key="1", call=lambda: handles.append(current_operation()))
        with pytest.raises(ZeroDivisionError):
            guard.run("pay", key="2", call=lambda: handles.append(current_operation()) or 1 // 0)
        for handle in handles:
            with pytest.raises(PolicyError, match="is over"):
                handle.write(shop.add("anna", 1))


def test_without_a_lease_there_is_nothing_to_go_with() -> None:
    store = DynamoDBStore("dynamodb://eu-central-1/semel?endpoint=http://127.0.0.1:1", retry_for="50ms")
    with Semel(store, sweep_every=None) as guard, pytest.raises(StoreUnavailable, match="unprotected"):
        guard.run(
            "pay", key="1", on_store_error="open", call=lambda: current_operation().write()  # type: ignore[union-attr]
        )  # fmt: skip


def test_steps_that_can_be_undone_and_writes_do_not_mix(shop: Shop, store: DynamoDBStore) -> None:
    undone: list[str] = []
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            op.write(shop.add("anna", 1))
            op.step("charge", lambda: "c-1", undo=undone.append)

        with pytest.raises(PolicyError, match="a step of their own"):
            transfer("1")
        assert guard.lookup("transfer", "1") is None
    assert (undone, shop.balance("anna")) == (["c-1"], None)


def test_a_step_cannot_write_with_the_completion(shop: Shop, store: DynamoDBStore) -> None:
    """It is not run again once it is done, and by then its writes would be forgotten."""
    with Semel(store, sweep_every=None) as guard:

        @guard.once(key="order", operation="transfer")
        def transfer(order: str, op: Operation = INJECTED) -> None:
            op.step("order", lambda: op.write(shop.add("anna", 1)))

        with pytest.raises(PolicyError, match="outside of steps"):
            transfer("1")
    assert shop.balance("anna") is None


def test_threads_of_a_handler_may_write_at_once() -> None:
    slow = threading.Barrier(4)

    def accept(before: tuple[Any, ...], more: tuple[Any, ...]) -> tuple[Any, ...]:
        time.sleep(0.001)  # others would get in between
        return (*before, *more)

    store = MemoryStore()
    store.accept = accept  # type: ignore[attr-defined]
    written: list[int] = []

    def work() -> None:
        op: Any = current_operation()

        def write(number: int) -> None:
            slow.wait(10)
            op.write({"Put": number})

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, range(4)))
        written.append(len(op._call.writes))
        op._call.writes = ()  # memory makes none

    with Semel(store, sweep_every=None) as guard:
        guard.run("pay", key="1", call=work)
    assert written == [4]


def test_what_a_recover_hook_asked_for_is_not_made_by_the_handler_after_it(shop: Shop) -> None:
    from semel import NOT_DONE

    now = [4_000_000_000.0]
    with Semel(DynamoDBStore(shop.url, clock=lambda: now[0]), sweep_every=None) as guard:

        def interrupted() -> None:
            raise KeyboardInterrupt

        def recover() -> Any:
            current_operation().write(shop.add("anna", 100))  # type: ignore[union-attr]
            return NOT_DONE

        def work() -> str:
            current_operation().write(shop.add("anna", 1))  # type: ignore[union-attr]
            return "done"

        with pytest.raises(KeyboardInterrupt):
            guard.run("pay", key="1", call=interrupted, recover=recover)
        now[0] += 60
        assert guard.run("pay", key="1", call=work, recover=recover) == "done"
    assert shop.balance("anna") == 1


def test_at_most_once_is_unknown_after_a_crash_and_nothing_was_written(shop: Shop, store: DynamoDBStore) -> None:
    with Semel(store, sweep_every=None) as guard:

        def interrupted() -> None:
            current_operation().write(shop.add("anna", 1))  # type: ignore[union-attr]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            guard.run("pay", key="1", call=interrupted, guarantee="at_most_once")
        with pytest.raises(OutcomeUnknown):
            guard.run("pay", key="1", call=interrupted, guarantee="at_most_once")
        record = store.execute(Lookup(guard._identity("pay", "1", None)))
        assert record is not None
    assert shop.balance("anna") is None


# Messages


def test_a_message_is_written_with_the_completion_or_not_at_all(dynamodb: DynamoDBServer) -> None:
    shop = Shop(dynamodb)
    table = f"{shop.accounts}_messages"
    shop.client.create_table(
        TableName=table,
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("stream", "id")],
        KeySchema=[{"AttributeName": "stream", "KeyType": "HASH"}, {"AttributeName": "id", "KeyType": "RANGE"}],
        BillingMode="PAY_PER_REQUEST",
    )
    puts: list[dict[str, Any]] = []

    def place(op: Operation) -> str:
        put = put_message(table, "placed", {"n": 1}, stream="o-7", source="/orders", headers={"X": "1"})
        puts.append(put)
        op.write(put, put_message(table, "noted", b"\x00"))
        if len(puts) == 1:
            raise RuntimeError("the handler broke")
        return str(put["Put"]["Item"]["id"]["S"])

    def messages() -> list[Message]:
        items = shop.client.scan(TableName=table, ConsistentRead=True)["Items"]
        return sorted((read_item(item) for item in items), key=lambda message: message.type, reverse=True)

    with Semel(DynamoDBStore(shop.url), sweep_every=None) as guard:
        with pytest.raises(RuntimeError):
            guard.run("place", key="k1", call=place)
        assert messages() == []
        for _ in range(2):
            id = guard.run("place", key="k1", call=place)
    first, second = (put["Put"]["Item"]["id"]["S"] for put in puts)
    assert first == second == id  # the next attempt writes the same message
    placed, noted = messages()
    assert (placed.id, placed.stream, placed.source, placed.data) == (id, "o-7", "/orders", b'{"n":1}')
    assert placed.headers == {
        "idempotency-key": id, "idempotency-root": "k1", "idempotency-parent": "k1", "causation-id": "k1", "x": "1",
    }  # fmt: skip
    assert (noted.type, noted.stream, noted.data, noted.subject) == ("noted", "", b"\x00", "")
