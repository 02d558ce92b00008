"""The idempotency of a service as plain data: its routes, store, replay contract and errors, with an example.

``find_installation`` finds the middleware in an application, with its guard, tenant and endpoints. It runs and changes
nothing. It imports no framework: an application has imported its own already.

``design_of`` makes the data, which ``semel describe`` prints. The example is no template: real requests are sent to the
middleware, over a store in memory, and the route's rule, key format, headers and errors are its own.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, NamedTuple
from wsgiref.util import setup_testing_defaults

from semel.core.keys import header_value
from semel.core.policy import Policy
from semel.core.values import value
from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.conditional import etag
from semel.http.contract.exchange import KEY_HEADER, KeyHeader
from semel.http.contract.routes import Endpoint, Middleware, Routes, undeclared
from semel.http.contract.rules import NEVER_REPLAYED, REPLAY_HEADERS, SAFE_METHODS, Conditional, Idempotent
from semel.http.describe.plain_rules import duration_text, plain_rule
from semel.http.describe.refusals import example_key, example_path, refusals
from semel.http.wsgi.middleware import WSGIMiddleware
from semel.stores.guard import Semel
from semel.stores.memory import MemoryStore

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
_SPELLED: Final = {"etag": "ETag"}
_SENT: Final = {"amount": 10}
_OTHER: Final = {"amount": 99}
_MADE: Final = b'{"id": 42, "amount": 10}'


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
    if not _is_instance(app, "starlette.applications", "Starlette"):
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
    if not _is_instance(app, "litestar.app", "Litestar"):
        return None
    from semel.http.litestar import SemelPlugin

    for plugin in app.plugins:
        if isinstance(plugin, SemelPlugin):
            return _middleware(plugin.middleware.around(app))
    return None


def _flask(app: Any) -> Installation | None:
    return _middleware(app.extensions.get("semel")) if _is_instance(app, "flask.app", "Flask") else None


def _django(app: Any) -> Installation | None:
    if not _is_instance(app, "django.core.handlers.base", "BaseHandler"):
        return None
    from django.conf import settings
    from django.utils.module_loading import import_string

    from semel.http.django import IdempotencyMiddleware, endpoints
    from semel.http.django.handling import configuration

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
        if _is_instance(app, module, name):
            endpoints = import_module(glue).endpoints
            return lambda: list(endpoints(app))
    return None


def _is_instance(app: Any, module: str, name: str) -> bool:
    """Whether it is an instance of a class whose module may not be imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(app, cls)


def _name_of(resolver: Any) -> str:
    """Return the function's dotted name."""
    name = getattr(resolver, "__qualname__", None) or type(resolver).__qualname__
    return f"{getattr(resolver, '__module__', '')}.{name}".lstrip(".")


# -- the design


class ExampleStep(NamedTuple):
    """A request and its answer, as text on the wire."""

    title: str
    request: str
    answer: str


def design_of(name: str, service: Installation) -> dict[str, Any]:
    """Return the design of the service, ready for ``json.dumps`` or a page.

    :param name: the application, as the page calls it.
    """
    guard, policy = service.guard, service.guard.policy
    declared = [each for each in service.endpoints if each.rule is not None and each.method not in SAFE_METHODS]
    shown = _pick_endpoint(declared)
    return {
        "application": name,
        "framework": service.framework,
        "tenant": _tenant(service),
        "docs": service.docs,
        "header": service.key_header.title,
        "store": _store(guard),
        "records": _records(guard),
        "routes": [_route(each, policy, service.key_header) for each in declared],
        "undeclared": [_place(each) for each in undeclared(service.endpoints)],
        "replay": {
            "headers": sorted(_SPELLED.get(name, name.title()) for name in REPLAY_HEADERS),
            "never": list(NEVER_REPLAYED),
        },
        "errors": _errors(declared, guard, service.key_header),
        "example": []
        if shown is None
        else [step._asdict() for step in example_exchange(shown, policy, service.docs, service.key_header)],
    }


def _tenant(service: Installation) -> dict[str, str] | None:
    if service.tenant:
        return {"found_by": service.tenant}
    return {"fixed": service.guard.tenant} if service.guard.tenant else None


def _place(endpoint: Endpoint) -> dict[str, Any]:
    return {"method": endpoint.method, "path": endpoint.host + endpoint.path, "name": endpoint.name}


def _route(endpoint: Endpoint, policy: Policy, key_header: KeyHeader) -> dict[str, Any]:
    rule = endpoint.rule
    assert rule is not None
    route = {**_place(endpoint), **plain_rule(rule, policy)}
    if isinstance(rule, Idempotent):
        under = rule.under(policy)
        route["key_source"] = key_header.title
        route["failures"] = "remembered" if under.stores(500) else "run again"
        route["replay_marker"] = under.replay_marker.title()
        route["max_stored_body"] = under.max_stored_body if under.keep_body else 0
        if under.connection is not None:  # a crash rolls back the rows and the record: nobody holds a lease
            route |= {"lease": None, "on_abandoned": "rollback"}
    return route


def _store(guard: Guard) -> dict[str, Any]:
    store = guard.store
    about = (inspect.getdoc(type(store)) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        "kind": type(store).__name__,
        "about": about,
        "wakes": store.wakes,
        "counts": store.counts,
    }


def _records(guard: Guard) -> dict[str, Any]:
    """Describe how the guard stores records, without revealing a secret."""
    return {
        "guarantee": guard.policy.guarantee,
        "keys": "readable" if guard.readable_keys else "hashed only",
        "fingerprint": "keyed with a secret" if guard.secret else "a plain hash",
        "encrypted": guard.codec.cipher is not None,
        "quota": None if guard.quota is None else guard.quota.live_keys,
        "sweep_every": None if guard.sweep_every is None else duration_text(guard.sweep_every),
    }


def _errors(declared: list[Endpoint], guard: Guard, key_header: KeyHeader) -> list[dict[str, Any]]:
    """List the errors of all routes, each with the routes that can answer with it."""
    errors: dict[tuple[str, int], dict[str, Any]] = {}
    for endpoint in declared:
        quota, path = guard.quota is not None, example_path(endpoint.path)
        for each in refusals(endpoint.rule, guard.policy, quota=quota, path=path, key_header=key_header):
            known = {"code": each.code, "status": each.status, "retryable": each.error.retryable, "when": each.when}
            error = errors.setdefault((each.code, each.status), {**known, "routes": []})
            # The shortest has nothing that is special to one route.
            error["when"] = min(error["when"], each.when, key=len)
            error["routes"].append(f"{endpoint.method} {endpoint.host}{endpoint.path}")
    return sorted(errors.values(), key=lambda error: (error["status"], error["code"]))


# -- the example


def _pick_endpoint(endpoints: Iterable[Endpoint]) -> Endpoint | None:
    """Return the route to show: preferably one that requires a key, and whose key format has an example."""
    fit = [each for each in endpoints if isinstance(each.rule, Idempotent) and example_key(each.rule) is not None]
    return min(fit, key=lambda each: not isinstance(each.rule, Idempotent) or not each.rule.required, default=None)


def example_exchange(
    endpoint: Endpoint, policy: Policy | None = None, docs: str | None = None, key_header: KeyHeader = KEY_HEADER
) -> list[ExampleStep]:
    """Return four exchanges: the first answer, a duplicate while it runs, the replay, and a reused key.

    The middleware answers them by the route's own rule. Only the handler's answer is made up.
    """
    assert isinstance(endpoint.rule, Idempotent)
    rule = endpoint.rule.under(policy or Policy())
    # A duplicate would wait for ever here, a short ttl could end before the page is written, and there is no database.
    rule = replace(
        rule, policy=rule.policy.replace(on_duplicate="raise", ttl="24h"), connection=None, connection_parameter=None
    )
    early: list[ExampleStep] = []

    def handler(environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        early.append(ask("A retry that comes while the first request is still being processed", _SENT))
        lines = [("Content-Type", "application/json"), ("Content-Length", str(len(_MADE)))]
        start_response("201 Created" if endpoint.method == "POST" else "200 OK", lines)
        return [_MADE]

    def ask(title: str, body: dict[str, int]) -> ExampleStep:
        return _send_example(protected, title, endpoint, rule, key_header.title, json.dumps(body).encode())

    with Semel(MemoryStore(), tenant="example", sweep_every=None) as guard:
        routes = {f"{endpoint.method} {example_path(endpoint.path)}": rule}
        protected = WSGIMiddleware(handler, guard=guard, routes=routes, docs=docs, header=key_header.title)
        steps = [ask("The first request", _SENT), *early]
        steps.append(ask("A retry after that: the same key, the same request", _SENT))
        if not rule.include and "amount" not in rule.exclude:  # otherwise it may be the same request
            steps.append(ask("The same key, another request", _OTHER))
        return steps


def _send_example(app: Any, title: str, endpoint: Endpoint, rule: Idempotent, header: str, body: bytes) -> ExampleStep:
    lines = [("Host", "api.example"), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    key = example_key(rule)
    if key is not None:
        lines.append((header, header_value(key, quote=rule.key_mode == "strict")))
    if isinstance(rule, Conditional):
        lines.append(("If-Match", etag(7)))
    path = example_path(endpoint.path)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": endpoint.method, "SCRIPT_NAME": "", "PATH_INFO": path, "wsgi.input": io.BytesIO(body),
    }  # fmt: skip
    setup_testing_defaults(environ)
    for name, text in lines:
        field = name.upper().replace("-", "_")
        environ[field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"] = text
    begun: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        begun[:] = [status, headers]
        return lambda data: None

    chunks = app(environ, start_response)
    try:
        answer = b"".join(chunks)
    finally:
        if hasattr(chunks, "close"):
            chunks.close()
    status, headers = begun
    request = _text(f"{endpoint.method} {path} HTTP/1.1", lines, body)
    return ExampleStep(title, request, _text(f"HTTP/1.1 {status}", headers, answer))


def _text(first: str, lines: Iterable[tuple[str, str]], body: bytes) -> str:
    shown = [f"{name.title()}: {text}" for name, text in lines]
    return "\n".join([first, *shown, "", body.decode("utf-8", "replace")]).rstrip()
