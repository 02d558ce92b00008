"""Several Ops at once, on stores that do not share round trips; and what a caller is told when retries are over."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from semel.core.ops import Lookup, Op
from semel.engine.ports import execute_each, execute_each_async
from semel.errors import ConfigurationError, NotMigrated, RecordTooLarge, SemelError, StoreUnavailable, StoreUncertain
from semel.sql.connections.errors import Contention, StatementTooLarge
from semel.stores.retries import Backoff, public_error
from semel.stores.urls import open_async_store, open_store

ONE, TWO = Lookup(b"1" * 16), Lookup(b"2" * 16)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), NotMigrated("no table")])
def test_an_op_that_fails_is_answered_with_its_error_and_the_others_with_their_results(error: SemelError) -> None:
    def execute(op: Op[Any]) -> bytes:
        if op is ONE:
            raise error
        return op.id

    async def execute_async(op: Op[Any]) -> bytes:
        return execute(op)

    assert execute_each(execute, [ONE, TWO]) == [error, TWO.id]
    assert asyncio.run(execute_each_async(execute_async, [ONE, TWO])) == [error, TWO.id]


def test_ops_on_one_record_keep_their_order_while_others_run() -> None:
    again = Lookup(ONE.id)
    steps: list[tuple[str, Op[Any]]] = []

    async def execute(op: Op[Any]) -> bytes:
        steps.append(("begins", op))
        await asyncio.sleep(0)
        steps.append(("ends", op))
        return op.id

    assert asyncio.run(execute_each_async(execute, [ONE, TWO, again])) == [ONE.id, TWO.id, ONE.id]
    order = [(step, id(op)) for step, op in steps]
    assert order.index(("begins", id(TWO))) < order.index(("ends", id(ONE))) < order.index(("begins", id(again)))


@pytest.mark.parametrize(
    ("error", "sent", "public"),
    [
        (Contention("busy"), False, StoreUnavailable),
        (Contention("busy"), True, StoreUncertain),
        (StoreUncertain("lost"), False, StoreUncertain),
        (StatementTooLarge("too large"), True, RecordTooLarge),
        (NotMigrated("no table"), False, NotMigrated),
        (NotMigrated("no table"), True, StoreUncertain),
    ],
)
def test_a_caller_is_told_not_stored_only_if_nothing_was_sent(
    error: SemelError, sent: bool, public: type[SemelError]
) -> None:
    error.__cause__ = cause = OSError()
    told = public_error(error, sent)
    assert (type(told), str(told), told.__cause__) == (public, str(error), cause)


def test_pauses_double_up_to_the_slowest_and_end_in_time() -> None:
    endless, over = Backoff(60.0, slowest=0.05), Backoff(0.0)
    assert [endless.next_pause() for _ in range(4)] == [0.02, 0.04, 0.05, 0.05]
    assert over.next_pause() is None


@pytest.mark.redis
@pytest.mark.server
def test_a_mistake_in_the_set_up_is_the_answer_of_its_op(redis_url: str) -> None:
    """As with a missing table of DynamoDB: see test_dynamodb_table.py."""
    import redis

    with redis.Redis.from_url(redis_url) as raw:
        raw.rpush("semel:" + ONE.id.hex(), "not a record")

    async def main() -> list[Any]:
        store = open_async_store(redis_url)
        try:
            return await store.execute_many([ONE, TWO])
        finally:
            await store.close()

    with closing(open_store(redis_url)) as store:
        for answers in (store.execute_many([ONE, TWO]), asyncio.run(main())):
            assert [type(answer) for answer in answers] == [ConfigurationError, type(None)]
