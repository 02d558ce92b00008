"""The types of ASGI's callables, and what is looked up in a request's scope before anything else is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

__all__ = ["FILES", "App", "Message", "Receive", "Scope", "Send", "without_files"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

FILES: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Messages by which the server sends a file that the application never reads: nothing could be captured."""


def without_files(scope: Scope) -> None:
    """Hide these extensions from the application, so that it sends the bytes themselves."""
    if not FILES.isdisjoint(scope["extensions"] or ()):
        scope["extensions"] = {name: value for name, value in scope["extensions"].items() if name not in FILES}
