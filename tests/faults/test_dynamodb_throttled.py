"""DynamoDB that throttles, fails and drops connections under load: each operation is executed once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from semel import (
    INJECTED,
    AsyncDynamoDBStore,
    AsyncOperation,
    AsyncSemel,
    DynamoDBStore,
    Operation,
    Policy,
    Semel,
    StoreUnavailable,
    StoreUncertain,
    Wait,
)
from semel.stores.dynamodb import migrate
from semel.stores.dynamodb.settings import DynamoDBSettings
from tests.faults import dynamodb_transfers as transfers
from tests.faults.dynamodb_proxy import FAULTS, Proxy
from tests.servers import DynamoDBServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

WORKERS = 8
KEYS = 40
SHARE = 0.3
POLICY = Policy(lease=60, on_duplicate=Wait("60s"), completion_timeout="30s")


class Till:
    """A table of counters: each operation adds one to its own, which a second execution would do again."""

    def __init__(self, table: str) -> None:
        migrate(table)
        settings = DynamoDBSettings(table, 5, 5, 5, None)
        self.name = f"{settings.table}_counters"
        self.client = transfers.World(table, self.name, 0).client()
        self.client.create_table(
            TableName=self.name,
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )

    def added(self, key: str) -> dict[str, object]:
        return {
            "Update": {
                "TableName": self.name,
                "Key": {"id": {"S": key}},
                "UpdateExpression": "ADD executed :one",
                "ExpressionAttributeValues": {":one": {"N": "1"}},
            }
        }

    def counts(self) -> dict[str, int]:
        items = self.client.scan(TableName=self.name, ConsistentRead=True)["Items"]
        return {item["id"]["S"]: int(item["executed"]["N"]) for item in items}


@pytest.fixture
def table(dynamodb: DynamoDBServer) -> str:
    return dynamodb.table()


@pytest.fixture
def till(table: str) -> Iterator[Till]:
    till = Till(table)
    yield till
    till.client.close()


def keys(worker: int) -> list[str]:
    """The same for all, each in an order of its own."""
    shuffled = [f"k{number}" for number in range(KEYS)]
    random.Random(worker).shuffle(shuffled)
    return shuffled


def judged(proxy: Proxy, till: Till, answers: dict[str, set[str]], runs: Counter[str]) -> None:
    once = {f"k{number}": 1 for number in range(KEYS)}
    assert till.counts() == once, "what was written"
    assert runs == once, "handlers that ran"
    assert {key: len(said) for key, said in answers.items()} == once, "all were told the same"
    assert all(proxy.counted[fault] for fault in FAULTS), proxy.counted
    print(f"\n{WORKERS} workers, {KEYS} operations: {dict(proxy.counted)}")


def test_eight_threads_execute_each_operation_once(table: str, till: Till) -> None:
    answers: dict[str, set[str]] = {f"k{number}": set() for number in range(KEYS)}
    runs: Counter[str] = Counter()
    failures: list[BaseException] = []
    with Proxy(table, SHARE) as proxy:

        def work(worker: int) -> None:
            store = DynamoDBStore(proxy.url, retry_for="20s")
            with Semel(store, policy=POLICY, sweep_every=None) as guard:

                @guard.once(key="key", operation="add")
                def add(key: str, op: Operation = INJECTED) -> str:
                    runs[key] += 1
                    op.write(till.added(key))
                    return f"{key} by {worker}"

                try:
                    for key in keys(worker):
                        answers[key].add(add(key))
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    judged(proxy, till, answers, runs)


def test_eight_async_workers_execute_each_operation_once(table: str, till: Till) -> None:
    answers: dict[str, set[str]] = {f"k{number}": set() for number in range(KEYS)}
    runs: Counter[str] = Counter()

    async def work(url: str, worker: int) -> None:
        store = AsyncDynamoDBStore(url, retry_for="20s")
        async with AsyncSemel(store, policy=POLICY, sweep_every=None) as guard:

            @guard.once(key="key", operation="add")
            async def add(key: str, op: AsyncOperation = INJECTED) -> str:
                runs[key] += 1
                op.write(till.added(key))
                return f"{key} by {worker}"

            for key in keys(worker):
                answers[key].add(await add(key))

    async def main(url: str) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                group.create_task(work(url, worker))

    with Proxy(table, SHARE) as proxy:
        asyncio.run(main(proxy.url))
    judged(proxy, till, answers, runs)


def test_a_service_that_only_throttles_or_fails_is_told_apart_and_nothing_runs_twice(table: str, till: Till) -> None:
    """Throttled: certainly not stored. Failed or dropped: nobody can say. Well again, one call does it."""
    runs: list[str] = []
    with (
        Proxy(table, 0.0) as proxy,
        Semel(
            DynamoDBStore(proxy.url, retry_for="100ms"), policy=Policy(completion_timeout=0), sweep_every=None
        ) as guard,
    ):

        @guard.once(key="key", operation="add")
        def add(key: str, op: Operation = INJECTED) -> str:
            runs.append(key)
            op.write(till.added(key))
            return key

        add("first")
        proxy.share = 1.0
        for fault, kind in (
            ("ProvisionedThroughputExceededException", StoreUnavailable),
            ("ThrottlingException", StoreUnavailable),
            ("InternalServerError", StoreUncertain),
            ("dropped before", StoreUncertain),
        ):
            proxy._dice.choice = lambda faults, fault=fault: fault  # type: ignore[method-assign, assignment, misc]
            with pytest.raises((StoreUnavailable, StoreUncertain)) as failed:
                add(fault)
            assert type(failed.value) is kind, fault
        assert runs == ["first"], "without a claim nothing runs"
        proxy.share = 0.0
        for fault in ("ProvisionedThroughputExceededException", "dropped before"):
            assert add(fault) == fault
    assert till.counts() == {"first": 1, "ProvisionedThroughputExceededException": 1, "dropped before": 1}
