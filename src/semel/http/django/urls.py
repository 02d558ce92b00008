"""The routes of a Django project, with the rules that they are declared with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from django.urls import URLPattern, get_resolver
from django.urls.resolvers import RoutePattern

from semel.http.contract.routes import Endpoint, MatchedRoute, declared_rule, with_braces
from semel.http.contract.rules import Rule
from semel.http.django.handling import current_handling

_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


def endpoints(urlconf: Any = None) -> list[Endpoint]:
    """Return the routes of the project, or of another URLconf. Django's own views, such as the admin's, are left out.

    A function view accepts every method unless ``require_http_methods`` restricts it, so it is listed as a POST.
    """
    return [
        Endpoint(method, path, rule, name)
        for path, view in _views(get_resolver(urlconf).url_patterns, "/")
        if not _module_of(view).startswith("django.")
        for method, rule, name in _methods_of(view)
    ]


class DjangoRoutes:
    """Finds the route of the current request, by what Django's resolver has matched."""

    def binds_hosts(self) -> bool:
        return True  # each request may have a URLconf of its own

    def __call__(self, environment: Any) -> MatchedRoute:
        handling = current_handling.get()
        assert handling is not None
        request = handling.request
        # A middleware that chooses a URLconf for the request, such as that of django-hosts, does so by its host.
        host = request.get_host().lower() if getattr(request, "urlconf", None) else ""
        match = request.resolver_match
        return MatchedRoute(host, _template(match.route) if match is not None and match.route else "")


@functools.lru_cache(maxsize=1024)
def _template(route: str) -> str:
    """Return the whole pattern of a view as a path with its parameters in braces."""
    from django.contrib.admindocs.views import simplify_regex

    regular = any(sign in route for sign in "^$(\\")
    return "/" + with_braces(simplify_regex(route) if regular else route).lstrip("/")


def _views(patterns: Iterable[Any], prefix: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    from django.contrib.admindocs.views import simplify_regex

    for each in patterns:
        pattern = each.pattern
        text = str(pattern)
        if not isinstance(pattern, RoutePattern) and hasattr(pattern, "_regex"):
            text = simplify_regex(text).lstrip("/")
        path = prefix + with_braces(text)
        if isinstance(each, URLPattern):
            yield path, each.callback
        else:
            yield from _views(each.url_patterns, path)


def _module_of(view: Any) -> str:
    return str(getattr(_class_of(view) or inspect.unwrap(view), "__module__", ""))


def _class_of(view: Any) -> Any:
    return getattr(view, "view_class", None) or getattr(view, "cls", None)


def _methods_of(view: Any) -> Iterator[tuple[str, Rule | None, str]]:
    """Yield (method, rule, name) for each method that the view accepts."""
    whole = declared_rule(view)
    by_class = _class_of(view)
    if by_class is None:
        for method in _accepted_methods(view):
            yield method, whole, getattr(view, "__qualname__", repr(view))
        return
    actions = getattr(view, "actions", None)  # of a view set: {"post": "create"}
    for method in _METHODS:
        name = actions.get(method.lower()) if actions else method.lower()
        handler = getattr(by_class, name, None) if name else None
        if handler is not None and method.lower() in by_class.http_method_names:
            rule = whole or declared_rule(handler) or declared_rule(by_class.dispatch) or _api_view_rule(handler)
            yield method, rule, f"{by_class.__name__}.{name}"


def _accepted_methods(view: Any) -> Iterable[str]:
    """Return the methods that ``require_http_methods`` allows. Only its closure has them."""
    while view is not None:
        listed = _closure_variable(view, "request_method_list")
        if listed is not None:
            return [method for method in listed if method in _METHODS]
        view = getattr(view, "__wrapped__", None)
    return ("POST",)


def _api_view_rule(handler: Any) -> Rule | None:
    """Return the rule of a function that REST framework's ``api_view`` has turned into a class."""
    return declared_rule(_closure_variable(handler, "func"))


def _closure_variable(function: Any, name: str) -> Any:
    """Return a variable in the closure of a decorator's wrapper, or None."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    try:
        return function.__closure__[names.index(name)].cell_contents if name in names else None
    except ValueError:  # the cell is still empty
        return None
