"""Decorators that are made by a call: ``@guard.once`` without its brackets is told what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from semel.errors import PolicyError

__all__ = ["with_brackets"]

F = TypeVar("F", bound=Callable[..., Any])


def with_brackets(method: F) -> F:
    """A method of a guard that makes a decorator from keywords alone; those without a default must be given."""
    parameters = inspect.signature(method).parameters.values()
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]

    @functools.wraps(method)
    def make(self: Any, *args: Any, **settings: Any) -> Any:
        if not args and all(name in settings for name in needed):
            return method(self, **settings)
        first = _first_parameter(args[0] if args else None)
        shown = ", ".join(f'{name}="{"session" if name == "connection" else first}"' for name in needed)
        raise PolicyError(
            f"@guard.{method.__name__} is given its settings in brackets, by name, and is told what the key is: "
            f"write @guard.{method.__name__}({shown})"
        )

    return cast("F", make)


def _first_parameter(function: object) -> str:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return next((name for name in names if name not in ("self", "cls")), "order_id")
