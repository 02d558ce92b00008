"""Redis as the cache of an async tiered store.

All tasks share one connection to each server. It sends what they read and write in one turn of the loop together, in
their order. A background task opens connections, so no caller waits for one. ``redis_cache.py`` is the cache for
threads, and says why both are written by hand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from semel.core.policy import Duration
from semel.errors import SemelError, StoreUncertain
from semel.stores.redis.aio_connection import AsyncRedisConnection, AsyncServers
from semel.stores.redis.failures import Moved, ServerUnreachable
from semel.stores.redis.settings import Address
from semel.stores.tiered.cache import CachedRecord, Outage, Tally, Write
from semel.stores.tiered.copies import (
    CONNECT_TIMEOUT,
    MAX_PENDING,
    TIME,
    TIMEOUT,
    ServerTime,
    cache_settings,
    copy_key,
    entry_keys,
    invalidation,
    unpack,
    write_command,
)


class AsyncRedisCache:
    """The cache of an ``AsyncTieredStore``. Connections are opened in the background."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None = None,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """Same parameters as ``RedisCache``."""
        self.tally = Tally()
        self.name = b""
        self.on_change: Callable[[str | None], None] | None = None
        self._settings = cache_settings(url, prefix, timeout, connect_timeout)
        self._prefix = self._settings.prefix.encode()
        self._servers = AsyncServers(self._settings, assess_risks=False)  # a cache may forget
        self._times: dict[Address, ServerTime] = {}
        self._asking: set[Address] = set()
        """Servers that are being asked for the time."""
        self._writes: dict[bytes, asyncio.Future[Any]] = {}
        """The last write of each id that has no reply yet."""
        self._delayed = 0
        self._outage = Outage()
        self._opener: asyncio.Task[None] | None = None
        self._closed = False

    # -- what a tiered store calls ---------------------------------------------------------------------------------

    async def get(self, id: bytes) -> CachedRecord | None:
        keys = entry_keys(self._prefix + self.name, id)
        connection, clock = self._ready(keys[0])
        if connection is None or clock is None:
            self.tally.skipped += 1
            return None
        try:
            reply = await connection.send((b"MGET", *keys))
        except SemelError as error:
            self._handle_error(connection, error)
            return None
        self._outage.count_answer()
        now = time.monotonic()
        if clock.is_old(now):
            self._ask_time(connection)
        return None if reply[0] is None else unpack(id, reply, clock.latest(now))

    def write(self, write: Write) -> None:
        if write.delay and self._delayed < MAX_PENDING:
            self._delayed += 1
            asyncio.get_running_loop().call_later(write.delay, self._send_delayed, write)
        else:
            self._send(write)

    async def settle(self, id: bytes) -> None:
        last = self._writes.get(id)
        if last is not None and last.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([last], timeout=self._settings.timeout)

    async def invalidate(self, id: bytes, token: int, seconds: float) -> None:
        keys = entry_keys(self._prefix + self.name, id)
        connection = await self._servers.connection(await self._servers.address_of(keys[0]))
        for command in invalidation(keys, token, seconds):
            await connection.send(command.parts)

    async def connect(self, seconds: float) -> bool:
        self._start_opening()
        if self._opener is not None:
            await asyncio.wait([self._opener], timeout=seconds)
        return not self._outage.active

    def open(self) -> None:
        if self._closed:
            self._closed, self._outage = False, Outage()
            self._servers.open()

    async def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        writes = [write for write in self._writes.values() if write.get_loop() is loop]  # not those of a closed loop
        if writes:
            await asyncio.wait(writes, timeout=self._settings.timeout)
        if self._opener is not None and not self._opener.done():
            self._opener.cancel()
            await asyncio.gather(self._opener, return_exceptions=True)
        await self._servers.close()

    # -- reading and writing ---------------------------------------------------------------------------------------

    def _ready(self, key: bytes) -> tuple[AsyncRedisConnection | None, ServerTime | None]:
        """Return the open connection to the server that has the key, and its clock. If there is none, open one."""
        connection = None if self._closed else self._servers.ready(key)
        if connection is None:
            self._start_opening()
            return None, None
        return connection, self._times.get(connection.address)

    def _handle_error(self, connection: AsyncRedisConnection, error: SemelError) -> None:
        self.tally.failed += 1
        if isinstance(error, Moved):
            self._servers.topology.moved(error, connection.address)
            self._start_opening()
        elif isinstance(error, (StoreUncertain, ServerUnreachable)) or self._outage.count_refusal():
            self._servers.drop(connection)
            if not self._outage.active:
                self._outage.begin(error, self.on_change)
            self._start_opening()

    def _send_delayed(self, write: Write) -> None:
        self._delayed -= 1
        self._send(write)

    def _send(self, write: Write) -> None:
        if write.wanted is not None and not write.wanted():
            return
        key = copy_key(self._prefix + self.name, write.id)
        connection, clock = self._ready(key)
        if connection is None or clock is None or len(self._writes) >= MAX_PENDING:
            self.tally.dropped += 1
            return
        try:
            sent = connection.send(write_command(write, key, clock).parts)
        except SemelError as error:
            self._handle_error(connection, error)
            return
        self._writes[write.id] = sent
        sent.add_done_callback(lambda done: self._on_written(write.id, done, connection.address))
        if clock.is_old(time.monotonic()):
            self._ask_time(connection)

    def _on_written(self, id: bytes, done: asyncio.Future[Any], address: Address) -> None:
        if self._writes.get(id) is done:
            del self._writes[id]
        error = None if done.cancelled() else done.exception()
        if error is None:
            self.tally.written += 1
            return
        self.tally.failed += 1
        if isinstance(error, Moved):
            self._servers.topology.moved(error, address)

    # -- keeping the connections open ------------------------------------------------------------------------------

    def _ask_time(self, connection: AsyncRedisConnection) -> None:
        if connection.address in self._asking or connection.closed:
            return
        asked = time.monotonic()
        self._asking.add(connection.address)

        def on_reply(done: asyncio.Future[Any]) -> None:
            self._asking.discard(connection.address)
            if not done.cancelled() and done.exception() is None:
                self._times[connection.address].learn(asked, time.monotonic(), done.result())

        connection.send(TIME.parts).add_done_callback(on_reply)

    def _start_opening(self) -> None:
        """Have a task open the connections, unless one does so already."""
        if not self._closed and (self._opener is None or self._opener.done()):
            self._opener = asyncio.get_running_loop().create_task(self._open_all(), name="semel-tier")

    async def _open_all(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._outage.retry_at - time.monotonic()))
            try:
                for address in await self._servers.masters():
                    await self._open(address)
            except SemelError as error:
                self._outage.begin(error, self.on_change)
                continue
            if self._outage.active:
                self._outage.end(self.on_change)
            return

    async def _open(self, address: Address) -> None:
        connection = await self._servers.connection(address)
        if address not in self._times or self._times[address].is_old(time.monotonic()) or self._outage.active:
            asked = time.monotonic()
            answer = await connection.send(TIME.parts)
            self._times[address] = ServerTime(asked, time.monotonic(), answer)
