"""The Django request in hand: what the middleware and the decorated view know of it together."""

from __future__ import annotations

from contextvars import ContextVar
from copy import deepcopy
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.contract.rules import SAFE_METHODS, Idempotent, Rule
from semel.http.django.configuration import Configuration

if TYPE_CHECKING:
    from django.http import HttpRequest

__all__ = ["Handling", "current", "in_hand", "parsed_before"]


_READ: Final = ("_post", "_files", "_post_parse_error", "_upload_handlers")
"""Where Django keeps what it has made of a request's body."""
_SESSION: Final = ("_session_cache", "_session_key", "accessed", "modified")
"""Where it keeps what it knows of a session."""


class Handling:
    """One request on its way."""

    def __init__(self, request: HttpRequest, configuration: Configuration, *, in_loop: bool) -> None:
        self.request = request
        self.in_loop = in_loop
        """Whether it came by ASGI."""
        self.response: Any = None
        """What Django answered."""
        self.tenant: str | None = None
        self.declared = False
        """Whether it has come to a view that is claimed. Such a one is run to its end, though the client hang up."""
        self._configuration = configuration
        self._begun = False
        self._body: bytes | None = None
        """The request's body, where somebody outside of us has read it already."""
        self._session: dict[str, Any] = {}

    @property
    def guard(self) -> Guard:
        return self._configuration.guard

    def begins_again(self) -> bool:
        """Whether this is not the first run of the request; then what was made of it meanwhile is forgotten."""
        again, self._begun = self._begun, True
        if again:
            _forget_body(self.request, self._body)
            _put_back(self.request, self._session)
        elif "HTTP_IDEMPOTENCY_KEY" in self.request.META:
            self._body = getattr(self.request, "_body", None)
            self._session = _session_of(self.request)
        return again

    def _asks(self, rule: Rule) -> bool:
        """Whether a claim will be made, and so whose request it is must be known."""
        request = self.request
        self.declared = isinstance(rule, Idempotent) and request.method not in SAFE_METHODS
        return self.declared and self._configuration.tenant is not None and "HTTP_IDEMPOTENCY_KEY" in request.META

    def prepare(self, rule: Rule) -> None:
        """Find out whose request it is, where the view runs: what is asked may need its thread's database."""
        if self._asks(rule):
            self.tenant = self._configuration.whose(self.request)

    async def aprepare(self, rule: Rule) -> None:
        if self._asks(rule):
            self.tenant = await self._configuration.awhose(self.request)


def _forget_body(request: HttpRequest, outside: bytes | None) -> None:
    if hasattr(request, "_files"):
        for _, uploaded in request._files.lists():
            for each in uploaded:
                each.close()
    for name in _READ:
        request.__dict__.pop(name, None)
    if outside is None:
        request.__dict__.pop("_body", None)
        request._read_started = False
    else:
        request._body = outside
        request._stream = BytesIO(outside)


def _session_of(request: HttpRequest) -> dict[str, Any]:
    """What is known of the session. Most have not been loaded yet, and this costs nothing."""
    session = getattr(request, "session", None)
    return {name: deepcopy(getattr(session, name)) for name in _SESSION if hasattr(session, name)}


def _put_back(request: HttpRequest, known: dict[str, Any]) -> None:
    session = getattr(request, "session", None)
    if session is None or not known:
        return
    session.__dict__.pop("_session_cache", None)  # one that was loaded since is loaded again
    for name, value in known.items():
        setattr(session, name, deepcopy(value))


def parsed_before() -> ConfigurationError:
    """The body was read before it came to us, and not kept: nothing could be compared."""
    return ConfigurationError(
        "the request's body was parsed before IdempotencyMiddleware saw it, so it cannot be compared: put that "
        "middleware after IdempotencyMiddleware, or have it read request.body first"
    )


in_hand: ContextVar[Handling | None] = ContextVar("semel_django", default=None)


def current() -> Handling:
    found = in_hand.get()
    if found is None:
        raise ConfigurationError(
            "this view is declared to happen once, and the middleware is not installed: "
            'MIDDLEWARE = [..., "semel.http.django.IdempotencyMiddleware"]'
        )
    return found
