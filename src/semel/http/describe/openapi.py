"""OpenAPI: describe the declared endpoints in a document, and read rules from one.

::

    spec = document(app.openapi(), endpoints(app), guard=guard)
    middleware = WSGIMiddleware(app, guard=guard, routes=rules_by_operation(spec, {"createPayment": idempotent()}))

The modules of FastAPI and Litestar call ``document`` themselves; Django REST framework has ``drf.postprocess``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Final

from semel.core.policy import Policy
from semel.engine.guard import Guard
from semel.errors import ConfigurationError
from semel.http.contract.exchange import KEY_HEADER, KeyHeader
from semel.http.contract.routes import Endpoint
from semel.http.contract.rules import SAFE_METHODS, Idempotent, Rule
from semel.http.describe.operations import add_components, describe_operation
from semel.http.describe.paths import Declarations, DocumentedOperation, Matching, check_version, operations
from semel.http.describe.plain_rules import EXTENSION, rule_from_plain

__all__ = ["document", "rules_by_operation"]

_PART: Final = re.compile(r"\{[^{}]*\}")


def document(
    spec: Mapping[str, Any],
    endpoints: Declarations,
    *,
    guard: Guard | None = None,
    policy: Policy | None = None,
    prefix: str = "",
    docs: str | None = None,
    header: str = KEY_HEADER.title,
    strict: bool = False,
) -> dict[str, Any]:
    """Return a copy of an OpenAPI document (3.0 or later) that describes the declared operations.

    Each gets its headers, all errors that its rule can answer with, and ``x-idempotency``. What the document has stays.
    Describing a document twice changes nothing more.

    :param endpoints: ``endpoints(app)`` of a framework's module, or the ``routes=`` of a middleware.
    :param guard: the guard of the middleware, whose policy the rules change; or pass its ``policy=``.
    :param prefix: the beginning that the document's paths have and the endpoints' do not, where the application is
        mounted.
    :param docs: the URL of a page that explains the errors, as passed to the middleware.
    :param header: the name of the header that has the key, as passed to the middleware.
    :param strict: raise ConfigurationError if the document lacks a protected endpoint.
    """
    check_version(spec)
    key_header = KeyHeader(header)
    policy = guard.policy if guard is not None else policy
    quota = guard is not None and guard.quota is not None
    result: dict[str, Any] = copy.deepcopy(dict(spec))
    matching = Matching(endpoints, prefix)
    answers = False
    for operation in operations(result):
        endpoint = matching.find(operation, result)
        if endpoint is not None and endpoint.rule is not None and operation.method not in SAFE_METHODS:
            answers |= describe_operation(
                result, operation, endpoint.rule, policy, quota=quota, docs=docs, key_header=key_header
            )
    if answers:
        add_components(result)
    if strict:
        _refuse_left([each for each in matching.left() if isinstance(each.rule, Idempotent)])
    return result


def rules_by_operation(
    spec: Mapping[str, Any], rules: Mapping[str, Rule] | None = None, *, prefix: str = ""
) -> dict[str, Rule]:
    """Return the ``routes=`` of a middleware, by operationId and from each operation's own ``x-idempotency``.

    :param rules: rules by operationId, which override those of the document.
    :param prefix: the beginning that the paths of requests have and the document's do not, such as the path of a
        server's URL.
    """
    check_version(spec)
    documented = list(operations(spec))
    wanted = dict(rules or {})
    _refuse_unknown(wanted, documented)
    table: dict[str, Rule] = {}
    for operation in documented:
        if operation.id in wanted:
            rule = wanted[operation.id]
        elif EXTENSION in operation.content:
            rule = rule_from_plain(operation.content[EXTENSION], f"{operation}: {EXTENSION}")
        else:
            continue
        if operation.method in SAFE_METHODS:
            raise ConfigurationError(
                f"{operation.id or operation} is a {operation.method}: it changes nothing and is never claimed"
            )
        table[f"{operation.method} {_PART.sub(_plain_part, prefix + operation.path)}"] = rule
    return table


def _plain_part(match: re.Match[str]) -> str:
    """Rename ``{order-id}``: in ``routes=`` a part has letters, digits and underscores."""
    return re.sub(r"\W", "_", match[0][1:-1]).join("{}")


def _refuse_unknown(wanted: Mapping[str, Rule], documented: list[DocumentedOperation]) -> None:
    known = [operation.id for operation in documented if operation.id]
    unknown = sorted(wanted.keys() - set(known))
    if unknown:
        there = ", ".join(sorted(known)) or "no operationId at all"
        raise ConfigurationError(f"no operation is called {', '.join(unknown)}; the document has: {there}")
    twice = sorted(name for name in wanted if known.count(name) > 1)
    if twice:
        raise ConfigurationError(f"several operations are called {', '.join(twice)}: an operationId names one")


def _refuse_left(left: list[Endpoint]) -> None:
    if left:
        raise ConfigurationError(
            f"the document has no operation for {', '.join(str(each) for each in left)}: "
            "add it, or set prefix= to the beginning of its paths"
        )
