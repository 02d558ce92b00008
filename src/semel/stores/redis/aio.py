"""The Redis store for one event loop: all its tasks share one connection to each server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from semel.core.ops import Op, Sweep, Swept
from semel.core.policy import Duration
from semel.errors import ConfigurationError, SemelError, StoreError, StoreUnavailable
from semel.stores.redis.aio_link import AsyncLink
from semel.stores.redis.aio_listener import AsyncListener
from semel.stores.redis.aio_servers import AsyncServers
from semel.stores.redis.link import require_redis
from semel.stores.redis.programs import Programs, Watch
from semel.stores.redis.replies import Lost, Moved, NoMemory, NoScript, NotMaster, Unreachable
from semel.stores.redis.risks import Risk
from semel.stores.redis.scripts import Command, Kept
from semel.stores.redis.settings import (
    CONNECT_TIMEOUT,
    LISTEN_AGAIN,
    RETRY_FOR,
    TIMEOUT,
    Address,
    Settings,
)
from semel.stores.redis.sweeping import walk
from semel.stores.redis.trips import Trip

__all__ = ["AsyncRedisStore"]

R = TypeVar("R")


class AsyncRedisStore:
    """A store in Redis 7 or newer, or Valkey, for one event loop. Connections are opened when first needed."""

    counts = False
    resumes = False
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
        """As of ``RedisStore``. One connection to each server serves all tasks: there are no lanes."""
        require_redis()
        settings = Settings(
            url, prefix=prefix, connections=1, timeout=timeout, connect_timeout=connect_timeout, retry_for=retry_for,
            wait_replicas=wait_replicas, wait_aof=wait_aof, wait_timeout=wait_timeout,
        )  # fmt: skip
        self._programs = Programs(
            settings.prefix, replicas=settings.wait_replicas, aof=settings.wait_aof, wait_ms=settings.wait_ms
        )
        self.wakes = listen
        self._settings = settings
        self._servers = AsyncServers(settings, self._programs.barrier)
        self._listener = AsyncListener(settings, self._programs.channel, self._servers)
        self._closed = False

    async def execute(self, op: Op[R]) -> R:
        programs, servers = self._programs, self._servers
        key = programs.key(op.id)
        trip: Trip | None = None
        redirected: Address | None = None
        while True:
            if self._closed:
                closed = StoreUnavailable("the store is closed")
                raise closed if trip is None else trip.failure(closed)
            link: AsyncLink | None = None
            line: AsyncLink | None = None
            where = redirected
            try:
                if type(op) is Sweep:
                    return cast(R, await self._sweep(op))
                link = servers.ready(key) if redirected is None else None
                if link is None:
                    where = redirected or await servers.address_of(key)
                    link = await servers.link(where)
                program = programs.start(op, key, link.clock)
                command = next(program)
                asking = redirected is not None
                while True:
                    try:
                        if type(command) is Command:
                            reply = await link.send(command.parts, asking)
                        elif isinstance(command, Kept):
                            line, reply = await self._kept(link, command, asking)
                        else:
                            reply = None
                            (line or link).tell(command.parts)
                    except NoScript:
                        command = command.in_full()
                    except NoMemory as full:
                        command = program.throw(full)
                    else:
                        command = program.send(reply)
            except StopIteration as stop:
                if servers.down and link is not None:
                    servers.down.discard(link.address)
                return cast(R, stop.value)
            except SemelError as error:
                redirected = None
                if link is not None:
                    where = link.address
                if trip is None:
                    trip = Trip(op, 0.0 if where in servers.down else self._settings.retry_for)
                pause = trip.pause_after(error)
                if link is not None and isinstance(error, (NotMaster, Lost)):
                    servers.drop(line or link)
                    if isinstance(error, NotMaster):
                        servers.drop(link)
                if pause is None:
                    if isinstance(error, (Unreachable, Lost)):
                        servers.down.add(where)
                    raise trip.failure(error) from error.__cause__
                if link is not None and isinstance(error, Moved):
                    redirected = servers.topology.moved(error, link.address)
            await asyncio.sleep(pause)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Ops on different records go out together, those on one record one after the other, as they came."""
        answers: list[Any] = [None] * len(ops)
        queues: dict[bytes, list[int]] = {}
        for at, op in enumerate(ops):
            queues.setdefault(op.id, []).append(at)

        async def follow(queue: list[int]) -> None:
            for at in queue:
                try:
                    answers[at] = await self.execute(ops[at])
                except (StoreError, ConfigurationError) as error:
                    answers[at] = error

        await asyncio.gather(*map(follow, queues.values()))
        return answers

    async def wait(self, id: bytes, seconds: float) -> None:
        if not await self._listener.listen(min(seconds, LISTEN_AGAIN)):
            return  # nothing is heard: that was a wait, and the caller looks for itself
        key = self._programs.key(id)
        gate = self._listener.enter(key)  # before we ask to be told, so that no answer can slip in between
        try:
            lease_left = await self.execute(Watch(id))
            if lease_left is not None:
                await asyncio.wait([gate], timeout=max(0.0, min(seconds, lease_left, LISTEN_AGAIN)))
        finally:
            self._listener.leave(key, gate)

    async def risks(self) -> list[Risk]:
        """What the settings of the servers may cost, asked now: eviction, lost writes at a restart or a failover."""
        found: dict[Risk, None] = {}
        for address in await self._servers.masters():
            found.update(dict.fromkeys(await self._servers.look_at(await self._servers.link(address))))
        return list(found)

    async def close(self) -> None:
        self._closed = True
        await self._listener.stop()
        await self._servers.close()

    async def _kept(self, link: AsyncLink, command: Kept, asking: bool) -> tuple[AsyncLink, tuple[Any, Any]]:
        """On the second connection to the same server; an error is an answer of what is kept, too."""
        try:
            line = await self._servers.link(link.address, waits=True)
            replies = await line.kept(command.parts, asking)
            if isinstance(replies[0], NotMaster):
                self._servers.drop(line)
            return line, replies
        except NoScript:
            raise
        except SemelError as error:
            return link, (error, None)

    async def _sweep(self, op: Sweep) -> Swept:
        unknown = 0
        cursors = self._servers.cursors
        for address in await self._servers.masters():
            link = await self._servers.link(address)
            steps = walk(self._programs.prefix, op.limit - unknown, cursors.get(address, b"0"))
            try:
                commands = next(steps)
                while True:
                    commands = steps.send(await link.exchange(commands))
            except StopIteration as stop:
                cursors[address] = stop.value[0]
                unknown += stop.value[1]
        return Swept(0, unknown)
