"""The API as a type checker sees it: ``make check`` reads this file, and nobody runs it.

What stands here is a promise: decorated functions keep their parameters and their results, ``run`` gives what its call
gives, and the async twins say the same.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type
from uuid import UUID, uuid4

from semel import (
    CANNOT_TELL,
    INJECTED,
    NOT_DONE,
    AsyncMemoryStore,
    AsyncOperation,
    AsyncResumer,
    AsyncSemel,
    AsyncSQLiteStore,
    AsyncStore,
    Codec,
    KeyFormat,
    Listing,
    MemoryStore,
    Operation,
    Outcome,
    OutgoingCall,
    Policy,
    Record,
    Recovered,
    Resumer,
    ResumeReport,
    Semel,
    Size,
    SQLiteStore,
    State,
    StatementResult,
    Store,
    Swept,
    Wait,
    current_operation,
    derive_key,
    in_context,
    log_events,
    outgoing_call,
    outgoing_headers,
    outgoing_key,
    outgoing_metadata,
)
from semel.messaging import AsyncOutbox, Outbox


@dataclass
class Order:
    id: str
    total: int


@dataclass
class Receipt:
    id: UUID


store: Store = MemoryStore()
store = SQLiteStore("app.db", synchronous="normal", busy_timeout="5s")
guard = Semel(
    store,
    policy=Policy(guarantee="at_most_once", lease="30s", ttl=timedelta(days=1), on_duplicate=Wait("5s")),
    tenant="acme",
    on_event=log_events(show_keys=False),
    codec=Codec(),
    secret=b"secret",
    readable_keys=False,
    sweep_every=None,
)

by_url = Semel("sqlite:///app.db", tenant="acme")
async_by_url = AsyncSemel("redis://localhost:6379/0")

# -- sync


@guard.once(key="order.id")
def by_name(order: Order, carrier: str = "mail") -> Receipt:
    return Receipt(uuid4())


@guard.once(
    key=lambda order: order.id, ttl="7d", lease=10, on_duplicate=Wait(5), remember_errors=(KeyError, ValueError)
)
def by_function(order: Order, *, note: str | None = None) -> int:
    return order.total


@guard.once(key="order.id", recover=lambda order: NOT_DONE, key_format=KeyFormat.named("uuid"), exclude=("op",))
def with_handle(order: Order, op: Operation = INJECTED) -> str:
    assert_type(op.capture("id", uuid4), UUID)
    assert_type(op.derive("charge"), str)
    assert_type(op.token, int)
    assert_type(op.attempt, int)
    assert_type(op.lease_lost, bool)
    assert_type(op.id, bytes)
    return op.key


class Shop:
    @guard.once(key="order.id", tenant="acme")
    def sell(self, order: Order) -> Receipt:
        return Receipt(uuid4())

    @classmethod
    @guard.once(key="order_id")
    def open(cls, order_id: int) -> None: ...

    @staticmethod
    @guard.once(key="order_id", fingerprint=None, guarantee="at_least_once", on_store_error="open")
    def close(order_id: int) -> None: ...


def use(order: Order) -> None:
    assert_type(by_name(order), Receipt)
    assert_type(by_name(order, carrier="ship"), Receipt)
    assert_type(by_function(order, note=None), int)
    assert_type(with_handle(order), str)
    assert_type(Shop().sell(order), Receipt)
    Shop.open(3)
    Shop.close(3)
    by_name("order")  # type: ignore[arg-type]
    by_name()  # type: ignore[call-arg]
    by_name(order, colour="red")  # type: ignore[call-arg]
    by_function(order, "note")  # type: ignore[call-arg]
    assert_type(guard.run("ship", key=order.id, call=lambda: by_name(order)), Receipt)
    assert_type(guard.run("ship", key=7, call=lambda: None, ttl=None, returns=None), None)
    assert_type(guard.run_outcome("ship", key=uuid4(), call=lambda: 1, fingerprint={"a": 1}), Outcome[int])
    assert_type(guard.run_outcome("ship", key="k", call=lambda: 1).replayed, bool)
    assert_type(guard.run("ship", key=1, call=lambda op: op.capture("id", uuid4)), UUID)
    assert_type(guard.run("ship", key=1, call=charge), int)
    assert_type(guard.run("ship", key=1, call=count), str)
    assert_type(guard.run_outcome("ship", key=1, call=lambda op: op.attempt), Outcome[int])
    assert_type(guard.lookup("ship", order.id), Record | None)
    assert_type(guard.sweep(), Swept)
    assert_type(guard.list_page(operation="ship", states=[State.RUNNING], older="1m", limit=10), Listing)
    assert_type(guard.list_page().records, tuple[Record, ...])
    assert_type(next(guard.list(tenant="acme")), Record)
    assert_type(guard.measure(), Size)
    guard.resolve("ship", order.id, Receipt(uuid4()), returns=Receipt)
    guard.release("ship", order.id, force=True)
    with Semel(store) as other:
        assert_type(other, Semel)


def wrong() -> None:
    guard.run("ship", key="k", call=lambda: 1, guarantee="exactly_once")  # type: ignore[call-overload]
    guard.run("ship", key="k", call=lambda: 1, leese=1)  # type: ignore[call-overload]
    guard.run("ship", key="k")  # type: ignore[call-overload]
    guard.run("ship", key="k", call=charge_async)  # type: ignore[arg-type, unused-coroutine]
    guard.run("ship", key="k", call=by_function)  # type: ignore[arg-type]
    guard.once(charge)  # type: ignore[call-arg]
    guard.once(key=7)  # type: ignore[arg-type]
    Policy(guarantee="never")  # type: ignore[arg-type]
    Semel(AsyncMemoryStore())  # type: ignore[arg-type]
    AsyncSemel(MemoryStore())  # type: ignore[arg-type]


@guard.once(key="order.id")
async def async_under_sync(order: Order) -> Receipt:
    return Receipt(uuid4())


# -- async

async_store: AsyncStore = AsyncMemoryStore()
async_store = AsyncSQLiteStore("app.db")
async_guard = AsyncSemel(async_store, policy=Policy(on_abandoned="reject"), sweep_every="10m")


@async_guard.once(key="order.id", ttl="7d")
async def ship(order: Order, carrier: str = "mail") -> Receipt:
    return Receipt(uuid4())


@async_guard.once(key="order.id")
async def ship_with_handle(order: Order, op: AsyncOperation = INJECTED) -> UUID:
    assert_type(await op.capture("id", uuid4), UUID)
    assert_type(op.derive("charge"), str)
    return await op.capture("id", uuid4)


class AsyncShop:
    @async_guard.once(key="order.id")
    async def sell(self, order: Order) -> int:
        return 1


async def use_async(order: Order) -> None:
    assert_type(await ship(order), Receipt)
    assert_type(await ship(order, carrier="ship"), Receipt)
    assert_type(await ship_with_handle(order), UUID)
    assert_type(await AsyncShop().sell(order), int)
    assert_type(await async_under_sync(order), Receipt)
    await ship("order")  # type: ignore[arg-type]
    task: asyncio.Task[Receipt] = asyncio.create_task(ship(order))
    assert_type(await task, Receipt)
    results = await asyncio.gather(ship(order), ship(order))
    assert_type(results, tuple[Receipt, Receipt])
    assert_type(await async_guard.run("ship", key=order.id, call=lambda: ship(order)), Receipt)
    assert_type(await async_guard.run_outcome("ship", key=order.id, call=lambda: ship(order)), Outcome[Receipt])
    assert_type(await async_guard.run("ship", key=1, call=charge_async), int)
    assert_type(await async_guard.run("ship", key=1, call=lambda op: op.capture("id", uuid4)), UUID)
    assert_type(await async_guard.run_outcome("ship", key=1, call=charge_async), Outcome[int])
    assert_type(await async_guard.lookup("ship", order.id), Record | None)
    assert_type(await async_guard.sweep(10), Swept)
    assert_type(await async_guard.list_page(after="x", look=100), Listing)
    assert_type([record async for record in async_guard.list(operation="ship")], list[Record])
    assert_type(await async_guard.measure(), Size)
    await async_guard.resolve("ship", order.id, None)
    await async_guard.release("ship", order.id, tenant="acme", force=False)
    async with AsyncSemel(async_store) as other:
        assert_type(other, AsyncSemel)


@async_guard.once(key="order.id")
def plain_under_async(order: Order) -> int:
    return order.total


async def use_plain(order: Order) -> None:
    made: Awaitable[int] = plain_under_async(order)
    assert_type(await made, int)


# -- words

verdicts = [Recovered(1), NOT_DONE, CANNOT_TELL]
assert_type(Recovered(1), Recovered[int])
state: State = State.DONE

# -- messages

outbox = Outbox(SQLiteStore("shop.db"), source="/orders")
assert_type(outbox.add(object(), "order.placed", {"order": 7}, stream="order-7", headers={"a": "b"}), str)
outbox.add(object(), "order.placed", b"", delay="5m", id="one")
outbox.add(object(), "order.placed", b"", stream=7)  # type: ignore[arg-type]


def emits(op: Operation) -> None:
    assert_type(op.emit("order.placed", {"order": 7}, stream="order-7", dedup="7"), str)


async def emits_async(op: AsyncOperation, connection: object) -> None:
    assert_type(await op.emit("order.placed", "text", delay=timedelta(seconds=1)), str)
    assert_type(await AsyncOutbox(AsyncSQLiteStore("shop.db")).add(connection, "order.placed", []), str)


# -- recovery, and keys on the way out


@guard.once(key="order.id", resumable=True)
def resumable(order: Order, op: Operation = INJECTED) -> int:
    with op.propagate("charge"):
        assert_type(outgoing_headers(), dict[str, str])
        assert_type(outgoing_metadata("POST /charges"), dict[str, str])
        assert_type(outgoing_key(), str | None)
        assert_type(outgoing_call("POST", "https://pay.example", b"", hosts=["pay.example"]), OutgoingCall | None)
    assert_type(derive_key("charge"), str | None)
    assert_type(in_context(outgoing_key)("target"), str | None)
    in_context(outgoing_key)(5)  # type: ignore[arg-type]
    return 1


assert_type(Resumer(guard, [resumable], every="5s").resume(), ResumeReport)
Resumer(async_guard)  # type: ignore[arg-type]


async def use_recovery() -> None:
    async with AsyncResumer(async_guard, [ship], tries=3) as resumer:
        assert_type(await resumer.resume(), ResumeReport)


op = current_operation()
if op is not None:
    assert_type(op.key, str)


def charge(op: Operation) -> int:
    return len(op.key)


def count() -> str:
    return ""


@guard.once_in_transaction(connection="session", key="order")
def pay_once(order: str, session: object) -> bytes:
    return b""


async def charge_async(op: AsyncOperation) -> int:
    return len(op.key)


async def transactions(aguard: AsyncSemel, conn: object) -> None:
    assert_type(guard.run_in_transaction(conn, "pay", key=1, call=charge), int)
    assert_type(guard.run_in_transaction(conn, "pay", key=1, call=count, own_transaction=True, tries=3, ttl="7d"), str)
    assert_type(guard.run_in_transaction(conn, "pay", key=1, call=lambda: 1), int)
    assert_type(guard.run_in_transaction_outcome(conn, "pay", key=1, call=charge), Outcome[int])
    assert_type(pay_once("o-1", conn), bytes)
    paid = guard.execute_once(conn, "pay", key=1, statement="UPDATE a SET b = %s", parameters=[1], ttl="7d")
    assert_type(paid.rows, list[dict[str, Any]])
    assert_type(paid.count, int)
    assert_type(
        await aguard.execute_once(conn, "pay", key=1, statement="UPDATE a SET b = :b", parameters={"b": 1}),
        StatementResult,
    )
    assert_type(await aguard.run_in_transaction(conn, "pay", key=1, call=charge_async), int)
    assert_type(
        await aguard.run_in_transaction_outcome(conn, "pay", key=1, call=charge_async, own_transaction=True),
        Outcome[int],
    )
