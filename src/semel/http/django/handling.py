"""The ``SEMEL`` setting of a project, and the current request: what the middleware and the decorated view share.

Responses become status and header lines, and back. Django has one line for a name, except for cookies.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.conf import settings
from django.core import mail
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import ResponseHeaders
from django.utils.module_loading import import_string

from semel.engine.aio import AsyncGuard
from semel.engine.guard import Guard
from semel.engine.sync import SyncGuard
from semel.errors import ConfigurationError
from semel.http.contract.exchange import KEY_HEADER, KeyHeader
from semel.http.contract.rules import MAX_REQUEST_BODY, SAFE_METHODS, Idempotent, Rule, check_max_request_body
from semel.http.wsgi.answers import reason_phrase
from semel.stores.memory import AsyncMemoryStore, MemoryStore

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase


TenantResolver: TypeAlias = "Callable[[HttpRequest], Any]"

NO_TENANT: Final = "SEMEL has no TENANT: all callers share one space of keys, so one may get another's answer"
_KNOWN: Final = frozenset({"GUARD", "TEST_GUARD", "TENANT", "DOCS", "MAX_REQUEST_BODY", "HEADER"})


def user(request: HttpRequest) -> str | None:
    """Return the primary key of the authenticated user: a function for ``TENANT``. Anonymous requests are an error."""
    account = request.user
    return str(account.pk) if account.is_authenticated else None


@dataclass(slots=True, frozen=True)
class Configuration:
    """The setting, checked and imported."""

    guard: Guard
    tenant: TenantResolver | None
    docs: str | None
    max_request_body: int = MAX_REQUEST_BODY
    key_header: KeyHeader = KEY_HEADER

    def has_key(self, request: HttpRequest) -> bool:
        """Whether the request has the header of the key, valid or not."""
        return self.key_header.variable in request.META


def configuration() -> Configuration:
    """Read ``settings.SEMEL``. Raises ConfigurationError."""
    setting = getattr(settings, "SEMEL", None)
    if not isinstance(setting, dict) or "GUARD" not in setting:
        raise ConfigurationError('the settings lack SEMEL = {"GUARD": "shop.once.guard", "TENANT": …}')
    if unknown := sorted(setting.keys() - _KNOWN):
        there = ", ".join(sorted(_KNOWN))
        raise ConfigurationError(f"SEMEL has unknown settings: {', '.join(unknown)}; there are {there}")
    in_tests = hasattr(mail, "outbox")  # by setup_test_environment(): Django's own sign
    guard = _guard("TEST_GUARD" if in_tests and "TEST_GUARD" in setting else "GUARD", setting)
    if in_tests and "TEST_GUARD" not in setting:
        _keep_in_memory(guard)
    tenant = _imported("TENANT", setting.get("TENANT"))
    if tenant is not None and not callable(tenant):
        raise ConfigurationError(f"SEMEL's TENANT is a function of the request, or its dotted path, not {tenant!r}")
    longest = setting.get("MAX_REQUEST_BODY", MAX_REQUEST_BODY)
    check_max_request_body(longest)
    key_header = KeyHeader(setting.get("HEADER", KEY_HEADER.title))
    return Configuration(guard, tenant, setting.get("DOCS"), longest, key_header)


def _guard(name: str, setting: dict[str, Any]) -> Guard:
    guard = _imported(name, setting[name])
    if not isinstance(guard, Guard) and callable(guard) and not inspect.isclass(guard):
        guard = _call_once(guard)
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"SEMEL's {name} is a guard such as Semel(SQLiteStore('app.db')), not {guard!r}")
    return guard


def _keep_in_memory(guard: Guard) -> None:
    """While tests run, keep records in memory: the guard's store is the developer's own database, not the test one.

    Transactional views still write their records with their rows, into the test database.
    """
    if isinstance(guard, (AsyncGuard, SyncGuard)) and not isinstance(guard.store, (MemoryStore, AsyncMemoryStore)):
        store: Any = AsyncMemoryStore() if isinstance(guard, AsyncGuard) else MemoryStore()
        store.adopt = guard.store.adopt  # uses the view's connection, and none of the store's
        guard.use_store(store)


@functools.cache
def _call_once(make: Callable[[], Any]) -> Any:
    """Call it once: the middleware, the checks and the documents need the same guard."""
    return make()


def _imported(name: str, thing: Any) -> Any:
    if not isinstance(thing, str):
        return thing
    try:
        return import_string(thing)
    except ImportError as error:
        raise ConfigurationError(f"SEMEL's {name} cannot be imported: {error}") from error


_READ: Final = ("_post", "_files", "_post_parse_error", "_upload_handlers")
"""Attributes in which Django stores the parsed body of a request."""
_SESSION: Final = ("_session_cache", "_session_key", "accessed", "modified")
"""Attributes in which Django stores the data of a session."""


class Handling:
    """One request."""

    def __init__(self, request: HttpRequest, configuration: Configuration, *, in_loop: bool) -> None:
        self.request = request
        self.in_loop = in_loop
        """Whether it is served by ASGI."""
        self.response: Any = None
        """Django's answer."""
        self.tenant: str | None = None
        self.declared = False
        """Whether the request has reached a view that is claimed. It runs to its end even if the client hangs up."""
        self._configuration = configuration
        self._begun = False
        self._body: bytes | None = None
        """The request's body, if a middleware outside ours has read it already."""
        self._session: dict[str, Any] = {}

    @property
    def guard(self) -> Guard:
        return self._configuration.guard

    def begins_again(self) -> bool:
        """Return whether the request is run again. If so, reset what the previous run has made of it."""
        again, self._begun = self._begun, True
        if again:
            _forget_body(self.request, self._body)
            _put_back(self.request, self._session)
        elif self._configuration.has_key(self.request):
            self._body = getattr(self.request, "_body", None)
            self._session = _session_of(self.request)
        return again

    def prepare(self, rule: Rule) -> None:
        """Find the tenant in the thread of the view: ``TENANT`` may need the database connection of that thread."""
        resolve = self._tenant_resolver(rule)
        if resolve is not None:
            self.tenant = (async_to_sync(resolve) if iscoroutinefunction(resolve) else resolve)(self.request)

    async def aprepare(self, rule: Rule) -> None:
        """Find the tenant in an event loop. A plain function may query the database, so it runs in a thread."""
        resolve = self._tenant_resolver(rule)
        if resolve is not None:
            self.tenant = await (resolve if iscoroutinefunction(resolve) else sync_to_async(resolve))(self.request)

    def _tenant_resolver(self, rule: Rule) -> TenantResolver | None:
        """Return ``TENANT`` if a claim will be made, which needs the tenant."""
        self.declared = isinstance(rule, Idempotent) and self.request.method not in SAFE_METHODS
        return self._configuration.tenant if self.declared and self._configuration.has_key(self.request) else None


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
    """Return the data of the session. Most sessions are not loaded yet, and need no copy."""
    session = getattr(request, "session", None)
    return {name: deepcopy(getattr(session, name)) for name in _SESSION if hasattr(session, name)}


def _put_back(request: HttpRequest, known: dict[str, Any]) -> None:
    session = getattr(request, "session", None)
    if session is None or not known:
        return
    session.__dict__.pop("_session_cache", None)  # one that was loaded meanwhile is loaded again
    for name, value in known.items():
        setattr(session, name, deepcopy(value))


def parsed_before() -> ConfigurationError:
    """The body was read before us and not kept, so requests cannot be compared."""
    return ConfigurationError(
        "the request's body was parsed before IdempotencyMiddleware saw it, so it cannot be compared: put that "
        "middleware after IdempotencyMiddleware, or have it read request.body first"
    )


current_handling: ContextVar[Handling | None] = ContextVar("semel_django", default=None)


def require_handling() -> Handling:
    handling = current_handling.get()
    if handling is None:
        raise ConfigurationError(
            "this view is declared, but the middleware is not installed: "
            'MIDDLEWARE = [..., "semel.http.django.IdempotencyMiddleware"]'
        )
    return handling


# -- responses as lines, and back


def response_lines(response: HttpResponseBase) -> list[tuple[str, str]]:
    """Return the header lines of a response, as a server gets them."""
    cookies = [("Set-Cookie", cookie.output(header="").strip()) for cookie in response.cookies.values()]
    return [*response.items(), *cookies]


def rewrite_response(
    response: HttpResponseBase, status: int, lines: Iterable[tuple[str, str]], content: bytes
) -> HttpResponseBase:
    """Return the response with these header lines, or another one if its status or content differs."""
    if response.streaming or response.status_code != status or response.content != content:
        # If the status is the same, the reason phrase is the view's own.
        reason = response._reason_phrase if response.status_code == status else reason_phrase(status)
        response = _take_over(response, HttpResponse(content, status=status, reason=reason))
    return _set_headers(response, lines)


def stream_response(
    response: HttpResponseBase, lines: Iterable[tuple[str, str]], chunks: Iterable[bytes] | AsyncIterator[bytes]
) -> HttpResponseBase:
    """Return a streaming response with these header lines and chunks, in place of the response."""
    other = StreamingHttpResponse(chunks, status=response.status_code, reason=response._reason_phrase)
    return _set_headers(_take_over(response, other), lines)


def _take_over(old: HttpResponseBase, new: HttpResponseBase) -> HttpResponseBase:
    """Close with the new response what the old one has to close."""
    new._resource_closers.extend(old._resource_closers)
    new.cookies = old.cookies
    if old.has_header("Set-Cookie"):
        new["Set-Cookie"] = old["Set-Cookie"]
    new._charset = old._charset
    return new


def _set_headers(response: HttpResponseBase, lines: Iterable[tuple[str, str]]) -> HttpResponseBase:
    spelled = {name.lower(): name for name in response.headers}
    headers: Any = ResponseHeaders({})
    cookies = False
    for name, value in lines:
        low = name.lower()
        if low == "set-cookie":
            cookies = True
            if "set-cookie" in spelled:  # others are in response.cookies, and stay there
                headers[name] = response.headers[name]
        elif low in headers:
            headers[low] = f"{headers[low]}, {value}"
        else:
            headers[spelled.get(low, low.title())] = value
    if not cookies:
        response.cookies.clear()
    response.headers = headers
    return response
