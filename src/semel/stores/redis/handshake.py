"""What is sent on a new connection before the first Op, and what is learned from it: the server's clock.

A handshake is a generator that yields batches of commands and is sent their replies, with errors as values. The sync
and the async connection both run it.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic_ns
from typing import Any, Final, TypeAlias

from semel.errors import ConfigurationError, SemelError
from semel.stores.redis.commands import RedisCommand, scripts
from semel.stores.redis.failures import NotMaster
from semel.stores.redis.settings import RedisSettings

__all__ = ["Handshake", "ServerClock", "introduce", "prepare"]

TIME_TRIES: Final = 3
"""How often TIME is asked for on a new connection."""
ASK_AGAIN: Final = 600 * 10**9
"""Nanoseconds after which a claim asks for TIME again, because two clocks drift apart."""

Handshake: TypeAlias = Generator[list[RedisCommand], list[Any], None]


class ServerClock:
    """An estimate of one server's clock, in microseconds: TIME when a connection opens, then our monotonic clock.

    Leases and expiry do not need it, because the life of the key says when they end. It serves for what a first claim
    writes without a script: the token, which other systems may compare, and the time that a record's age counts from.

    The reply to TIME was true at some moment after we asked. Counted from the moment of asking, the estimate is never
    behind the server, and ahead of it by one round trip at most. Of several tries the tightest counts. Tokens that the
    clock gives out always grow, even if the estimate is corrected.
    """

    __slots__ = ("_known", "ahead", "ask_at", "last_token")

    def __init__(self) -> None:
        self.ahead = 0
        """Microseconds by which the server's clock is ahead of our monotonic one."""
        self._known = False
        self.ask_at = 0
        """When a claim must ask for TIME again, by our monotonic clock, in ns."""
        self.last_token = 0
        """The greatest token so far. A new one is the time, or greater than this one."""

    def learn(self, asked_at: int, answer: Any, *, restart: bool = False) -> None:
        """Take in a reply to TIME.

        :param asked_at: our monotonic clock, in ns, when TIME was sent.
        :param restart: forget earlier replies, which are too old to compare with.
        """
        ahead = int(answer[0]) * 1_000_000 + int(answer[1]) - asked_at // 1000
        self.ahead = min(self.ahead, ahead) if self._known and not restart else ahead
        self._known = True
        self.ask_at = asked_at + ASK_AGAIN

    def now(self) -> int:
        return monotonic_ns() // 1000 + self.ahead

    def note_token(self, token: int) -> None:
        """Take in a token that the server gave out: later ones must be greater."""
        self.last_token = max(self.last_token, token)


def introduce(username: str | None, password: str | None, db: int) -> Handshake:
    """Log in, select the database, and set the name of the client."""
    commands = [RedisCommand((b"CLIENT", b"SETNAME", b"semel"))]
    if db:
        commands.insert(0, RedisCommand((b"SELECT", db)))
    if password is not None:
        credentials = (username, password) if username else (password,)
        commands.insert(0, RedisCommand((b"AUTH", *credentials)))
    replies = yield commands
    for reply in replies[: len(commands) - 1]:  # the name is a courtesy: it may be refused
        _check(reply)
    if isinstance(replies[-1], SemelError) and "NOAUTH" in str(replies[-1]):
        raise replies[-1]


def prepare(settings: RedisSettings, clock: ServerClock) -> Handshake:
    """Make a connection ready for Ops: load the scripts, learn the time, and check that the server is a master."""
    yield [RedisCommand((b"SCRIPT", b"LOAD", script.text)) for script in scripts().values()]  # if refused: sent in full
    for _ in range(TIME_TRIES):
        asked_at = monotonic_ns()
        (answer,) = yield [RedisCommand((b"TIME",))]
        _check(answer)
        clock.learn(asked_at, answer)
    if settings.kind == "sentinel":
        (role,) = yield [RedisCommand((b"ROLE",))]
        if not isinstance(role, SemelError) and role[0] != b"master":
            raise NotMaster("the sentinels name a server that is not the master yet")
    if settings.wait_aof:
        (answer,) = yield [RedisCommand((b"WAITAOF", 1, 0, 1))]
        if isinstance(answer, SemelError):
            raise ConfigurationError(f"wait_aof needs Redis 7.2 or newer with appendonly yes: {answer}")


def _check(reply: Any) -> None:
    if isinstance(reply, SemelError):
        raise reply
