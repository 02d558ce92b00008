"""The background task of the async Redis store: it hears which attempts have ended, and wakes who waits for them."""

from __future__ import annotations

import asyncio

from semel.stores.redis.aio_link import AsyncLink, open_link
from semel.stores.redis.aio_servers import AsyncServers
from semel.stores.redis.greeting import introduce
from semel.stores.redis.scripts import Command
from semel.stores.redis.settings import Settings

__all__ = ["AsyncListener"]


class AsyncListener:
    """One connection that subscribes to the store's channel. In a cluster any node hears what any other publishes."""

    def __init__(self, settings: Settings, channel: bytes, servers: AsyncServers) -> None:
        self._settings = settings
        self._channel = channel
        self._servers = servers
        self._gates: dict[bytes, list[asyncio.Future[None]]] = {}
        self._hears = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def listen(self, seconds: float) -> bool:
        """Start if need be; whether messages are heard, within so many seconds."""
        if self._task is None or self._task.done():
            self._hears = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._hear(), name="semel-listener")
        try:
            async with asyncio.timeout(seconds):
                await self._hears.wait()
        except TimeoutError:
            return False
        return True

    def enter(self, key: bytes) -> asyncio.Future[None]:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gates.setdefault(key, []).append(gate)
        return gate

    def leave(self, key: bytes, gate: asyncio.Future[None]) -> None:
        gates = self._gates.get(key)
        if gates is not None and gate in gates:
            gates.remove(gate)
            if not gates:
                del self._gates[key]

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _hear(self) -> None:
        settings, tries = self._settings, 0
        while True:
            link: AsyncLink | None = None
            try:
                masters = await self._servers.masters()
                address = masters[tries % len(masters)]
                link = await open_link(settings, address, Command(()), self._wake)
                await link.greet(introduce(settings.username, settings.password, settings.db))
                await link.send((b"SUBSCRIBE", self._channel))
                self._wake_all()  # whatever was said while nobody listened
                self._hears.set()
                await link.ended.wait()
            except asyncio.CancelledError:
                raise
            except Exception:  # whatever broke: open it again; waiters look for themselves meanwhile
                pass
            finally:
                self._hears.clear()
                self._wake_all()
                if link is not None:
                    link.close()
            tries += 1
            await asyncio.sleep(0.25)

    def _wake_all(self) -> None:
        for key in list(self._gates):
            self._wake(key)

    def _wake(self, key: bytes) -> None:
        for gate in self._gates.pop(key, ()):
            if not gate.done():
                gate.set_result(None)
