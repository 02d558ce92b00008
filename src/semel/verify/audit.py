"""Audit an OpenAPI document: what can happen twice, and what the document does not say about it.

Each write is put in a class: an *action* needs a key, a *conditional* change names the version that it changes, and a
*natural* write leaves the same state however often it is sent. The class comes from ``x-idempotency``, if the operation
has it, and otherwise from the method and the names. Names only suggest: a POST to ``/search`` is taken for a query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from semel.core.values import value
from semel.http.contract.rules import SAFE_METHODS
from semel.http.describe.openapi import DocumentedOperation, check_version, operations
from semel.http.describe.plain_rules import EXTENSION
from semel.verify.findings import ERROR, WARNING, Finding

RULES: Final = {
    "key-missing": (ERROR, "An action takes an Idempotency-Key"),
    "key-optional": (WARNING, "An action requires its Idempotency-Key"),
    "errors-undocumented": (WARNING, "The document has the errors that a key can lead to"),
    "patch-unconditional": (WARNING, "A PATCH names the version that it changes"),
    "put-delta": (ERROR, "The body of a PUT is a state, not a change"),
    "elsewhere": (WARNING, "The document is in one file"),
}
"""The severity of each rule, and what it demands."""
STATUSES: Final = {
    "400": "the key is missing or invalid",
    "409": "the first request is still running",
    "422": "the key belongs to another request",
}
"""What a key can lead to."""

_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_QUERIES: Final = frozenset(
    {
        *("calculate", "check", "count", "describe", "estimate", "evaluate", "fetch", "filter", "find", "get", "list"),
        *("lookup", "match", "preview", "query", "read", "resolve", "search", "simulate", "suggest", "validate"),
    }
)
"""Words that name a POST which changes nothing."""
_UPDATES: Final = frozenset(["change", "edit", "modify", "patch", "replace", "update"])
"""Words that name a POST which is used as a PATCH."""
_SETS: Final = frozenset(["clear", "delete", "disable", "enable", "remove", "set", "unset"])
"""Words that name a POST which says how things shall be."""
_KINDS: Final = (
    (frozenset(["add", "create", "insert", "make", "new", "send", "start", "submit"]), "action"),
    (_QUERIES, "query"),
    (_UPDATES, "conditional"),
    (_SETS, "natural"),
)
_CHANGES: Final = frozenset(["adjustment", "decrease", "decrement", "delta", "diff", "increase", "increment", "offset"])
_VERBS: Final = frozenset(
    ["add", "adjust", "append", "decrease", "decrement", "increase", "increment", "remove", "subtract"]
)
_DEEPEST: Final = 8
"""How many references are followed one after the other."""


@value
class ClassedWrite:
    """One write of the document, and how it is protected."""

    method: str
    path: str
    kind: str
    """``action``, ``conditional``, ``natural``, ``exempt`` or ``query``."""


@value
class Audit:
    """The result of an audit."""

    title: str
    writes: tuple[ClassedWrite, ...]
    findings: tuple[Finding, ...]


def audit(document: Mapping[str, Any], *, header: str | None = None) -> Audit:
    """Audit an OpenAPI document of version 3.0 or later. Raises ConfigurationError for anything else.

    :param header: the name of the header that has the key. By default every header, and every field of the body, that
        has "idempotency" in its name.
    """
    check_version(document)
    paths = {path: _resolved(document, item) or item for path, item in _mapping(document.get("paths")).items()}
    document = {**document, "paths": paths}
    writes, findings = [], list(_elsewhere(document))
    for operation in operations(document):
        if operation.method in SAFE_METHODS or operation.method == "TRACE" or _is_elsewhere(operation.content):
            continue
        names = _headers(document, operation)
        keys = [required for name, required in names.items() if _is_key(name, header)]
        if header is None:
            keys += [required for name, required in _fields(document, _body(document, operation)) if _is_key(name)]
        kind = _kind(operation, bool(keys), "if-match" in names)
        writes.append(ClassedWrite(operation.method, operation.path, kind))
        findings += [
            _finding(rule, message, operation.method, operation.path)
            for rule, message in _check(document, operation, kind, keys, header or "Idempotency-Key")
        ]
    info = document.get("info")
    title = info.get("title") if isinstance(info, Mapping) else None
    return Audit(str(title or "untitled"), tuple(writes), tuple(findings))


def _elsewhere(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield one finding if parts of the document are in other files, of which the audit knows nothing."""
    parts = [
        (str(path), method, part["$ref"])
        for path, item in _mapping(document.get("paths")).items()
        for method, part in {"": item, **_mapping(item)}.items()
        if _is_elsewhere(part)
    ]
    if parts:
        path, method, where = parts[0]
        text = (
            f"{len(parts)} parts are in other files, such as {where}, and were not looked at: bundle the document first"
        )
        yield _finding("elsewhere", text, method.upper(), path)


def _finding(rule: str, message: str, method: str, path: str) -> Finding:
    return Finding(rule, RULES[rule][0], message, method, path)


def _is_elsewhere(part: Any) -> bool:
    return not str(_mapping(part).get("$ref", "#")).startswith("#")


def _kind(operation: DocumentedOperation, keyed: bool, conditional: bool) -> str:
    declared = operation.content.get(EXTENSION)
    if isinstance(declared, Mapping) and isinstance(declared.get("class"), str):
        return str(declared["class"])
    if operation.method == "PATCH" or (conditional and not keyed):
        return "conditional"
    if operation.method != "POST":
        return "natural"
    if keyed:
        return "action"
    last = next((part for part in reversed(operation.path.split("/")) if part and "{" not in part), "")
    words = _words(last)
    verb = _words(re.split(r"[/.]", operation.id)[-1])[:1]  # of repos/create-fork and storage.buckets.insert, the last
    for hints in (verb, {*words[:1], *words[-1:]}):
        for names, kind in _KINDS:
            if names.intersection(hints):
                return kind
    return "action"


def _check(
    document: Mapping[str, Any], operation: DocumentedOperation, kind: str, keys: list[bool], header: str
) -> Iterator[tuple[str, str]]:
    """Yield the rules that the operation breaks, with a message each."""
    if kind == "action" and not keys:
        yield (
            "key-missing",
            f"a retry does it again: require the header {header}, or declare {EXTENSION} if it need not",
        )
    elif kind == "action" and not any(keys):
        yield "key-optional", f"{header} is optional, so a client that leaves it out is not protected: require it"
    if kind == "conditional" and not keys and "if-match" not in _headers(document, operation):
        text = "two clients overwrite each other, and a late retry undoes a change"
        yield "patch-unconditional", f"{text}: add the header If-Match, or {header}"
    if operation.method == "PUT":
        changes = sorted({name for name, _ in _fields(document, _body(document, operation)) if _is_change(name)})
        if changes:
            text = "a change adds up when it is sent twice: take the new value, or use POST with a key"
            yield "put-delta", f"{', '.join(changes)}: {text}"
    if keys:
        answers = _mapping(operation.content.get("responses"))
        known = {str(status).upper() for status in answers}
        missing = [] if known & {"4XX", "DEFAULT"} else [status for status in STATUSES if status not in known]
        if missing:
            meanings = ", ".join(f"{status} ({STATUSES[status]})" for status in missing)
            yield "errors-undocumented", f"clients are not told of {meanings}"


def _is_key(name: str, header: str | None = None) -> bool:
    return name == header.lower() if header is not None else "idempotency" in name.lower()


def _headers(document: Mapping[str, Any], operation: DocumentedOperation) -> dict[str, bool]:
    """The names of the request's headers in lower case, and whether each is required."""
    found = {}
    for holder in (operation.item, operation.content):
        for part in holder.get("parameters") or ():
            parameter = _resolved(document, part)
            if parameter.get("in") == "header":
                found[str(parameter.get("name")).lower()] = bool(parameter.get("required"))
    return found


def _body(document: Mapping[str, Any], operation: DocumentedOperation) -> Mapping[str, Any]:
    content = _mapping(_resolved(document, operation.content.get("requestBody")).get("content"))
    return next((_mapping(_mapping(each).get("schema")) for each in content.values()), {})


def _fields(document: Mapping[str, Any], schema: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names of the body's own fields, also of those that it is composed of, and whether each is required."""
    left, seen = [schema], set()
    while left:
        part = _resolved(document, left.pop())
        if id(part) in seen:  # schemas may refer to themselves
            continue
        seen.add(id(part))
        required = part.get("required")
        for name in _mapping(part.get("properties")):
            yield str(name), isinstance(required, list) and name in required
        for word in ("allOf", "oneOf", "anyOf"):
            below = part.get(word)
            left += below if isinstance(below, list) else []


def _resolved(document: Mapping[str, Any], part: Any) -> Mapping[str, Any]:
    """Follow references within the document. What cannot be found is empty."""
    for _ in range(_DEEPEST):
        found = _mapping(part)
        reference = found.get("$ref")
        if not isinstance(reference, str):
            return found
        part = document if reference.startswith("#/") else None
        for name in reference[2:].split("/"):
            part = _mapping(part).get(name.replace("~1", "/").replace("~0", "~"))
    return {}


def _mapping(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else {}


def _is_change(name: str) -> bool:
    words = _words(name)
    return bool(_CHANGES.intersection(words)) or (len(words) > 1 and words[0] in _VERBS)


def _words(name: str) -> list[str]:
    """The words of a name: ``addItems``, ``add_items`` and ``add-items`` have two."""
    return [word.lower() for word in _WORD.findall(name)]
