"""Flask: ``install`` protects an app, and ``@idempotent()`` declares a view, below the decorator of its route.

::

    install(app, guard=guard, tenant=lambda request: g.user.id)

    @app.post("/payments")
    @idempotent(ttl="24h")
    def pay(op: Operation): ...

The claim is made just before the view runs. ``before_request`` functions run first: a request that they refuse is not
claimed, and a replay is authorised like any other request.
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
from semel.http.contract.rerun import RunAgain
from semel.http.contract.routes import RouteTable
from semel.http.contract.rules import MAX_REQUEST_BODY, Decorators, Exempt, Rule
from semel.http.in_transaction import connected
from semel.http.wsgi.middleware import WSGIMiddleware, current_responder
from semel.stores.guard import Semel

try:
    import flask
except ImportError as error:
    raise MissingDependency("flask", "flask") from error

if TYPE_CHECKING:
    from flask import Flask, Request

__all__ = [
    "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "install", "natural",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
TenantResolver: TypeAlias = "Callable[[Request], str | None]"
NAME = "semel"


def install(
    app: Flask,
    *,
    guard: Semel,
    tenant: TenantResolver | None = None,
    routes: RouteTable | None = None,
    docs: str | None = None,
    max_request_body: int = MAX_REQUEST_BODY,
) -> None:
    """Protect the app. Call it once, in the application factory if there is one.

    :param tenant: a function of the request that returns its tenant, which scopes the keys. It is called after the
        ``before_request`` functions.
    :param routes: rules of views that are not decorated: ``{"POST /orders/{id}": idempotent()}``.
    :param docs: the URL of a page that explains the errors; they link to it.
    :param max_request_body: the longest request body in bytes; a longer one is refused with 413, as is one above
        Flask's own ``MAX_CONTENT_LENGTH``.
    """
    if NAME in app.extensions:
        raise ConfigurationError("install() was called for this app already: one guard for one app")
    middleware = WSGIMiddleware(
        app.wsgi_app, guard=guard, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
        request=lambda environ: flask.request, endpoints=lambda: endpoints(app),
    )  # fmt: skip
    app.extensions[NAME] = middleware
    app.wsgi_app = middleware  # type: ignore[method-assign]


def _protect(view: F, rule: Rule) -> F:
    if isinstance(rule, Exempt):
        return exempted(view, rule)
    check_declarable(view)
    view = connected(view, rule)
    hints = _hints(view)
    handle = handle_parameter(hints)
    if handle is not None and AsyncOperation in (typing.get_args(hints[handle]) or (hints[handle],)):
        raise PolicyError(f"{view.__qualname__}: annotate {handle} with Operation: the guard of a Flask app is sync")

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


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


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
