"""The connection that an async Redis store's tasks share: what is written when."""

from __future__ import annotations

import asyncio

from semel import AsyncRedisStore
from semel.stores.redis.aio_connection import WRITE_EARLY, AsyncRedisConnection


async def _link(store: AsyncRedisStore) -> AsyncRedisConnection:
    return await store._servers.connection(await store._servers.address_of(b""))


def test_the_server_begins_before_all_of_a_turn_have_asked(redis_url: str) -> None:
    """Many callers that ask in one turn are not written as one batch, for which the server would wait, and then we."""

    async def run() -> None:
        store = AsyncRedisStore(redis_url, listen=False)
        link = await _link(store)
        waiting = []
        for number in range(3 * WRITE_EARLY + 1):
            waiting.append(link.send((b"ECHO", b"%d" % number)))
            assert len(link._unsent) < WRITE_EARLY
        assert len(link._unsent) == 1
        assert await asyncio.gather(*waiting) == [b"%d" % number for number in range(3 * WRITE_EARLY + 1)]
        await store.close()

    asyncio.run(run())


def test_a_few_that_ask_in_one_turn_are_one_write(redis_url: str) -> None:
    async def run() -> None:
        store = AsyncRedisStore(redis_url, listen=False)
        link = await _link(store)
        waiting = [link.send((b"ECHO", b"%d" % number)) for number in range(WRITE_EARLY - 1)]
        assert len(link._unsent) == WRITE_EARLY - 1
        await asyncio.sleep(0)
        assert not link._unsent
        assert await asyncio.gather(*waiting) == [b"%d" % number for number in range(WRITE_EARLY - 1)]
        await store.close()

    asyncio.run(run())
