"""The peers of the outbox and the relay: txoutbox and faststream-outbox, where they are installed.

Their publishers are functions for one message. txoutbox may send as many messages at the same time as Semel's relay has
in a batch. faststream-outbox needs a connection for each message that it sends at the same time, so it has 32 workers;
it keeps no order of streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from time import perf_counter
from typing import Any, Final

from bench.turns import Turn

__all__ = ["FASTSTREAM", "TXOUTBOX", "faststream_adder", "faststream_relay", "txoutbox_adder", "txoutbox_relay"]

TXOUTBOX: Final = "txoutbox"
FASTSTREAM: Final = "faststream-outbox"
WORKERS: Final = 32
_EVENT: Final = {"order": 1}
_FILL_TXOUTBOX: Final = """
INSERT INTO bench_txoutbox (topic, key, payload) SELECT 'paid', 'order-' || i %% %s, '{"order":1}' FROM
generate_series(1, %s) AS i ORDER BY i
"""
_FILL_FASTSTREAM: Final = """
INSERT INTO bench_faststream (queue, payload, headers) SELECT 'paid', '{"order":1}',
'{"content-type":"application/json"}' FROM generate_series(1, %s)
"""


def txoutbox_adder(connection: Any) -> tuple[str, Callable[[Any, int], Any]] | None:
    """Return the schema, and what adds a message on a connection of asyncpg."""
    try:
        from txoutbox.adapters.postgres import PostgresStorage
    except ImportError:
        return None
    storage = PostgresStorage(connection, table="bench_txoutbox")
    return storage.schema_sql(), lambda conn, number: storage.insert(conn, "paid", _EVENT, key=f"order-{number}")


def faststream_adder() -> tuple[Any, Callable[[Any, int], Any]] | None:
    """Return the metadata of the table, and what adds a message on a connection of SQLAlchemy."""
    broker = _faststream(None)
    if broker is None:
        return None
    return broker[0], lambda conn, number: broker[1].publish(_EVENT, queue="paid", session=conn)


def txoutbox_relay(stack: ExitStack, url: str, connection: Any, batch: int, streams: int, broker: float) -> Turn | None:
    """Return a turn that empties an outbox, on connections that stay open until the stack is closed.

    :param connection: a connection of psycopg, to fill it.
    :param broker: seconds that the broker takes.
    """
    try:
        from txoutbox import Relay, RelayConfig
        from txoutbox.adapters.postgres import PostgresStorage
    except ImportError:
        return None
    connection.execute(PostgresStorage(None, table="bench_txoutbox").schema_sql())  # type: ignore[arg-type, unused-ignore]

    async def publish(message: Any) -> None:
        await asyncio.sleep(broker)

    runner = stack.enter_context(asyncio.Runner())
    storage = runner.run(PostgresStorage.connect(url, table="bench_txoutbox", delete_on_ack=True))
    stack.callback(lambda: runner.run(storage.close()))

    async def empty() -> None:
        config = RelayConfig(batch_size=batch, concurrency=batch, lease=timedelta(seconds=60))
        relay = Relay(storage, publish, config=config)
        while (await relay.run_once()).claimed:
            pass

    def turn(seconds: float) -> float:
        count = max(2 * batch, int(seconds * 10_000))
        connection.execute("TRUNCATE bench_txoutbox")
        connection.execute(_FILL_TXOUTBOX, (streams, count))
        connection.execute("ANALYZE bench_txoutbox")
        began = perf_counter()
        runner.run(empty())
        rate = count / (perf_counter() - began)
        assert connection.execute("SELECT count(*) FROM bench_txoutbox").fetchone() == (0,)
        return rate

    return turn


def faststream_relay(url: str, connection: Any, batch: int, broker: float) -> Turn | None:
    """Return a turn that empties an outbox, like ``txoutbox_relay``. The peer starts and stops within the turn."""
    if _faststream(None) is None:
        return None
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import create_async_engine

    metadata = _faststream(None)[0]  # type: ignore[index, unused-ignore]
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    metadata.create_all(engine)
    engine.dispose()

    async def empty(count: int) -> None:
        engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=WORKERS + 1)
        _, outbox = _faststream(engine)  # type: ignore[misc, unused-ignore]
        done, sent = asyncio.Event(), 0

        @outbox.subscriber(  # type: ignore[untyped-decorator, unused-ignore]
            "paid", max_workers=WORKERS, fetch_batch_size=batch, terminal_flush_batch_size=batch,
            min_fetch_interval=0.01, max_fetch_interval=0.1,
        )  # fmt: skip
        async def send(body: dict[str, int]) -> None:
            nonlocal sent
            await asyncio.sleep(broker)
            sent += 1
            if sent == count:
                done.set()

        await outbox.start()
        await done.wait()
        await outbox.stop()
        await engine.dispose()

    def turn(seconds: float) -> float:
        count = max(2 * batch, int(seconds * 5_000))
        connection.execute("TRUNCATE bench_faststream")
        connection.execute(_FILL_FASTSTREAM, (count,))
        connection.execute("ANALYZE bench_faststream")
        began = perf_counter()
        asyncio.run(empty(count))
        rate = count / (perf_counter() - began)
        assert connection.execute("SELECT count(*) FROM bench_faststream").fetchone() == (0,)
        return rate

    return turn


def _faststream(engine: Any) -> tuple[Any, Any] | None:
    try:
        from faststream_outbox import OutboxBroker, make_outbox_table
    except ImportError:
        return None
    from sqlalchemy import MetaData

    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="bench_faststream")
    return metadata, OutboxBroker(engine, outbox_table=table, logger=None, log_level=logging.ERROR)
