"""The service of documents in Litestar and Django, whose packages are imported only where they are served."""

from __future__ import annotations

from typing import Any

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http.rules import Exempt, Rule
from tests.http.apps_documents import ROUTES, Documents, whose

OPEN = (("GET", "/documents/{id}"), ("POST", "/documents"), ("GET", "/failed"))


def litestar() -> Any:
    """All ``async def``: Litestar itself loses plain functions (sync_to_thread) where a path has several methods."""
    from litestar import Litestar, Request, Response, route

    from semel.http import litestar as glue

    documents = Documents()

    def view() -> Any:
        async def endpoint(request: Any) -> Any:
            status, lines, body = documents.answer(request.method, request.url.path)
            return Response(body or None, status_code=status, headers=lines, media_type="text/plain")

        endpoint.__annotations__ = {"request": Request, "return": Response[Any]}
        return endpoint

    def declared(rule: Rule | None) -> Any:
        if rule is None:
            return view()
        return glue.exempt(rule.reason)(view()) if isinstance(rule, Exempt) else glue._declare(rule)(view())

    listed: dict[tuple[str, str], Rule | None] = {**ROUTES, **dict.fromkeys(OPEN)}
    handlers = [
        route(path.replace("{id}", "{id:str}"), http_method=[method], status_code=200)(declared(rule))  # type: ignore[list-item]
        for (method, path), rule in listed.items()
    ]
    return Litestar(
        handlers, plugins=[glue.SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)], openapi_config=None
    )


def django(kind: str, *, in_loop: bool = False) -> Any:
    """:param kind: ``function``, ``class``, ``async`` or ``drf``."""
    import django as package
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="not a secret",
        MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"],
        SEMEL={"GUARD": AsyncSemel(AsyncMemoryStore()) if in_loop else Semel(MemoryStore()), "TENANT": whose},
        INSTALLED_APPS=["semel.http.django"],
        REST_FRAMEWORK={"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []},
        APPEND_SLASH=False,
        LOGGING={"version": 1, "disable_existing_loggers": False},
    )
    package.setup()
    from django.core.asgi import get_asgi_application
    from django.core.wsgi import get_wsgi_application
    from django.urls import path

    by_path: dict[str, dict[str, Rule | None]] = {}
    for (method, place), rule in [*ROUTES.items(), *(((m, p), None) for m, p in OPEN)]:
        by_path.setdefault(place, {})[method] = rule
    documents = Documents()
    settings.ROOT_URLCONF = tuple(
        path(place.lstrip("/").replace("{id}", "<str:id>"), _django_view(kind, documents, rules))
        for place, rules in by_path.items()
    )
    return get_asgi_application() if in_loop else get_wsgi_application()


def _django_view(kind: str, documents: Documents, rules: dict[str, Rule | None]) -> Any:
    from django.http import HttpResponse
    from django.views import View
    from django.views.decorators.http import require_http_methods

    from semel.http import django as glue
    from semel.http.django.views import _declare

    def respond(request: Any) -> HttpResponse:
        status, lines, body = documents.answer(request.method, request.path)
        return HttpResponse(body, status=status, headers=lines)

    def function(request: Any, id: str = "") -> Any:
        return respond(request)

    async def awaited(request: Any, id: str = "") -> Any:
        return respond(request)

    def method(self: Any, request: Any, id: str = "") -> Any:
        return respond(request)

    bare = {"function": function, "async": awaited}.get(kind, method)

    def declared(rule: Rule | None) -> Any:
        if rule is None or isinstance(rule, Exempt):
            return bare
        return _declare(rule)(bare)

    views = {name: declared(rule) for name, rule in rules.items()}
    made: Any
    if kind in ("class", "drf"):
        base = View
        if kind == "drf":
            from rest_framework.views import APIView as base
        made = type("Routes", (base,), {name.lower(): view for name, view in views.items()}).as_view()
    elif kind == "async":

        async def made(request: Any, id: str = "") -> Any:
            return await views[request.method](request, id)

    else:

        def made(request: Any, id: str = "") -> Any:
            return views[request.method](request, id)

    undeclared = "POST" in rules and rules["POST"] is None
    hands_on = kind in ("function", "async")  # to the views of each method, which are declared
    if hands_on:
        made = require_http_methods(list(rules))(made)
    if any(isinstance(rule, Exempt) for rule in rules.values()) or (hands_on and not undeclared):
        made = glue.exempt("of the test's own")(made)
    return made
