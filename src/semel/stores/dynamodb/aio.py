"""The DynamoDB store for one event loop, by aiobotocore. ``sync.py`` says why both stores are written by hand."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.engine.ports import STORE_CLOSED
from semel.errors import SemelError, StoreError, StoreUnavailable
from semel.stores.dynamodb.failures import CallRetry, error_of, public_error, take_error, take_reply
from semel.stores.dynamodb.programs import ApiCall, DynamoDBPrograms, Reply
from semel.stores.dynamodb.settings import CONNECT_TIMEOUT, RETRY_FOR, TIMEOUT, DynamoDBSettings
from semel.stores.dynamodb.transactions import accept
from semel.stores.settings import require

R = TypeVar("R")


@functools.cache
def _session() -> Any:
    """Return the session of the process: it holds the credentials and the slow-to-read model of the service."""
    return require("aiobotocore.session", "aiobotocore").get_session()


class AsyncDynamoDBStore:
    """A store in a DynamoDB table, for one event loop. The client is created when first needed."""

    wakes = False
    counts = False
    resumes = False
    lists = True
    trails = False
    adopt = None
    accept = staticmethod(accept)

    def __init__(
        self,
        url: str,
        *,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Same parameters as ``DynamoDBStore``."""
        self._settings = DynamoDBSettings(url, timeout, connect_timeout, retry_for, clock)
        require("aiobotocore.session", "aiobotocore")
        self._programs = DynamoDBPrograms(self._settings.table, self._settings.clock)
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = AsyncExitStack()
        self._opening: asyncio.Lock | None = None
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._closed = False

    async def execute(self, op: Op[R]) -> R:
        """Run the Op in a task of its own, which a cancelled caller that asks again joins.

        A second send could overtake the first, which would then take effect after the attempt is over.
        """
        task = self._running.get(id(op))
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.get_running_loop().create_task(self._run(op), name="semel-call")
            self._running[id(op)] = task
            task.add_done_callback(lambda done: self._on_done(op, done))
        return cast(R, await asyncio.shield(task))

    def _on_done(self, op: Op[Any], task: asyncio.Task[Any]) -> None:
        if self._running.get(id(op)) is task:
            del self._running[id(op)]
        if not task.cancelled():
            task.exception()  # mark it as seen: nobody may be waiting any more

    async def _run(self, op: Op[R]) -> R:
        program = self._programs.of(op)
        retry = CallRetry(self._settings.retry_for)
        try:
            call = next(program)
            while True:
                call = program.send(await self._send(call, retry))
        except StopIteration as stop:
            return cast(R, stop.value)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run several Ops at the same time, but those on one record in their order."""
        answers: list[Any] = [None] * len(ops)
        by_record: dict[bytes, list[int]] = {}
        for i, op in enumerate(ops):
            by_record.setdefault(op.id, []).append(i)

        async def in_order(positions: list[int]) -> None:
            for i in positions:
                try:
                    answers[i] = await self.execute(ops[i])
                except StoreError as error:
                    answers[i] = error

        # No task group: it would wrap an error that ends all of them, such as a missing table.
        ends = await asyncio.gather(*map(in_order, by_record.values()), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        return answers

    async def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        await asyncio.sleep(min(seconds, 0.05))

    def open(self) -> None:
        self._closed = False

    async def close(self) -> None:
        running = [task for task in self._running.values() if task.get_loop() is asyncio.get_running_loop()]
        if running:
            await asyncio.wait(running)
        self._closed = True
        self._client = None
        if self._loop is asyncio.get_running_loop():
            await self._stack.aclose()
            self._loop = None

    async def _send(self, call: ApiCall, retry: CallRetry) -> Reply:
        """Make a call, and repeat it as ``retry`` says. Returns the reply."""
        settings = self._settings
        while True:
            client = await self._open()
            sent = settings.clock.local()
            try:
                return take_reply(await getattr(client, call.action)(**call.params), call, retry, settings, sent)
            except SemelError:
                raise
            except Exception as error:
                answer = take_error(error, call, retry, settings, sent)
            if not isinstance(answer, float):
                return answer
            await asyncio.sleep(answer)

    async def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise StoreUnavailable(STORE_CLOSED)
        if self._loop is not loop:
            self._loop, self._client, self._stack, self._opening = loop, None, AsyncExitStack(), asyncio.Lock()
        if self._client is None:
            assert self._opening is not None
            async with self._opening:
                if self._client is None:
                    self._client = await self._new_client()
        return self._client

    async def _new_client(self) -> Any:
        session = _session()
        config = require("aiobotocore.config", "aiobotocore").AioConfig(**self._settings.config())
        try:
            return await self._stack.enter_async_context(
                session.create_client(**self._settings.client(), config=config)
            )
        except Exception as error:
            raise public_error(error_of(error, self._settings.table)) from error
