"""What the ASGI and the WSGI middleware share: settings, rules under the guard's policy, and the start-up report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.contract.inventory import Endpoint, report
from semel.http.contract.rerun import Kept
from semel.http.contract.routes import Routes
from semel.http.contract.rules import MAX_REQUEST_BODY, Action, Rule, check_max_request_body

__all__ = ["Middleware", "check_tenant"]

MOST_RULES: Final = 1000
"""Rules whose form under the guard's policy is kept."""
App = TypeVar("App")
G = TypeVar("G", bound=Guard)


class Middleware(Generic[App, G]):
    """Base of ``semel.http.asgi.middleware.Idempotency`` and ``semel.http.wsgi.middleware.Idempotency``."""

    def __init__(
        self,
        app: App,
        guard: G,
        wanted: type[G],
        *,
        tenant: Any,
        routes: Mapping[tuple[str, str], Rule] | None,
        docs: str | None,
        max_request_body: int = MAX_REQUEST_BODY,
        level: int = 3,
    ) -> None:
        if not isinstance(guard, wanted):
            raise ConfigurationError(f"guard= takes {_a(wanted.__name__)} here, not {type(guard).__name__}")
        check_tenant(tenant)
        check_max_request_body(max_request_body)
        if tenant is None and not guard.tenant:
            warnings.warn(
                "Idempotency has no tenant=: all callers share one space of keys, so one may be given another's answer",
                stacklevel=level,
            )
        self.app = app
        self.guard = guard
        self.tenant = tenant
        self.docs = docs
        self.max_request_body = max_request_body
        self.routes = Routes(routes)
        self.known: Callable[[], list[Endpoint]] | None = None
        """Lists the application's endpoints, where the framework's glue can."""
        self.kept = Kept()
        self._reported = False
        self._rules: dict[int, tuple[Action, Action]] = {}

    def declared(self, method: str, path: str, root: str) -> Rule | None:
        """The table's rule for a request, by its whole path or by the one below ``root``, where we are mounted."""
        rule = self.routes.find(method, path)
        if rule is None and root and path.startswith(root):
            rule = self.routes.find(method, path[len(root) :])
        return rule

    def rule(self, declared: Action) -> Action:
        """The rule under this guard's policy and our bound, made out once."""
        known = self._rules.get(id(declared))
        if known is None:  # the declared one is kept too, so that its id stays its own
            if len(self._rules) == MOST_RULES:  # an application that makes new ones for each request
                self._rules.clear()
            made = declared.under(self.guard.policy)
            self.keep(declared)
            if made.max_request_body is None:
                made = replace(made, max_request_body=self.max_request_body)
            known = self._rules[id(declared)] = (declared, made)
        return known[1]

    def endpoints(self) -> list[Endpoint]:
        """All that is known of the application: what its framework lists, and the table of routes."""
        listed = self.known() if self.known is not None else []
        by_table = [
            Endpoint(each.method, each.path, each.rule or self.routes.find(each.method, each.path), each.name)
            for each in listed
        ]
        named = {(each.method, each.path) for each in by_table}
        return [*by_table, *(each for each in self.routes.endpoints() if (each.method, each.path) not in named)]

    def report(self) -> None:
        """Name the routes that nobody has declared, once. A mistake among them is an error, until it is mended."""
        listed = self.endpoints()
        report(listed)
        self.keep(*(each.rule for each in listed))
        self._reported = True

    def keep(self, *rules: Rule | None) -> None:
        """Keep requests as they come from now on, where a rule has a transaction: they may have to be run again."""
        for rule in rules:
            if isinstance(rule, Action) and rule.connection is not None:
                rule.under(self.guard.policy)  # which may be one that a transaction cannot keep
                self.kept.wanted = True


def check_tenant(tenant: object) -> None:
    """Refuse what could not be asked, when the middleware is made."""
    if tenant is not None and not callable(tenant):
        raise ConfigurationError(
            f"tenant= is a function that says whose request it is, not {tenant!r}. One tenant for all requests is the "
            "guard's: Semel(store, tenant=…)"
        )


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
