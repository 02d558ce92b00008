"""A consumer: it applies each message once, in the transaction that also records its id.

`python -m examples.ledger.consumer DATABASE SOURCE [batches]`. With `batches`, one transaction applies many messages.
"""

import asyncio
import json
import signal
import sys

import psycopg

from semel import AsyncPostgresStore
from semel.messaging import AsyncInbox, Message, open_source


async def main(url: str, source: str, *options: str) -> None:
    inbox = AsyncInbox(AsyncPostgresStore(url, listen=False))
    connection: psycopg.AsyncConnection | None = None

    class Lent:
        """The consumer's only connection, opened again after the database was down."""

        async def __aenter__(self) -> psycopg.AsyncConnection:
            nonlocal connection
            if connection is None or connection.closed:
                connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
            return connection

        async def __aexit__(self, *_: object) -> None:
            """Keep the connection for the next message."""

    @inbox.handler("ledger", connect=Lent, ordered=True, in_batches="batches" in options)
    async def apply(messages: Message | list[Message], connection: psycopg.AsyncConnection) -> None:
        entries = [json.loads(each.data) for each in (messages if isinstance(messages, list) else [messages])]
        async with connection.cursor() as cursor:
            await cursor.executemany(
                "INSERT INTO applied (account, number) VALUES (%s, %s)",
                [(entry["account"], entry["number"]) for entry in entries],
            )

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, apply.stop)
    await apply.run(open_source(source))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
