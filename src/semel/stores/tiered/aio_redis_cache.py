"""Redis as the cache of an async tiered store.

All tasks share one line to each server, which sends what they ask and write in one turn of the loop together and in
their order. Lines are opened by a task in the background: no caller waits for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from semel.core.policy import Duration
from semel.errors import SemelError, StoreUncertain
from semel.stores.redis.aio_connection import AsyncRedisConnection
from semel.stores.redis.aio_servers import AsyncServers
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.failures import Moved, ServerUnreachable
from semel.stores.redis.settings import Address
from semel.stores.tiered.copies import ServerTime, unpack
from semel.stores.tiered.outages import Outage
from semel.stores.tiered.ports import Found, Tally, Write
from semel.stores.tiered.redis_commands import CONNECT_TIMEOUT, TIME, TIMEOUT, command_of, settings_of
from semel.stores.tiered.writer import MOST_WAITING

__all__ = ["AsyncRedisCache"]


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
        """As of ``RedisCache``."""
        self.tally = Tally()
        self.on_change: Callable[[str | None], None] | None = None
        self._settings = settings_of(url, prefix, timeout, connect_timeout)
        # A cache may forget, so the servers are not assessed. Nothing waits for replicas either.
        self._servers = AsyncServers(self._settings, RedisCommand(()), assess_risks=False)
        self._times: dict[Address, ServerTime] = {}
        self._asking: set[Address] = set()
        """Servers that are asked for the time right now."""
        self._writes: dict[bytes, asyncio.Future[Any]] = {}
        """The last write of each id that is not confirmed yet."""
        self._held_back = 0
        self._outage = Outage()
        self._seeker: asyncio.Task[None] | None = None
        self._closed = False

    # -- what a tiered store asks ----------------------------------------------------------------------------------

    async def get(self, id: bytes) -> Found | None:
        link, clock = self._line(id)
        if link is None or clock is None:
            self.tally.skipped += 1
            return None
        try:
            reply = await link.send((b"GET", self._key(id)))
        except SemelError as error:
            self._refused(link, error)
            return None
        self._outage.answered()
        now = time.monotonic()
        if clock.is_old(now):
            self._ask_time(link)
        return None if reply is None else unpack(id, reply, clock.latest(now))

    def write(self, write: Write) -> None:
        if write.delay and self._held_back < MOST_WAITING:
            self._held_back += 1
            asyncio.get_running_loop().call_later(write.delay, self._due, write)
        else:
            self._send(write)

    async def settle(self, id: bytes) -> None:
        last = self._writes.get(id)
        if last is not None and last.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([last], timeout=self._settings.timeout)

    async def connect(self, seconds: float) -> bool:
        self._seek()
        if self._seeker is not None:
            await asyncio.wait([self._seeker], timeout=seconds)
        return not self._outage.away

    async def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        writes = [write for write in self._writes.values() if write.get_loop() is loop]  # not of a loop that is over
        if writes:
            await asyncio.wait(writes, timeout=self._settings.timeout)
        if self._seeker is not None and not self._seeker.done():
            self._seeker.cancel()
            await asyncio.gather(self._seeker, return_exceptions=True)
        await self._servers.close()

    def _key(self, id: bytes) -> bytes:
        return self._settings.prefix.encode() + id.hex().encode()

    # -- reading and writing ---------------------------------------------------------------------------------------

    def _line(self, id: bytes) -> tuple[AsyncRedisConnection | None, ServerTime | None]:
        """The open line to the server that has the id, and its clock; where there is none, it is sought."""
        link = None if self._closed else self._servers.ready(self._key(id))
        if link is None:
            self._seek()
            return None, None
        return link, self._times.get(link.address)

    def _refused(self, link: AsyncRedisConnection, error: SemelError) -> None:
        self.tally.failed += 1
        if isinstance(error, Moved):
            self._servers.topology.moved(error, link.address)
            self._seek()
        elif isinstance(error, (StoreUncertain, ServerUnreachable)) or self._outage.refused():
            self._servers.drop(link)
            if not self._outage.away:
                self._outage.begins(error, self.on_change)
            self._seek()

    def _due(self, write: Write) -> None:
        self._held_back -= 1
        self._send(write)

    def _send(self, write: Write) -> None:
        if write.wanted is not None and not write.wanted():
            return
        link, clock = self._line(write.id)
        if link is None or clock is None or len(self._writes) >= MOST_WAITING:
            self.tally.dropped += 1
            return
        try:
            sent = link.send(command_of(write, self._key(write.id), clock).parts)
        except SemelError as error:
            self._refused(link, error)
            return
        self._writes[write.id] = sent
        sent.add_done_callback(lambda done: self._wrote(write.id, done, link.address))
        if clock.is_old(time.monotonic()):
            self._ask_time(link)

    def _wrote(self, id: bytes, done: asyncio.Future[Any], address: Address) -> None:
        if self._writes.get(id) is done:
            del self._writes[id]
        error = None if done.cancelled() else done.exception()
        if error is None:
            self.tally.written += 1
            return
        self.tally.failed += 1
        if isinstance(error, Moved):
            self._servers.topology.moved(error, address)

    # -- keeping the lines -----------------------------------------------------------------------------------------

    def _ask_time(self, link: AsyncRedisConnection) -> None:
        if link.address in self._asking or link.closed:
            return
        asked = time.monotonic()
        self._asking.add(link.address)

        def heard(done: asyncio.Future[Any]) -> None:
            self._asking.discard(link.address)
            if not done.cancelled() and done.exception() is None:
                self._times[link.address].learn(asked, time.monotonic(), done.result())

        link.send(TIME.parts).add_done_callback(heard)

    def _seek(self) -> None:
        """Have the lines opened, by one task at a time."""
        if not self._closed and (self._seeker is None or self._seeker.done()):
            self._seeker = asyncio.get_running_loop().create_task(self._reach_all(), name="semel-tier")

    async def _reach_all(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._outage.seek_at - time.monotonic()))
            try:
                for address in await self._servers.masters():
                    await self._reach(address)
            except SemelError as error:
                self._outage.begins(error, self.on_change)
                continue
            if self._outage.away:
                self._outage.ends(self.on_change)
            return

    async def _reach(self, address: Address) -> None:
        link = await self._servers.connection(address)
        if address not in self._times or self._times[address].is_old(time.monotonic()) or self._outage.away:
            asked = time.monotonic()
            answer = await link.send(TIME.parts)
            self._times[address] = ServerTime(asked, time.monotonic(), answer)
