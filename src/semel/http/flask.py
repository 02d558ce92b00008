"""Flask: an extension that installs the middleware, and ``@action()`` on a view, below the route's own decorator.

::

    SemelFlask(app, guard=guard, tenant=lambda request: request.authorization.username)

    @app.post("/payments")
    @action(ttl="24h")
    def pay(op: Operation): ...

The claim is made just before the view runs: after ``before_request`` functions, so what they turn away is not claimed,
and a replay is authorised as any request is.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from semel.engine.declare import handle_parameter
from semel.engine.operation import AsyncOperation, running
from semel.engine.sync import Semel
from semel.errors import ConfigurationError, MissingDependency, PolicyError
from semel.http.rules import Action
from semel.http.wsgi import Idempotency, current_responder
from semel.http.wsgi_responder import Environ

try:
    import flask
except ImportError as error:
    raise MissingDependency("flask", "flask") from error

if TYPE_CHECKING:
    from flask import Flask, Request

__all__ = ["Action", "SemelFlask", "action"]

F = TypeVar("F", bound=Callable[..., Any])
TenantResolver: TypeAlias = "Callable[[Request], str | None]"
NAME = "semel"


class SemelFlask:
    """``SemelFlask(app, guard=guard, tenant=…)``, or without an app, and ``init_app(app)`` later."""

    def __init__(
        self,
        app: Flask | None = None,
        *,
        guard: Semel,
        tenant: TenantResolver | None = None,
        docs: str | None = None,
    ) -> None:
        """
        :param tenant: whose request it is, from Flask's request, when ``before_request`` functions have run; its
            result scopes the keys.
        :param docs: a page that explains the errors; linked from them.
        """
        self.guard = guard
        self.tenant = tenant
        self.docs = docs
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Install the middleware. Once for an app; other middlewares may be put around it, or be there already."""
        if NAME in app.extensions:
            raise ConfigurationError("SemelFlask is installed in this app already: one guard for one app")
        app.extensions[NAME] = self
        app.wsgi_app = Idempotency(  # type: ignore[method-assign]
            app.wsgi_app, guard=self.guard, tenant=self.tenant and self._tenant, docs=self.docs
        )

    def _tenant(self, environ: Environ) -> str | None:
        return self.tenant(flask.request) if self.tenant is not None else None


def action(base: Action | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare a view that needs a key and happens once for it. Settings of ``Action`` and of ``Policy``.

    GET, HEAD and OPTIONS of the same view are not concerned. A parameter annotated ``Operation`` is given the handle;
    None, where the key is optional and was left out, or the method is one of those.
    """
    rule = Action.declared(base, **settings)

    def decorate(view: F) -> F:
        hints = _hints(view)
        handle = handle_parameter(hints)
        if handle is not None and AsyncOperation in (typing.get_args(hints[handle]) or (hints[handle],)):
            raise PolicyError(
                f"{view.__qualname__}: annotate {handle} with Operation: the guard of a Flask app is sync"
            )

        @functools.wraps(view)
        def endpoint(*args: Any, **kwargs: Any) -> Any:
            operation = None
            responder = current_responder()
            if responder is not None:
                responder.longest_body = flask.request.max_content_length
                if not responder.claim(rule):
                    return flask.Response(status=204)  # it takes the view's place; the middleware sends the real one
                if responder.attempt is not None:
                    operation = responder.attempt.operation
            if handle is not None:
                kwargs[handle] = operation
            token = running.set(operation)
            try:
                return flask.current_app.ensure_sync(view)(*args, **kwargs)
            finally:
                running.reset(token)

        endpoint.__semel_rule__ = rule  # type: ignore[attr-defined]
        return cast(F, endpoint)

    return decorate


def _hints(view: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as types, without those that name what exists for the type checker only."""
    found: dict[str, Any] = {}
    for name, hint in getattr(view, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with suppress(NameError, TypeError, AttributeError):
            found |= typing.get_type_hints(alone, getattr(view, "__globals__", {}))
    return found
