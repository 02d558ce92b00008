# Twin: outbox.py is generated from this file by make twins.
# Twin: await outbox.add -> outbox.add
# Twin: awaited=True -> awaited=False
"""The outbox: add a message in the transaction of the state that it tells of.

::

    outbox = AsyncOutbox(store)
    async with connection.transaction():
        await connection.execute("INSERT INTO orders …")
        await outbox.add(connection, "order.placed", {"order": 7}, stream="order-7")

The message commits with the rows of the transaction, or is rolled back with them. A relay sends it afterwards, at least
once. What a message is made of is decided in ``engine/operation/emitting.py``, the statements are in ``semel.sql``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.core.messaging.messages import OUTBOX_MODES, OutboxMode, SwitchMode
from semel.core.policy import Duration
from semel.engine.operation.emitting import make_message, tell_emitted
from semel.engine.ports import AsyncStore, AsyncUnit, check_sql_store, unit_of
from semel.errors import ConfigurationError
from semel.observe import events


class AsyncOutbox:
    """The messages that are to be sent, in the caller's own database."""

    def __init__(self, store: AsyncStore, *, source: str = "", on_event: events.EventHooks | None = None) -> None:
        """
        :param store: a store in the database of your rows: SQLite, PostgreSQL or MySQL.
        :param source: who sends the messages, such as ``/orders``. CloudEvents call it the source.
        :param on_event: a hook, or a list of hooks, called with ``Emitted``, unless a hook of the running operation is.
        """
        check_sql_store(store, "Outbox", awaited=True)
        self.store = store
        self.source = source
        self._hook = events.call_hooks(events.hooks_of(on_event), "semel.outbox")

    async def add(
        self,
        connection: object,
        type: str,
        data: Any,
        *,
        stream: str | None = None,
        id: str | None = None,
        dedup: str | None = None,
        destination: str = "",
        subject: str = "",
        source: str | None = None,
        content_type: str | None = None,
        delay: Duration | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Add a message in the transaction that is open on the connection. Returns its id.

        A message whose id is in the outbox already is not added again. Inside an operation the message carries its
        lineage: the headers ``idempotency-key``, ``causation-id``, ``idempotency-root``, ``idempotency-parent`` and
        ``traceparent``.

        :param connection: any connection or session that ``guard.run_in_transaction`` accepts, with an open
            transaction. Without one it raises ConfigurationError.
        :param type: what happened, such as ``"order.placed"``.
        :param data: bytes are sent as they are, text as UTF-8, everything else as JSON.
        :param stream: messages of one stream, such as an order, are sent in the order of their commits. Transactions
            that add to one stream wait for each other.
        :param id: identifies the message everywhere and for ever. Inside an operation it is by default made of the
            operation and the message's place among its messages of this type and stream, so that a re-run adds the
            same message. Otherwise it is a UUID of version 7.
        :param dedup: make the id of this text, the type and the source instead: another message with the same three is
            the same message.
        :param destination: the topic, exchange, subject, stream, queue or URL. Defaults to the relay's.
        :param subject: what it is about, such as the name of a file. CloudEvents call it the subject.
        :param source: defaults to the outbox's.
        :param content_type: defaults to JSON, text or bytes, depending on the data.
        :param delay: send it only after this time. Not for a message with a stream.
        :param headers: further headers. They replace the operation's.
        """
        message = make_message(
            type, data, stream=stream, id=id, dedup=dedup, destination=destination, subject=subject,
            source=self.source if source is None else source, content_type=content_type, delay=delay, headers=headers,
        )  # fmt: skip
        unit: AsyncUnit = unit_of(self.store, connection)
        await unit.add(message)
        tell_emitted(message, hook=self._hook)
        return message.id

    async def switch(self, mode: OutboxMode) -> None:
        """Change how messages are stored on their way to the relay: in a queue, the default, in a table that is only
        appended to, or in the database's own log.

        The database remembers the mode, for all who add and send messages. The call waits until the transactions that
        have added messages have ended, and messages that are added meanwhile wait for it. What is in the log moves to
        the queue. Streams stay in order.

        :param mode: ``"queue"``, or on PostgreSQL ``"log"`` or ``"wal"``, for many messages.
        """
        if mode not in OUTBOX_MODES:
            raise ConfigurationError(f"the mode of an outbox is {', '.join(map(repr, OUTBOX_MODES))}, not {mode!r}")
        while not await self.store.execute(SwitchMode(mode)):
            pass  # it has moved a part of a long log
