"""The routes of an application, and what the ASGI and the WSGI middleware share: settings, rules, the start-up report.

A decorator leaves its rule on the function. ``Routes`` has the rules of endpoints that cannot be decorated. ``report``
warns at start-up of endpoints that have no rule.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from semel.core.values import value
from semel.engine.guard import Guard
from semel.errors import ConfigurationError, PolicyError
from semel.http.contract.exchange import KEY_HEADER, Exchange, KeyHeader
from semel.http.contract.rules import MAX_REQUEST_BODY, SAFE_METHODS, Exempt, Idempotent, Rule, check_max_request_body

RouteTable: TypeAlias = Mapping[str, Rule]
"""``{"POST /orders": idempotent(), "PATCH /orders/{id}": conditional()}``"""

_PART: Final = re.compile(r"\{\w+\}")
_CONVERTER: Final = re.compile(r"<(?:[^:<>]*:)?(\w+)>")
_EXAMPLE: Final = 'routes= maps a method and a path to a rule, like {"POST /orders": idempotent()}'
UNSAFE_TO_REPEAT: Final = frozenset({"POST", "PATCH"})
F = TypeVar("F")
_log = logging.getLogger("semel.http")


@value
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    """The path, with its parameters in braces: ``/orders/{id}``."""
    rule: Rule | None
    """None if it is not declared."""
    name: str = ""
    """The name of the function."""
    host: str = ""
    """The pattern of the host that the route is bound to; empty if it serves all hosts."""
    late_commit: str = ""
    """The name of a dependency that commits after the answer was stored; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.method} {self.host}{self.path}" + (f" ({self.name})" if self.name else "")


class MatchedRoute(NamedTuple):
    """The route that a request has reached, or will reach."""

    host: str = ""
    """The host of the request, if its route is bound to hosts. It is a part of the operation then."""
    template: str = ""
    """The path with its parameters in braces, after the pattern of its host; empty if it is not known."""


class RouteFinder(Protocol):
    """Finds the route of a request, in the way of one framework."""

    def binds_hosts(self) -> bool:
        """Whether some route is bound to a host. Asked at start-up, when all routes are known."""
        ...

    def __call__(self, environment: Any, /) -> MatchedRoute:
        """:param environment: the ASGI scope or the WSGI environ."""
        ...


def with_braces(pattern: str) -> str:
    """Return the pattern of a path in Flask, Quart or Django with its parameters in braces.

    ``/orders/<int:id>`` becomes ``/orders/{id}``.
    """
    return _CONVERTER.sub(r"{\1}", pattern)


def by_method_and_path(routes: RouteTable | None) -> dict[tuple[str, str], Rule]:
    """Return the rules by (method, path). Raises ConfigurationError for anything that is no such table."""
    table: Any = routes or {}
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{_EXAMPLE}, not {table!r}")
    rules: dict[tuple[str, str], Rule] = {}
    for route, rule in table.items():
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
        self._patterns: list[tuple[str, re.Pattern[str], str]] = []
        for method, path in self.rules:
            if method in SAFE_METHODS:
                raise ConfigurationError(f"{method} {path} changes nothing and is never claimed: leave it out")
            if method != method.upper() or not path.startswith("/"):
                raise ConfigurationError(f'a route is a method and a path, like "POST /orders", not {method} {path}')
            if _PART.search(path):
                literals = [re.escape(text) for text in _PART.split(path)]
                self._patterns.append((method, re.compile("[^/]+".join(literals)), path))

    def merge(self, endpoints: Iterable[Endpoint]) -> list[Endpoint]:
        """Return these endpoints with the table's rules filled in, and the rest of the table after them."""
        listed = [replace(each, rule=each.rule or self.find(each.method, each.path)) for each in endpoints]
        known = {(each.method, each.path) for each in listed}
        rest = [(*route, rule) for route, rule in self.rules.items() if route not in known]
        return [*listed, *(Endpoint(method, path, rule) for method, path, rule in rest)]

    def find(self, method: str, path: str) -> Rule | None:
        """Return the rule of this request, or None if the route is not in the table."""
        rule = self.rules.get((method, path))
        if rule is not None or not self._patterns:
            return rule
        return self.rules.get((method, self.template(method, path)))

    def template(self, method: str, path: str) -> str:
        """Return the path as the table has it, with its parameters in braces; empty if it is not in the table."""
        if (method, path) in self.rules:
            return path
        for wanted, pattern, known in self._patterns:
            if wanted == method and pattern.fullmatch(path):
                return known
        return ""


# -- rules on functions


def declared_rule(function: Any) -> Rule | None:
    """Return the rule that a decorator has left on a function, also if other decorators have wrapped it since."""
    while function is not None:
        rule: Rule | None = getattr(function, "__semel_rule__", None)
        if rule is not None:
            return rule
        if getattr(function, "__semel_replaced__", False):
            raise ConfigurationError(
                f"{name_of(function)} is declared, but its route calls the undeclared function: put the decorator of "
                'the route on top, @app.post(…), and ours below it. If that is intended, declare it @exempt("why")'
            )
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return None


def check_declarable(function: Any) -> None:
    """Raise PolicyError for what cannot be declared: a class, or a function that has a rule already."""
    if isinstance(function, type):
        raise PolicyError(f"decorate the method, such as post, of {name_of(function)}, not the class")
    rule: Rule | None = getattr(function, "__semel_rule__", None)
    if rule is not None:
        raise PolicyError(f"{name_of(function)} is declared @{rule.decorator}() already: one rule for one endpoint")


def mark_replaced(function: Any) -> None:
    """Mark a function as replaced by its declared form. A route that calls this one is a mistake."""
    with suppress(AttributeError):  # a bound method, which is a new object each time
        function.__semel_replaced__ = True


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def mark_exempt(function: F, rule: Exempt) -> F:
    """Return the function itself, marked as exempt."""
    function.__semel_rule__ = rule  # type: ignore[attr-defined]
    return function


# -- the report at start-up


def undeclared(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Return the endpoints that are not declared, and that a client cannot safely repeat."""
    return [each for each in endpoints if each.rule is None and each.method in UNSAFE_TO_REPEAT]


def report(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Warn of undeclared endpoints, and of those that are declared but never claimed. Returns the undeclared ones."""
    endpoints = list(endpoints)
    missing = undeclared(endpoints)
    if missing:
        _log.warning(
            "%d route%s will run again if a client retries: %s. Declare each @idempotent(), @conditional() or "
            '@natural(), or @exempt("why") where a repetition does no harm.',
            len(missing),
            "" if len(missing) == 1 else "s",
            ", ".join(str(each) for each in missing),
        )
    for each in endpoints:
        if each.late_commit and isinstance(each.rule, Idempotent):
            _log.warning(
                "%s: the dependency %s commits after the answer was stored and sent. If that commit fails, retries get "
                "an answer without its effect. Commit in the endpoint, end the dependency before the answer with "
                'Depends(%s, scope="function"), or use connection=.',
                each,
                each.late_commit,
                each.late_commit,
            )
    if unclaimed := never_claimed(endpoints):
        _log.warning(
            "%s declared @idempotent(), but a GET is never claimed: it runs each time. Make it a POST, or remove the "
            "decorator.",
            ", ".join(str(each) for each in unclaimed) + (" is" if len(unclaimed) == 1 else " are"),
        )
    return missing


def never_claimed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Return the endpoints that are declared to need a key, but answer to GET only."""
    declared = [each for each in endpoints if isinstance(each.rule, Idempotent)]
    claimed = {(each.path, each.name) for each in declared if each.method not in SAFE_METHODS}
    return [each for each in declared if each.method == "GET" and (each.path, each.name) not in claimed]


MOST_RULES: Final = 1000
"""How many rules are remembered in their form under the guard's policy."""
App = TypeVar("App")
AnyGuard = TypeVar("AnyGuard", bound=Guard)
TenantResolver = TypeVar("TenantResolver", bound=Callable[[Any], Any])


class Reruns:
    """Whether requests are copied as they come. Only if some route has a transaction, since it costs a copy of each."""

    possible = False


class Middleware(Generic[App, AnyGuard, TenantResolver]):
    """Base of ``semel.http.asgi.ASGIMiddleware`` and ``semel.http.wsgi.WSGIMiddleware``."""

    GUARD: ClassVar[type[Guard]]
    """The class of its guards."""

    def __init__(
        self,
        app: App,
        *,
        guard: AnyGuard,
        tenant: TenantResolver | None = None,
        routes: RouteTable | None = None,
        docs: str | None = None,
        max_request_body: int = MAX_REQUEST_BODY,
        header: str = KEY_HEADER.title,
        request: Callable[[Any], Any] | None = None,
        endpoints: Callable[[], list[Endpoint]] | None = None,
        find_route: RouteFinder | None = None,
    ) -> None:
        """
        :param guard: an ``AsyncSemel`` under ASGI, a ``Semel`` under WSGI.
        :param tenant: a function of the request, here the ASGI scope or the WSGI environ, that returns its tenant,
            which scopes the keys. It is called after authentication, and may be async under ASGI.
        :param routes: rules of endpoints that are not decorated: ``{"POST /orders/{id}": idempotent()}``.
        :param docs: the URL of a page that explains the errors; they link to it.
        :param max_request_body: the longest request body in bytes; a longer one is refused with 413.
        :param header: the name of the header that has the key.
        :param request: makes the framework's own request from the scope or environ, for ``tenant``.
        :param endpoints: lists the application's endpoints, for the report at start-up.
        :param find_route: finds the route of a request in the framework's own table, for hosts and events.
        """
        self.key_header = check_installation(guard, self.GUARD, tenant, max_request_body, header)
        if tenant is None and not guard.tenant:
            warnings.warn(
                "tenant= is missing: all callers share one space of keys, so one may get another's answer",
                stacklevel=2,
            )
        self.app = app
        self.guard = guard
        self.tenant: Callable[[Any], Any] | None = tenant
        self.docs = docs
        self.max_request_body = max_request_body
        self.routes = Routes(routes)
        self.request = request
        self.list_endpoints = endpoints
        self.find_route = find_route
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


def no_tenant() -> ConfigurationError:
    """Return the error for a request without a tenant. Its key would belong to nobody."""
    return ConfigurationError("tenant= returned nothing for this request: it must run after authentication")


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
