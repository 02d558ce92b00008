# Twin: sync.py is generated from this file by make twins.
# Twin: for one event loop, by aiobotocore -> for threads, by boto3
# Twin: for one event loop -> for threads
# Twin: "aiobotocore.session", "aiobotocore" -> "botocore.session", "dynamodb"
# Twin: "aiobotocore.config", "aiobotocore" -> "botocore.config", "dynamodb"
# Twin: AioConfig -> Config
# Twin: _run -> execute
"""The DynamoDB store for one event loop, by aiobotocore. All callers share one client and its pool of connections.

What is sent, and how replies and errors are judged, is in ``programs.py`` and ``failures.py``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

# sync: from typing import Any, Final, TypeVar, cast
from typing import Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration

# sync only: from semel.engine.forking import survive_forks
from semel.engine.ports import STORE_CLOSED, execute_each_async
from semel.errors import SemelError, StoreUnavailable
from semel.stores.dynamodb.failures import CallRetry, error_of, take_error, take_reply
from semel.stores.dynamodb.programs import ApiCall, DynamoDBPrograms, Reply
from semel.stores.dynamodb.settings import CONNECT_TIMEOUT, RETRY_FOR, TIMEOUT, DynamoDBSettings
from semel.stores.dynamodb.transactions import accept
from semel.stores.retries import public_error
from semel.stores.settings import require

# sync only: _client_lock: Final = threading.Lock()
# sync only: """Many threads may use a client, but only one at a time may create one."""
R = TypeVar("R")


@functools.cache
def _session() -> Any:
    """Return the session of the process: it holds the credentials and the slow-to-read model of the service."""
    return require("aiobotocore.session", "aiobotocore").get_session()


async def open_client_async(settings: DynamoDBSettings) -> Any:
    """Return a client with these settings."""
    config = require("aiobotocore.config", "aiobotocore").AioConfig(**settings.config())
    try:
        # sync: with _client_lock:
        # sync:     return _session().create_client(**settings.client(), config=config)
        return await _session().create_client(**settings.client(), config=config).__aenter__()
    except Exception as error:
        raise public_error(error_of(error, settings.table)) from error


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
        """
        :param url: ``dynamodb://region/table``; credentials are those of the process, as boto3 finds them.
        :param timeout: how long the service may take for one call.
        :param connect_timeout: how long it may take to connect.
        :param retry_for: how long a call is retried before the Op fails, if it is throttled or gets no response.
        :param clock: seconds since 1970; by default the service's, from the Date headers of its responses.
        """
        self._settings = DynamoDBSettings(url, timeout, connect_timeout, retry_for, clock)
        require("aiobotocore.session", "aiobotocore")
        self._programs = DynamoDBPrograms(self._settings.table, self._settings.clock)
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # async only
        self._running: dict[int, asyncio.Task[Any]] = {}  # async only
        # sync only: survive_forks(self._forked)
        self._closed = False

    # sync only: def _forked(self) -> None:
    # sync only:     # The child creates a client of its own; the parent's connections are neither used nor closed.
    # sync only:     self._parents_client, self._client = self._client, None
    # sync only:     self._opening = threading.Lock()
    # async only
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

    # async only
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
        return await execute_each_async(self.execute, ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        await asyncio.sleep(min(seconds, 0.05))

    def open(self) -> None:
        self._closed = False

    async def close(self) -> None:
        loop = asyncio.get_running_loop()  # async only
        running = [task for task in self._running.values() if task.get_loop() is loop]  # async only
        # async only
        if running:
            await asyncio.wait(running)
        # async only
        if self._loop is not loop:  # the client, if there is one, belongs to a loop that has ended
            self._closed, self._client = True, None
            return
        async with self._opening:  # another call may be creating the client
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            await client.close()

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
        # async only
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._client, self._opening = asyncio.get_running_loop(), None, asyncio.Lock()
        client = self._client
        if client is None:
            async with self._opening:
                if self._closed:
                    raise StoreUnavailable(STORE_CLOSED)
                if self._client is None:
                    self._client = await open_client_async(self._settings)
                client = self._client
        return client
