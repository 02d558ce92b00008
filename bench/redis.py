"""Redis by redis.asyncio, two commands one by one with a connection for each caller, beside Semel on one connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench import guarded, job
from bench.contest import Contestant, Match
from bench.turns import tasks
from semel import AsyncRedisStore
from semel.core.ops import Claim, Claimed, Complete, Existing
from semel.core.states import Takeover
from semel.stores.redis.commands import scripts
from semel.stores.redis.layout import eight_bytes, new_value

__all__ = ["STORE_ALONE", "matches"]

STORE_ALONE: Final = "Semel's store: claim and complete"
_BARE_FIRST: Final = "the same two commands by redis.asyncio"
_BARE_REPLAY: Final = "the same command by redis.asyncio"
_SNAPSHOT: Final = b'{"id":"pay_1001","amount":4200,"ok":true}'


def _claim() -> Claim:
    return Claim(os.urandom(16), 7, b"f" * 16, 30.0, 86400.0, Takeover.RETRY, "acme", job.OPERATION, "a key")


@contextmanager
def matches(url: str, callers: int) -> Iterator[list[Match]]:
    """On a server whose database may be filled; on uvloop where it is installed."""
    notes: list[str] = []
    factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
        notes.append("uvloop is not installed: measured on asyncio's own loop")
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=factory))
        loop = "uvloop" if factory is not None else "asyncio"
        contestants = _contestants(stack, runner, url, callers)
        yield [Match("redis", f"Redis, {loop}", contestants, notes)]


def _contestants(stack: ExitStack, runner: asyncio.Runner, url: str, callers: int) -> list[Contestant]:
    first, replay = _bare(stack, runner, url, callers)
    store = AsyncRedisStore(url)
    stack.callback(lambda: runner.run(store.close()))

    async def store_first(number: int) -> None:
        claim = _claim()
        claimed = await store.execute(claim)
        assert isinstance(claimed, Claimed)
        await job.async_handler()
        assert await store.execute(Complete(claim.id, claimed.token, _SNAPSHOT, 86400.0))

    known = [_claim() for _ in range(job.KNOWN)]

    async def store_replay(number: int) -> None:
        shown: Claimed | Existing = await store.execute(known[number % job.KNOWN])
        assert isinstance(shown, Existing)

    async def prepare() -> None:
        for claim in known:
            claimed = await store.execute(claim)
            assert isinstance(claimed, Claimed)
            await store.execute(Complete(claim.id, claimed.token, _SNAPSHOT, 86400.0))

    runner.run(prepare())
    jobs: list[tuple[str, str, Any, bool]] = [
        (_BARE_FIRST, "first", first, True),
        (_BARE_REPLAY, "replay", replay, True),
        (STORE_ALONE, "first", store_first, False),
        (STORE_ALONE, "replay", store_replay, False),
    ]
    return [
        *(
            Contestant(name, kind, count, tasks(runner, call, count), yardstick=bare)
            for count in (1, callers)
            for name, kind, call, bare in jobs
        ),
        *guarded.async_contestants(runner, store, (1, callers)),
    ]


def _bare(stack: ExitStack, runner: asyncio.Runner, url: str, callers: int) -> tuple[Any, Any]:
    """The very commands that the store sends, issued one by one from a pool of connections; values made before."""
    from redis.asyncio import Redis

    client = Redis.from_url(url, max_connections=callers)
    stack.callback(lambda: runner.run(client.aclose()))
    execute: Callable[..., Awaitable[Any]] = client.execute_command
    claim = _claim()
    value, life = new_value(claim, 1, 1)
    script = scripts()["complete"]
    arguments = (eight_bytes(1), _SNAPSHOT, 86_400_000, eight_bytes(1), 0, "bare:wake")

    async def first(number: int, key: str = "") -> None:
        key = key or f"bare:{os.urandom(16).hex()}"
        assert await execute("SET", key, value, "NX", "GET", "PX", life, get=True) is None
        await job.async_handler()
        assert await execute("EVALSHA", script.sha, 1, key, *arguments)

    async def replay(number: int) -> None:
        key = f"bare:known-{number % job.KNOWN}"
        assert await execute("SET", key, value, "NX", "GET", "PX", life, get=True)

    async def prepare() -> None:
        await client.script_load(script.text)
        for number in range(job.KNOWN):
            await first(number, f"bare:known-{number}")

    runner.run(prepare())
    return first, replay
