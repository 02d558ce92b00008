"""Redis as the cache of a sync tiered store: one server, behind Sentinel, or a Cluster.

::

    callers ──▶ get ──▶ Combiner ──▶ the reading connection to each server
        └─────▶ write ──▶ queue ──▶ the writer thread ──▶ the writing connection to each server

Callers only use connections that are open. One thread opens them, writes, and asks for the time, so no caller waits for
any of it. A connection that fails is dropped at once, and from then on nobody waits for that server until the thread
has reached it again.

``aio_redis_cache.py`` is the cache for event loops. It needs neither thread nor lock: tasks share one connection, which
writes what they send in one turn together. Hence the two hand-written caches; what is stored is in ``copies.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.core.values import value
from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError, StoreUncertain
from semel.stores.batching.combiner import Combiner
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.connection import RedisConnection, Servers
from semel.stores.redis.failures import Moved, NotMaster, ServerUnreachable
from semel.stores.redis.settings import Address
from semel.stores.tiered.cache import CachedRecord, Outage, Tally, Write
from semel.stores.tiered.copies import (
    CONNECT_TIMEOUT,
    MAX_PENDING,
    OLD,
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

BATCH: Final = 256
"""Writes in one batch."""
LINGER: Final = 0.002
"""Seconds that a write waits for others to share its batch; one that a caller waits for is sent immediately."""
STOP_SECONDS: Final = 1.0
"""How long closing waits for the last batch; also the pause after an unexpected error."""
_log: Final = logging.getLogger("semel.tiered")


class RedisCache:
    """The cache of a ``TieredStore`` in Redis 7 or newer, or Valkey. Connections are opened in the background."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None = None,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
    ) -> None:
        """
        :param url: same as for ``RedisStore``.
        :param prefix: what the cache's keys begin with; ``semel-tier:`` by default.
        :param timeout: how long a caller waits for a reply before it asks the primary.
        :param connect_timeout: how long a new connection may take; no caller waits for it.
        """
        self.tally = Tally()
        self.name = b""
        self.on_change: Callable[[str | None], None] | None = None
        self._settings = cache_settings(url, prefix, timeout, connect_timeout)
        self._prefix = self._settings.prefix.encode()
        self._servers = Servers(self._settings)
        self._times: dict[Address, ServerTime] = {}
        self._reset()
        survive_forks(self._reset)
        self._combiner = Combiner([_Reader(self.read_many)], queue_timeout=0.0)
        self._writer = _WriterThread(self._deliver, self._maintain, self.tally)

    def _reset(self) -> None:
        self._reading, self._writing = _OpenConnections(), _OpenConnections()
        self._connected = threading.Event()
        self._outage = Outage()

    # -- what a tiered store calls ---------------------------------------------------------------------------------

    def get(self, id: bytes) -> CachedRecord | None:
        if not self._reading.open:
            self.tally.skipped += 1
            self._writer.start()
            return None
        try:
            return self._combiner.execute(_Get(id))
        except StoreError:  # closed, or too many callers
            self.tally.skipped += 1
            return None

    def write(self, write: Write) -> None:
        if self._writing.open:
            self._writer.offer(write)
        else:
            self.tally.dropped += 1
            self._writer.start()

    def settle(self, id: bytes) -> None:
        if self._writing.open:
            self._writer.settle(self._settings.timeout)

    def invalidate(self, id: bytes, token: int, seconds: float) -> None:
        keys = entry_keys(self._prefix + self.name, id)
        connection = RedisConnection(self._settings, self._servers.address_of(keys[0]))
        try:
            for reply in connection.exchange(invalidation(keys, token, seconds)):
                if isinstance(reply, SemelError):
                    raise reply
        finally:
            connection.close()

    def connect(self, seconds: float) -> bool:
        self._writer.start()
        return self._connected.wait(seconds)

    def open(self) -> None:
        if self._writer.resume():
            self._reset()
            self._combiner.open()

    def close(self) -> None:
        self._writer.stop()
        self._combiner.close()
        self._reading.close()
        self._writing.close()

    # -- reading, in a caller's thread -----------------------------------------------------------------------------

    def read_many(self, ids: Sequence[bytes]) -> list[CachedRecord | None]:
        """Read the entries of several ids, in one round trip to each server. An error counts as a miss."""
        self._reading.close_dropped()
        found: list[CachedRecord | None] = [None] * len(ids)
        groups: dict[Address, list[int]] = {}
        for i, id in enumerate(ids):
            address = self._address_of(id)
            if address is None:
                self.tally.skipped += 1
            else:
                groups.setdefault(address, []).append(i)
        for address, places in groups.items():
            connection = self._usable(self._reading, address)
            if connection is None:
                self.tally.skipped += len(places)
                continue
            replies = connection.exchange(
                [RedisCommand((b"MGET", *entry_keys(self._prefix + self.name, ids[i]))) for i in places]
            )
            clock, now = self._times[address], time.monotonic()
            for i, reply in zip(places, replies, strict=True):
                if isinstance(reply, SemelError):
                    self._handle_error(address, reply)
                else:
                    self._outage.count_answer()
                    found[i] = None if reply[0] is None else unpack(ids[i], reply, clock.latest(now))
            if clock.is_old(now):
                self._writer.wake()
        return found

    def _address_of(self, id: bytes) -> Address | None:
        return self._servers.topology.address_of(copy_key(self._prefix + self.name, id))

    def _usable(self, connections: _OpenConnections, address: Address) -> RedisConnection | None:
        connection = connections.open.get(address)
        if connection is not None and connection.closed:  # its user was interrupted; redis-py would open it again
            self._drop(address, ServerUnreachable(f"the connection to Redis at {address} was interrupted"))
            return None
        return connection

    def _handle_error(self, address: Address, error: SemelError) -> None:
        self.tally.failed += 1
        if isinstance(error, Moved):
            self._servers.topology.moved(error, address)
            self._writer.wake()
        elif isinstance(error, (StoreUncertain, ServerUnreachable)) or self._outage.count_refusal():
            self._drop(address, error)

    def _drop(self, address: Address, error: SemelError) -> None:
        self._reading.drop(address)
        self._writing.drop(address)
        if isinstance(error, (StoreUncertain, NotMaster)):
            self._servers.topology.forget(address)
        self._connected.clear()
        if not self._outage.active:
            self._outage.begin(error, self.on_change)
        self._writer.wake()

    # -- writing and opening connections, in the writer thread -----------------------------------------------------

    def _maintain(self) -> float:
        """Open missing connections, and ask for the time where it is old. Returns in how many seconds to call again."""
        self._writing.close_dropped()
        now = time.monotonic()
        if now < self._outage.retry_at:
            return self._outage.retry_at - now
        try:
            for address in self._servers.masters():
                connection = self._writing.open.get(address)
                if connection is None or address not in self._reading.open:
                    self._open(address)
                elif self._times[address].is_old(now):
                    self._ask_time(address, connection)
        except SemelError as error:
            self._connected.clear()
            self._outage.begin(error, self.on_change)
            return max(0.0, self._outage.retry_at - time.monotonic())
        if self._outage.active:
            self._outage.end(self.on_change)
            self._connected.set()
        return OLD

    def _open(self, address: Address) -> None:
        self._reading.drop(address)
        self._writing.drop(address)
        opened: list[RedisConnection] = []
        try:
            for _ in range(2):
                opened.append(RedisConnection(self._settings, address))
            self._ask_time(address, opened[0])
        except BaseException:
            for connection in opened:
                connection.close()
            self._servers.topology.forget(address)
            raise
        self._writing.open[address], self._reading.open[address] = opened

    def _ask_time(self, address: Address, connection: RedisConnection) -> None:
        asked = time.monotonic()
        (answer,) = connection.exchange([TIME])
        if isinstance(answer, SemelError):
            self._drop(address, answer)
            raise answer
        self._times[address] = ServerTime(asked, time.monotonic(), answer)

    def _deliver(self, writes: list[Write]) -> None:
        groups: dict[Address, list[RedisCommand]] = {}
        for write in writes:
            key = copy_key(self._prefix + self.name, write.id)
            address = self._servers.topology.address_of(key)
            if address is None or address not in self._writing.open:
                self.tally.dropped += 1
            else:
                groups.setdefault(address, []).append(write_command(write, key, self._times[address]))
        for address, commands in groups.items():
            connection = self._usable(self._writing, address)
            if connection is None:
                self.tally.dropped += len(commands)
                continue
            asked = time.monotonic()
            *replies, clock = connection.exchange([*commands, TIME])
            errors = [reply for reply in replies if isinstance(reply, SemelError)]
            self.tally.failed += len(errors)
            self.tally.written += len(replies) - len(errors)
            for error in errors:
                if isinstance(error, Moved):
                    self._servers.topology.moved(error, address)
            if isinstance(clock, SemelError):
                self._drop(address, clock)
            else:
                self._times[address].learn(asked, time.monotonic(), clock)


class _OpenConnections:
    """The open connections of one user: the thread that reads, or the one that writes. Only the user closes them."""

    def __init__(self) -> None:
        self.open: dict[Address, RedisConnection] = {}
        self._dropped: list[RedisConnection] = []

    def drop(self, address: Address) -> None:
        """Nobody uses it from now on. It is not closed here, because another thread may be using it right now."""
        connection = self.open.pop(address, None)
        if connection is not None:
            self._dropped.append(connection)

    def close_dropped(self) -> None:
        """Close what was dropped; called by the user."""
        while self._dropped:
            self._dropped.pop().close()

    def close(self) -> None:
        for address in list(self.open):
            self.drop(address)
        self.close_dropped()


@value
class _Get(Op["CachedRecord | None"]):
    id: bytes


class _Reader:
    """The connection of the combiner: callers that read at the same time share a round trip."""

    gathers = True

    def __init__(self, read_many: Callable[[Sequence[bytes]], list[CachedRecord | None]]) -> None:
        self._read_many = read_many

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return list(self._read_many([op.id for op in ops]))

    def close(self) -> None:
        """Nothing to do: the cache closes its connections itself."""


class _WriterThread:
    """Writes what callers leave behind, and maintains the connections.

    The thread is started when first needed, and again in a forked child.
    """

    def __init__(self, deliver: Callable[[list[Write]], None], maintain: Callable[[], float], tally: Tally) -> None:
        """
        :param deliver: writes to the cache; may block.
        :param maintain: keeps the connections open; returns in how many seconds it wants to be called again.
        """
        self._deliver = deliver
        self._maintain = maintain
        self._tally = tally
        self._stopped = False
        self._reset()
        survive_forks(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._queue: deque[Write | threading.Event] = deque()
        self._delayed: deque[tuple[float, Write]] = deque()
        self._urgent = False
        self._thread: threading.Thread | None = None

    def offer(self, write: Write) -> None:
        """Queue a write, or drop it if too many are waiting."""
        if len(self._queue) + len(self._delayed) >= MAX_PENDING or self._stopped:
            self._tally.dropped += 1
        elif write.delay:
            first = not self._delayed
            self._delayed.append((time.monotonic() + write.delay, write))  # all have the same delay: in order
            if first:
                self.wake()
        else:
            self._queue.append(write)
            self.wake()

    def settle(self, seconds: float) -> None:
        """Wait until everything offered before is written or dropped."""
        done = threading.Event()
        self._urgent = True
        self._queue.append(done)
        self.wake()
        done.wait(seconds)

    def wake(self) -> None:
        self._work.set()
        self.start()

    def start(self) -> None:
        """Start the thread if it is not running."""
        if self._thread is None:
            with self._lock:
                self._start_locked()

    def _start_locked(self) -> None:
        if self._thread is None and not self._stopped:  # another thread may have started it meanwhile
            self._thread = threading.Thread(target=self._run, name="semel-tier", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._work.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    def resume(self) -> bool:
        """After ``stop``: start again when first needed. Returns False if there was no ``stop``."""
        stopped, self._stopped = self._stopped, False
        if stopped:
            self._reset()
        return stopped

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._work.wait(self._pause(self._maintain()))
                if not self._urgent and not self._stopped:
                    time.sleep(LINGER)
                self._work.clear()
                self._urgent = False
                self._write()
            except Exception:
                _log.exception("writing to the cache failed; trying again in a moment")
                time.sleep(STOP_SECONDS)

    def _pause(self, seconds: float) -> float:
        if self._delayed:
            return min(seconds, max(0.0, self._delayed[0][0] - time.monotonic()))
        return seconds

    def _write(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._queue.append(self._delayed.popleft()[1])
        while self._queue:
            batch: list[Write] = []
            settled: list[threading.Event] = []
            while self._queue and len(batch) < BATCH:
                first = self._queue.popleft()
                if isinstance(first, threading.Event):
                    settled.append(first)
                elif first.wanted is None or first.wanted():
                    batch.append(first)
            try:
                if batch:
                    self._deliver(batch)
            finally:
                for each in settled:
                    each.set()
