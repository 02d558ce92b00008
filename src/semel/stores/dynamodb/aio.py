"""The DynamoDB store for one event loop, by aiobotocore."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.errors import SemelError, StoreError, StoreUnavailable
from semel.stores.dynamodb.programs import Call, Programs, Reply
from semel.stores.dynamodb.settings import (
    CONNECT_TIMEOUT,
    READS,
    RETRY_FOR,
    TIMEOUT,
    Settings,
    Tries,
    answered,
    named,
    public,
    require,
)
from semel.stores.dynamodb.transactions import accept

__all__ = ["AsyncDynamoDBStore"]

R = TypeVar("R")


@functools.cache
def _session() -> Any:
    """One for the process: it holds the credentials and the description of the service, which takes long to read."""
    return require("aiobotocore.session", "aiobotocore").get_session()


class AsyncDynamoDBStore:
    """A store in a DynamoDB table, for one event loop. The client is made when first needed."""

    wakes = False
    counts = False
    resumes = False
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
        """As of ``DynamoDBStore``."""
        self._settings = Settings(url, timeout, connect_timeout, retry_for, clock)
        require("aiobotocore.session", "aiobotocore")
        self._programs = Programs(self._settings.table, self._settings.clock)
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = AsyncExitStack()
        self._opening: asyncio.Lock | None = None
        self._under_way: dict[int, asyncio.Task[Any]] = {}
        self._closed = False

    async def execute(self, op: Op[R]) -> R:
        """In a task of its own: a caller that is cancelled and asks again joins it. Sent a second time it could
        overtake the first, which would land when all is over."""
        task = self._under_way.get(id(op))
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.get_running_loop().create_task(self._run(op), name="semel-call")
            self._under_way[id(op)] = task
            task.add_done_callback(lambda done: self._over(op, done))
        return cast(R, await asyncio.shield(task))

    def _over(self, op: Op[Any], task: asyncio.Task[Any]) -> None:
        if self._under_way.get(id(op)) is task:
            del self._under_way[id(op)]
        if not task.cancelled():
            task.exception()  # told to whoever waits, if anyone does

    async def _run(self, op: Op[R]) -> R:
        program = self._programs.of(op)
        tries = Tries(self._settings.retry_for)
        try:
            call = next(program)
            while True:
                call = program.send(await self._sent(call, tries))
        except StopIteration as stop:
            return cast(R, stop.value)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """At the same time, but for those of one record, which keep their order."""
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

        # No task group: it would wrap what ends all of them, such as a table that is not there.
        ends = await asyncio.gather(*map(in_order, by_record.values()), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        return answers

    async def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        await asyncio.sleep(min(seconds, 0.05))

    async def close(self) -> None:
        under_way = [task for task in self._under_way.values() if task.get_loop() is asyncio.get_running_loop()]
        if under_way:
            await asyncio.wait(under_way)
        self._closed = True
        self._client = None
        if self._loop is asyncio.get_running_loop():
            await self._stack.aclose()

    async def _sent(self, call: Call, tries: Tries) -> Reply:
        while True:
            client = await self._open()
            begun = self._settings.clock.here()
            try:
                reply: dict[str, Any] = await getattr(client, call.action)(**call.params)
                self._told(reply, begun)
                if call.action not in READS:
                    tries.wrote()
                return reply
            except SemelError:
                raise
            except Exception as error:
                self._told(getattr(error, "response", None) or {}, begun)
                answer = answered(error, call)
                if answer is not None:
                    return answer
                failure = named(error, self._settings.table)
                failure.__cause__ = error
                pause = tries.pause_after(failure, call.once)
            await asyncio.sleep(pause)

    def _told(self, response: dict[str, Any], begun: float) -> None:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self._settings.clock.heard(headers.get("date"), begun, self._settings.clock.here())

    async def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._loop is not loop:
            self._loop, self._client, self._stack, self._opening = loop, None, AsyncExitStack(), asyncio.Lock()
        if self._client is None:
            assert self._opening is not None
            async with self._opening:
                if self._client is None:
                    self._client = await self._made()
        return self._client

    async def _made(self) -> Any:
        session = _session()
        config = require("aiobotocore.config", "aiobotocore").AioConfig(**self._settings.config())
        try:
            return await self._stack.enter_async_context(
                session.create_client(**self._settings.client(), config=config)
            )
        except Exception as error:
            raise public(named(error, self._settings.table)) from error
