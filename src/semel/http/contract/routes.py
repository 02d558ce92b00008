"""The table of routes that are claimed at the edge: rules by method and path, where a path may have ``{parts}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from semel.errors import ConfigurationError
from semel.http.contract.inventory import Endpoint
from semel.http.contract.rules import SAFE_METHODS, Rule

__all__ = ["Routes"]

_PART = re.compile(r"\{\w+\}")


def _checked(rules: Any) -> Mapping[tuple[str, str], Rule]:
    """Refuse a table of another shape. The rule of a route is an object: ``Action()``, not ``Action``."""
    like = 'routes= is a table of rules by method and path, like {("POST", "/orders"): Action()}'
    if not isinstance(rules, Mapping):
        raise ConfigurationError(f"{like}, not {rules!r}")
    for route, rule in rules.items():
        if not (isinstance(route, tuple) and len(route) == 2 and all(isinstance(part, str) for part in route)):
            raise ConfigurationError(f"{like}; {route!r} is no such pair")
        if not isinstance(rule, Rule):
            raise ConfigurationError(f"{like}; the rule of {route[0]} {route[1]} is {rule!r}")
    return rules


class Routes:
    """Finds the rule of a request. ``/orders/{id}`` is any one segment in that place; a path without parts wins."""

    def __init__(self, rules: Mapping[tuple[str, str], Rule] | None = None) -> None:
        self.rules = dict(_checked(rules or {}))
        self._exact: dict[tuple[str, str], Rule] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Rule]] = []
        for (method, path), rule in self.rules.items():
            if method in SAFE_METHODS:
                raise ConfigurationError(f"{method} {path} changes nothing and is never claimed: leave it out")
            if method != method.upper() or not path.startswith("/"):
                raise ConfigurationError(
                    f'a route is a method and a path, like ("POST", "/orders"), not {method} {path}'
                )
            if not _PART.search(path):
                self._exact[method, path] = rule
                continue
            literals = [re.escape(text) for text in _PART.split(path)]
            self._patterns.append((method, re.compile("[^/]+".join(literals)), rule))

    def endpoints(self) -> list[Endpoint]:
        """All of the table."""
        return [Endpoint(method, path, rule) for (method, path), rule in self.rules.items()]

    def find(self, method: str, path: str) -> Rule | None:
        """The rule for this request, or None: not declared."""
        rule = self._exact.get((method, path))
        if rule is not None or not self._patterns:
            return rule
        for wanted, pattern, declared in self._patterns:
            if wanted == method and pattern.fullmatch(path):
                return declared
        return None
