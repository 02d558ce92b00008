"""A Redis server full of finished records: copies of one that the store itself wrote, under ids of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.large_store import KEY, LIFE, Full, id_of, sample
from semel import AsyncRedisStore
from semel.stores.redis.layout import eight_bytes

__all__ = ["full_redis"]

PREFIX: Final = b"semel:"
AT_ONCE: Final = 2000
"""Records that are written to the socket together."""


@contextmanager
def full_redis() -> Iterator[FullRedis]:
    """An empty server of our own."""
    from tests.servers import RedisServer

    with RedisServer() as server:
        yield FullRedis(server)


class FullRedis(Full):
    """Redis expires records by itself; what its sweep does is to look for those in doubt."""

    name = "Redis"
    sweeps = False

    def __init__(self, server: Any) -> None:
        super().__init__(server.pid)
        self._server = server
        self._expired = 0

    def store(self) -> AsyncRedisStore:
        return AsyncRedisStore(self._server.url)

    def fill(self, start: int, count: int) -> None:
        self._write((number, LIFE * 1000) for number in range(start, start + count))

    def expire(self, start: int, count: int, rate: float, delay: float) -> None:
        self._expired = self._gone() + count
        self._write((start + number, max(1, int((delay + number / rate) * 1000))) for number in range(count))

    def left(self) -> int:
        return self._expired - self._gone()

    def removing(self) -> float:
        return self._stat("expire_cycle_cpu_milliseconds") / 1000

    def _gone(self) -> int:
        """Expired and removed since the server began."""
        return self._stat("expired_keys")

    def _stat(self, name: str) -> int:
        return int(self._server.cli("INFO", "stats").partition(f"{name}:")[2].splitlines()[0])

    def _write(self, records: Iterator[tuple[int, int]]) -> None:
        """By SET, as fast as the socket takes it: the server is told not to answer until the end."""
        import hiredis

        pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command  # its own types know pairs only
        value, now = asyncio.run(self._sampled())
        at = value.index(KEY.encode())
        head, names, rest = value[12:48], value[56:at], value[at + len(KEY) :]
        token = int.from_bytes(value[4:12], "big")
        with socket.create_connection(("127.0.0.1", self._server.port)) as line:
            line.sendall(pack((b"CLIENT", b"REPLY", b"OFF")))
            batch: list[bytes] = []
            for number, life in records:
                made = b"".join(
                    (value[:4], eight_bytes(token + number), head, eight_bytes(now + life * 1000), names,
                     b"%0*d" % (len(KEY), number), rest)
                )  # fmt: skip
                batch.append(pack((b"SET", PREFIX + id_of(number).hex().encode(), made, b"PX", life)))
                if len(batch) == AT_ONCE:
                    line.sendall(b"".join(batch))
                    batch.clear()
            batch.append(pack((b"CLIENT", b"REPLY", b"ON")))
            line.sendall(b"".join(batch))
            line.settimeout(60)
            if line.recv(5) != b"+OK\r\n":
                raise RuntimeError("Redis did not take the records")

    async def _sampled(self) -> tuple[bytes, int]:
        """A finished record as the store has left it in the server, and the server's clock in microseconds."""
        from redis.asyncio import Redis

        store = self.store()
        client = Redis.from_url(self._server.url)
        try:
            id = await sample(store)
            value = await client.get(PREFIX + id.hex().encode())
            assert isinstance(value, bytes)
            seconds, microseconds = await client.time()
            return value, seconds * 1_000_000 + microseconds
        finally:
            await client.aclose()
            await store.close()
