"""A subscriber of FastStream that is killed where it hurts most: see ``test_faststream.py``.

It applies messages until the last one is there, kills itself once after a commit and before the acknowledgement, and
once before a commit. Prints how often it was killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import aiosqlite
from faststream import Context
from faststream.rabbit import RabbitBroker, RabbitQueue, RabbitRouter

from semel import AsyncSQLiteStore
from semel.messaging import AsyncInbox
from semel.messaging import faststream as integration
from semel.messaging.ports import Delivery
from tests.messaging.dying_consumer import die_once, live_until_done


async def work(amqp: str, queue: str, database: str, folder: Path) -> None:
    class DyingDelivery(integration._OneDelivery):
        async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
            if deliveries[0].message.id == "m-2":
                die_once(folder / "acknowledge")
            await super().acknowledge(deliveries)

    integration._OneDelivery = DyingDelivery  # type: ignore[misc]
    inbox = AsyncInbox(AsyncSQLiteStore(database))
    broker = RabbitBroker(amqp, logger=None)
    happened = asyncio.Event()
    router = RabbitRouter(
        middlewares=[
            integration.InboxMiddleware(
                inbox,
                "ledger",
                connect=lambda: aiosqlite.connect(database),
                tries=5,
                pause="10ms",
                on_event=lambda event: happened.set(),
            )
        ]
    )

    @router.subscriber(RabbitQueue(queue, declare=False))
    async def book(entry: dict[str, Any], connection: Annotated[Any, Context()]) -> None:
        await connection.execute("INSERT INTO applied (id) VALUES (?)", (entry["id"],))
        if entry["id"] == "m-3":
            die_once(folder / "effect")
        if entry["id"] == "m-4" and not (folder / "failure").exists():
            (folder / "failure").touch()
            raise ValueError("this message fails once")
        if entry["id"] == "poison":
            raise ValueError("this message fails always")

    broker.include_router(router)
    await broker.start()
    statement = "SELECT (SELECT count(*) FROM applied) + (SELECT count(*) FROM semel_dead_letter)"
    async with asyncio.timeout(60), aiosqlite.connect(database) as connection:
        while (await (await connection.execute(statement)).fetchone()) != (5,):
            await happened.wait()
            happened.clear()
    await broker.stop()
    await inbox.store.close()


def main(amqp: str, queue: str, database: str, folder: str) -> None:
    asyncio.run(work(amqp, queue, database, Path(folder)))


if __name__ == "__main__":
    print(live_until_done(main, *sys.argv[1:]))
