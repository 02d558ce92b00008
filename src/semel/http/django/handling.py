"""The state of a Django request that the middleware and the decorated view share."""

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

__all__ = ["Handling", "current_handling", "parsed_before", "require_handling"]


_READ: Final = ("_post", "_files", "_post_parse_error", "_upload_handlers")
"""Attributes in which Django keeps the parsed body of a request."""
_SESSION: Final = ("_session_cache", "_session_key", "accessed", "modified")
"""Attributes in which it keeps the state of a session."""


class Handling:
    """One request while it is handled."""

    def __init__(self, request: HttpRequest, configuration: Configuration, *, in_loop: bool) -> None:
        self.request = request
        self.in_loop = in_loop
        """Whether it is served by ASGI."""
        self.response: Any = None
        """Django's response."""
        self.tenant: str | None = None
        self.declared = False
        """Whether its view is claimed. Such a view runs to its end although the client hangs up."""
        self._configuration = configuration
        self._begun = False
        self._body: bytes | None = None
        """The request's body, if a middleware outside of us has read it already."""
        self._session: dict[str, Any] = {}

    @property
    def guard(self) -> Guard:
        return self._configuration.guard

    def begins_again(self) -> bool:
        """Count a run of the request. Returns whether it is run again; then what the last run has parsed is dropped."""
        again, self._begun = self._begun, True
        if again:
            _forget_body(self.request, self._body)
            _put_back(self.request, self._session)
        elif "HTTP_IDEMPOTENCY_KEY" in self.request.META:
            self._body = getattr(self.request, "_body", None)
            self._session = _session_of(self.request)
        return again

    def _needs_tenant(self, rule: Rule) -> bool:
        """Whether a claim will be made that needs the tenant."""
        request = self.request
        self.declared = isinstance(rule, Idempotent) and request.method not in SAFE_METHODS
        return self.declared and self._configuration.tenant is not None and "HTTP_IDEMPOTENCY_KEY" in request.META

    def prepare(self, rule: Rule) -> None:
        """Find the tenant, in the thread of the view: the resolver may use its database connection."""
        if self._needs_tenant(rule):
            self.tenant = self._configuration.whose(self.request)

    async def aprepare(self, rule: Rule) -> None:
        if self._needs_tenant(rule):
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
    """Copy the state of the session. Most have not been loaded yet."""
    session = getattr(request, "session", None)
    return {name: deepcopy(getattr(session, name)) for name in _SESSION if hasattr(session, name)}


def _put_back(request: HttpRequest, known: dict[str, Any]) -> None:
    session = getattr(request, "session", None)
    if session is None or not known:
        return
    session.__dict__.pop("_session_cache", None)  # a session that was loaded since is loaded again
    for name, value in known.items():
        setattr(session, name, deepcopy(value))


def parsed_before() -> ConfigurationError:
    """The error for a body that was read before it came to us, and not kept: it cannot be compared."""
    return ConfigurationError(
        "the request's body was parsed before IdempotencyMiddleware saw it, so it cannot be compared: put that "
        "middleware after IdempotencyMiddleware, or have it read request.body first"
    )


current_handling: ContextVar[Handling | None] = ContextVar("semel_django", default=None)


def require_handling() -> Handling:
    """Return the state of the current request. Raises ConfigurationError if the middleware is not installed."""
    found = current_handling.get()
    if found is None:
        raise ConfigurationError(
            "this view is declared, but the middleware is not installed: "
            'MIDDLEWARE = [..., "semel.http.django.IdempotencyMiddleware"]'
        )
    return found
