"""An operation whose writes go with its completion, in a world of two accounts: for processes that are killed in it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

from aiobotocore.client import AioBaseClient
from botocore.client import BaseClient
from botocore.exceptions import ConnectionClosedError

from semel import (
    AsyncDynamoDBStore,
    AsyncSemel,
    ConditionFailed,
    DynamoDBStore,
    Policy,
    Semel,
    SemelError,
    current_operation,
)
from semel.stores.dynamodb import aio, migrate, sync
from semel.stores.dynamodb.settings import DynamoDBSettings

LEASE = 0.2
PATIENCE = 30.0
MET = 7
"""How a process ends that came to the moment and was not killed."""
Moment: TypeAlias = Literal["before", "after", "lost"]


class World(NamedTuple):
    """Two accounts in a table, and the key of one operation on them in the table of records."""

    url: str
    accounts: str
    number: int

    @property
    def key(self) -> str:
        return f"k{self.number}"

    def client(self) -> Any:
        return sync._session().create_client(**DynamoDBSettings(self.url, 5, 5, 5, None).client())


def worlds(table: str) -> Callable[[], World]:
    """A maker of worlds in which Anna has 100 and Bert has nothing; their tables are made once."""
    migrate(table)
    name = f"{DynamoDBSettings(table, 5, 5, 5, None).table}_accounts"
    client = World(table, name, 0).client()
    client.create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    numbers = itertools.count(1)

    def make() -> World:
        made = World(table, name, next(numbers))
        client.put_item(TableName=name, Item={"id": {"S": f"anna {made.number}"}, "balance": {"N": "100"}})
        return made

    return make


def ledger(world: World) -> dict[str, int]:
    client = world.client()
    found = {}
    for name in ("anna", "bert"):
        key = {"id": {"S": f"{name} {world.number}"}}
        item = client.get_item(TableName=world.accounts, Key=key, ConsistentRead=True).get("Item")
        if item:
            found[name] = int(item["balance"]["N"])
    client.close()
    return found


def moved(world: World, name: str, amount: int) -> dict[str, Any]:
    values = {":amount": {"N": str(amount)}}
    update = {
        "TableName": world.accounts,
        "Key": {"id": {"S": f"{name} {world.number}"}},
        "UpdateExpression": "ADD balance :amount",
        "ExpressionAttributeValues": values,
    }
    if amount < 0:
        values[":least"] = {"N": str(-amount)}
        update["ConditionExpression"] = "balance >= :least"
    return {"Update": update}


def write(world: World, amount: int) -> None:
    op = current_operation()
    assert op is not None
    op.write(moved(world, "anna", -amount), moved(world, "bert", amount))


def policy() -> Policy:
    return Policy(lease=LEASE, completion_timeout="50ms")


def pay(world: World) -> None:
    """Thirty of the hundred: there would be enough for a second time, and nothing but the transaction forbids it."""
    store = DynamoDBStore(world.url, clock=time.time)
    Semel(store, policy=policy(), sweep_every=None).run("pay", key=world.key, call=lambda: write(world, 30))


async def _pay_async(world: World) -> None:
    store = AsyncDynamoDBStore(world.url, clock=time.time)

    async def work() -> None:
        write(world, 30)

    async with AsyncSemel(store, policy=policy(), sweep_every=None) as guard:
        await guard.run("pay", key=world.key, call=work)


def pay_async(world: World) -> None:
    asyncio.run(_pay_async(world))


def overdraw(world: World) -> None:
    """More than there is, and that answer is kept."""
    store = DynamoDBStore(world.url, clock=time.time)
    guard = Semel(store, policy=policy(), sweep_every=None)
    try:
        guard.run("pay", key=world.key, call=lambda: write(world, 160), remember_errors=(ConditionFailed,))
    except ConditionFailed:
        return
    raise AssertionError("it was paid")


def paid_once(world: World) -> None:
    assert ledger(world) == {"anna": 70, "bert": 30}, ledger(world)


def paid_never(world: World) -> None:
    assert ledger(world) == {"anna": 100}, ledger(world)


# A process of its own, and what happens to it


def run(what: tuple[Callable[[World], None], World, Moment | None, int]) -> None:
    """In a child: the operation, killed at a call, or without its answer; with no moment, until there is an answer."""
    operation, world, moment, at = what
    if moment is None:
        return _until_answered(operation, world)
    _meet(moment, at)
    try:
        operation(world)
    finally:
        os._exit(0 if _calls < at else MET)


def _until_answered(operation: Callable[[World], None], world: World) -> None:
    """As a client would: the same again, while the error says that it may be."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return operation(world)
        except SemelError as error:
            if not error.retryable or time.monotonic() > end:
                raise
            time.sleep(0.02)


_calls = 0


def _meet(moment: Moment, at: int) -> None:
    """Before or after call ``at`` of the service this process is killed; or the answer to that call is lost."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # it comes in a moment, and nothing else may happen until then

    @contextmanager
    def passing() -> Iterator[None]:
        global _calls  # noqa: PLW0603
        _calls += 1
        here = _calls == at
        if here and moment == "before":
            kill()
        try:
            yield
        finally:
            if here and moment == "after":
                kill()
        if here and moment == "lost":
            raise ConnectionClosedError(endpoint_url="lost on purpose")

    send, send_async = BaseClient._make_api_call, AioBaseClient._make_api_call

    def sent(self: Any, name: str, params: Any) -> Any:
        with passing():
            return send(self, name, params)

    async def sent_async(self: Any, name: str, params: Any) -> Any:
        with passing():
            return await send_async(self, name, params)

    BaseClient._make_api_call, AioBaseClient._make_api_call = sent, sent_async


def prepare() -> None:
    """Read the service's description once, and not in each child."""
    sync._session().create_client("dynamodb", region_name="eu-central-1").close()
    aio._session().get_service_model("dynamodb")
