"""The servers of an async store: where they are, the open connections to each, and which risks were logged.

``servers.py`` is the same for threads, and says why both are written by hand.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from semel.engine.ports import STORE_CLOSED
from semel.errors import ConfigurationError, SemelError, StoreError
from semel.stores.redis.aio_connection import AsyncRedisConnection, open_connection
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.failures import NotMaster, ServerUnreachable, server_unreachable
from semel.stores.redis.handshake import introduce, prepare
from semel.stores.redis.risks import QUESTIONS, Risk, RiskLog
from semel.stores.redis.settings import Address, RedisSettings
from semel.stores.redis.topology import SearchTime, Topology, topology_of

R = TypeVar("R")


class AsyncServers:
    """Finds the servers and opens each connection once, however many tasks ask for it."""

    def __init__(self, settings: RedisSettings, wait: RedisCommand, *, assess_risks: bool = True) -> None:
        """
        :param wait: the command that confirms writes.
        :param assess_risks: log settings of a server that can lose records, when it is first connected to.
        """
        self.topology: Topology = topology_of(settings)
        self.cursors: dict[Address, bytes] = {}
        """Where the next sweep of each server continues."""
        self.down: set[Address | None] = set()
        """Servers that a caller has retried in vain: later callers try them once, and do not wait."""
        self._settings = settings
        self._wait = wait
        self.only: AsyncRedisConnection | None = None
        """The last open connection, if there is one server that has all keys."""
        self._connections: dict[Address, AsyncRedisConnection] = {}
        self._durable_connections: dict[Address, AsyncRedisConnection] = {}
        """The second connection to each server, for durable commands. WAIT blocks its connection, and commands that
        need no confirmation must not queue behind it."""
        self._opening: dict[tuple[Address, bool], asyncio.Task[AsyncRedisConnection]] = {}
        self._searching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._risks = RiskLog(settings)
        self._assess_risks = assess_risks
        self._assessed: set[Address] = set()
        self._closed = False

    def ready(self, key: bytes) -> AsyncRedisConnection | None:
        """Return the open connection to the server that has the key, if there is one: the path of nearly every call."""
        address = self.topology.only or self.topology.address_of(key)
        connection = self._connections.get(address) if address is not None else None
        if connection is None or connection.closed or connection.loop is not asyncio.get_running_loop():
            return None
        return connection

    async def address_of(self, key: bytes) -> Address:
        """Return the server that has the key, after a search if need be."""
        address = self.topology.address_of(key)
        if address is None:
            await self.search()
            address = self.topology.address_of(key)
            if address is None:
                self.topology.forget()
                raise NotMaster("no node of the Redis Cluster has the slot")
        return address

    async def masters(self) -> list[Address]:
        """Return all servers that take writes, after a search if need be."""
        if not self.topology.masters():
            await self.search()
        return self.topology.masters()

    async def connection(self, address: Address, *, durable: bool = False) -> AsyncRedisConnection:
        """Return the connection to a server. If it must be opened, all who ask meanwhile wait for the same one.

        :param durable: return the second connection, for durable commands.
        """
        self._check_usable()
        connection = (self._durable_connections if durable else self._connections).get(address)
        if connection is not None and not connection.closed:
            return connection
        opening = self._opening.get((address, durable))
        if opening is None:
            task = asyncio.create_task(self._open(address, durable), name="semel-connect")
            opening = self._opening[address, durable] = task
            opening.add_done_callback(lambda task: self._opened((address, durable), task))
        return await self._join(opening)

    async def search(self) -> None:
        """Find the servers. All who ask meanwhile wait for the same search."""
        self._check_usable()
        if self._searching is None or self._searching.done():
            self._searching = asyncio.create_task(self._search(), name="semel-search")
            self._searching.add_done_callback(_retrieve)
        await self._join(self._searching)

    async def _join(self, task: asyncio.Task[R]) -> R:
        """Wait for a task that others wait for, too. If ``close`` cancels it, its callers get an error instead."""
        caller = asyncio.current_task()
        cancellations = caller.cancelling() if caller is not None else 0
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled() or (caller is not None and caller.cancelling() > cancellations):
                raise
            raise ServerUnreachable(STORE_CLOSED) from None

    def drop(self, connection: AsyncRedisConnection) -> None:
        """Close a connection that is lost, or that leads to a server which is no longer a master."""
        connection.close()
        for connections in (self._connections, self._durable_connections):
            if connections.get(connection.address) is connection:
                del connections[connection.address]
                self.topology.forget(connection.address)

    async def assess(self, connection: AsyncRedisConnection) -> list[Risk]:
        """Return the risks of a server; new ones are logged."""
        return self._risks.report(await connection.exchange(QUESTIONS))

    def open(self) -> None:
        """Open connections again after ``close``, when they are asked for."""
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in (*self._opening.values(), self._searching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        connections = (*self._connections.values(), *self._durable_connections.values())
        await asyncio.gather(*(connection.finish() for connection in connections if connection.loop is loop))
        self._connections, self._durable_connections = {}, {}
        await asyncio.sleep(0)  # the transports end in the next turn

    async def _open(self, address: Address, durable: bool) -> AsyncRedisConnection:
        settings = self._settings
        try:
            connection = await open_connection(settings, address, self._wait)
            try:
                async with asyncio.timeout(settings.connect_timeout):
                    await connection.run_handshake(introduce(settings.username, settings.password, settings.db))
                    if not durable:  # scripts, clock and risks are known from the first connection
                        await connection.run_handshake(prepare(settings, connection.clock))
                        if self._assess_risks and address not in self._assessed:
                            self._assessed.add(address)
                            await self.assess(connection)
            except BaseException:
                connection.close()
                raise
        except TimeoutError as error:
            self.topology.forget(address)
            raise NotMaster(f"Redis at {address} did not answer the first commands in time") from error
        except SemelError:
            self.topology.forget(address)
            raise
        (self._durable_connections if durable else self._connections)[address] = connection
        if self.topology.only is not None and not durable:
            self.only = connection
        return connection

    def _opened(self, key: tuple[Address, bool], task: asyncio.Task[AsyncRedisConnection]) -> None:
        if self._opening.get(key) is task:
            del self._opening[key]
        _retrieve(task)

    async def _search(self) -> None:
        search, time = self.topology.search(), SearchTime(self._settings.connect_timeout)
        try:
            address, command, left = next(search)
            while True:
                address, command, left = search.send(await self._ask(address, command, time.share(left)))
        except StopIteration:
            self.down.discard(None)

    async def _ask(self, address: Address, command: tuple[bytes, ...], timeout: float) -> Any:
        """Send one command over a connection of its own. Returns the reply, or the error as a value."""
        settings = self._settings
        connection: AsyncRedisConnection | None = None
        try:
            async with asyncio.timeout(timeout):
                connection = await open_connection(settings, address, self._wait)
                if self.topology.sentinels:
                    introduction = introduce(settings.sentinel_username, settings.sentinel_password, 0)
                else:
                    introduction = introduce(settings.username, settings.password, 0)
                await connection.run_handshake(introduction)
                return await connection.send(command) or ()
        except TimeoutError as error:
            return server_unreachable(str(address), error)
        except StoreError as error:
            return error
        finally:
            if connection is not None:
                connection.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ServerUnreachable(STORE_CLOSED)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise ConfigurationError("this store belongs to another event loop: make one per loop")
            # The previous loop is closed, and with it everything that belonged to it.
            self._connections, self._durable_connections, self._opening = {}, {}, {}
            self._searching, self._loop = None, loop


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as seen: everyone who asked may be gone by now."""
    if not task.cancelled():
        task.exception()
