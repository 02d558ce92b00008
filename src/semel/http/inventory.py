"""What an application's routes are declared to be, whichever framework it is written in; and which are not declared."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from semel.core.values import value
from semel.http.rules import Exempt, Rule

__all__ = ["Endpoint", "declared_rule", "exempted", "report", "undeclared"]

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
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return None


def exempted(function: F, reason: str) -> F:
    """The function as it is, declared to be left alone."""
    function.__semel_rule__ = Exempt(reason)  # type: ignore[attr-defined]
    return function


def undeclared(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Those that a client cannot safely repeat, and that say nothing about it."""
    return [each for each in endpoints if each.rule is None and each.method in UNSAFE_TO_REPEAT]


def report(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """One warning that names the undeclared ones, for start-up."""
    found = undeclared(endpoints)
    if found:
        _log.warning(
            "%d route%s can be repeated by a client and will then happen again: %s. Declare each @action(), "
            '@conditional() or @natural(), or @exempt("why") where a repetition does no harm.',
            len(found),
            "" if len(found) == 1 else "s",
            ", ".join(str(each) for each in found),
        )
    return found
