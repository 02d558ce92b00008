"""Commands to a Redis server, and the Lua scripts that most of them call.

A script is read from its file once, called by its SHA, and sent in full if the server does not know it. Scripts that a
running attempt needs in order to continue and to finish are flagged ``allow-oom``. So a full server refuses an
operation before it has begun, at the claim, and not when its effect has happened and only the result is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from typing import Any, Final, NamedTuple

_STANDALONE: Final = frozenset({"complete", "confirm"})
"""Scripts that do not need ``record.lua``."""
SCRIPT_NAMES: Final = (
    "claim", "renew", "complete", "release", "save_step", "confirm", "lookup", "resolve", "watch", "sweep",
)  # fmt: skip


class RedisCommand(NamedTuple):
    """The words of one command, and the script that it calls, if any."""

    parts: tuple[Any, ...]
    script: Script | None = None

    def in_full(self) -> RedisCommand:
        """Return the same command with the text of its script, for a server that does not know the SHA.

        That is the case after a restart, a failover or SCRIPT FLUSH.
        """
        if self.script is None:
            return self
        return type(self)((b"EVAL", self.script.text, *self.parts[2:]))

    def durable(self) -> DurableCommand:
        return DurableCommand(self.parts, self.script)

    def unanswered(self) -> UnansweredCommand:
        return UnansweredCommand(self.parts, self.script)


make_command: Final[Callable[[tuple[tuple[Any, ...], Script | None]], RedisCommand]] = partial(
    tuple.__new__, RedisCommand
)
"""Makes a RedisCommand of its fields in order, faster than ``RedisCommand(...)``, which is a Python function."""


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
