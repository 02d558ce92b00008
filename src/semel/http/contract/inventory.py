"""The endpoints of an application and the rules that they are declared with, for every framework."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from semel.core.values import value
from semel.errors import ConfigurationError, PolicyError
from semel.http.contract.rules import SAFE_METHODS, Exempt, Idempotent, Rule

__all__ = [
    "Endpoint",
    "check_declarable",
    "declared_rule",
    "mark_exempt",
    "mark_replaced",
    "never_claimed",
    "report",
    "undeclared",
]  # fmt: skip

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

    def __str__(self) -> str:
        return f"{self.method} {self.path}" + (f" ({self.name})" if self.name else "")


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


def undeclared(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Return the endpoints that are not declared, and that a client cannot safely repeat."""
    return [each for each in endpoints if each.rule is None and each.method in UNSAFE_TO_REPEAT]


def report(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Warn of undeclared endpoints, and of those that are declared but never claimed. Returns the undeclared ones."""
    endpoints = list(endpoints)
    found = undeclared(endpoints)
    if found:
        _log.warning(
            "%d route%s will run again if a client retries: %s. Declare each @idempotent(), @conditional() or "
            '@natural(), or @exempt("why") where a repetition does no harm.',
            len(found),
            "" if len(found) == 1 else "s",
            ", ".join(str(each) for each in found),
        )
    if unclaimed := never_claimed(endpoints):
        _log.warning(
            "%s declared @idempotent(), but a GET is never claimed: it runs each time. Make it a POST, or remove the "
            "decorator.",
            ", ".join(str(each) for each in unclaimed) + (" is" if len(unclaimed) == 1 else " are"),
        )
    return found


def never_claimed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Return the endpoints that are declared to need a key, but answer to GET only."""
    declared = [each for each in endpoints if isinstance(each.rule, Idempotent)]
    claimed = {(each.path, each.name) for each in declared if each.method not in SAFE_METHODS}
    return [each for each in declared if each.method == "GET" and (each.path, each.name) not in claimed]
