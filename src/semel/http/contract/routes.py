"""The ``routes=`` of a middleware: rules by method and path, for endpoints that cannot be decorated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from semel.errors import ConfigurationError
from semel.http.contract.inventory import Endpoint
from semel.http.contract.rules import SAFE_METHODS, Rule

__all__ = ["RouteTable", "Routes", "by_method_and_path"]

RouteTable: TypeAlias = Mapping[str, Rule]
"""``{"POST /orders": idempotent(), "PATCH /orders/{id}": conditional()}``"""

_PART: Final = re.compile(r"\{\w+\}")
_EXAMPLE: Final = 'routes= maps a method and a path to a rule, like {"POST /orders": idempotent()}'


def by_method_and_path(routes: RouteTable | None) -> dict[tuple[str, str], Rule]:
    """Return the rules by (method, path). Raises ConfigurationError for anything that is no such table."""
    given: Any = routes or {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{_EXAMPLE}, not {given!r}")
    rules: dict[tuple[str, str], Rule] = {}
    for route, rule in given.items():
        method, blank, path = route.partition(" ") if isinstance(route, str) else ("", "", "")
        if not blank:
            raise ConfigurationError(f"{_EXAMPLE}; {route!r} is no method and path")
        if not isinstance(rule, Rule):
            raise ConfigurationError(f"{_EXAMPLE}; the rule of {method} {path} is {rule!r}")
        rules[method, path] = rule
    return rules


class Routes:
    """Finds the rule of a request. ``{id}`` in a path matches one segment; a path without such parts wins."""

    def __init__(self, routes: RouteTable | None = None) -> None:
        self.rules = by_method_and_path(routes)
        self._exact: dict[tuple[str, str], Rule] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Rule]] = []
        for (method, path), rule in self.rules.items():
            if method in SAFE_METHODS:
                raise ConfigurationError(f"{method} {path} changes nothing and is never claimed: leave it out")
            if method != method.upper() or not path.startswith("/"):
                raise ConfigurationError(f'a route is a method and a path, like "POST /orders", not {method} {path}')
            if not _PART.search(path):
                self._exact[method, path] = rule
                continue
            literals = [re.escape(text) for text in _PART.split(path)]
            self._patterns.append((method, re.compile("[^/]+".join(literals)), rule))

    def merge(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Return these endpoints with the table's rules filled in, and the rest of the table after them."""
        listed = [
            Endpoint(each.method, each.path, each.rule or self.find(each.method, each.path), each.name)
            for each in endpoints
        ]
        known = {(each.method, each.path) for each in listed}
        rest = [(*route, rule) for route, rule in self.rules.items() if route not in known]
        return [*listed, *(Endpoint(method, path, rule) for method, path, rule in rest)]

    def find(self, method: str, path: str) -> Rule | None:
        """Return the rule of this request, or None if the route is not in the table."""
        rule = self._exact.get((method, path))
        if rule is not None or not self._patterns:
            return rule
        for wanted, pattern, declared in self._patterns:
            if wanted == method and pattern.fullmatch(path):
                return declared
        return None
