# Twin: connection.py is generated from this file by make twins.
# Twin: for an event loop -> for threads
# Twin: , and for a new event loop -> , and in a forked child
"""A connection of a combiner that retries its batches, for an event loop.

A driver says how a connection is opened, used and closed (``AsyncBatchDriver``); ``batches.py`` decides what is sent
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from semel.core.ops import Op

# sync only: from semel.engine.forking import survive_forks
from semel.errors import SemelError
from semel.stores.batching.batches import BatchRetry


class AsyncBatchDriver(Protocol):
    """Opens, uses and closes the connections of one library."""

    async def connect(self, settings: Any) -> Any: ...

    async def send(self, connection: Any, settings: Any, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        """Send the Ops once and put each answer into ``answers`` as it arrives. Raises the error of the batch."""
        ...

    def is_open(self, connection: Any) -> bool: ...

    def interrupt(self, connection: Any) -> None:
        """The caller was interrupted in a statement, whose answer must not be read by the next one."""
        ...

    async def close(self, connection: Any) -> None: ...


@asynccontextmanager
async def connected_async(driver: AsyncBatchDriver, settings: Any) -> AsyncIterator[Any]:
    """Open a connection, and close it at the end."""
    connection = await driver.connect(settings)
    try:
        yield connection
    finally:
        await driver.close(connection)


class AsyncRetryingConnection:
    """Runs batches over one connection, and retries them while the server may come back.

    It opens the connection when needed, again when it was lost, and for a new event loop.
    """

    gathers = True

    def __init__(self, driver: AsyncBatchDriver, settings: Any) -> None:
        """
        :param settings: with ``retry_for``, the seconds that a lost server is retried. While it is down, later batches
            are tried once.
        """
        self._driver = driver
        self._settings = settings
        self._connection: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # async only
        # sync only: self._parents: list[Any] = []
        # sync only: survive_forks(self._forked)
        self._down = False

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run a batch; an Op that failed is answered with its error."""
        retry = BatchRetry(ops, 0.0 if self._down else self._settings.retry_for)
        driver = self._driver
        loop = asyncio.get_running_loop()  # async only
        while left := retry.next_try():
            try:
                # sync: if self._connection is None:
                # sync:     self._connection = driver.connect(self._settings)
                if self._connection is None or self._loop is not loop:
                    self._connection, self._loop = await driver.connect(self._settings), loop
                await driver.send(self._connection, self._settings, left, retry.try_answers)
                self._down = False
            except SemelError as error:
                self._forget_closed()
                if retry.send_one_by_one(error):
                    for at, op in retry.unanswered():
                        retry.try_answers[at] = (await self.run([op]))[0]
                    continue
                pause = retry.pause_after(error)
                if pause is None:
                    self._down = self._connection is None
                elif pause:
                    await asyncio.sleep(pause)
            except BaseException:
                if self._connection is not None:
                    driver.interrupt(self._connection)
                self._forget_closed()
                raise
        return retry.answers

    def _forget_closed(self) -> None:
        if self._connection is not None and not self._driver.is_open(self._connection):
            self._connection = None

    # sync only: def _forked(self) -> None:
    # sync only:     # Keep a reference to the parent's connection: closing it here would end the parent's session.
    # sync only:     self._parents.append(self._connection)
    # sync only:     self._connection = None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._driver.close(connection)
