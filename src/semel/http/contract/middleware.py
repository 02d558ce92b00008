"""What the ASGI and the WSGI middleware share: settings, rules under the guard's policy, and the start-up report."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Generic, Self, TypeVar

from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.contract.exchange import KEY_HEADER, Exchange, KeyHeader
from semel.http.contract.routes import Endpoint, MatchedRoute, RouteFinder, Routes, RouteTable, report
from semel.http.contract.rules import MAX_REQUEST_BODY, Idempotent, Rule, check_max_request_body

MOST_RULES: Final = 1000
"""How many rules are remembered in their form under the guard's policy."""
App = TypeVar("App")
G = TypeVar("G", bound=Guard)


class Reruns:
    """Whether requests are copied as they come. Only if some route has a transaction, since it costs a copy of each."""

    possible = False


class Middleware(Generic[App, G]):
    """Base of ``semel.http.asgi.ASGIMiddleware`` and ``semel.http.wsgi.WSGIMiddleware``."""

    def __init__(
        self,
        app: App,
        guard: G,
        wanted: type[G],
        *,
        tenant: Callable[[Any], Any] | None,
        routes: RouteTable | None,
        docs: str | None,
        max_request_body: int = MAX_REQUEST_BODY,
        header: str = KEY_HEADER.title,
        request: Callable[[Any], Any] | None = None,
        endpoints: Callable[[], list[Endpoint]] | None = None,
        find_route: RouteFinder | None = None,
        level: int = 3,
    ) -> None:
        self.key_header = check_installation(guard, wanted, tenant, max_request_body, header)
        if tenant is None and not guard.tenant:
            warnings.warn(
                "tenant= is missing: all callers share one space of keys, so one may get another's answer",
                stacklevel=level,
            )
        self.app = app
        self.guard = guard
        self.tenant = tenant
        self.docs = docs
        self.max_request_body = max_request_body
        self.routes = Routes(routes)
        self.request = request
        """Makes the framework's own request, which ``tenant`` receives."""
        self.list_endpoints = endpoints
        """Lists the application's endpoints, where a framework can."""
        self.find_route = find_route
        """Finds the route of a request, where a framework can."""
        self.binds_hosts = False
        """Whether some route is bound to a host. Known after the report."""
        self.reruns = Reruns()
        self._reported = False
        self.rules: dict[int, tuple[Idempotent, Idempotent]] = {}
        """By the id of each declared rule: the rule, and its form under the guard's policy."""

    def around(self, app: App) -> Self:
        """Return this middleware around another application. It shares everything else, and does not report again."""
        other = copy.copy(self)
        other.app = app
        other._reported = True
        return other

    def find_rule(self, method: str, path: str, root: str) -> Rule | None:
        """Return the rule in ``routes=`` for a path, or for the part of it below ``root``, where we are mounted."""
        rule = self.routes.find(method, path)
        if rule is None and root and path.startswith(root):
            rule = self.routes.find(method, path[len(root) :])
        return rule

    def matched_route(self, environment: Any) -> MatchedRoute:
        """Return the route of a request, as far as the framework tells."""
        return MatchedRoute() if self.find_route is None else self.find_route(environment)

    def route_name(self, environment: Any, exchange: Exchange) -> str:
        """Return the name of the operation on events: the template of its path if it is known, not the path itself."""
        template = self.matched_route(environment).template or self.routes.template(exchange.method, exchange.path)
        return f"{exchange.method} {template or exchange.path}"

    def rule(self, declared: Idempotent) -> Idempotent:
        """Return the rule with this guard's policy and our limit filled in. It is computed once."""
        known = self.rules.get(id(declared))
        if known is None:  # the declared one is remembered too, so that no other gets its id
            if len(self.rules) == MOST_RULES:  # an application that makes new rules for each request
                self.rules.clear()
            effective = declared.under(self.guard.policy)
            self.keep(declared)
            if effective.max_request_body is None:
                effective = replace(effective, max_request_body=self.max_request_body)
            known = self.rules[id(declared)] = (declared, effective)
        return known[1]

    def endpoints(self) -> list[Endpoint]:
        """Return all known endpoints: those that the framework lists, and those in ``routes=``."""
        return self.routes.merge(self.list_endpoints() if self.list_endpoints is not None else [])

    def report(self) -> None:
        """Warn of undeclared routes, once. Raises ConfigurationError if a route is misconfigured."""
        listed = self.endpoints()
        report(listed)
        self.binds_hosts = self.find_route is not None and self.find_route.binds_hosts()
        self.keep(*(each.rule for each in listed))
        self._reported = True

    def keep(self, *rules: Rule | None) -> None:
        """Buffer requests from now on if one of the rules has a transaction: a conflict runs its request again."""
        for rule in rules:
            if isinstance(rule, Idempotent) and rule.connection is not None:
                rule.check_connection(awaited=self.guard.AWAITED)
                rule.under(self.guard.policy)  # raises where the policy and a transaction exclude each other
                self.reruns.possible = True


def check_installation(
    guard: object, wanted: type[Guard], tenant: object, max_request_body: object, header: object
) -> KeyHeader:
    """Return the header of the key.

    Raises ConfigurationError for a guard of the other kind, or for a setting that cannot be used.
    """
    if not isinstance(guard, wanted):
        needed = "an AsyncSemel" if wanted.AWAITED else "a Semel"
        raise ConfigurationError(f"guard= takes {needed} here, not {type(guard).__name__}")
    if tenant is not None and not callable(tenant):
        raise ConfigurationError(
            f"tenant= is a function of the request that returns its tenant, not {tenant!r}. To use one tenant for all "
            "requests, set it on the guard: Semel(store, tenant=…)"
        )
    check_max_request_body(max_request_body)
    return KeyHeader(header)
