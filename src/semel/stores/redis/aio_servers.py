"""The servers of an async store: where they are, the open link to each, and which risks were told already."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, TypeVar

from semel.errors import ConfigurationError, SemelError, StoreError
from semel.stores.redis.aio_link import AsyncLink, open_link
from semel.stores.redis.greeting import greet, introduce
from semel.stores.redis.replies import NotMaster, Unreachable, unreachable
from semel.stores.redis.risks import QUESTIONS, Risk, assess, described
from semel.stores.redis.scripts import Command
from semel.stores.redis.settings import Address, Settings
from semel.stores.redis.topology import SearchTime, Topology, topology_of

__all__ = ["AsyncServers"]

R = TypeVar("R")
CLOSED: Final = "the store is closed"
_log: Final = logging.getLogger("semel.redis")


class AsyncServers:
    """Opens each connection once, however many tasks ask for it."""

    def __init__(self, settings: Settings, barrier: Command) -> None:
        self.topology: Topology = topology_of(settings)
        self.cursors: dict[Address, bytes] = {}
        self.down: set[Address | None] = set()
        """Servers that stayed away for a whole patience: no other caller waits for them as long."""
        self._settings = settings
        self._barrier = barrier
        self._links: dict[Address, AsyncLink] = {}
        self._waits: dict[Address, AsyncLink] = {}
        """The second connection to a server: WAIT stops its own, and those who do not wait must not stand behind it."""
        self._opening: dict[tuple[Address, bool], asyncio.Task[AsyncLink]] = {}
        self._searching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen: set[Address] = set()
        self._told: set[str] = set()
        self._closed = False

    def ready(self, key: bytes) -> AsyncLink | None:
        """The open link to the server that has the key, if there is one: the path of nearly every call."""
        address = self.topology.address_of(key)
        link = self._links.get(address) if address is not None else None
        if link is None or link.closed or link.loop is not asyncio.get_running_loop():
            return None
        return link

    async def address_of(self, key: bytes) -> Address:
        address = self.topology.address_of(key)
        if address is None:
            await self.search()
            address = self.topology.address_of(key)
            if address is None:
                self.topology.forget()
                raise NotMaster("no node of the Redis Cluster has the slot")
        return address

    async def masters(self) -> list[Address]:
        if not self.topology.masters():
            await self.search()
        return self.topology.masters()

    async def link(self, address: Address, *, waits: bool = False) -> AsyncLink:
        """The link to a server, opened if need be; all who ask meanwhile wait for the same one. ``waits``: the one for
        what is kept."""
        self._check_usable()
        link = (self._waits if waits else self._links).get(address)
        if link is not None and not link.closed:
            return link
        opening = self._opening.get((address, waits))
        if opening is None:
            open_one = self._open_second(address) if waits else self._open(address)
            opening = self._opening[address, waits] = asyncio.create_task(open_one, name="semel-connect")
            opening.add_done_callback(lambda task: self._opened((address, waits), task))
        return await self._shared(opening)

    async def search(self) -> None:
        """Find out who has what; all who ask meanwhile wait for the same search."""
        self._check_usable()
        if self._searching is None or self._searching.done():
            self._searching = asyncio.create_task(self._search(), name="semel-search")
            self._searching.add_done_callback(_retrieve)
        await self._shared(self._searching)

    async def _shared(self, task: asyncio.Task[R]) -> R:
        """What a task finds for all who wait for it. Where ``close`` has cancelled it, they were not cancelled."""
        caller = asyncio.current_task()
        asked = caller.cancelling() if caller is not None else 0
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled() or (caller is not None and caller.cancelling() > asked):
                raise
            raise Unreachable(CLOSED) from None

    def drop(self, link: AsyncLink) -> None:
        """It is lost, or no master any more."""
        link.close()
        for links in (self._links, self._waits):
            if links.get(link.address) is link:
                del links[link.address]
                self.topology.forget(link.address)

    async def look_at(self, link: AsyncLink) -> list[Risk]:
        """The risks of a server; those that are new are logged."""
        settings = self._settings
        replies = await link.exchange(QUESTIONS)
        risks = assess(replies, wait_replicas=settings.wait_replicas, wait_aof=settings.wait_aof)
        news = [risk for risk in risks if risk.name not in self._told]
        if news:
            self._told.update(risk.name for risk in news)
            _log.warning("records in Redis are at risk: %s", described(news))
        return risks

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in (*self._opening.values(), self._searching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = (*self._links.values(), *self._waits.values())
        await asyncio.gather(*(link.finish() for link in links if link.loop is asyncio.get_running_loop()))
        self._links, self._waits = {}, {}
        await asyncio.sleep(0)  # the transports end in the next turn

    async def _open(self, address: Address) -> AsyncLink:
        settings = self._settings
        try:
            link = await open_link(settings, address, self._barrier)
            try:
                async with asyncio.timeout(settings.connect_timeout):
                    await link.greet(introduce(settings.username, settings.password, settings.db))
                    await link.greet(greet(settings, link.clock))
                    if address not in self._seen:
                        self._seen.add(address)
                        await self.look_at(link)
            except BaseException:
                link.close()
                raise
        except TimeoutError as error:
            self.topology.forget(address)
            raise NotMaster(f"Redis at {address} did not answer the first words in time") from error
        except SemelError:
            self.topology.forget(address)
            raise
        self._links[address] = link
        return link

    async def _open_second(self, address: Address) -> AsyncLink:
        """Scripts, clock and risks are known from the first."""
        settings = self._settings
        link = await open_link(settings, address, self._barrier)
        try:
            async with asyncio.timeout(settings.connect_timeout):
                await link.greet(introduce(settings.username, settings.password, settings.db))
        except TimeoutError as error:
            link.close()
            raise NotMaster(f"Redis at {address} did not answer the first words in time") from error
        self._waits[address] = link
        return link

    def _opened(self, line: tuple[Address, bool], task: asyncio.Task[AsyncLink]) -> None:
        if self._opening.get(line) is task:
            del self._opening[line]
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
        settings = self._settings
        link: AsyncLink | None = None
        try:
            async with asyncio.timeout(timeout):
                link = await open_link(settings, address, self._barrier)
                if self.topology.sentinels:
                    await link.greet(introduce(settings.sentinel_username, settings.sentinel_password, 0))
                else:
                    await link.greet(introduce(settings.username, settings.password, 0))
                return await link.send(command) or ()
        except TimeoutError as error:
            return unreachable(str(address), error)
        except StoreError as error:
            return error
        finally:
            if link is not None:
                link.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise Unreachable(CLOSED)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise ConfigurationError("this store belongs to another event loop: make one per loop")
            # What a dead loop left behind is nobody's.
            self._links, self._waits, self._opening, self._searching, self._loop = {}, {}, {}, None, loop


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Everyone who asked may be gone by now: an error that nobody takes is no news."""
    if not task.cancelled():
        task.exception()
