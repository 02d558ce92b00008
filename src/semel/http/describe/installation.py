"""Find what is installed in an application: its guard, its tenant and its endpoints.

Nothing is run or changed. No framework is imported: an application of a framework has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from semel.core.values import value
from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.exchange import KEY_HEADER, KeyHeader
from semel.http.contract.middleware import Middleware
from semel.http.contract.routes import Endpoint, Routes
from semel.http.wsgi.middleware import WSGIMiddleware

FRAMEWORKS: Final = (
    ("starlette.applications", "Starlette", "semel.http.fastapi"),
    ("litestar.app", "Litestar", "semel.http.litestar"),
    ("flask.app", "Flask", "semel.http.flask"),
    ("quart.app", "Quart", "semel.http.quart"),
)
"""The class of a framework's applications, and our module with ``endpoints(app)``."""
INSIDE: Final = ("app", "wsgi_app", "application", "asgi_app", "_app", "wrapped", "__wrapped__", "__self__")
"""Attributes in which wrappers have the application that they wrap."""
DEEPEST: Final = 20


@value
class Installation:
    """What is known of a service."""

    framework: str
    guard: Guard
    tenant: str
    """The name of the function that returns the tenant of a request; empty if there is none."""
    docs: str | None
    key_header: KeyHeader
    endpoints: list[Endpoint]


def find_installation(app: Any) -> Installation:
    """Look into an application, and into what it wraps. Raises ConfigurationError if there is no middleware."""
    seen: list[str] = []
    for _ in range(DEEPEST):
        for look in (_middleware, _starlette, _litestar, _flask, _django):
            installation = look(app)
            if installation is not None:
                return installation
        seen.append(type(app).__name__)
        inner = next((each for name in INSIDE if (each := getattr(app, name, None)) is not None), None)
        if inner is None or inner is app:
            break
        app = inner
    raise ConfigurationError(
        f"no middleware of Semel is installed in this application ({' around '.join(seen)}): install it, or name the "
        "object that the server runs, if that is another one"
    )


def _middleware(app: Any) -> Installation | None:
    """The middleware itself, around any application."""
    if not isinstance(app, Middleware):
        return None
    inner = getattr(app.app, "__self__", app.app)  # such as the bound method Flask.wsgi_app
    listing = _listing(inner)
    plain = "WSGI" if isinstance(app, WSGIMiddleware) else "ASGI"
    framework = type(inner).__name__ if listing is not None else plain
    return _installation(
        framework, app.guard, app.tenant, app.docs, app.key_header, app.list_endpoints or listing, app.routes
    )


def _starlette(app: Any) -> Installation | None:
    if not _is(app, "starlette.applications", "Starlette"):
        return None
    for entry in app.user_middleware:
        if isinstance(entry.cls, type) and issubclass(entry.cls, ASGIMiddleware):
            settings: Mapping[str, Any] = entry.kwargs
            return _installation(
                type(app).__name__, settings["guard"], settings.get("tenant"), settings.get("docs"),
                KeyHeader(settings.get("header", KEY_HEADER.title)), _listing(app), Routes(settings.get("routes")),
            )  # fmt: skip
    return None


def _litestar(app: Any) -> Installation | None:
    if not _is(app, "litestar.app", "Litestar"):
        return None
    from semel.http.litestar import SemelPlugin

    for plugin in app.plugins:
        if isinstance(plugin, SemelPlugin):
            around = plugin.middleware
            return _installation("Litestar", around.guard, around.tenant, around.docs, around.key_header, _listing(app))
    return None


def _flask(app: Any) -> Installation | None:
    return _middleware(app.extensions.get("semel")) if _is(app, "flask.app", "Flask") else None


def _django(app: Any) -> Installation | None:
    if not _is(app, "django.core.handlers.base", "BaseHandler"):
        return None
    from django.conf import settings
    from django.utils.module_loading import import_string

    from semel.http.django import IdempotencyMiddleware, endpoints
    from semel.http.django.configuration import configuration

    classes = [each for each in map(import_string, settings.MIDDLEWARE) if isinstance(each, type)]
    if not any(issubclass(each, IdempotencyMiddleware) for each in classes):
        return None
    config = configuration()
    return _installation("Django", config.guard, config.tenant, config.docs, config.key_header, endpoints)


def _installation(
    framework: str,
    guard: Guard,
    tenant: Any,
    docs: str | None,
    key_header: KeyHeader,
    listing: Callable[[], list[Endpoint]] | None,
    routes: Routes | None = None,
) -> Installation:
    endpoints = (routes or Routes()).merge(listing() if listing is not None else [])
    return Installation(framework, guard, "" if tenant is None else _name_of(tenant), docs, key_header, endpoints)


def _listing(app: Any) -> Callable[[], list[Endpoint]] | None:
    """Return the function of the framework's module that lists the endpoints; None if it is no framework's."""
    for module, name, glue in FRAMEWORKS:
        if _is(app, module, name):
            endpoints = import_module(glue).endpoints
            return lambda: list(endpoints(app))
    return None


def _is(app: Any, module: str, name: str) -> bool:
    """Whether it is an instance of a class whose module may not be imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(app, cls)


def _name_of(resolver: Any) -> str:
    """Return the function's dotted name."""
    name = getattr(resolver, "__qualname__", None) or type(resolver).__qualname__
    return f"{getattr(resolver, '__module__', '')}.{name}".lstrip(".")
