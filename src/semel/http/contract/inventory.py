"""What an application's routes are declared to be, whichever framework it is written in; and which are not declared."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from semel.core.values import value
from semel.errors import ConfigurationError, PolicyError
from semel.http.contract.rules import SAFE_METHODS, Exempt, Idempotent, Rule

__all__ = [
    "Endpoint", "check_declarable", "declared_rule", "exempted", "never_claimed", "replaced", "report", "undeclared",
]  # fmt: skip

UNSAFE_TO_REPEAT: Final = frozenset({"POST", "PATCH"})
F = TypeVar("F")
_log = logging.getLogger("semel.http")


@value
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    """With its parts in braces: ``/orders/{id}``."""
    rule: Rule | None
    """None: it was not declared."""
    name: str = ""
    """The function's, for people."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}" + (f" ({self.name})" if self.name else "")


def declared_rule(function: Any) -> Rule | None:
    """The rule that a decorator has left on a function, also on one that was wrapped since."""
    while function is not None:
        rule: Rule | None = getattr(function, "__semel_rule__", None)
        if rule is not None:
            return rule
        if getattr(function, "__semel_replaced__", False):
            raise ConfigurationError(
                f"{name_of(function)} is declared to happen once, and its route calls it undeclared: put the route's "
                'decorator on top, @app.post(…), and ours below it; or declare it @exempt("why"), if that is meant'
            )
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return None


def check_declarable(function: Any) -> None:
    """Refuse what could never be claimed, when it is declared."""
    if isinstance(function, type):
        raise PolicyError(f"decorate the method, such as post, of {name_of(function)}, not the class")
    rule: Rule | None = getattr(function, "__semel_rule__", None)
    if rule is not None:
        raise PolicyError(f"{name_of(function)} is declared @{rule.decorator}() already: one rule for one endpoint")


def replaced(function: Any) -> None:
    """Remember that there is a declared function in its place: a route that calls this one is a mistake."""
    with suppress(AttributeError):  # a bound method, which is made anew each time
        function.__semel_replaced__ = True


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def exempted(function: F, rule: Exempt) -> F:
    """The function as it is, declared to be left alone."""
    function.__semel_rule__ = rule  # type: ignore[attr-defined]
    return function


def undeclared(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Those that a client cannot safely repeat, and that say nothing about it."""
    return [each for each in endpoints if each.rule is None and each.method in UNSAFE_TO_REPEAT]


def report(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """One warning that names the undeclared ones, for start-up; and one for those that are declared in vain."""
    endpoints = list(endpoints)
    found = undeclared(endpoints)
    if found:
        _log.warning(
            "%d route%s can be repeated by a client and will then happen again: %s. Declare each @idempotent(), "
            '@conditional() or @natural(), or @exempt("why") where a repetition does no harm.',
            len(found),
            "" if len(found) == 1 else "s",
            ", ".join(str(each) for each in found),
        )
    if vain := never_claimed(endpoints):
        _log.warning(
            "%s declared @idempotent(), but a GET is never claimed: it runs each time. Make it a POST, or remove the "
            "decorator.",
            ", ".join(str(each) for each in vain) + (" is" if len(vain) == 1 else " are"),
        )
    return found


def never_claimed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Those that need a key and answer to a GET alone."""
    declared = [each for each in endpoints if isinstance(each.rule, Idempotent)]
    claimed = {(each.path, each.name) for each in declared if each.method not in SAFE_METHODS}
    return [each for each in declared if each.method == "GET" and (each.path, each.name) not in claimed]
