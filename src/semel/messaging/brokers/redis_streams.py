"""Redis Streams: an entry's fields are the attributes of the message and ``data``. Needs ``semel[redis]``, Redis 7.

It connects in the same way as the Redis store, so single servers, sentinels and clusters work, with the same URLs.

Every batch is one transaction for each Redis stream (MULTI, EXEC), so all of it is stored, or nothing. If the answer
is lost, nobody knows which, and the whole batch is sent again: messages may be stored twice, but in their order.

Redis itself hands the entries of a stream to whichever consumer of a group asks next, so two consumers would work on
one message stream at the same time. An ordered source therefore reads alone: one consumer of the group is the reader,
and the others wait until it stops or dies. To share work, use several Redis streams, or ``ordered=False``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import resources
from secrets import token_hex
from time import monotonic
from typing import Any, Final, Self, TypeAlias

from semel.core.messaging.messages import Message, attributes, read_message
from semel.core.policy import Duration, seconds
from semel.engine.background import BackgroundTask
from semel.errors import BrokerUnavailable, ConfigurationError, SemelError
from semel.messaging.brokers.options import flag, number, split_options
from semel.messaging.brokers.sending import LATE, send_in_waves, too_large
from semel.messaging.ports import BrokerDown, Capabilities, Delivery, DestinationDown, Refused, Result, Sent, TryAgain
from semel.stores.redis.aio_connection import AsyncServers
from semel.stores.redis.commands import RedisCommand, Script
from semel.stores.redis.connection import require_redis
from semel.stores.redis.failures import CommandRefused, ConnectionLost, Moved, NoMemory, NotMaster, ServerUnreachable
from semel.stores.redis.settings import CONNECT_TIMEOUT, TIMEOUT, URL_OPTIONS, RedisSettings

LARGEST: Final = 4 << 20
"""Redis takes up to 512 MB, but all of it must fit in its memory."""
TAKEOVER: Final = 30.0
MOST_WAITING: Final = 10_000
"""The most messages that wait behind postponed ones of their streams. Then no new ones are read."""
_DATA: Final = b"data"
_DOWN: Final = frozenset({"OOM", "MISCONF", "NOREPLICAS", "NOAUTH", "WRONGPASS"})
"""Error replies that every message gets."""


class RedisStreamsBroker:
    """Publishes to Redis Streams."""

    def __init__(
        self,
        url: str,
        *,
        stream: str = "",
        max_length: int | None = None,
        largest: int = LARGEST,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """
        :param url: same as for ``RedisStore``. With ``wait_replicas`` or ``wait_aof``, a message is sent when
            these have it.
        :param stream: the key of the Redis stream for messages without a destination.
        :param max_length: trim every stream to about this number of entries. **Entries that no consumer has read are
            lost, too.**
        :param largest: the most bytes that a message may have.
        :param timeout: how long the server may take to reply.
        :param connect_timeout: how long it may take to connect.
        """
        self._servers = _Servers(url, timeout, connect_timeout)
        self._stream = stream
        self._trim: tuple[Any, ...] = () if max_length is None else (b"MAXLEN", b"~", max_length)
        self.capabilities = Capabilities(name="Redis Streams", ordered=True, pipelines=True, largest=largest)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``redis://host:6379/0?stream=orders``; further options: ``max_length``, ``largest``."""
        url, options = split_options(url, {"stream": str, "max_length": number, "largest": number}, URL_OPTIONS)
        return cls(url, **options)

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        return await send_in_waves(messages, self._key, self._refuses, partial(self._send, deadline=deadline))

    async def close(self) -> None:
        await self._servers.close()

    def _key(self, message: Message) -> str:
        return message.destination or self._stream

    def _refuses(self, message: Message) -> Refused | None:
        if not self._key(message):
            return Refused("the message has no destination, and the relay no default: put ?stream=… into its URL")
        if "data" in message.headers:
            return Refused("a header cannot be called data on Redis Streams, where that is the field of the data")
        return too_large(message, self.capabilities.largest)

    async def _send(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        if monotonic() >= deadline:
            return [LATE] * len(messages)
        by_key: dict[str, list[int]] = {}
        for at, message in enumerate(messages):
            by_key.setdefault(self._key(message), []).append(at)
        results: dict[int, Result] = {}
        groups = ([messages[at] for at in places] for places in by_key.values())
        stored = await asyncio.gather(*map(partial(self._store, deadline=deadline), by_key, groups))
        for places, outcomes in zip(by_key.values(), stored, strict=True):
            results.update(zip(places, outcomes, strict=True))
        return [results[at] for at in range(len(messages))]

    async def _store(self, key: str, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        """Store the messages in one Redis stream, all or none."""
        add = (b"XADD", key, *self._trim, b"*")
        entries = [RedisCommand((*add, *_fields(message))) for message in messages]
        commands = [RedisCommand((b"MULTI",)), *entries, RedisCommand((b"EXEC",))]
        confirms, in_cluster = self._servers.confirms, self._servers.settings.kind == "cluster"
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                replies = await self._servers.exchange(key, [*commands, self._servers.wait] if confirms else commands)
        except TimeoutError:
            return [TryAgain("Redis did not answer before the deadline")] * len(messages)
        except CommandRefused as error:  # when it connected: it has another password, or no such database
            return [DestinationDown(str(error)) if in_cluster else BrokerDown(str(error))] * len(messages)
        except SemelError as error:
            return [_result(error, in_cluster)] * len(messages)
        stored = replies[len(commands) - 1]
        if isinstance(stored, SemelError):
            errors = (reply for reply in replies if isinstance(reply, SemelError))
            return [_result(next(errors), in_cluster)] * len(messages)
        if confirms and not self._servers.confirmed(replies[-1]):
            return [TryAgain("too few replicas, or not the disk, have confirmed the messages")] * len(messages)
        return [_result(entry, in_cluster) if isinstance(entry, SemelError) else Sent() for entry in stored]


def _fields(message: Message) -> Iterable[Any]:
    for name, text in attributes(message).items():
        yield from (name, text)
    yield from (_DATA, message.data)


def _result(error: SemelError, in_cluster: bool) -> Result:
    """Return what an error means for a message. A server of a cluster has only some of the streams."""
    code = _code(error)
    if code == "WRONGTYPE":
        return Refused("the destination is a key of Redis that is no stream")
    if code == "NOPERM":
        return Refused(str(error))
    if code in _DOWN or isinstance(error, (ServerUnreachable, NoMemory)):
        return DestinationDown(str(error)) if in_cluster else BrokerDown(str(error))
    return TryAgain(str(error))


def _code(error: BaseException) -> str:
    """Return the first word of an error reply."""
    return str(error.__cause__ or error).partition(" ")[0]


class RedisStreamsSource:
    """Consumes a Redis stream, as a consumer of a group."""

    def __init__(
        self,
        url: str,
        *,
        stream: str,
        group: str,
        consumer: str = "",
        ordered: bool = True,
        takeover: Duration = TAKEOVER,
        delete: bool = False,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """
        :param url: same as for ``RedisStore``.
        :param stream: the key of the Redis stream.
        :param group: the consumer group. It is created if it does not exist, and begins with the oldest entry.
        :param consumer: the name in the group. No two processes may share it. One that restarts with the same name
            continues at once with what it had not finished. Defaults to a new name.
        :param ordered: read alone, so that the order of every message stream is kept. With False, all consumers of the
            group share the work.
        :param takeover: how long a consumer may show no sign of life before others take over its messages.
        :param delete: delete entries that are acknowledged, too. Only if no other group reads the stream.
        :param timeout: how long the server may take to reply.
        :param connect_timeout: how long it may take to connect.
        """
        if not stream or not group:
            raise ConfigurationError(
                "a source of Redis Streams needs a stream and a group: ?stream=orders&group=billing"
            )
        self._servers = _Servers(url, timeout, connect_timeout)
        self._blocking = _Servers(url, timeout, connect_timeout, assess_risks=False)
        """A read that waits for a message holds up its connection."""
        self._stream = stream
        self._group = group
        self._consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
        self._takeover = seconds(takeover, "takeover")
        self._longest_wait = seconds(timeout, "timeout") / 2
        self._delete = delete
        self._ordered = ordered
        # In a cluster both keys must be in one slot.
        self._reader_key = f"{stream if '{' in stream else '{' + stream + '}'}:reader:{group}"
        self._reader_until = 0.0
        """Until when this consumer is the reader of an ordered source."""
        self._keeping = BackgroundTask("semel-redis-streams")
        self._forget()
        self.capabilities = Capabilities(
            name="Redis Streams", ordered=ordered, pipelines=True, largest=LARGEST, counts_starts=True
        )

    def _forget(self) -> None:
        self._begun = False
        self._history: bytes | None = b"0-0"
        """The last entry that was read again, of those that this consumer has not finished. None: all were read."""
        self._in_hand: set[bytes] = set()
        """Entries that were delivered, and are neither acknowledged nor postponed."""
        self._lines: dict[str | bytes, list[_Waiting]] = {}
        """For each message stream with a postponed message: the entries that wait, and their ``starts``."""
        self._due: dict[str | bytes, float] = {}
        """When the first one of each line is to be delivered again."""
        self._claim_at = 0.0
        """When to look for entries of dead consumers."""
        self._seen = b"0-0"
        """The newest entry that is known to exist. The wait for a new one ends with the first one after it."""

    def _read_again(self) -> None:
        """Deliver again what is not acknowledged. After an error, the caller has let go of all that it had."""
        self._in_hand.clear()
        self._history = b"0-0"

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``redis://host:6379/0?stream=orders&group=billing``; further options: ``consumer``, ``ordered``,
        ``takeover``, ``delete``.
        """
        known: dict[str, Callable[[str], Any]] = {
            "stream": str, "group": str, "consumer": str, "ordered": flag, "takeover": seconds, "delete": flag,
        }  # fmt: skip
        url, options = split_options(url, known, URL_OPTIONS)
        return cls(url, **{"stream": "", "group": "", **options})

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        until = monotonic() + seconds
        try:
            while True:
                found = await self._read(limit, max(0.0, until - monotonic()))
                if found or monotonic() >= until:
                    self._in_hand.update(delivery.handle for delivery in found)
                    return found
        except SemelError as error:
            self._read_again()
            if _code(error) == "NOGROUP":  # somebody has deleted the stream
                self._forget()
            raise BrokerUnavailable(f"Redis did not deliver: {error}") from error
        except BaseException:
            self._history = b"0-0"  # what was read for a caller that is gone is read again
            raise

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if not deliveries:
            return
        ids = [delivery.handle for delivery in deliveries]
        self._in_hand.difference_update(ids)
        commands: list[tuple[Any, ...]] = [(b"XACK", self._stream, self._group, *ids)]
        if self._delete:
            commands.append((b"XDEL", self._stream, *ids))
        try:
            await self._ask_all(commands)
        except SemelError as error:
            self._read_again()
            raise BrokerUnavailable(f"Redis did not acknowledge: {error}") from error

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        self._in_hand.discard(delivery.handle)
        key = self._key(delivery.message, delivery.handle)
        line, entry = self._lines.setdefault(key, []), (delivery.handle, delivery.starts)
        follows = bool(line) and _order(line[0]) < _order(entry)
        # One that follows a postponed one was not tried, so it does not count as a start.
        insort(line, entry if follows else (delivery.handle, delivery.starts + 1), key=_order)
        if not follows:
            self._due[key] = monotonic() + seconds

    async def close(self) -> None:
        await self._keeping.stop(timeout=0)
        if self._begun:
            unfinished = self._known()
            with contextlib.suppress(SemelError, TimeoutError):  # then the others wait for the takeover
                async with asyncio.timeout(1.0):
                    if self._ordered:
                        await self._as_reader(0)
                    elif unfinished:  # as if they had been idle for long: others may have them now
                        idle = (b"IDLE", int(self._takeover * 1000), b"JUSTID")
                        await self._ask(b"XCLAIM", self._stream, self._group, self._consumer, 0, *unfinished, *idle)
        self._forget()
        await self._servers.close()
        await self._blocking.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(self, limit: int, wait: float) -> list[Delivery]:
        """Return what is there now; if nothing is, return what comes while it waits."""
        if not self._begun:
            await self._begin()
        if self._ordered and monotonic() >= self._reader_until and not await self._take_over():
            await asyncio.sleep(min(wait, self._takeover / 10))
            return []
        if found := await self._due_again(limit):
            return found
        while self._history is not None:
            entries = await self._entries(limit, self._history)
            if self._ordered and not self._reader_until:
                return []  # another one is the reader by now: what it leaves comes before anything new
            self._history = entries[-1][0] if entries else None
            again = [(id, fields) for id, fields in entries if id not in self._known()]
            if again:
                return await self._deliver(again, await self._starts([id for id, _ in again]))
        if not self._ordered and monotonic() >= self._claim_at:
            await self._claim_abandoned()
        until_due = min(self._due.values(), default=monotonic() + wait) - monotonic()
        wait = max(0.0, min(wait, until_due, self._longest_wait, self._takeover / 3))
        if sum(map(len, self._lines.values())) >= MOST_WAITING:
            await asyncio.sleep(wait)
            return []
        entries = await self._entries(limit, b">", wait)
        return await self._deliver(entries, [1] * len(entries))

    async def _begin(self) -> None:
        try:
            await self._ask(b"XGROUP", b"CREATE", self._stream, self._group, b"0", b"MKSTREAM")
        except SemelError as error:
            if _code(error) != "BUSYGROUP":
                raise
        self._begun = True
        self._keeping.start(self._keep_alive)

    async def _entries(self, limit: int, after: bytes, wait: float = 0.0) -> list[Any]:
        """Read entries of the group: new ones (``>``), or those that this consumer has not finished."""
        block = (b"BLOCK", max(1, int(wait * 1000))) if wait else ()
        if self._ordered:
            entries = await self._as_reader(self._takeover, self._group, limit, after)
            if entries and after == b">":
                self._seen = entries[-1][0]
            if not entries and wait:  # wait without taking anything: after the wait, another may be the reader
                reply = await self._ask(
                    b"XREAD", b"COUNT", 1, *block, b"STREAMS", self._stream, self._seen, blocks=True
                )
                self._seen = reply[0][1][0][0] if reply else self._seen
            return entries or []
        command = (b"XREADGROUP", b"GROUP", self._group, self._consumer, b"COUNT", limit, *block)
        reply = await self._ask(*command, b"STREAMS", self._stream, after, blocks=bool(block))
        return reply[0][1] if reply else []

    async def _deliver(self, entries: Iterable[Any], starts: Iterable[int]) -> list[Delivery]:
        """Return the entries that no postponed one holds back, and put the others into their lines."""
        found = []
        for (id, fields), count in zip(entries, starts, strict=True):
            if fields is None:  # it was trimmed or deleted while it was being handled
                await self._ask(b"XACK", self._stream, self._group, id)
                continue
            texts = dict(zip(fields[::2], fields[1::2], strict=True))
            data = texts.pop(_DATA, b"")
            headers = {name.decode(errors="replace"): text.decode(errors="replace") for name, text in texts.items()}
            delivery = Delivery(read_message(headers, data, self._stream), count, id)
            line = self._lines.get(self._key(delivery.message, id))
            if line is not None:
                insort(line, (id, count), key=_order)
            else:
                found.append(delivery)
        return found

    async def _due_again(self, limit: int) -> list[Delivery]:
        """Deliver postponed messages whose time has come, and those that waited behind them."""
        now = monotonic()
        found: list[Delivery] = []
        claim = (b"XCLAIM", self._stream, self._group, self._consumer, 0)
        for key in [key for key, due in self._due.items() if due <= now]:
            # If this fails, all that is not acknowledged is read again: the line must be gone by then.
            due, line = self._due.pop(key), self._lines.pop(key)
            room = limit - len(found)
            some, rest = line[:room], line[room:]
            # They count in Redis, so that it is known after a crash as well.
            replies = await self._ask_all([(*claim, id, b"RETRYCOUNT", starts) for id, starts in some])
            entries = [reply[0] if reply else (id, None) for reply, (id, _) in zip(replies, some, strict=True)]
            found += await self._deliver(entries, [starts for _, starts in some])
            if rest:
                self._due[key], self._lines[key] = due, rest
                break
        return found

    def _known(self) -> set[bytes]:
        return {*self._in_hand, *(id for line in self._lines.values() for id, _ in line)}

    async def _starts(self, ids: Sequence[bytes]) -> list[int]:
        replies = await self._ask_all([(b"XPENDING", self._stream, self._group, id, id, 1) for id in ids])
        return [reply[0][3] if reply else 1 for reply in replies]

    def _key(self, message: Message, id: bytes) -> str | bytes:
        return message.stream or id if self._ordered else id

    # -- other consumers -------------------------------------------------------------------------------------------

    async def _take_over(self) -> bool:
        """Try to become the reader, and to take over what the last one had not finished."""
        self._forget()
        self._begun = True
        if await self._as_reader(self._takeover) is None:
            return False
        await self._claim(0)
        # Otherwise the wait for a new entry would end at once for each old one, until all of them are known. What is
        # new up to here is read before that wait.
        newest = await self._ask(b"XREVRANGE", self._stream, b"+", b"-", b"COUNT", 1)
        self._seen = newest[0][0] if newest else self._seen
        return True

    async def _as_reader(self, lease: float, *read: Any) -> list[Any] | None:
        """Be the reader for ``lease`` seconds, and read as well. Returns None if another consumer is the reader."""
        asked_at = monotonic()
        names = (self._stream, self._reader_key, self._consumer, int(lease * 1000), *read)
        reply: list[Any] | None = await self._ask(b"EVALSHA", _reader_script().sha, 2, *names, script=_reader_script())
        self._reader_until = asked_at + lease if reply is not None else 0.0
        return reply

    async def _claim_abandoned(self) -> None:
        """Take over entries of consumers that show no sign of life."""
        ids = await self._claim(self._takeover)
        self._claim_at = monotonic() + self._takeover / 3
        new = [id for id in ids if id not in self._known()]
        for id, starts in zip(new, await self._starts(new), strict=True):
            self._lines[id], self._due[id] = [(id, starts + 1)], 0.0

    async def _claim(self, idle: float) -> list[bytes]:
        """Become the owner of all entries that were idle for ``idle`` seconds, and return their ids."""
        found: list[bytes] = []
        cursor = b"0-0"
        while True:
            claim = (b"XAUTOCLAIM", self._stream, self._group, self._consumer, int(idle * 1000), cursor)
            reply = await self._ask(*claim, b"COUNT", 1000, b"JUSTID")
            cursor = reply[0]
            found += reply[1]
            if cursor == b"0-0":
                return found

    async def _keep_alive(self) -> None:
        """Show a sign of life as long as the source is open, so that handlers may take their time."""
        while True:
            await asyncio.sleep(self._takeover / 3)
            with contextlib.suppress(SemelError):
                if self._ordered and monotonic() < self._reader_until:
                    await self._as_reader(self._takeover)
                elif not self._ordered and (mine := self._known()):  # postponed ones as well
                    await self._ask(b"XCLAIM", self._stream, self._group, self._consumer, 0, *mine, b"JUSTID")

    async def _ask(self, *parts: Any, script: Script | None = None, blocks: bool = False) -> Any:
        servers = self._blocking if blocks else self._servers
        (reply,) = _checked(await servers.exchange(self._stream, [RedisCommand(parts, script)]))
        return reply

    async def _ask_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return _checked(await self._servers.exchange(self._stream, [RedisCommand(parts) for parts in commands]))


def _checked(replies: list[Any]) -> list[Any]:
    """Return the replies. Raises the first of them that is an error."""
    for reply in replies:
        if isinstance(reply, SemelError):
            raise reply
    return replies


@cache
def _reader_script() -> Script:
    return Script(resources.files("semel.messaging.brokers").joinpath("lua", "reader.lua").read_text("utf-8"))


_Waiting: TypeAlias = tuple[bytes, int]
"""The id of an entry that waits in a line, and its ``starts``."""


def _order(waiting: _Waiting) -> tuple[int, int]:
    milliseconds, _, count = waiting[0].partition(b"-")
    return int(milliseconds), int(count)


class _Servers:
    """The servers behind a URL, with the connections of the Redis store."""

    def __init__(self, url: str, timeout: Duration, connect_timeout: Duration, *, assess_risks: bool = True) -> None:
        require_redis()
        self.settings = RedisSettings(
            url, prefix=None, connections=1, timeout=timeout, connect_timeout=connect_timeout, retry_for=0.0,
            wait_replicas=None, wait_aof=None, wait_timeout=None,
        )  # fmt: skip
        self.wait = RedisCommand(self.settings.wait_command)
        self.confirms = bool(self.settings.wait_replicas or self.settings.wait_aof)
        """Whether a write is to be confirmed by replicas, or by the disk."""
        self._servers = AsyncServers(self.settings, assess_risks=assess_risks)

    def confirmed(self, reply: Any) -> bool:
        """Whether the reply to ``wait`` confirms the writes before it."""
        if isinstance(reply, SemelError):
            return False
        written, replicas = reply if self.settings.wait_aof else (1, reply)
        return bool(written and replicas >= self.settings.wait_replicas)

    async def exchange(self, key: str, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send the commands together to the server that has the key, and return the replies; errors are replies, too.

        Raises SemelError if the server cannot be reached. If the caller is cancelled, nothing more is sent.
        """
        self._servers.open()
        connection = await self._servers.connection(await self._servers.address_of(key.encode()))
        try:
            replies = await connection.exchange(commands)
        except asyncio.CancelledError:
            self._servers.drop(connection)
            raise
        if any(isinstance(reply, (NotMaster, ConnectionLost, Moved)) for reply in replies):
            self._servers.drop(connection)
        return replies

    async def close(self) -> None:
        await self._servers.close()
