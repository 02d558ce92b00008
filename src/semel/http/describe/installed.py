"""What an application has installed: its guard, tenant and endpoints, wherever its framework keeps them.

Nothing is run or changed by looking, and no framework is imported: an application of one has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from semel.core.values import value
from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.contract.inventory import Endpoint
from semel.http.contract.middleware import Middleware
from semel.http.contract.routes import Routes

__all__ = ["Installed", "installed_in"]

FRAMEWORKS: Final = (
    ("starlette.applications", "Starlette", "semel.http.fastapi"),
    ("litestar.app", "Litestar", "semel.http.litestar"),
    ("flask.app", "Flask", "semel.http.flask"),
)
"""Where a framework has its application's class, and where we have its ``endpoints(app)``."""
INSIDE: Final = ("app", "wsgi_app", "application", "asgi_app", "_app", "wrapped", "__wrapped__", "__self__")
"""Where wrappers keep what they wrap."""
DEEPEST: Final = 20


@value
class Installed:
    """What is known of a service."""

    framework: str
    guard: Guard
    tenant: str
    """The name of the function that finds it out; empty: there is none."""
    docs: str | None
    endpoints: list[Endpoint]


def installed_in(app: Any) -> Installed:
    """Look into an application, and into what it is wrapped in; ConfigurationError where no middleware is found."""
    seen: list[str] = []
    for _ in range(DEEPEST):
        for look in (_by_hand, _starlette, _litestar, _flask, _django):
            found = look(app)
            if found is not None:
                return found
        seen.append(type(app).__name__)
        inner = next((each for name in INSIDE if (each := getattr(app, name, None)) is not None), None)
        if inner is None or inner is app:
            break
        app = inner
    raise ConfigurationError(
        f"no middleware of Semel is installed in this application ({' around '.join(seen)}): install it, or name "
        "the object that the server is given, if that is another one"
    )


def _by_hand(app: Any) -> Installed | None:
    """The middleware itself, around any application."""
    if not isinstance(app, Middleware):
        return None
    inner = getattr(app.app, "__self__", app.app)  # such as the bound method Flask.wsgi_app
    listing = _listing(inner)
    kind = type(inner).__name__ if listing is not None else "WSGI" if _is_wsgi(app) else "ASGI"
    return _installed(kind, app.guard, app.tenant, app.docs, app.list_endpoints or listing, app.routes)


def _starlette(app: Any) -> Installed | None:
    if not _is(app, "starlette.applications", "Starlette"):
        return None
    from semel.http.asgi.middleware import ASGIMiddleware

    for entry in app.user_middleware:
        if isinstance(entry.cls, type) and issubclass(entry.cls, ASGIMiddleware):
            given: Mapping[str, Any] = entry.kwargs
            routes = Routes(given.get("routes"))
            listing, kind = _listing(app), type(app).__name__
            return _installed(kind, given["guard"], given.get("tenant"), given.get("docs"), listing, routes)
    return None


def _litestar(app: Any) -> Installed | None:
    if not _is(app, "litestar.app", "Litestar"):
        return None
    from semel.http.litestar import SemelPlugin

    for plugin in app.plugins:
        if isinstance(plugin, SemelPlugin):
            around = plugin.middleware
            return _installed("Litestar", around.guard, around.tenant, around.docs, _listing(app))
    return None


def _flask(app: Any) -> Installed | None:
    if not _is(app, "flask.app", "Flask") or "semel" not in app.extensions:
        return None
    extension = app.extensions["semel"]
    return _installed("Flask", extension.guard, extension.tenant, extension.docs, _listing(app))


def _django(app: Any) -> Installed | None:
    if not _is(app, "django.core.handlers.base", "BaseHandler"):
        return None
    from django.conf import settings
    from django.utils.module_loading import import_string

    from semel.http.django import IdempotencyMiddleware, endpoints
    from semel.http.django.configuration import configuration

    classes = [each for each in map(import_string, settings.MIDDLEWARE) if isinstance(each, type)]
    if not any(issubclass(each, IdempotencyMiddleware) for each in classes):
        return None
    said = configuration()
    return _installed("Django", said.guard, said.tenant, said.docs, endpoints)


def _installed(
    framework: str,
    guard: Guard,
    tenant: Any,
    docs: str | None,
    listing: Callable[[], list[Endpoint]] | None,
    routes: Routes | None = None,
) -> Installed:
    found = (routes or Routes()).merged(listing() if listing is not None else [])
    return Installed(framework, guard, "" if tenant is None else _name_of(tenant), docs, found)


def _listing(app: Any) -> Callable[[], list[Endpoint]] | None:
    """How the framework's glue lists an application's endpoints; None for no framework's."""
    for module, name, glue in FRAMEWORKS:
        if _is(app, module, name):
            endpoints = import_module(glue).endpoints
            return lambda: list(endpoints(app))
    return None


def _is(app: Any, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(app, cls)


def _is_wsgi(app: Any) -> bool:
    from semel.http.wsgi.middleware import WSGIMiddleware

    return isinstance(app, WSGIMiddleware)


def _name_of(resolver: Any) -> str:
    """A function, as people know it."""
    name = getattr(resolver, "__qualname__", None) or type(resolver).__qualname__
    return f"{getattr(resolver, '__module__', '')}.{name}".lstrip(".")
