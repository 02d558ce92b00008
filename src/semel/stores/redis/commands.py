"""What is sent to a Redis server: commands, the Lua scripts that most of them call, and the handshake.

A script is read from its file once, called by its SHA, and sent in full if the server does not know it. Scripts that a
running attempt needs in order to continue and to finish are flagged ``allow-oom``. So a full server refuses an
operation before it has begun, at the claim, and not when its effect has happened and only the result is missing.

A handshake is what is sent on a new connection before the first Op, and what is learned from it: the server's clock. It
is a generator that yields batches of commands and is sent their replies, with errors as values. The sync and the async
connection both run it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from functools import cache, partial
from importlib import resources
from time import monotonic_ns
from typing import Any, Final, NamedTuple, TypeAlias

from semel.errors import ConfigurationError, SemelError
from semel.stores.redis.failures import NotMaster
from semel.stores.redis.settings import RedisSettings

_STANDALONE: Final = frozenset({"complete", "confirm", "show", "keep_minutes"})
"""Scripts that do not need ``record.lua``."""
SCRIPT_NAMES: Final = (
    "claim", "renew", "complete", "release", "save_step", "confirm", "lookup", "resolve", "watch", "sweep",
    "show", "keep_minutes",
)  # fmt: skip


class RedisCommand(NamedTuple):
    """The words of one command, and the script that it calls, if any."""

    parts: tuple[Any, ...] | bytes
    """The words, or the bytes that are sent for them: the two most frequent commands are made from a template."""
    script: Script | None = None

    def in_full(self) -> RedisCommand:
        """Return the same command with the text of its script, for a server that does not know the SHA.

        That is the case after a restart, a failover or SCRIPT FLUSH.
        """
        if self.script is None:
            return self
        parts = unpack(self.parts) if isinstance(self.parts, bytes) else self.parts
        return type(self)((b"EVAL", self.script.text, *parts[2:]))

    def durable(self) -> DurableCommand:
        return DurableCommand(self.parts, self.script)

    def unanswered(self) -> UnansweredCommand:
        return UnansweredCommand(self.parts, self.script)


make_command: Final[Callable[[tuple[tuple[Any, ...] | bytes, Script | None]], RedisCommand]] = partial(
    tuple.__new__, RedisCommand
)
"""Makes a RedisCommand of its fields in order, faster than ``RedisCommand(...)``, which is a Python function."""


def template(*words: bytes | None) -> bytes:
    """Return a command as a format for ``%``. For each None among the words it takes two values, a length and a word.

    To fill it in takes half the time of packing the words one by one.
    """
    texts = [
        b"$%d\r\n%b\r\n" if word is None else b"$%d\r\n%b\r\n" % (len(word), word.replace(b"%", b"%%"))
        for word in words
    ]
    return b"*%d\r\n" % len(words) + b"".join(texts)


def unpack(packed: bytes) -> list[bytes]:
    """Return the words of a packed command."""
    from hiredis import Reader

    reader = Reader()
    reader.feed(packed)
    words: list[bytes] = reader.gets()
    return words


class DurableCommand(RedisCommand):
    """A command whose write must be confirmed: WAIT or WAITAOF follows it on the same connection.

    The program is sent a pair: the reply to the command and the reply to the WAIT. Either may be an error as a value.
    """

    __slots__ = ()


class UnansweredCommand(RedisCommand):
    """A command whose reply nobody waits for. The program is sent None."""

    __slots__ = ()


class Script:
    """One Lua file, after the code that all of them share."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text.encode("utf-8")
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def call(self, key: bytes, *arguments: Any) -> RedisCommand:
        return make_command(((b"EVALSHA", self.sha, 1, key, *arguments), self))


@cache
def scripts() -> dict[str, Script]:
    """Return all scripts by name."""
    folder = resources.files("semel.stores.redis").joinpath("lua")
    shared = folder.joinpath("record.lua").read_text("utf-8")
    texts = {name: folder.joinpath(f"{name}.lua").read_text("utf-8") for name in SCRIPT_NAMES}
    return {name: Script(text if name in _STANDALONE else _with_shared(shared, text)) for name, text in texts.items()}


def _with_shared(shared: str, text: str) -> str:
    """Put the shared code before the script, but after the line of flags, which must be the first."""
    flags, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
    return f"{flags}\n{shared}\n{rest}" if flags else f"{shared}\n{rest}"


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
