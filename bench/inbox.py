"""The inbox on PostgreSQL: batches of a hundred messages, whose effects are a row each, alone and applied once.

Four consumers with a connection each. *By hand* is the same insert with ON CONFLICT, without Semel.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench.contest import Contestant, Match
from bench.turns import threads
from semel import PostgresStore
from semel.core.messaging.messages import Message
from semel.messaging import Inbox
from semel.stores.postgres import migrate

__all__ = ["BATCH", "WITH_THE_INBOX", "matches"]

BATCH: Final = 100
CLIENTS: Final = 4
WITH_THE_INBOX: Final = "process_many"
_TABLE: Final = "CREATE TABLE IF NOT EXISTS bench_booking (event text, amount integer)"
_EFFECT: Final = "INSERT INTO bench_booking SELECT event, 42 FROM unnest(%s::text[]) AS g (event)"
_BY_HAND: Final = (
    "INSERT INTO semel_inbox (consumer, id, received) SELECT 'by hand', id, now() FROM unnest(%s::text[]) AS g (id) "
    "ON CONFLICT DO NOTHING RETURNING id"
)


@contextmanager
def matches(url: str, clients: int = CLIENTS) -> Iterator[list[Match]]:
    """On a database that may be filled."""
    import psycopg

    migrate(url)
    numbers = itertools.count()
    with ExitStack() as stack:
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(clients):
            free.put(stack.enter_context(psycopg.connect(url, autocommit=True)))
        with psycopg.connect(url) as connection:
            connection.execute(_TABLE)
        inbox = Inbox(PostgresStore(url, listen=False))
        stack.callback(inbox.store.close)

        def effect(connection: Any, ids: list[str]) -> None:
            connection.execute(_EFFECT, (ids,))

        def with_the_inbox(connection: Any, ids: list[str]) -> None:
            messages = [Message(id, "paid", b"{}") for id in ids]
            inbox.process_many(
                connection, "bench", messages, lambda new: effect(connection, [message.id for message in new])
            )

        def by_hand(connection: Any, ids: list[str]) -> None:
            effect(connection, [id for (id,) in connection.execute(_BY_HAND, (ids,)).fetchall()])

        def turn(apply: Callable[[Any, list[str]], None]) -> Any:
            def once(number: int) -> None:
                connection = free.get()
                batch = next(numbers)
                with connection.transaction():
                    apply(connection, [f"{batch:012}-{at:02}" for at in range(BATCH)])
                free.put(connection)

            return threads(once, clients)

        calls = {"unprotected": effect, WITH_THE_INBOX: with_the_inbox, "by hand: ON CONFLICT": by_hand}
        title = f"Inbox, batches of {BATCH} messages, threads (psycopg), {clients} consumers"
        yield [
            Match(
                "inbox",
                title,
                [
                    Contestant(name, "first", clients, turn(call), yardstick=call is effect)
                    for name, call in calls.items()
                ],
            )
        ]
