"""Conditional requests (RFC 9110, section 13): entity tags, If-Match and If-None-Match.

::

    @app.patch("/payments/{id}")
    @conditional()
    async def change(id: str, change: Change, response: Response):
        payment = await load(id)
        check_match(etag(payment.version))      # 412 unless the caller has seen this version
        ...
        response.headers["ETag"] = etag(payment.version + 1)

Comparison is strong for If-Match: a weak tag never matches. Between a check and the write that follows, another writer
may change the resource. To close that gap let the write itself compare (``UPDATE … WHERE version = …``), and raise
PreconditionFailed if it changed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar, Token
from hashlib import blake2b
from typing import Final

from semel.core.values import value
from semel.errors import ConfigurationError, PreconditionFailed, PreconditionInvalid, PreconditionRequired

IF_MATCH: Final = b"if-match"
IF_NONE_MATCH: Final = b"if-none-match"
MOST_TAGS: Final = 100
_TAG: Final = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_BETWEEN: Final = re.compile(r"[ \t]*,[ \t,]*")


def etag(state: str | bytes | int) -> str:
    """Return a strong entity tag for a version number, a version's name, or the bytes of a representation."""
    if isinstance(state, bool) or not isinstance(state, (str, bytes, int)):
        raise ConfigurationError(f"an entity tag is made from a version or from bytes, not from {type(state).__name__}")
    text = blake2b(state, digest_size=16).hexdigest() if isinstance(state, bytes) else str(state)
    tag = f'"{text}"'
    if not _TAG.fullmatch(tag):
        raise ConfigurationError(f"{text[:40]!r} cannot be an entity tag: no blanks, quotes or control characters")
    return tag


@value
class Preconditions:
    """The tags of a request as sent; ``("*",)`` for any, None if the header is missing."""

    match: tuple[str, ...] | None = None
    none_match: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return self.match is not None or self.none_match is not None

    def check(self, current: str | None) -> None:
        """Compare with the resource's current tag; None if there is no such resource. Raises PreconditionFailed."""
        if self.match is not None and not self._matches(current):
            raise PreconditionFailed("The resource is not in the state that If-Match names. Read it, and try again.")
        if self.none_match is not None and self._excluded(current):
            raise PreconditionFailed("The resource is in a state that If-None-Match excludes.")

    def _matches(self, current: str | None) -> bool:
        assert self.match is not None
        if current is None:
            return False
        return self.match == ("*",) or (not current.startswith("W/") and current in self.match)

    def _excluded(self, current: str | None) -> bool:
        assert self.none_match is not None
        if current is None:
            return False
        weak = current.removeprefix("W/")
        return self.none_match == ("*",) or any(tag.removeprefix("W/") == weak for tag in self.none_match)


def preconditions(headers: Iterable[tuple[bytes, bytes]], *, required: bool = False) -> Preconditions:
    """Read from header lines with lower-case names. Raises PreconditionInvalid or PreconditionRequired."""
    match: list[bytes] = []
    none_match: list[bytes] = []
    for name, text in headers:
        if name == IF_MATCH:
            match.append(text)
        elif name == IF_NONE_MATCH:
            none_match.append(text)
    found = Preconditions(_tags("If-Match", match), _tags("If-None-Match", none_match))
    if required and not found:
        raise PreconditionRequired(
            "This change must be conditional: read the resource, and send its ETag in If-Match with the change."
        )
    return found


def _tags(name: str, lines: list[bytes]) -> tuple[str, ...] | None:
    if not lines:
        return None
    text = b", ".join(lines).decode("latin-1").strip(" \t,")
    if text == "*":
        return ("*",)
    tags: list[str] = []
    at = 0
    while at < len(text) or not tags:
        tag = _TAG.match(text, at)
        if tag is None or len(tags) == MOST_TAGS:
            raise PreconditionInvalid(f'{name} is * or a list of entity tags, such as "7"')
        tags.append(tag[0])
        at = tag.end()
        if at < len(text):
            between = _BETWEEN.match(text, at)
            if between is None:
                raise PreconditionInvalid(f'{name} is * or a list of entity tags, such as "7"')
            at = between.end()
    return tuple(tags)


_current: ContextVar[Preconditions | None] = ContextVar("semel_preconditions", default=None)


def current_preconditions() -> Preconditions:
    """Return the current request's preconditions, in a handler of a conditional route."""
    found = _current.get()
    if found is None:
        raise ConfigurationError(
            "check_match() is for handlers of routes declared @conditional(), behind the middleware"
        )
    return found


def bind_preconditions(found: Preconditions) -> Token[Preconditions | None]:
    """Make these the current preconditions, in the context that the handler runs in."""
    return _current.set(found)


def unbind_preconditions(token: Token[Preconditions | None]) -> None:
    _current.reset(token)


def check_match(current: str | None) -> None:
    """Raise PreconditionFailed (412) unless the resource's current tag meets the request's preconditions.

    :param current: the resource's tag; None if there is no such resource.
    """
    current_preconditions().check(current)
