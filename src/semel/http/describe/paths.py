"""The operations of an OpenAPI document, and the endpoint that each of them describes.

They are matched by method and path, whatever the parameters of the path are called: ``/orders/{id:int}`` is
``/orders/{order_id}``. The document may leave out the beginning of a path that its servers' URLs have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from semel.core.values import value
from semel.errors import ConfigurationError
from semel.http.contract.routes import Endpoint, RouteTable, by_method_and_path

Declarations: TypeAlias = Iterable[Endpoint] | RouteTable
"""What an application declares: the endpoints of a framework, or the ``routes=`` of a middleware."""
Template: TypeAlias = tuple[str, str]

METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_PART: Final = re.compile(r"\{[^{}]*\}|<[^<>]*>")
_VARIABLE: Final = re.compile(r"\{([^{}]*)\}")


@value
class DocumentedOperation:
    """One operation of a document. ``content`` is the document's own object: changing it changes the document."""

    method: str
    path: str
    item: dict[str, Any]
    content: dict[str, Any]

    @property
    def id(self) -> str:
        name = self.content.get("operationId")
        return name if isinstance(name, str) else ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def check_version(spec: object) -> None:
    """Raise ConfigurationError unless it is an OpenAPI 3 document."""
    if not isinstance(spec, Mapping):
        raise ConfigurationError(f"an OpenAPI document is a dict, as json.loads gives it, not {type(spec).__name__}")
    version = spec.get("openapi")
    if not isinstance(version, str) or not version.startswith("3."):
        stated = f"openapi: {version!r}" if "openapi" in spec else f"swagger: {spec.get('swagger')!r}"
        raise ConfigurationError(
            f"this is not an OpenAPI document of version 3.0 or later ({stated}): convert it first"
        )


def operations(spec: Mapping[str, Any]) -> Iterator[DocumentedOperation]:
    """Yield all operations below ``paths``. Webhooks and callbacks are left out: the service sends these requests."""
    for path, item in (spec.get("paths") or {}).items():
        if not isinstance(item, dict):
            continue
        for method in METHODS:
            if isinstance(item.get(method), dict):
                yield DocumentedOperation(method.upper(), path, item, item[method])


def template(method: str, path: str) -> Template:
    """Return method and path in the form in which they are compared."""
    return method.upper(), _PART.sub("{}", path) or "/"


def example_path(path: str) -> str:
    """Return a path that a request could have."""
    return _PART.sub("42", path)


def as_endpoints(declared: Declarations) -> list[Endpoint]:
    """Return endpoints, also from the ``routes=`` of a middleware."""
    if isinstance(declared, Mapping):
        return [Endpoint(method, path, rule) for (method, path), rule in by_method_and_path(declared).items()]
    return list(declared)


class Matching:
    """Finds the endpoint that an operation describes."""

    def __init__(self, declared: Declarations, prefix: str = "") -> None:
        self._exact: dict[Template, Endpoint] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Endpoint]] = []
        for each in as_endpoints(declared):
            method, path = template(each.method, prefix + each.path)
            self._exact[method, path] = each
            if "{}" in path:
                literals = [re.escape(text) for text in path.split("{}")]
                self._patterns.append((method, re.compile("[^/]+".join(literals)), each))
        self._found: set[int] = set()

    def find(self, operation: DocumentedOperation, spec: Mapping[str, Any]) -> Endpoint | None:
        """Find it by its path, alone or below the path of a server, or else by a path with parameters that matches."""
        names = list(_names(operation, spec))
        endpoint = next((self._exact[name] for name in names if name in self._exact), None)
        if endpoint is None:
            endpoint = next(
                (
                    each
                    for method, path in names
                    for wanted, pattern, each in self._patterns
                    if wanted == method and pattern.fullmatch(path)
                ),
                None,
            )
        self._found.add(id(endpoint))
        return endpoint

    def left(self) -> list[Endpoint]:
        """Return the endpoints that no operation describes."""
        return [each for each in self._exact.values() if id(each) not in self._found]


def _names(operation: DocumentedOperation, spec: Mapping[str, Any]) -> Iterator[Template]:
    """Yield the templates that the operation's endpoint may have."""
    yield template(operation.method, operation.path)
    for holder in (operation.content, operation.item, spec):
        servers = holder.get("servers")
        if isinstance(servers, list) and servers:
            for prefix in map(_server_path, servers):
                if prefix:
                    yield template(operation.method, prefix + operation.path)
            return  # the innermost list overrides the others


def _server_path(server: Any) -> str:
    if not isinstance(server, Mapping) or not isinstance(server.get("url"), str):
        return ""
    variables = server.get("variables") or {}

    def default(match: re.Match[str]) -> str:
        variable = variables.get(match[1])
        return str(variable.get("default", "")) if isinstance(variable, Mapping) else ""

    try:
        return urlsplit(_VARIABLE.sub(default, server["url"])).path.rstrip("/")
    except ValueError:
        return ""
