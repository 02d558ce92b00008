"""The Lua files: read once, known to the server by their SHA, sent in full where it has forgotten them."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any, Final

__all__ = ["NAMES", "Command", "Script", "scripts"]

ALONE: Final = frozenset({"complete"})
"""Scripts that do without ``record.lua``."""
NAMES: Final = ("claim", "renew", "complete", "release", "save_step", "lookup", "resolve", "watch", "sweep")


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
        return Command((b"EVAL", self._script.text, *self.parts[2:]))


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
    return {name: Script(text if name in ALONE else f"{shared}\n{text}") for name, text in texts.items()}
