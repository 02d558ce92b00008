"""The connections of an async store, shared by all its tasks. Commands of one turn of the loop share a write.

With many callers the first commands are written before the last caller has sent its own. So the server works while we
do, and neither waits for the other's whole batch.

This is a thin asyncio protocol around hiredis' reader. The connections of redis-py serve one caller at a time, and
that, not Redis, is what limits them: see the page on speed. Replies come in the order of the commands, so a caller
that was cancelled leaves its place in the queue, and its reply is dropped. ``connection.py`` does the same for
threads; it is no twin of this module, because a thread blocks on its own batch and shares nothing.

``AsyncServers`` knows where the servers are, and opens each connection once, however many tasks ask for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, TypeVar, cast

from semel.engine.ports import STORE_CLOSED
from semel.errors import ConfigurationError, SemelError, StoreError, StoreUncertain
from semel.stores.redis.commands import Handshake, RedisCommand, ServerClock, introduce, prepare
from semel.stores.redis.failures import (
    NoScript,
    NotMaster,
    ServerUnreachable,
    connection_lost,
    error_of_reply,
    server_unreachable,
    with_cause,
)
from semel.stores.redis.risks import QUESTIONS, RiskLog
from semel.stores.redis.settings import CLOSE_TIMEOUT, MAX_IN_FLIGHT, Address, RedisSettings
from semel.stores.redis.topology import SearchTime, Topology, topology_of
from semel.stores.risks import Risk

WRITE_EARLY: Final = 8
"""Queued commands that are written without waiting for the end of the turn. With fewer, system calls cost too much."""
_INCOMPLETE: Final = object()


async def open_connection(
    settings: RedisSettings, address: Address, on_message: Callable[[bytes], object] | None = None
) -> AsyncRedisConnection:
    """Return an open connection to a server, before any handshake.

    :param on_message: called with each message of a channel that the connection subscribes to.
    """
    loop = asyncio.get_running_loop()

    def make() -> AsyncRedisConnection:
        return AsyncRedisConnection(settings, address, on_message)

    try:
        async with asyncio.timeout(settings.connect_timeout):
            if not address.port:
                _, connection = await loop.create_unix_connection(make, address.host)
            else:
                context = _tls(settings) if settings.tls else None
                _, connection = await loop.create_connection(make, address.host, address.port, ssl=context)
    except (OSError, TimeoutError, UnicodeError, OverflowError) as error:  # the last two: no valid host or port
        raise server_unreachable(str(address), error) from error
    return connection


def _tls(settings: RedisSettings) -> Any:
    from redis.asyncio.connection import RedisSSLContext
    from redis.exceptions import RedisError

    options = {"cert_reqs": "required", "check_hostname": True, **settings.ssl}
    try:
        return RedisSSLContext(**options).get()
    except (OSError, TypeError, ValueError, RedisError) as error:
        raise ConfigurationError(f"the TLS settings of the Redis URL cannot be used: {error}") from error


class AsyncRedisConnection(asyncio.Protocol):
    """The connection, the queue of replies to come, and an estimate of the server's clock."""

    def __init__(self, settings: RedisSettings, address: Address, on_message: Callable[[bytes], object] | None) -> None:
        from hiredis import Reader, ReplyError, pack_command

        self.address = address
        self.clock = ServerClock()
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        """Set when the connection is broken."""
        self._pack: Callable[[Any], bytes] = pack_command
        self._timeout = settings.timeout
        self._wait_command = settings.wait_command
        self._next_wait: asyncio.Future[Any] | None = None
        """The reply to the WAIT that is sent at the end of this turn."""
        self._sent_wait: asyncio.Future[Any] | None = None
        """The reply to the WAIT that was sent and is not answered yet."""
        self._held = 0
        """Durable commands that are not sent before that reply."""
        self._on_message = on_message
        self._reader = Reader(
            notEnoughData=_INCOMPLETE, replyError=lambda text: with_cause(error_of_reply(text), ReplyError(text))
        )
        self._transport: asyncio.Transport | None = None
        self._replies: deque[asyncio.Future[Any]] = deque()
        """The replies to come, in the order of the commands."""
        self._unsent: list[bytes] = []
        self._flushing = False
        self._paused = False
        self._received_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    # -- what a store calls ----------------------------------------------------------------------------------------

    async def send_durable(self, parts: tuple[Any, ...] | bytes, asking: bool = False) -> tuple[Any, Any]:
        """Send one command and a WAIT after it. Return the replies to both; errors are replies, too.

        The WAIT is sent at the end of the turn, after all commands of the turn, and confirms all of them. One WAIT is
        under way at a time: the server takes them one by one, and each would add its time to the next. Commands that
        come meanwhile are held, and share the next WAIT.
        """
        await self._until_wait_is_answered()
        sent = self.send(parts, asking)
        wait = self._next_wait
        if wait is None:
            wait = self._next_wait = self.loop.create_future()
            wait.add_done_callback(_drop)  # all who share it may be gone when it fails
        try:
            reply = await sent
        except NoScript:
            raise
        except SemelError as error:
            return error, None
        try:
            return reply, await asyncio.shield(wait)
        except SemelError as error:
            return reply, error

    def send_unanswered(self, parts: tuple[Any, ...] | bytes) -> None:
        """Send one command whose reply nobody waits for. If it cannot be sent, it is left out."""
        with contextlib.suppress(SemelError):
            self.send(parts).add_done_callback(_drop)

    async def exchange(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send all commands together and return all replies, in one round trip. Errors are replies, too."""
        replies = await self._exchange([command.parts for command in commands])
        for at, reply in enumerate(replies):
            if isinstance(reply, NoScript):
                (replies[at],) = await self._exchange([commands[at].in_full().parts])
        return replies

    async def run_handshake(self, handshake: Handshake) -> None:
        """Run a handshake; the connection is closed if it fails."""
        try:
            commands = next(handshake)
            while True:
                replies = await self._exchange([command.parts for command in commands])
                for reply in replies:
                    if isinstance(reply, StoreUncertain):
                        raise server_unreachable(str(self.address), reply)
                commands = handshake.send(replies)
        except StopIteration:
            return
        except BaseException:
            self.close()
            raise

    def send(self, parts: tuple[Any, ...] | bytes, asking: bool = False) -> asyncio.Future[Any]:
        """Queue one command for the write of this turn. The future resolves to its reply."""
        if asking:
            self.send((b"ASKING",)).add_done_callback(_drop)
        if self.closed:
            raise ServerUnreachable(f"the connection to Redis at {self.address} is closed")
        if len(self._replies) >= MAX_IN_FLIGHT:
            raise ServerUnreachable(f"{MAX_IN_FLIGHT} commands wait for Redis at {self.address} already")
        future: asyncio.Future[Any] = self.loop.create_future()
        if not self._replies:
            self._received_at = monotonic()
        self._replies.append(future)
        self._unsent.append(parts if type(parts) is bytes else self._pack(parts))
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._write, True)
        elif len(self._unsent) >= WRITE_EARLY:
            self._write()
        return future

    async def finish(self) -> None:
        """Wait a moment for the replies that are still to come, then close."""
        until = monotonic() + CLOSE_TIMEOUT
        while not self.closed and (left := until - monotonic()) > 0:
            unanswered = [each for each in (*self._replies, self._next_wait) if each is not None and not each.done()]
            if unanswered:
                await asyncio.wait(unanswered, timeout=left)
            elif self._held:  # they are sent in the next turn
                await asyncio.sleep(0)
            else:
                break
        self.close()

    def close(self) -> None:
        self.closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- writing and reading ---------------------------------------------------------------------------------------

    async def _until_wait_is_answered(self) -> None:
        if self._sent_wait is None:
            return
        if self._held >= MAX_IN_FLIGHT:
            raise ServerUnreachable(f"{MAX_IN_FLIGHT} commands wait for Redis at {self.address} already")
        self._held += 1
        try:
            while self._sent_wait is not None:
                await asyncio.wait([self._sent_wait])
        finally:
            self._held -= 1

    async def _exchange(self, commands: Sequence[tuple[Any, ...] | bytes]) -> list[Any]:
        replies: list[Any] = []
        futures: list[asyncio.Future[Any]] = []
        try:
            for parts in commands:
                futures.append(self.send(parts))
            for future in futures:
                try:
                    replies.append(await future)
                except SemelError as error:
                    replies.append(error)
        except BaseException:
            for future in futures:
                if not future.cancel():
                    _drop(future)
            raise
        return replies

    def _wait_answered(self, wait: asyncio.Future[Any]) -> None:
        self._sent_wait = None

    def _write(self, end_of_turn: bool = False) -> None:
        """Write what is queued; at the end of a turn of the loop with a WAIT after it, if one is needed."""
        if end_of_turn:
            self._flushing = False
            if self._next_wait is not None and not self.closed:
                self._replies.append(self._next_wait)
                self._unsent.append(self._pack(self._wait_command))
                self._sent_wait, self._next_wait = self._next_wait, None
                self._sent_wait.add_done_callback(self._wait_answered)
        if self._paused or self.closed or self._transport is None or not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        self._transport.write(b"".join(unsent) if len(unsent) > 1 else unsent[0])
        if self._watchdog is None:
            self._watchdog = self.loop.call_later(self._timeout, self._check_silence)

    def _check_silence(self) -> None:
        """Break the connection if the server has been silent for too long, so that callers get an error."""
        self._watchdog = None
        if not self._replies or self.closed:
            return
        silent = monotonic() - self._received_at
        if silent >= self._timeout:
            self._end(f"no answer within {self._timeout:g} s")
        else:
            self._watchdog = self.loop.call_later(self._timeout - silent, self._check_silence)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, replies = self._reader, self._replies
        reader.feed(data)
        self._received_at = monotonic()
        try:
            while (reply := reader.gets()) is not _INCOMPLETE:
                if self._on_message is not None and isinstance(reply, list) and reply[0] == b"message":
                    self._on_message(reply[2])
                    continue
                future = replies.popleft()
                if future.done():
                    continue
                if isinstance(reply, SemelError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except Exception as error:  # a broken stream, or one reply too many: the order is lost
            self._end(f"{type(error).__name__}: {error}")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc is not None else "the server closed it", exc)

    def _end(self, why: str, cause: Exception | None = None) -> None:
        """Fail everyone who waits: what was sent is uncertain, what is still queued here was certainly not sent."""
        self.close()
        self.ended.set()
        unsent = len(self._unsent)
        self._unsent = []
        if self._next_wait is not None:  # the commands before it may have been sent
            self._next_wait.set_exception(connection_lost(str(self.address), why))
            self._next_wait = None
        while self._replies:
            future = self._replies.popleft()
            if not future.done():
                trouble: SemelError = connection_lost(str(self.address), why)
                if len(self._replies) < unsent:
                    trouble = ServerUnreachable(f"the connection to Redis at {self.address} was lost: {why}")
                future.set_exception(with_cause(trouble, cause))


def _drop(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future or task as seen: nobody awaits it, or everyone who did may be gone by now."""
    if not future.cancelled():
        future.exception()


R = TypeVar("R")


class AsyncServers:
    """The servers of a store: where they are, the open connections to each, and which risks were logged."""

    def __init__(self, settings: RedisSettings, *, assess_risks: bool = True) -> None:
        """
        :param assess_risks: log settings of a server that can lose records, when it is first connected to.
        """
        self.topology: Topology = topology_of(settings)
        self.cursors: dict[Address, bytes] = {}
        """Where the next sweep of each server continues."""
        self.down: set[Address | None] = set()
        """Servers that a caller has retried in vain: later callers try them once, and do not wait."""
        self._settings = settings
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
        if self.topology.address_of(key) is None:
            await self.search()
        return self.topology.require_address(key)

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
            self._searching.add_done_callback(_drop)
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
        asked = time.time()
        replies = await connection.exchange(QUESTIONS)
        return self._risks.report(replies, asked, time.time())

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
            connection = await open_connection(settings, address)
            try:
                async with asyncio.timeout(settings.connect_timeout):
                    await connection.run_handshake(introduce(*settings.credentials(), settings.db))
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
        _drop(task)

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
                connection = await open_connection(settings, address)
                await connection.run_handshake(introduce(*settings.credentials(self.topology.sentinels), 0))
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
