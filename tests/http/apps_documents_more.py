"""The service of documents in Litestar and Django, whose packages are imported only where they are served."""

from __future__ import annotations

from typing import Any

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http.contract.rules import Conditional, Exempt, Rule
from tests.http.apps_documents import Documents, routes_by_method, whose

OPEN = (("GET", "/documents/{id}"), ("POST", "/documents"), ("GET", "/failed"))


def litestar(*, threads: bool = False) -> Any:
    """:param threads: the conditional ones are plain functions. Not all: of the methods of one path Litestar itself
    loses that a function is a plain one (sync_to_thread) when another is added to them, so these come last."""
    from litestar import Litestar, Request, Response, route

    from semel.http import litestar as glue

    documents = Documents()

    def respond(request: Any) -> Any:
        status, lines, body = documents.answer(request.method, request.url.path)
        return Response(body or None, status_code=status, headers=lines, media_type="text/plain")

    def view(in_thread: bool = False) -> Any:
        async def endpoint(request: Any) -> Any:
            return respond(request)

        def threaded(request: Any) -> Any:
            return respond(request)

        chosen: Any = threaded if in_thread else endpoint
        chosen.__annotations__ = {"request": Request, "return": Response[Any]}
        return chosen

    def in_thread(rule: Rule | None) -> bool:
        return threads and isinstance(rule, Conditional)

    def declared(rule: Rule | None) -> Any:
        if rule is None:
            return view()
        if isinstance(rule, Exempt):
            return glue.exempt(rule.reason)(view())
        return getattr(glue, rule.decorator)(rule)(view(in_thread(rule)))

    listed: dict[tuple[str, str], Rule | None] = {**dict(routes_by_method()), **dict.fromkeys(OPEN)}
    handlers = [
        route(
            path.replace("{id}", "{id:str}"),
            http_method=[method],  # type: ignore[list-item]
            status_code=200,
            **({"sync_to_thread": True} if in_thread(rule) else {}),
        )(declared(rule))
        for (method, path), rule in sorted(listed.items(), key=lambda each: in_thread(each[1]))
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
    for (method, place), rule in [*routes_by_method(), *(((m, p), None) for m, p in OPEN)]:
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
        return getattr(glue, rule.decorator)(rule)(bare)

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
