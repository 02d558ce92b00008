"""One connection of an async store, shared by all its tasks: what they ask in one turn of the loop shares its writes.

With many callers the first of them are written before the rest has asked: so the server works while we do, and neither
waits for the other's whole batch.

A thin protocol on hiredis' reader. redis-py's own connections serve one caller at a time, and that, not Redis, is what
limits them: see the page on speed. Answers come in the order of the commands, so a caller that went away leaves its
place in the queue, and its answer is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, cast

from semel.errors import ConfigurationError, SemelError, StoreUncertain
from semel.stores.redis.clock import ServerClock
from semel.stores.redis.greeting import Greeting
from semel.stores.redis.replies import NoScript, Unreachable, from_reply, lost, unreachable
from semel.stores.redis.scripts import Command
from semel.stores.redis.settings import CLOSE_PATIENCE, MOST_IN_FLIGHT, Address, Settings

__all__ = ["AsyncLink", "open_link"]

TOGETHER: Final = 8
"""Commands that are written without waiting for the end of the turn. With fewer, system calls cost what is gained."""
_NOTHING: Final = object()


async def open_link(
    settings: Settings, address: Address, barrier: Command, hear: Callable[[bytes], object] | None = None
) -> AsyncLink:
    """An open line to a server, on which nothing was said yet."""
    loop = asyncio.get_running_loop()

    def make() -> AsyncLink:
        return AsyncLink(address, settings.timeout, barrier, hear)

    try:
        async with asyncio.timeout(settings.connect_timeout):
            if not address.port:
                _, link = await loop.create_unix_connection(make, address.host)
            else:
                context = _tls(settings) if settings.tls else None
                _, link = await loop.create_connection(make, address.host, address.port, ssl=context)
    except (OSError, TimeoutError, UnicodeError, OverflowError) as error:  # the last two of a name, a port
        raise unreachable(str(address), error) from error
    return link


def _tls(settings: Settings) -> Any:
    from redis.asyncio.connection import RedisSSLContext
    from redis.exceptions import RedisError

    given = {"cert_reqs": "required", "check_hostname": True, **settings.ssl}
    try:
        return RedisSSLContext(**given).get()
    except (OSError, TypeError, ValueError, RedisError) as error:
        raise ConfigurationError(f"the TLS settings of the Redis URL cannot be used: {error}") from error


class AsyncLink(asyncio.Protocol):
    """The line, its queue of answers to come, and what is known of the server's clock."""

    def __init__(
        self, address: Address, timeout: float, barrier: Command, hear: Callable[[bytes], object] | None
    ) -> None:
        from hiredis import Reader, ReplyError, pack_command

        def mapped(text: str) -> SemelError:
            error = from_reply(text)
            error.__cause__ = ReplyError(text)
            return error

        self.address = address
        self.clock = ServerClock()
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        """Set when the line is broken."""
        self._pack = pack_command
        self._timeout = timeout
        self._barrier_command = barrier
        self._barrier: asyncio.Future[Any] | None = None
        self._confirming: asyncio.Future[Any] | None = None
        """The barrier that has left and is not answered yet."""
        self._held = 0
        self._hear = hear
        self._reader = Reader(notEnoughData=_NOTHING, replyError=mapped)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._flushing = False
        self._paused = False
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None

    # -- what a store asks -----------------------------------------------------------------------------------------

    async def kept(self, parts: tuple[Any, ...], asking: bool = False) -> tuple[Any, Any]:
        """One command, and the barrier behind it: what either was answered with. The barrier leaves at the end of the
        turn, behind all that were asked for in it, and is the answer to all of them.

        One barrier is under way at a time: the server takes them one by one, and each would add its wait to the next.
        Who comes meanwhile is held, and shares the next one with all others who were."""
        await self._let_through()
        sent = self.send(parts, asking)
        barrier = self._barrier
        if barrier is None:
            barrier = self._barrier = self.loop.create_future()
            barrier.add_done_callback(_drop)  # all who asked may be gone when it fails
        try:
            reply = await sent
        except NoScript:
            raise
        except SemelError as error:
            return error, None
        try:
            return reply, await asyncio.shield(barrier)
        except SemelError as error:
            return reply, error

    def tell(self, parts: tuple[Any, ...]) -> None:
        """One command whose answer nobody waits for; where it cannot be sent, it is not."""
        with contextlib.suppress(SemelError):
            self.send(parts).add_done_callback(_drop)

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """One trip: all are written together, without a task for each. An error is an answer, too."""
        replies = await self._exchange([command.parts for command in commands])
        for at, reply in enumerate(replies):
            if isinstance(reply, NoScript):
                (replies[at],) = await self._exchange([commands[at].in_full().parts])
        return replies

    async def greet(self, greeting: Greeting) -> None:
        """Say what is said on a new connection."""
        try:
            commands = next(greeting)
            while True:
                replies = await self._exchange([command.parts for command in commands])
                for reply in replies:
                    if isinstance(reply, StoreUncertain):
                        raise unreachable(str(self.address), reply)
                commands = greeting.send(replies)
        except StopIteration:
            return
        except BaseException:
            self.close()
            raise

    def send(self, parts: tuple[Any, ...], asking: bool = False) -> asyncio.Future[Any]:
        """Queue one command for the write of this turn; the future of its reply."""
        if asking:
            self.send((b"ASKING",)).add_done_callback(_drop)
        if self.closed:
            raise Unreachable(f"the connection to Redis at {self.address} is closed")
        if len(self._waiting) >= MOST_IN_FLIGHT:
            raise Unreachable(f"{MOST_IN_FLIGHT} commands wait for Redis at {self.address} already")
        future: asyncio.Future[Any] = self.loop.create_future()
        if not self._waiting:
            self._heard_at = monotonic()
        self._waiting.append(future)
        self._unsent.append(self._pack(parts))
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)
        elif len(self._unsent) >= TOGETHER:
            self._write()
        return future

    async def finish(self) -> None:
        """Wait a moment for the answers that are still to come, then close."""
        until = monotonic() + CLOSE_PATIENCE
        while not self.closed and (left := until - monotonic()) > 0:
            waiting = [each for each in (*self._waiting, self._barrier) if each is not None and not each.done()]
            if waiting:
                await asyncio.wait(waiting, timeout=left)
            elif self._held:  # they go on in the next turn
                await asyncio.sleep(0)
            else:
                break
        self.close()

    def close(self) -> None:
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- how it travels --------------------------------------------------------------------------------------------

    async def _let_through(self) -> None:
        if self._confirming is None:
            return
        if self._held >= MOST_IN_FLIGHT:
            raise Unreachable(f"{MOST_IN_FLIGHT} commands wait for Redis at {self.address} already")
        self._held += 1
        try:
            while self._confirming is not None:
                await asyncio.wait([self._confirming])
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

    def _flush(self) -> None:
        self._flushing = False
        if self._barrier is not None and not self.closed:
            self._waiting.append(self._barrier)
            self._unsent.append(self._pack(self._barrier_command.parts))
            self._confirming, self._barrier = self._barrier, None
            self._confirming.add_done_callback(self._confirmed)
        self._write()

    def _confirmed(self, barrier: asyncio.Future[Any]) -> None:
        self._confirming = None

    def _write(self) -> None:
        if self._paused or self.closed or self._transport is None or not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        self._transport.write(b"".join(unsent) if len(unsent) > 1 else unsent[0])
        if self._watch is None:
            self._watch = self.loop.call_later(self._timeout, self._look)

    def _look(self) -> None:
        """Break the line when the server has been silent for too long: whoever waits must be told."""
        self._watch = None
        if not self._waiting or self.closed:
            return
        silent = monotonic() - self._heard_at
        if silent >= self._timeout:
            self._end(f"no answer within {self._timeout:g} s")
        else:
            self._watch = self.loop.call_later(self._timeout - silent, self._look)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        self._heard_at = monotonic()
        try:
            while (reply := reader.gets()) is not _NOTHING:
                if self._hear is not None and isinstance(reply, list) and reply[0] == b"message":
                    self._hear(reply[2])
                    continue
                future = waiting.popleft()
                if future.done():
                    continue
                if isinstance(reply, SemelError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except Exception as error:  # a broken stream, or an answer to nothing: nobody knows whose the next one is
            self._end(f"{type(error).__name__}: {error}")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc is not None else "the server closed it", exc)

    def _end(self, why: str, cause: Exception | None = None) -> None:
        """The line is broken: what was sent is uncertain, what was still queued here is not."""
        self.close()
        self.ended.set()
        never = len(self._unsent)
        self._unsent = []
        if self._barrier is not None:  # what it stands behind may have left already
            self._barrier.set_exception(lost(str(self.address), why))
            self._barrier = None
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                trouble: SemelError = lost(str(self.address), why)
                if len(self._waiting) < never:
                    trouble = Unreachable(f"the connection to Redis at {self.address} was lost: {why}")
                trouble.__cause__ = cause
                future.set_exception(trouble)


def _drop(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
