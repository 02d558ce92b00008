"""One connection of an async store, shared by all its tasks. Commands of one turn of the loop share a write.

With many callers the first commands are written before the last caller has sent its own. So the server works while we
do, and neither waits for the other's whole batch.

This is a thin asyncio protocol around hiredis' reader. The connections of redis-py serve one caller at a time, and
that, not Redis, is what limits them: see the page on speed. Replies come in the order of the commands, so a caller
that was cancelled leaves its place in the queue, and its reply is dropped. ``connection.py`` does the same for
threads; it is no twin of this module, because a thread blocks on its own batch and shares nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, cast

from semel.errors import ConfigurationError, SemelError, StoreUncertain
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.failures import (
    NoScript,
    ServerUnreachable,
    connection_lost,
    error_of_reply,
    server_unreachable,
)
from semel.stores.redis.handshake import Handshake, ServerClock
from semel.stores.redis.settings import CLOSE_TIMEOUT, MAX_IN_FLIGHT, Address, RedisSettings

WRITE_EARLY: Final = 8
"""So many commands are written without waiting for the end of the turn. With fewer, the system calls cost too much."""
_INCOMPLETE: Final = object()


async def open_connection(
    settings: RedisSettings,
    address: Address,
    wait: RedisCommand,
    on_message: Callable[[bytes], object] | None = None,
) -> AsyncRedisConnection:
    """Return an open connection to a server, before any handshake.

    :param wait: the command that confirms writes.
    :param on_message: called with each message of a channel that the connection subscribes to.
    """
    loop = asyncio.get_running_loop()

    def make() -> AsyncRedisConnection:
        return AsyncRedisConnection(address, settings.timeout, wait, on_message)

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

    def __init__(
        self, address: Address, timeout: float, wait: RedisCommand, on_message: Callable[[bytes], object] | None
    ) -> None:
        from hiredis import Reader, ReplyError, pack_command

        def error_of(text: str) -> SemelError:
            error = error_of_reply(text)
            error.__cause__ = ReplyError(text)
            return error

        self.address = address
        self.clock = ServerClock()
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        """Set when the connection is broken."""
        self._pack = pack_command
        self._timeout = timeout
        self._wait_command = wait
        self._next_wait: asyncio.Future[Any] | None = None
        """The reply to the WAIT that is sent at the end of this turn."""
        self._sent_wait: asyncio.Future[Any] | None = None
        """The reply to the WAIT that was sent and is not answered yet."""
        self._held = 0
        """Durable commands that are not sent before that reply."""
        self._on_message = on_message
        self._reader = Reader(notEnoughData=_INCOMPLETE, replyError=error_of)
        self._transport: asyncio.Transport | None = None
        self._replies: deque[asyncio.Future[Any]] = deque()
        """The replies to come, in the order of the commands."""
        self._unsent: list[bytes] = []
        self._flushing = False
        self._paused = False
        self._received_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    # -- what a store calls ----------------------------------------------------------------------------------------

    async def send_durable(self, parts: tuple[Any, ...], asking: bool = False) -> tuple[Any, Any]:
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

    def send_unanswered(self, parts: tuple[Any, ...]) -> None:
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

    def send(self, parts: tuple[Any, ...], asking: bool = False) -> asyncio.Future[Any]:
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
        self._unsent.append(self._pack(parts))
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

    async def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
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
                self._unsent.append(self._pack(self._wait_command.parts))
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
                trouble.__cause__ = cause
                future.set_exception(trouble)


def _drop(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future that nobody awaits as seen."""
    if not future.cancelled():
        future.exception()
