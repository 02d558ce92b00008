"""Redis as the cache of a sync tiered store: one server, behind Sentinel, or a Cluster.

Callers ask over lines that are open; opening them, writing and asking for the time is the affair of one thread. A line
that fails is given up at once, and from then on nobody waits for that server until the thread has reached it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.core.values import value
from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError, StoreUncertain
from semel.stores.batching.combiner import Combiner
from semel.stores.redis.commands import RedisCommand
from semel.stores.redis.connection import RedisConnection
from semel.stores.redis.failures import Moved, NotMaster, ServerUnreachable
from semel.stores.redis.servers import Servers
from semel.stores.redis.settings import Address
from semel.stores.tiered.copies import OLD, ServerTime, unpack
from semel.stores.tiered.outages import Outage
from semel.stores.tiered.ports import Found, Tally, Write
from semel.stores.tiered.redis_commands import CONNECT_TIMEOUT, TIME, TIMEOUT, command_of, settings_of
from semel.stores.tiered.writer import Writer

__all__ = ["RedisCache"]


@value
class _Get(Op["Found | None"]):
    id: bytes


class _Lines:
    """The open lines of one user: the lane that reads, or the thread that writes. Only that one closes them."""

    def __init__(self) -> None:
        self.open: dict[Address, RedisConnection] = {}
        self._lost: list[RedisConnection] = []

    def lose(self, address: Address) -> None:
        """Nobody uses it from here on; it may be in use right now, by another thread."""
        link = self.open.pop(address, None)
        if link is not None:
            self._lost.append(link)

    def clear(self) -> None:
        """Close what was lost; called by the one who uses them."""
        while self._lost:
            self._lost.pop().close()

    def close(self) -> None:
        for address in list(self.open):
            self.lose(address)
        self.clear()


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
        :param url: as of ``RedisStore``.
        :param prefix: what the cache's keys begin with; ``semel-tier:`` by default.
        :param timeout: how long a caller waits for an answer before it asks the store behind.
        :param connect_timeout: how long a new connection may take; no caller waits for it.
        """
        self.tally = Tally()
        self.on_change: Callable[[str | None], None] | None = None
        self._settings = settings_of(url, prefix, timeout, connect_timeout)
        self._servers = Servers(self._settings)
        self._times: dict[Address, ServerTime] = {}
        self._forked()
        survive_forks(self._forked)
        self._combiner = Combiner([_Reading(self)], queue_timeout=0.0)
        self._writer = Writer(self._deliver, self._tend, self.tally)

    def _forked(self) -> None:
        self._reading, self._writing = _Lines(), _Lines()
        self._connected = threading.Event()
        self._outage = Outage()

    # -- what a tiered store asks ----------------------------------------------------------------------------------

    def get(self, id: bytes) -> Found | None:
        if not self._reading.open:
            self.tally.skipped += 1
            self._writer.begin()
            return None
        try:
            return self._combiner.execute(_Get(id))  # type: ignore[no-any-return]
        except StoreError:  # closed, or crowded
            self.tally.skipped += 1
            return None

    def write(self, write: Write) -> None:
        if self._writing.open:
            self._writer.offer(write)
        else:
            self.tally.dropped += 1
            self._writer.begin()

    def settle(self, id: bytes) -> None:
        if self._writing.open:
            self._writer.settle(self._settings.timeout)

    def connect(self, seconds: float) -> bool:
        self._writer.begin()
        return self._connected.wait(seconds)

    def close(self) -> None:
        self._writer.stop()
        self._combiner.close()
        self._reading.close()
        self._writing.close()

    # -- reading, in a caller's thread -----------------------------------------------------------------------------

    def _read(self, ids: Sequence[bytes]) -> list[Found | None]:
        """One trip to each server that has some of the ids. An error is no answer here: it is a miss."""
        self._reading.clear()
        found: list[Found | None] = [None] * len(ids)
        groups: dict[Address, list[int]] = {}
        for i, id in enumerate(ids):
            address = self._address_of(id)
            if address is None:
                self.tally.skipped += 1
            else:
                groups.setdefault(address, []).append(i)
        for address, places in groups.items():
            link = self._usable(self._reading, address)
            if link is None:
                self.tally.skipped += len(places)
                continue
            replies = link.exchange([RedisCommand((b"GET", self._key(ids[i]))) for i in places])
            clock, now = self._times[address], time.monotonic()
            for i, reply in zip(places, replies, strict=True):
                if isinstance(reply, SemelError):
                    self._refused(address, reply)
                else:
                    self._outage.answered()
                    found[i] = None if reply is None else unpack(ids[i], reply, clock.latest(now))
            if clock.is_old(now):
                self._writer.wake()
        return found

    def _address_of(self, id: bytes) -> Address | None:
        return self._servers.topology.address_of(self._key(id))

    def _key(self, id: bytes) -> bytes:
        return self._settings.prefix.encode() + id.hex().encode()

    def _usable(self, lines: _Lines, address: Address) -> RedisConnection | None:
        link = lines.open.get(address)
        if (
            link is not None and link.closed
        ):  # its user was interrupted; redis-py would open it again, and wait for that
            self._lose(address, ServerUnreachable(f"the connection to Redis at {address} was interrupted"))
            return None
        return link

    def _refused(self, address: Address, error: SemelError) -> None:
        self.tally.failed += 1
        if isinstance(error, Moved):
            self._servers.topology.moved(error, address)
            self._writer.wake()
        elif isinstance(error, (StoreUncertain, ServerUnreachable)) or self._outage.refused():
            self._lose(address, error)

    def _lose(self, address: Address, error: SemelError) -> None:
        self._reading.lose(address)
        self._writing.lose(address)
        if isinstance(error, (StoreUncertain, NotMaster)):
            self._servers.topology.forget(address)
        self._connected.clear()
        if not self._outage.away:
            self._outage.begins(error, self.on_change)
        self._writer.wake()

    # -- writing and keeping the lines, in the writer's thread -----------------------------------------------------

    def _tend(self) -> float:
        """Open what is not open, ask for the time where that is long ago; in how many seconds to be called again."""
        self._writing.clear()
        now = time.monotonic()
        if now < self._outage.seek_at:
            return self._outage.seek_at - now
        try:
            for address in self._servers.masters():
                link = self._writing.open.get(address)
                if link is None or address not in self._reading.open:
                    self._reach(address)
                elif self._times[address].is_old(now):
                    self._ask_time(address, link)
        except SemelError as error:
            self._connected.clear()
            self._outage.begins(error, self.on_change)
            return max(0.0, self._outage.seek_at - time.monotonic())
        if self._outage.away:
            self._outage.ends(self.on_change)
            self._connected.set()
        return OLD

    def _reach(self, address: Address) -> None:
        self._reading.lose(address)
        self._writing.lose(address)
        made: list[RedisConnection] = []
        try:
            for _ in range(2):
                made.append(RedisConnection(self._settings, address))
            self._ask_time(address, made[0])
        except BaseException:
            for link in made:
                link.close()
            self._servers.topology.forget(address)
            raise
        self._writing.open[address], self._reading.open[address] = made

    def _ask_time(self, address: Address, link: RedisConnection) -> None:
        asked = time.monotonic()
        (answer,) = link.exchange([TIME])
        if isinstance(answer, SemelError):
            self._lose(address, answer)
            raise answer
        self._times[address] = ServerTime(asked, time.monotonic(), answer)

    def _deliver(self, writes: list[Write]) -> None:
        groups: dict[Address, list[RedisCommand]] = {}
        for write in writes:
            address = self._address_of(write.id)
            if address is None or address not in self._writing.open:
                self.tally.dropped += 1
            else:
                groups.setdefault(address, []).append(command_of(write, self._key(write.id), self._times[address]))
        for address, commands in groups.items():
            link = self._usable(self._writing, address)
            if link is None:
                self.tally.dropped += len(commands)
                continue
            asked = time.monotonic()
            *replies, clock = link.exchange([*commands, TIME])
            refused = [reply for reply in replies if isinstance(reply, SemelError)]
            self.tally.failed += len(refused)
            self.tally.written += len(replies) - len(refused)
            for reply in refused:
                if isinstance(reply, Moved):
                    self._servers.topology.moved(reply, address)
            if isinstance(clock, SemelError):
                self._lose(address, clock)
            else:
                self._times[address].learn(asked, time.monotonic(), clock)


class _Reading:
    """The lane of the combiner: those who ask at the same time share a trip."""

    gathers = True

    def __init__(self, cache: RedisCache) -> None:
        self._cache = cache

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return list(self._cache._read([op.id for op in ops]))

    def close(self) -> None:
        """The cache closes its lines itself."""
