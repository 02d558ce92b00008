"""The Redis store for one event loop. All tasks share one connection to each server.

``sync.py`` is the store for threads, and says why both are written by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from semel.core.ops import Op, WatchRecord
from semel.core.policy import Duration
from semel.engine.ports import STORE_CLOSED, execute_each_async
from semel.errors import SemelError, StoreUnavailable
from semel.stores.listening import AsyncListener
from semel.stores.redis.aio_connection import AsyncRedisConnection, AsyncServers, open_connection
from semel.stores.redis.commands import DurableCommand, RedisCommand, introduce
from semel.stores.redis.connection import require_redis
from semel.stores.redis.failures import (
    ConnectionLost,
    Moved,
    NoMemory,
    NoScript,
    NotMaster,
    OpRetry,
    ServerUnreachable,
)
from semel.stores.redis.programs import WALKS, RedisPrograms
from semel.stores.redis.settings import (
    CONNECT_TIMEOUT,
    RETRY_FOR,
    TIMEOUT,
    Address,
    RedisSettings,
)
from semel.stores.risks import Risk

R = TypeVar("R")


class AsyncRedisStore:
    """A store in Redis 7 or newer, or Valkey, for one event loop. Connections are opened when first needed."""

    counts = False
    resumes = False
    lists = True
    trails = True
    adopt = None
    accept = None

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None = None,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
        listen: bool = True,
        wait_replicas: int | None = None,
        wait_aof: bool | None = None,
        wait_timeout: Duration | None = None,
    ) -> None:
        """Same parameters as ``RedisStore``, without ``connections``: one to each server serves all tasks."""
        require_redis()
        settings = RedisSettings(
            url, prefix=prefix, connections=1, timeout=timeout, connect_timeout=connect_timeout, retry_for=retry_for,
            wait_replicas=wait_replicas, wait_aof=wait_aof, wait_timeout=wait_timeout,
        )  # fmt: skip
        self.wakes = listen
        self._settings = settings
        self._programs = RedisPrograms(settings)
        self._servers = AsyncServers(settings)
        self._listener = AsyncListener(self._receive)
        self._subscriptions = 0
        self._closed = False

    async def execute(self, op: Op[R]) -> R:
        programs, servers = self._programs, self._servers
        key = programs.prefix + op.id.hex().encode()  # programs.key(), in the path of every call
        retry: OpRetry | None = None
        redirection: Address | None = None
        while True:
            if self._closed:
                closed = StoreUnavailable(STORE_CLOSED)
                raise closed if retry is None else retry.failure(closed)
            connection: AsyncRedisConnection | None = None
            durable: AsyncRedisConnection | None = None
            where = redirection
            try:
                if type(op) in WALKS:
                    return cast(R, await self._walk(op))
                if redirection is None:
                    connection = servers.only
                    if connection is None or connection.closed or connection.loop is not asyncio.get_running_loop():
                        connection = servers.ready(key)
                if connection is None:
                    where = redirection or await servers.address_of(key)
                    connection = await servers.connection(where)
                program = programs.by_op[type(op)](op, key, connection.clock)
                command = next(program)
                asking = redirection is not None
                while True:
                    try:
                        if type(command) is RedisCommand:
                            reply = await connection.send(command.parts, asking)
                        elif isinstance(command, DurableCommand):
                            durable, reply = await self._send_durable(connection, command, asking)
                        else:
                            reply = None
                            (durable or connection).send_unanswered(command.parts)
                    except NoScript:
                        command = command.in_full()
                    except NoMemory as full:
                        command = program.throw(full)
                    else:
                        command = program.send(reply)
            except StopIteration as stop:
                if servers.down and connection is not None:
                    servers.down.discard(connection.address)
                return cast(R, stop.value)
            except SemelError as error:
                redirection = None
                if connection is not None:
                    where = connection.address
                if retry is None:
                    retry = OpRetry(op, 0.0 if where in servers.down else self._settings.retry_for)
                pause = retry.pause_after(error)
                if connection is not None and isinstance(error, (NotMaster, ConnectionLost)):
                    servers.drop(durable or connection)
                    if isinstance(error, NotMaster):
                        servers.drop(connection)
                if pause is None:
                    if isinstance(error, (ServerUnreachable, ConnectionLost)):
                        servers.down.add(where)
                    raise retry.failure(error) from error.__cause__
                if connection is not None and isinstance(error, Moved):
                    redirection = servers.topology.moved(error, connection.address)
            await asyncio.sleep(pause)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run several Ops. Those of one turn of the loop are sent together."""
        return await execute_each_async(self.execute, ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await self._listener.wait(self._programs.key(id), seconds, lambda: self.execute(WatchRecord(id)))

    async def risks(self) -> list[Risk]:
        """Return the ways in which the servers' settings can lose records: eviction, a restart, a failover."""
        servers = self._servers
        found: dict[Risk, None] = {}
        for address in await servers.masters():
            found.update(dict.fromkeys(await servers.assess(await servers.connection(address))))
        return list(found)

    def open(self) -> None:
        self._closed = False
        self._servers.open()

    async def close(self) -> None:
        self._closed = True
        await self._listener.stop()
        await self._servers.close()

    async def _send_durable(
        self, connection: AsyncRedisConnection, command: DurableCommand, asking: bool
    ) -> tuple[AsyncRedisConnection, tuple[Any, Any]]:
        """Send a durable command over the second connection to the same server. Errors are replies, too."""
        try:
            durable = await self._servers.connection(connection.address, durable=True)
            replies = await durable.send_durable(command.parts, asking)
            if isinstance(replies[0], NotMaster):
                self._servers.drop(durable)
            return durable, replies
        except NoScript:
            raise
        except SemelError as error:
            return connection, (error, None)

    async def _receive(self, ready: Callable[[], None], wake: Callable[[Any], None]) -> None:
        """Subscribe to the store's channel. One server is enough: each receives what another publishes."""
        settings = self._settings
        masters = await self._servers.masters()
        self._subscriptions += 1  # each time at another one
        address = masters[self._subscriptions % len(masters)]
        connection = await open_connection(settings, address, wake)
        try:
            await connection.run_handshake(introduce(*settings.credentials(), settings.db))
            await connection.send((b"SUBSCRIBE", self._programs.channel))
            ready()
            await connection.ended.wait()
        finally:
            connection.close()

    async def _walk(self, op: Op[Any]) -> Any:
        """Run an Op that is not about one record. A retry starts it again."""
        servers = self._servers
        walk = self._programs.walk(op, await servers.masters(), servers.topology, servers.cursors)
        try:
            address, commands = next(walk)
            while True:
                connection = await servers.connection(address)
                replies = await connection.exchange(commands)
                for reply in replies:
                    if isinstance(reply, (NotMaster, ConnectionLost)):
                        servers.drop(connection)
                    elif isinstance(reply, Moved):
                        servers.topology.moved(reply, address)
                address, commands = walk.send(replies)
        except StopIteration as stop:
            return stop.value
