# Twin: inbox.py is generated from this file by make twins.
# Twin: await inbox.process -> inbox.process
"""The inbox: apply every message once, in the transaction of its effect.

::

    inbox = AsyncInbox(store)
    async with connection.transaction():
        await inbox.process(connection, "ledger", message_id, apply)

The message's id is written first, then the effect, and both commit together. A broker delivers a message again until it
is acknowledged, so acknowledge it after the commit. Then a repeat finds the id and does nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

from semel.core.keys import check_name
from semel.core.messages import MAX_NAME, Message, PurgeInbox, fits_column
from semel.core.policy import Duration, seconds
from semel.engine.ports import AsyncStore, unit_of
from semel.errors import ConfigurationError

# sync only: from semel.errors import PolicyError
from semel.sql.aio import AsyncSQLUnit
from semel.sql.inbox import apply_message, apply_messages

KEEP: Final = "14d"
_ROW: Final = "the row of the inbox"
_PURGED_AT_ONCE: Final = 1000
"""Rows that one statement removes. A longer one would hold its locks for too long."""


class AsyncInbox:
    """The messages that consumers have applied, in the database of their effects."""

    def __init__(self, store: AsyncStore, *, keep: Duration = KEEP) -> None:
        """
        :param store: a store in the database of the effects: SQLite, PostgreSQL or MySQL.
        :param keep: how long an applied message is remembered. A message that is delivered again after that is applied
            again, so it must be longer than the broker keeps messages, and longer than dead letters wait for a redrive.
        """
        self.store = store
        self.keep = seconds(keep, "keep")

    async def process(
        self,
        connection: object,
        consumer: str,
        message_id: str,
        call: Callable[[], Any],
        *,
        own_transaction: bool = False,
    ) -> bool:
        """Call ``call()`` unless the consumer has applied this message. Returns whether it ran.

        It runs in the transaction that is open on the connection. If that is rolled back, the message counts as not
        applied. While another transaction applies the same message, this one waits, and runs if that one is rolled
        back. If waiting takes too long (``lock_timeout``), it raises TransactionConflict: nobody knows yet, so have the
        message delivered again.

        :param consumer: who applies it, such as ``"ledger"``. Every consumer applies every message once.
        :param own_transaction: open a transaction and commit it here.
        """
        check_consumer(consumer)
        check_message_id(message_id)
        unit = self._unit(connection, own_transaction)
        program = apply_message(unit.connection.dialect, consumer, message_id)
        async with _transaction(unit, own_transaction):
            if not await unit.run(program, _ROW):
                return False
            await self._call(unit, call)
        return True

    async def process_many(
        self,
        connection: object,
        consumer: str,
        messages: Sequence[Message],
        call: Callable[[list[Message]], Any],
        *,
        own_transaction: bool = False,
    ) -> int:
        """Call ``call(new)`` with those of the messages that the consumer has not applied yet. Returns how many.

        One statement finds them, whatever their number. It is not called if there are none.
        """
        check_consumer(consumer)
        for message in messages:
            check_message_id(message.id)
        unit = self._unit(connection, own_transaction)
        first = {message.id: message for message in reversed(messages)}
        program = apply_messages(unit.connection.dialect, consumer, list(first))
        async with _transaction(unit, own_transaction):
            new = await unit.run(program, _ROW)
            chosen = [message for message in messages if message.id in new and first[message.id] is message]
            if chosen:
                await self._call(unit, lambda: call(chosen))
        return len(chosen)

    async def purge(self) -> int:
        """Forget the messages that were applied longer ago than ``keep``. Returns how many."""
        total = 0
        while True:
            gone = await self.store.execute(PurgeInbox(self.keep, _PURGED_AT_ONCE))
            total += gone
            if gone < _PURGED_AT_ONCE:
                return total

    def _unit(self, connection: object, own: bool) -> AsyncSQLUnit:
        unit: AsyncSQLUnit = unit_of(self.store, connection)
        unit.require(own)
        return unit

    async def _call(self, unit: AsyncSQLUnit, call: Callable[[], Any]) -> None:
        # The row of the inbox is written by now. If the call committed, a crash after that would lose the rest.
        unit.watch()
        try:
            result = call()
            # sync: if inspect.iscoroutine(result):
            # sync:     result.close()
            # sync:     raise PolicyError("the call is async: use AsyncInbox")
            if inspect.isawaitable(result):
                await result
        finally:
            unit.unwatch()


@contextlib.asynccontextmanager
async def _transaction(unit: AsyncSQLUnit, own: bool) -> AsyncGenerator[None, None]:
    """Open a transaction and commit it, or roll it back after an error; without ``own`` the caller does that."""
    if not own:
        yield
        return
    try:
        await unit.begin()
        yield
        await unit.commit()
    except BaseException:
        with contextlib.suppress(Exception):  # the connection is gone, and the transaction with it
            await unit.undo()
        raise


def check_consumer(consumer: str) -> None:
    """Raise PolicyError unless this can be the name of a consumer."""
    check_name("a consumer", consumer)
    if len(consumer) > MAX_NAME or consumer.startswith("~"):
        raise ConfigurationError(f"the name of a consumer has at most {MAX_NAME} characters and begins with no ~")


def check_message_id(id: str) -> None:
    """Raise ConfigurationError unless the inbox can hold the id."""
    if not id or not fits_column(id):
        raise ConfigurationError(
            f"the id of a message is text of 1 to {MAX_NAME} characters, without control characters, and without "
            "spaces at its ends: without an id nobody can tell whether it was applied"
        )
