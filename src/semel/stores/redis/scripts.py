"""The Lua files: read once, known to the server by their SHA, sent in full where it has forgotten them.

Those that an attempt needs to go on and to end are flagged ``allow-oom``: a full server refuses an operation where it
has not begun, at the claim, and not where its effect is there already and only the answer is missing.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any, Final

__all__ = ["NAMES", "Command", "Kept", "Script", "Told", "scripts"]

ALONE: Final = frozenset({"complete", "confirm"})
"""Scripts that do without ``record.lua``."""
NAMES: Final = ("claim", "renew", "complete", "release", "save_step", "confirm", "lookup", "resolve", "watch", "sweep")


class Command:
    """What is sent to a server, and what to send instead where a script is not loaded."""

    __slots__ = ("_script", "parts")

    def __init__(self, parts: tuple[Any, ...], script: Script | None = None) -> None:
        self.parts = parts
        self._script = script

    def in_full(self) -> Command:
        """The same with the script's text: after a restart, a failover or SCRIPT FLUSH the SHA alone says nothing."""
        if self._script is None:
            return self
        return type(self)((b"EVAL", self._script.text, *self.parts[2:]))

    def kept(self) -> Kept:
        return Kept(self.parts, self._script)

    def told(self) -> Told:
        return Told(self.parts, self._script)


class Kept(Command):
    """What it writes is waited for: WAIT or WAITAOF goes behind it, on the same connection. Both replies are the
    answer, and an error is one, too."""

    __slots__ = ()


class Told(Command):
    """Nobody waits for its answer, whatever that is: the answer to the program is None."""

    __slots__ = ()


class Script:
    """One Lua file behind what all of them share."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text.encode("utf-8")
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def call(self, key: bytes, *arguments: Any) -> Command:
        return Command((b"EVALSHA", self.sha, 1, key, *arguments), self)


@cache
def scripts() -> dict[str, Script]:
    """All scripts by name."""
    folder = resources.files("semel.stores.redis").joinpath("lua")
    shared = folder.joinpath("record.lua").read_text("utf-8")
    texts = {name: folder.joinpath(f"{name}.lua").read_text("utf-8") for name in NAMES}
    return {name: Script(text if name in ALONE else _behind(shared, text)) for name, text in texts.items()}


def _behind(shared: str, text: str) -> str:
    """What all share stands before the rest, but behind the line of flags, which must be the first."""
    flags, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
    return f"{flags}\n{shared}\n{rest}" if flags else f"{shared}\n{rest}"
