"""What is said on a new connection before the first Op: who we are, the scripts, what time it is, whether it may wait.

A generator that yields batches of commands and is sent their replies, errors among them as values: the sync and the
async link say it.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic_ns
from typing import Any, TypeAlias

from semel.errors import ConfigurationError, SemelError
from semel.stores.redis.clock import TRIES, ServerClock
from semel.stores.redis.replies import NotMaster
from semel.stores.redis.scripts import Command, scripts
from semel.stores.redis.settings import Settings

__all__ = ["Greeting", "greet", "introduce"]

Greeting: TypeAlias = Generator[list[Command], list[Any], None]


def introduce(username: str | None, password: str | None, db: int) -> Greeting:
    """Name, password, database."""
    commands = [Command((b"CLIENT", b"SETNAME", b"semel"))]
    if db:
        commands.insert(0, Command((b"SELECT", db)))
    if password is not None:
        who = (username, password) if username else (password,)
        commands.insert(0, Command((b"AUTH", *who)))
    replies = yield commands
    for reply in replies[: len(commands) - 1]:  # a name is a courtesy
        _check(reply)
    if isinstance(replies[-1], SemelError) and "NOAUTH" in str(replies[-1]):
        raise replies[-1]


def greet(settings: Settings, clock: ServerClock) -> Greeting:
    """The rest, on a connection that Ops will use."""
    yield [Command((b"SCRIPT", b"LOAD", script.text)) for script in scripts().values()]  # refused: they go in full
    for _ in range(TRIES):
        asked_at = monotonic_ns()
        (answer,) = yield [Command((b"TIME",))]
        _check(answer)
        clock.learn(asked_at, answer)
    if settings.kind == "sentinel":
        (role,) = yield [Command((b"ROLE",))]
        if not isinstance(role, SemelError) and role[0] != b"master":
            raise NotMaster("the sentinels name a server that is not the master yet")
    if settings.wait_aof:
        (answer,) = yield [Command((b"WAITAOF", 1, 0, 1))]
        if isinstance(answer, SemelError):
            raise ConfigurationError(f"wait_aof needs Redis 7.2 or newer with appendonly yes: {answer}")


def _check(reply: Any) -> None:
    if isinstance(reply, SemelError):
        raise reply
