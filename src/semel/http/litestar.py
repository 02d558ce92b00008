"""Litestar: ``SemelPlugin`` protects an app, and ``@idempotent()`` declares a handler, below its route.

::

    app = Litestar([pay], plugins=[SemelPlugin(guard=guard, tenant=lambda request: request.user.id)])

    @post("/payments")
    @idempotent(ttl="24h")
    async def pay(data: Payment, op: AsyncOperation) -> Receipt: ...

The claim is made after guards, dependencies and the validation of the data, just before the function runs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, TypeAlias, cast
from urllib.parse import unquote

from semel.errors import ConfigurationError, MissingDependency, PolicyError, TransactionConflict
from semel.http.asgi.body import App, Receive, Scope, Send
from semel.http.asgi.endpoints import protect
from semel.http.asgi.middleware import ASGIMiddleware, current_responder
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.endpoint import Framework
from semel.http.contract.exchange import KEY_HEADER
from semel.http.contract.routes import Endpoint, MatchedRoute, declared_rule
from semel.http.contract.rules import MAX_REQUEST_BODY, Decorators, Exempt, Idempotent, Rule
from semel.http.describe import document
from semel.stores.aio_guard import AsyncSemel

try:
    from litestar import Litestar, Request, Response
    from litestar.background_tasks import BackgroundTask
    from litestar.config.app import AppConfig
    from litestar.exceptions import HTTPException
    from litestar.handlers import HTTPRouteHandler
    from litestar.handlers.base import BaseRouteHandler
    from litestar.openapi.spec import OpenAPI
    from litestar.plugins.base import InitPlugin, ReceiveRoutePlugin
    from litestar.routes import BaseRoute, HTTPRoute
    from litestar.utils.scope.state import CONNECTION_STATE_KEY, ScopeState
except ImportError as error:
    raise MissingDependency("litestar", "litestar") from error

__all__ = [
    "SemelPlugin", "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "natural",
]  # fmt: skip

TenantResolver: TypeAlias = "Callable[[Request[Any, Any, Any]], str | Awaitable[str | None] | None]"
_EXPOSED: Final = ("Idempotent-Replayed", "Idempotent-Stored", "Retry-After", "Link")


class SemelPlugin(InitPlugin, ReceiveRoutePlugin):
    """``Litestar(…, plugins=[SemelPlugin(guard=guard, tenant=…)])``"""

    def __init__(
        self,
        *,
        guard: AsyncSemel,
        tenant: TenantResolver | None = None,
        docs: str | None = None,
        max_request_body: int = MAX_REQUEST_BODY,
        header: str = KEY_HEADER.title,
    ) -> None:
        """
        :param tenant: a function of the request that returns its tenant, which scopes the keys. It is called after
            guards and dependencies, and may be async.
        :param docs: the URL of a page that explains the errors; they link to it.
        :param max_request_body: the longest request body in bytes; a longer one is refused with 413.
        :param header: the name of the header that has the key.
        """
        self.middleware = ASGIMiddleware(
            _nothing, guard=guard, tenant=tenant, docs=docs, max_request_body=max_request_body, request=Request,
            header=header, find_route=_LitestarRoutes(),
        )  # fmt: skip
        self._exposed: list[str] = []

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Add the middleware around all others, and our headers to CORS and OpenAPI."""
        if sum(isinstance(plugin, SemelPlugin) for plugin in app_config.plugins) > 1:
            raise ConfigurationError("SemelPlugin is installed in this app already: one guard for one app")
        app_config.middleware.insert(0, cast(Any, self._around))
        app_config.on_startup.append(self._start)
        if app_config.cors_config is not None:  # Litestar answers CORS outside of all middlewares
            ours = (self.middleware.key_header.title, *_EXPOSED)
            self._exposed = list(dict.fromkeys([*app_config.cors_config.expose_headers, *ours]))
            app_config.cors_config = dataclasses.replace(app_config.cors_config, expose_headers=self._exposed)
        _describe(app_config, self.middleware)
        return app_config

    def receive_route(self, route: BaseRoute) -> None:
        """Raise at start-up if a declared handler would run without protection, or if its replay would fail."""
        for handler in route.route_handlers if isinstance(route, HTTPRoute) else ():
            rule = declared_rule(handler.fn)
            if rule is None or isinstance(rule, Exempt):
                continue
            if handler.has_sync_callable:
                raise ConfigurationError(f"{handler}: a plain def would block the event loop; add sync_to_thread=True")
            if isinstance(rule, Idempotent):
                self.middleware.keep(rule)
                if handler.cache:
                    raise ConfigurationError(f"{handler}: cache= answers without a claim; leave it out")
                if (name := rule.replay_marker.title()) not in self._exposed:
                    self._exposed.append(name)
            _let_blanks_pass(handler)

    def _around(self, app: App) -> ASGIMiddleware:
        """Return the middleware around one route."""

        async def inside(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                _set_whole_path(scope)
                if self.middleware.reruns.possible:
                    _copy_state(scope)
            await app(scope, receive, send)

        return self.middleware.around(inside)

    async def _start(self, app: Litestar) -> None:
        self.middleware.list_endpoints = lambda: endpoints(app)
        await self.middleware.start()


def endpoints(app: Litestar) -> list[Endpoint]:
    """Return all routes of the app, with the rules that they are declared with."""
    return [
        Endpoint(method, route.path_format, declared_rule(handler.fn), _name(handler))
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for method, (handler, _) in sorted(route.route_handler_map.items())
        if method != "OPTIONS"  # Litestar answers these itself
    ]


class _LitestarRoutes:
    """Finds the template of a request's route in the scope. Litestar binds no route to a host."""

    def binds_hosts(self) -> bool:
        return False

    def __call__(self, scope: Scope) -> MatchedRoute:
        return MatchedRoute(template=scope.get("path_template", ""))


def _protect(function: Any, rule: Rule) -> Any:
    if isinstance(function, BaseRouteHandler):
        raise PolicyError(f"{function}: put the route's decorator on top, @post(…), and this one below it")
    return protect(function, rule, _FRAMEWORK)


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


class _Blank(Response[None]):
    """Takes the place of a handler's answer; the middleware sends the real one."""

    def __init__(self) -> None:
        # A task of its own, in the place of the route's background task, which belongs to the first answer.
        super().__init__(None, status_code=204, background=BackgroundTask(_nothing))


def _refused(status: int) -> HTTPException:
    return HTTPException(status_code=status, detail=HTTPStatus(status).phrase)


_FRAMEWORK: Final = Framework(
    blank=_Blank,
    abort=_refused,
    # A plain Exception: whatever cleans up after a handler may do so in "except Exception".
    run_again=lambda: _refused(TransactionConflict.status),
)


async def _nothing(*_: Any) -> None: ...


def _let_blanks_pass(handler: HTTPRouteHandler) -> None:
    """Keep the return DTO of the handler from encoding the blank response that takes the place of an answer."""
    dto = handler.resolve_return_dto()
    if dto is None or getattr(dto, "__semel_passes__", False):
        return

    def data_to_encodable_type(self: Any, data: Any) -> Any:
        return data if isinstance(data, _Blank) else encode(self, data)

    encode = dto.data_to_encodable_type
    passing = {"data_to_encodable_type": data_to_encodable_type, "__semel_passes__": True}
    handler._resolved_return_dto = type(dto.__name__, (dto,), passing)


def _set_whole_path(scope: Scope) -> None:
    """Give the exchange the whole path. Litestar cuts it where it mounts an application, and the same rest below two
    mounts is two operations.
    """
    path, raw = scope["path"], scope.get("raw_path")
    whole = unquote(raw.partition(b"?")[0]) if raw else path
    if whole.rstrip("/") != path.rstrip("/") and (responder := current_responder()) is not None:
        responder.life.exchange.path = whole


def _copy_state(scope: Scope) -> None:
    """Copy what Litestar notes about a request while it runs, so that a run that is not the last leaves no trace."""
    state = copy.copy(ScopeState.from_scope(cast(Any, scope)))
    for name in ScopeState.__slots__:
        if type(value := getattr(state, name)) in (dict, list):
            setattr(state, name, copy.copy(value))
    scope["state"][CONNECTION_STATE_KEY] = state


def _name(handler: HTTPRouteHandler) -> str:
    function = getattr(handler.fn, "func", handler.fn)  # in a thread
    return handler.name or str(getattr(function, "__name__", ""))


def _describe(app_config: AppConfig, around: ASGIMiddleware) -> None:
    """Have the application's OpenAPI document describe the declared handlers.

    Litestar builds its document as an object and turns it into plain data wherever it is shown or written to a file.
    ``document`` runs at that last step: all routes are registered by then.
    """
    if app_config.openapi_config is None:
        return
    config = copy.copy(app_config.openapi_config)  # the default one is shared by all applications
    build = config.to_openapi_schema

    def to_openapi_schema() -> OpenAPI:
        openapi = build()
        plain = openapi.to_schema

        def to_schema() -> dict[str, Any]:
            return document(
                plain(), endpoints(_application(app_config)),
                guard=around.guard, docs=around.docs, header=around.key_header.title,
            )  # fmt: skip

        openapi.to_schema = to_schema  # type: ignore[method-assign]
        return openapi

    config.to_openapi_schema = to_openapi_schema  # type: ignore[method-assign]
    app_config.openapi_config = config


def _application(app_config: AppConfig) -> Litestar:
    """Return the application that is made from this configuration. Litestar's own OpenAPI plugin knows it."""
    for plugin in app_config.plugins:
        if hasattr(plugin, "provide_openapi_schema"):
            return cast("Litestar", getattr(plugin, "app"))  # noqa: B009 - the class is private to Litestar
    raise LookupError("Litestar has no plugin for OpenAPI")
