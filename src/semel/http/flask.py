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
import inspect
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from semel.engine.declare.declaration import handle_parameter
from semel.engine.operation.operation import AsyncOperation, running
from semel.engine.sync import Semel
from semel.errors import (
    ConfigurationError,
    MissingDependency,
    NotUndone,
    PolicyError,
    PreconditionError,
    TransactionConflict,
)
from semel.http.contract.conditional import check_match, etag, hold, let_go
from semel.http.contract.inventory import Endpoint, check_declarable, declared_rule, exempted, replaced
from semel.http.contract.middleware import check_tenant
from semel.http.contract.rerun import RunAgain
from semel.http.contract.rules import (
    MAX_REQUEST_BODY,
    Action,
    Conditional,
    Exempt,
    Natural,
    Rule,
    check_max_request_body,
)
from semel.http.in_transaction import connected
from semel.http.wsgi.middleware import Idempotency, current_responder
from semel.http.wsgi.responder import Environ

try:
    import flask
except ImportError as error:
    raise MissingDependency("flask", "flask") from error

if TYPE_CHECKING:
    from flask import Flask, Request

__all__ = [
    "Action", "Conditional", "Natural", "SemelFlask", "action", "check_match", "conditional", "endpoints", "etag",
    "exempt", "natural",
]  # fmt: skip

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
        max_request_body: int = MAX_REQUEST_BODY,
    ) -> None:
        """
        :param tenant: whose request it is, from Flask's request, when ``before_request`` functions have run; its
            result scopes the keys.
        :param docs: a page that explains the errors; linked from them.
        :param max_request_body: bytes of a request's body that a claim takes; a longer one is refused with 413, as is one
            above Flask's own ``MAX_CONTENT_LENGTH``.
        """
        check_tenant(tenant)
        check_max_request_body(max_request_body)
        self.guard = guard
        self.tenant = tenant
        self.docs = docs
        self.max_request_body = max_request_body
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Install the middleware. Once for an app; other middlewares may be put around it, or be there already."""
        if NAME in app.extensions:
            raise ConfigurationError("SemelFlask is installed in this app already: one guard for one app")
        app.extensions[NAME] = self
        middleware = Idempotency(
            app.wsgi_app,
            guard=self.guard,
            tenant=self.tenant and self._tenant,
            docs=self.docs,
            max_request_body=self.max_request_body,
        )
        middleware.known = lambda: endpoints(app)
        self.middleware = middleware
        app.wsgi_app = middleware  # type: ignore[method-assign]

    def _tenant(self, environ: Environ) -> str | None:
        return self.tenant(flask.request) if self.tenant is not None else None


def action(base: Action | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare a view that needs a key and happens once for it. Settings of ``Action`` and of ``Policy``.

    GET, HEAD and OPTIONS of the same view are not concerned. A parameter annotated ``Operation`` is given the handle;
    None, where the key is optional and was left out, or the method is one of those.
    """
    return _declare(Action.declared(base, **settings))


def conditional(base: Conditional | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare a view that changes only what is as the caller knows it (If-Match): see ``check_match``."""
    return _declare(Conditional.declared(base, **settings))


def natural(base: Natural | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare a view whose second call changes nothing: a PUT of a whole, a DELETE. No key, no record."""
    return _declare(Natural.declared(base, **settings))


def exempt(reason: str) -> Callable[[F], F]:
    """Declare that a view is left alone, and why: only the report at start-up is silenced."""
    rule = Exempt(reason)
    return lambda view: exempted(view, rule)


def _declare(rule: Rule) -> Callable[[F], F]:
    def decorate(view: F) -> F:
        check_declarable(view)
        view = connected(view, rule)
        hints = _hints(view)
        handle = handle_parameter(hints)
        if handle is not None and AsyncOperation in (typing.get_args(hints[handle]) or (hints[handle],)):
            raise PolicyError(
                f"{view.__qualname__}: annotate {handle} with Operation: the guard of a Flask app is sync"
            )

        @functools.wraps(view)
        def endpoint(*args: Any, **kwargs: Any) -> Any:
            responder = current_responder()
            operation = preconditions = None
            if responder is not None:
                responder.max_request_body = flask.request.max_content_length
                if not responder.claim(rule):
                    return flask.Response(status=204)  # it takes the view's place; the middleware sends the real one
                preconditions = responder.preconditions
                if responder.attempt is not None:
                    operation = responder.attempt.operation
            if handle is not None:
                kwargs[handle] = operation
            token, held = running.set(operation), hold(preconditions)
            try:
                result = flask.current_app.ensure_sync(view)(*args, **kwargs)
                if operation is not None:
                    operation.leave()
                return result
            except PreconditionError as error:
                if responder is None:
                    raise
                responder.refuse(error)
                flask.abort(error.status)  # for teardown functions; the middleware sends the real answer
            except Exception as error:
                if responder is not None and responder.conflicts(error):
                    if responder.give_way(error):
                        raise RunAgain from error
                    flask.abort(TransactionConflict.status)
                raised = error if operation is None else operation.compensate(error)
                if responder is not None and isinstance(raised, NotUndone):
                    responder.refuse(raised)
                    flask.abort(raised.status)
                if raised is error:
                    raise
                raise raised from error
            finally:
                running.reset(token)
                let_go(held)

        endpoint.__semel_rule__ = rule  # type: ignore[attr-defined]
        replaced(view)
        return cast(F, endpoint)

    return decorate


def endpoints(app: Flask) -> list[Endpoint]:
    """All routes of the app, with what they are declared to be."""
    return [
        Endpoint(
            method, _PART.sub(r"{\1}", route.rule), _rule_of(app.view_functions[route.endpoint], method), route.endpoint
        )
        for route in app.url_map.iter_rules()
        if route.endpoint in app.view_functions
        for method in sorted(route.methods or ())
    ]


_PART = re.compile(r"<(?:[^:<>]*:)?(\w+)>")


def _rule_of(view: Any, method: str) -> Rule | None:
    """A class of views has a method for each of the protocol, and decorators for all."""
    by_class = getattr(view, "view_class", None)
    return declared_rule(view) or (declared_rule(getattr(by_class, method.lower(), None)) if by_class else None)


def _hints(view: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as types, without those that name what exists for the type checker only."""
    found: dict[str, Any] = {}
    for name, hint in getattr(view, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with suppress(NameError, TypeError, AttributeError):
            found |= typing.get_type_hints(alone, getattr(inspect.unwrap(view), "__globals__", {}))
    return found
