"""Tiered, with DynamoDB as the truth: writes of the handler's own go with the completion; then the cache answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
import redis as redis_py

from semel import (
    INJECTED,
    AsyncDynamoDBStore,
    AsyncOperation,
    AsyncRedisCache,
    AsyncSemel,
    AsyncTieredStore,
    ConditionFailed,
    ConfigurationError,
    DynamoDBStore,
    InProgress,
    MemoryStore,
    Operation,
    RedisCache,
    Semel,
    TieredStore,
    current_operation,
    open_store,
)
from semel.core.ops import Claim, CompleteWith, NotWritten
from semel.core.states import State, Takeover
from semel.stores.dynamodb import migrate
from semel.stores.dynamodb.settings import DynamoDBSettings
from tests.servers import DynamoDBServer

pytestmark = pytest.mark.server

PATIENT = 5.0
BOUND = 20.0


class Till:
    """An account beside the records, and what is taken from it through a tiered store of either kind."""

    def __init__(self, twin: str, url: str, redis_url: str, **settings: Any) -> None:
        migrate(url)
        known = DynamoDBSettings(url, 5, 5, 5, None)
        self.client = boto3.client(**known.client())
        self.accounts = f"{known.table}_accounts"
        self.client.create_table(
            TableName=self.accounts,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        self.url, self.redis_url = url, redis_url
        self.redis = redis_py.Redis.from_url(redis_url)
        self.asked: list[str] = []
        """Calls of the DynamoDB API."""
        self.ran = 0
        self.before_the_end: Callable[[], None] = lambda: None
        self._runner = asyncio.Runner() if twin == "async" else None
        self.store: Any
        if self._runner is None:
            self.store = TieredStore(DynamoDBStore(url), RedisCache(redis_url, timeout=PATIENT), **settings)
            self.guard: Any = Semel(self.store, sweep_every=None)
        else:
            self.store = AsyncTieredStore(
                AsyncDynamoDBStore(url), AsyncRedisCache(redis_url, timeout=PATIENT), **settings
            )
            self.guard = AsyncSemel(self.store, sweep_every=None)
        assert self.do(self.store.cache.connect(BOUND))
        sent = self.store.primary._send

        def noting(call: Any, tries: Any) -> Any:
            self.asked.append(call.action)
            return sent(call, tries)

        self.store.primary._send = noting

    def do(self, answer: Any) -> Any:
        return answer if self._runner is None else self._runner.run(answer)

    def put(self, balance: int) -> None:
        self.client.put_item(TableName=self.accounts, Item={"id": {"S": "anna"}, "balance": {"N": str(balance)}})

    @property
    def balance(self) -> int:
        found = self.client.get_item(TableName=self.accounts, Key={"id": {"S": "anna"}}, ConsistentRead=True)
        return int(found["Item"]["balance"]["N"])

    @property
    def ten_less(self) -> dict[str, Any]:
        """On condition that there are ten: a change that a repeat would make again."""
        return {
            "Update": {
                "TableName": self.accounts,
                "Key": {"id": {"S": "anna"}},
                "UpdateExpression": "ADD balance :less",
                "ConditionExpression": "balance >= :least",
                "ExpressionAttributeValues": {":less": {"N": "-10"}, ":least": {"N": "10"}},
            }
        }

    def take(self, key: str = "1", **policy: Any) -> Any:
        def begin() -> None:
            op = current_operation()
            assert op is not None
            self.ran += 1
            op.write(self.ten_less)

        def taken() -> str:
            begin()
            self.before_the_end()
            return "taken"

        async def awaited() -> str:
            begin()
            await asyncio.to_thread(self.before_the_end)
            return "taken"

        return self.do(self.guard.run("take", key=key, call=taken if self._runner is None else awaited, **policy))

    def new(self) -> list[str]:
        """What DynamoDB was asked for since the last time."""
        fresh, self.asked = self.asked, []
        return fresh

    @property
    def cached(self) -> int:
        """Keys in Redis, as they are."""
        return sum(1 for _ in self.redis.scan_iter("semel-tier:*"))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; the loop of the async twin runs meanwhile."""
        end = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < end, f"it does not come: {self.store.tally}"
            if self._runner is None:
                time.sleep(0.005)
            else:
                self._runner.run(asyncio.sleep(0.005))

    def settle(self) -> None:
        """Wait until what was to be written is there."""
        if self._runner is None:
            self.store.cache.settle(b"")
        while self._runner is not None and self.store.cache._writes:
            self._runner.run(asyncio.wait(list(self.store.cache._writes.values()), timeout=BOUND))

    def close(self) -> None:
        self.do(self.guard.close())
        if self._runner is not None:
            self._runner.close()
        self.client.close()
        self.redis.close()


Open = Callable[..., Till]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


@pytest.fixture(params=["sync", "async"])
def open_till(request: pytest.FixtureRequest, dynamodb: DynamoDBServer, redis_url: str) -> Iterator[Open]:
    opened: list[Till] = []

    def make(**settings: Any) -> Till:
        opened.append(Till(request.param, dynamodb.table(), redis_url, **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_it_is_written_once_and_then_the_cache_answers(open_till: Open) -> None:
    till = open_till()
    till.put(100)
    assert till.take() == "taken"
    name = ["put_item", "update_item"]  # of the primary, once
    assert till.new() == ["describe_table", *name, "put_item", "transact_write_items"]
    till.settle()
    assert [till.take() for _ in range(3)] == ["taken"] * 3
    assert till.new() == [], "the truth is not asked"
    assert (till.balance, till.ran, till.store.tally.replayed) == (90, 1, 3)


@pytest.mark.parametrize("mark_after", ["50ms", 0], ids=["unmarked", "marked"])
def test_a_condition_that_does_not_hold_leaves_nothing_in_the_cache(open_till: Open, mark_after: Any) -> None:
    till = open_till(mark_after=mark_after)
    till.put(5)
    if mark_after == 0:
        till.before_the_end = lambda: until(lambda: till.cached)
    for _ in range(2):
        with pytest.raises(ConditionFailed, match="Nothing was written"):
            till.take()
        till.settle()
        assert till.cached == 0
    assert (till.balance, till.ran, till.store.tally.replayed) == (5, 2, 0), "the key is free, and it is run again"
    till.put(100)
    assert [till.take() for _ in range(2)] == ["taken"] * 2
    assert (till.balance, till.ran) == (90, 3)


@pytest.mark.parametrize("mark_after", ["50ms", 0], ids=["unmarked", "marked"])
def test_between_the_refusal_and_the_release_nobody_is_told_that_it_is_done(open_till: Open, mark_after: Any) -> None:
    till = open_till(mark_after=mark_after)
    till.put(5)
    claims = [Claim(b"k" * 16, nonce, b"", 30.0, 60.0, Takeover.RETRY, "", "take", "1") for nonce in (1, 2)]
    won = till.do(till.store.execute(claims[0]))
    till.settle()
    if mark_after == 0:
        till.until(lambda: till.cached)
    answer = till.do(till.store.execute(CompleteWith(claims[0].id, won.token, b"taken", 60.0, (till.ten_less,))))
    assert isinstance(answer, NotWritten)
    till.settle()
    assert till.cached == 0
    again = till.do(till.store.execute(claims[1]))
    assert (again.record.state, again.record.snapshot) == (State.RUNNING, None)


def test_a_failure_that_is_remembered_is_replayed_as_the_truth_has_it(open_till: Open) -> None:
    till = open_till()
    till.put(5)
    for _ in range(4):
        with pytest.raises(ConditionFailed, match="Nothing was written"):
            till.take(remember_errors=(ConditionFailed,))
        till.settle()
    assert (till.balance, till.ran) == (5, 1)
    assert till.store.tally.replayed > 0, "shown by the truth once, and from then on by the cache"


def test_a_duplicate_of_one_that_still_runs_is_turned_away_by_the_cache(open_till: Open) -> None:
    till = open_till(mark_after=0)
    till.put(100)
    other = TieredStore(DynamoDBStore(till.url), RedisCache(till.redis_url, timeout=PATIENT))
    assert other.cache.connect(BOUND)
    told: list[str] = []

    def meanwhile() -> None:
        until(lambda: till.cached)
        with Semel(other, sweep_every=None) as guard, pytest.raises(InProgress) as refused:
            guard.run("take", key="1", call=lambda: "never")
        told.append(type(refused.value).__name__)
        assert other.tally.turned_away == 1

    till.before_the_end = meanwhile
    assert till.take() == "taken"
    assert told == ["InProgress"]
    till.settle()
    till.new()
    assert till.take() == "taken"
    assert till.new() == []
    assert (till.balance, till.ran) == (90, 1)


def test_by_url_and_in_decorated_functions_it_is_the_same(dynamodb: DynamoDBServer, redis_url: str) -> None:
    till = Till("sync", dynamodb.table(), redis_url)
    till.put(100)
    settings = till.store.primary._settings
    primary = f"dynamodb://{settings.region}/{settings.table}?endpoint={settings.endpoint}"
    put = {"Put": {"TableName": till.accounts, "Item": {"id": {"S": "bert"}, "balance": {"N": "1"}}}}
    with Semel(open_store(f"tiered:{primary},{redis_url}"), sweep_every=None) as guard:

        @guard.once(key="key")
        def open_account(key: str, op: Operation = INJECTED) -> str:
            op.write(put)
            return key

        @guard.once(key="key")
        async def open_another(key: str, op: AsyncOperation = INJECTED) -> str:
            op.write(put)
            return key

        assert [open_account("a") for _ in range(2)] == ["a", "a"]
        assert asyncio.run(open_another("b")) == "b"
    till.close()


def test_a_truth_that_takes_no_writes_says_so_through_the_tiers(redis_url: str) -> None:
    def handler() -> None:
        op = current_operation()
        assert op is not None
        op.write({"Put": {"TableName": "t", "Item": {"id": {"S": "1"}}}})

    with (
        Semel(TieredStore(MemoryStore(), RedisCache(redis_url)), sweep_every=None) as guard,
        pytest.raises(ConfigurationError, match="needs a DynamoDBStore"),
    ):
        guard.run("take", key="1", call=handler)
