"""JSON Schemas of what the contract adds to a request and an answer: the key, the preconditions, the problem.

Only words that OpenAPI 3.0 and JSON Schema 2020-12 share are used, so that one text is valid in every version. Patterns
are ones that JavaScript reads as Python does; they accept all that the service accepts.
"""

from __future__ import annotations

import re
from typing import Any, Final

from semel import errors
from semel.errors import ConfigurationError, SemelError
from semel.http.contract.rules import Idempotent

__all__ = ["PROBLEM", "PROBLEM_NAME", "key_schema", "tags_schema"]

PROBLEM_NAME: Final = "IdempotencyProblem"

_BARE: Final = r"[!#-+\--:<-\[\]-~]"
_QUOTED: Final = r'(?:[ !#-\[\]-~]|\\["\\])'
_PARAMETERS: Final = (
    r"(?:; *[a-z*][a-z0-9_.*-]*"  # a name, and what it is: a text, a token, a number, a truth, bytes
    r'(?:=(?:"(?:[ !#-\[\]-~]|\\["\\])*"|[A-Za-z*][!#$%&*+.^_`|~0-9A-Za-z:/\x27-]*'
    r"|-?[0-9]{1,12}(?:\.[0-9]{1,3})?|\?[01]|:(?:[A-Za-z0-9+/]{4})*:))?)*"
)
"""Parameters of a Structured Field (RFC 9651, section 3.1.2); the rarer kinds of values are left out."""
_TAG: Final = r'(?:W/)?"[!#-~\u0080-\u00ff]*"'
# Flags and names in groups, comments, \A and \Z, conditions, possessive quantifiers.
_PYTHON_ONLY: Final = re.compile(r"\(\?[P#(>aiLmsux-]|\\[AZz]|[*+?}]\+")


def _codes() -> list[str]:
    found = [getattr(errors, name) for name in errors.__all__]
    return sorted({cls.code for cls in found if not issubclass(cls, ConfigurationError)} - {SemelError.code})


PROBLEM: Final[dict[str, Any]] = {
    "title": PROBLEM_NAME,
    "description": "An error of the idempotency contract, as RFC 9457 writes one.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference", "description": "Names the kind of problem, for ever."},
        "title": {"type": "string", "description": "The kind of problem, in words."},
        "status": {"type": "integer", "minimum": 400, "maximum": 599, "description": "The status of this answer."},
        "detail": {"type": "string", "description": "What is wrong with this request."},
        "instance": {"type": "string", "format": "uri-reference", "description": "The path of the request."},
        "code": {"type": "string", "enum": _codes(), "description": "The kind of problem, for programs."},
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request, with the same key, may be sent again as it is.",
        },
        "retry_after": {
            "type": "integer",
            "minimum": 1,
            "description": "Seconds after which it may; the Retry-After header says the same.",
        },
    },
}


def key_schema(rule: Idempotent) -> dict[str, Any]:
    """Of the Idempotency-Key header's value, as the route reads it."""
    format, mode = rule.key_format, rule.key_mode
    inside = None if format.pattern is None else _portable(format.pattern)
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    if mode == "raw":
        schema["maxLength"] = format.max_length
        if format.name == "uuid":
            schema["format"] = "uuid"
        if format.pattern is None:
            schema["pattern"] = "^[ -~]+$"
        elif inside is not None:
            schema["pattern"] = f"^(?:{inside})$"
        return schema
    if format.pattern is not None and inside is None:
        return schema  # a pattern that only Python reads; the description has it
    counted = f"{{1,{format.max_length}}}"
    quoted = f'"{_QUOTED + counted if inside is None else f"(?:{inside})"}"{_PARAMETERS}'
    bare = _BARE + counted if inside is None else f"(?:{inside})"
    schema["pattern"] = f"^{quoted}$" if mode == "strict" else f"^(?:{bare}|{quoted})$"
    return schema


def tags_schema() -> dict[str, Any]:
    """Of the value of If-Match and If-None-Match."""
    return {"type": "string", "pattern": rf"^[ \t,]*(?:\*|{_TAG}(?:[ \t]*,[ \t,]*{_TAG})*)[ \t,]*$"}


def _portable(pattern: re.Pattern[str]) -> str | None:
    """The pattern's text, where other languages read it alike; else None."""
    if pattern.flags & ~re.UNICODE or _PYTHON_ONLY.search(pattern.pattern):
        return None
    return pattern.pattern
