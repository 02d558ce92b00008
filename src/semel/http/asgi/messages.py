"""ASGI's vocabulary: the types of its callables, and what is asked of a request's scope before anything is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from semel.http.contract.exchange import KEY

__all__ = ["FILES", "App", "Message", "Receive", "Scope", "Send", "has_key", "without_files"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_LENGTH: Final = len(KEY)
FILES: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Ways of a server to send a file that the application never reads: nothing could be captured."""


def has_key(scope: Scope) -> bool:
    """Whether there is a line of an Idempotency-Key, whatever it says."""
    for name, _ in scope["headers"]:  # noqa: SIM110 (every request pays for this, and a generator costs more)
        if len(name) == _LENGTH and name.lower() == KEY:
            return True
    return False


def without_files(scope: Scope) -> None:
    """Let the application know of no such way, so that it sends the bytes themselves."""
    if "extensions" in scope and not FILES.isdisjoint(scope["extensions"] or ()):
        scope["extensions"] = {name: value for name, value in scope["extensions"].items() if name not in FILES}
