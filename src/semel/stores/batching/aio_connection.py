# Twin: connection.py is generated from this file by make twins.
# Twin: for an event loop -> for threads
"""A connection of a combiner that retries its batches, for an event loop.

A store only says how it sends a batch once (``AsyncBatchSender``); ``batches.py`` decides what is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from semel.core.ops import Op
from semel.errors import SemelError
from semel.stores.batching.batches import BatchRetry


class AsyncBatchSender(Protocol):
    """Sends batches over one connection, which it opens when needed."""

    async def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        """Send the Ops once and put each answer into ``answers`` as it arrives. Raises the error of the batch."""
        ...

    def is_open(self) -> bool:
        """Whether there is a connection."""
        ...

    async def close(self) -> None: ...


class AsyncRetryingConnection:
    """Runs batches over a sender, and retries them while the server may come back."""

    gathers = True

    def __init__(self, sender: AsyncBatchSender, retry_for: float) -> None:
        """
        :param retry_for: seconds that a lost server is retried. While it is down, later batches are tried once.
        """
        self._sender = sender
        self._retry_for = retry_for
        self._down = False

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run a batch; an Op that failed is answered with its error."""
        retry = BatchRetry(ops, 0.0 if self._down else self._retry_for)
        while left := retry.next_try():
            try:
                await self._sender.send(left, retry.try_answers)
                self._down = False
            except SemelError as error:
                if retry.send_one_by_one(error):
                    for at, op in retry.unanswered():
                        retry.try_answers[at] = (await self.run([op]))[0]
                    continue
                pause = retry.pause_after(error)
                if pause is None:
                    self._down = not self._sender.is_open()
                elif pause:
                    await asyncio.sleep(pause)
        return retry.answers

    async def close(self) -> None:
        await self._sender.close()
