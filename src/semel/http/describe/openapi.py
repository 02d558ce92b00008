"""OpenAPI: describe the declared endpoints in a document, and read rules from one.

::

    spec = document(app.openapi(), endpoints(app), guard=guard)
    middleware = WSGIMiddleware(app, guard=guard, routes=rules_by_operation(spec, {"createPayment": idempotent()}))

The modules of FastAPI and Litestar call ``document`` themselves; Django REST framework has ``drf.postprocess``.

What the document has stays: a response that is described already keeps its description, schemas and examples. The
schemas use only keywords that OpenAPI 3.0 and JSON Schema 2020-12 share, so that the same text is valid in every
version, and patterns that JavaScript reads as Python does.

Operations and endpoints are matched by method and path, whatever the parameters of the path are called:
``/orders/{id:int}`` is ``/orders/{order_id}``. The document may leave out the beginning of a path that its servers'
URLs have.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from semel import errors
from semel.core.keys import header_value
from semel.core.policy import Policy
from semel.core.values import value
from semel.engine.guard import Guard
from semel.errors import ConfigurationError, SemelError
from semel.http.contract.conditional import etag
from semel.http.contract.exchange import KEY_HEADER, KeyHeader
from semel.http.contract.routes import Endpoint, RouteTable, by_method_and_path
from semel.http.contract.rules import SAFE_METHODS, Conditional, Idempotent, Natural, Rule
from semel.http.describe.plain_rules import EXTENSION, duration_text, plain_rule, rule_from_plain
from semel.http.describe.refusals import PARAMETER, Refusal, example_key, example_path, refusals

Declarations: TypeAlias = Iterable[Endpoint] | RouteTable
"""What an application declares: the endpoints of a framework, or the ``routes=`` of a middleware."""
Template: TypeAlias = tuple[str, str]
JSON: TypeAlias = dict[str, Any]

METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_PART: Final = re.compile(r"\{([^{}]*)\}")
PROBLEM_TYPE: Final = "application/problem+json"
PROBLEM_NAME: Final = "IdempotencyProblem"
_REFERENCE: Final = {"$ref": f"#/components/schemas/{PROBLEM_NAME}"}
_ABSENT: Final = "The resource does not exist, or no longer."

_BARE: Final = r"[!#-+\--:<-\[\]-~]"
_QUOTED: Final = r'(?:[ !#-\[\]-~]|\\["\\])'
_PARAMETERS: Final = (
    r"(?:; *[a-z*][a-z0-9_.*-]*"  # a name, and a string, a token, a number, a boolean or bytes
    r'(?:=(?:"(?:[ !#-\[\]-~]|\\["\\])*"|[A-Za-z*][!#$%&*+.^_`|~0-9A-Za-z:/\x27-]*'
    r"|-?[0-9]{1,12}(?:\.[0-9]{1,3})?|\?[01]|:(?:[A-Za-z0-9+/]{4})*:))?)*"
)
"""Parameters of a Structured Field (RFC 9651, section 3.1.2), without the rarer types of values."""
_TAG: Final = r'(?:W/)?"[!#-~\u0080-\u00ff]*"'
# Flags and names in groups, comments, \A and \Z, conditions, possessive quantifiers.
_PYTHON_ONLY: Final = re.compile(r"\(\?[P#(>aiLmsux-]|\\[AZz]|[*+?}]\+")


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
    return re.sub(r"\W", "_", match[1]).join("{}")


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


# -- one operation


def _codes() -> list[str]:
    classes = [getattr(errors, name) for name in errors.__all__]
    return sorted({cls.code for cls in classes if not issubclass(cls, ConfigurationError)} - {SemelError.code})


def describe_operation(
    spec: JSON,
    operation: DocumentedOperation,
    rule: Rule,
    policy: Policy | None,
    *,
    quota: bool,
    docs: str | None,
    key_header: KeyHeader,
) -> bool:
    """Write the rule into the operation. Returns whether the operation can answer with a problem."""
    content = operation.content
    content[EXTENSION] = plain_rule(rule, policy)
    if isinstance(rule, Natural):
        if operation.method == "DELETE" and rule.absent:
            _responses(content).setdefault("204", {"description": _ABSENT})
        return False
    if not isinstance(rule, Idempotent):
        return False
    rule = rule.under(policy or Policy())
    for parameter in _parameters(operation, rule, key_header):
        _add_parameter(spec, operation, parameter)
    responses = _responses(content)
    for status in list(responses):
        if status[:1] in ("2", "3"):
            _add_headers(_owned(spec, responses, status), _marks(rule, key_header))
    found = refusals(rule, quota=quota, path=example_path(operation.path), docs=docs, key_header=key_header)
    for status, group in groupby(found, key=lambda each: each.status):
        _add_refusals(spec, responses, str(status), list(group))
    return True


def add_components(spec: JSON) -> None:
    """Add the schema that all problems share."""
    schemas = _part(_part(spec, "components"), "schemas")
    taken = schemas.get(PROBLEM_NAME)
    if taken is not None and taken.get("description") != PROBLEM["description"]:
        raise ConfigurationError(f"the document has a schema of its own called {PROBLEM_NAME}: call it something else")
    schemas[PROBLEM_NAME] = copy.deepcopy(PROBLEM)


# -- the request


def _parameters(operation: DocumentedOperation, rule: Idempotent, key_header: KeyHeader) -> list[JSON]:
    parameters = [_key_parameter(rule, key_header)]
    if isinstance(rule, Conditional):
        created = operation.method == "PUT"  # which can create a resource: If-None-Match: *
        parameters.append(_match_parameter(rule.precondition_required and not created, rule.precondition_required))
        if created:
            parameters.append(_none_match_parameter())
    return parameters


def _key_parameter(rule: Idempotent, key_header: KeyHeader) -> JSON:
    window = duration_text(rule.policy.ttl_seconds)
    text = "Identifies the request. Send a new key with each new request, and the same key with each retry of it. "
    text += "The first answer is stored " + (f"for {window}" if window else "for ever") + " and replayed. "
    if isinstance(rule, Conditional) and not rule.required:
        text += "Without a key, a retry of a change that was made gets 412. "
    elif not rule.required:
        text += "Without a key the request is not protected: a retry runs again. "
    if rule.scope == "tenant":
        text += "A key is good for one request in the whole service. "
    if rule.key_format.name != "any":
        text += f"Expected: {rule.key_format.expected}. "
    if rule.key_format.max_length and rule.key_format.name not in ("uuid", "ulid"):
        text += f"At most {rule.key_format.max_length} characters. "
    if rule.key_mode == "strict":
        text += "Send it in quotes, as a Structured Field String."
    elif rule.key_mode == "auto":
        text += "Send it bare, or in quotes as a Structured Field String: both are the same key."
    parameter = _header_parameter(key_header.title, text.strip(), rule.required, key_schema(rule))
    example = example_key(rule)
    if example is not None:
        parameter["example"] = header_value(example, quote=rule.key_mode == "strict")
    return parameter


def _match_parameter(required: bool, needed: bool) -> JSON:
    text = "The ETag of the version to change, as it was read. The answer is 412 if the resource has changed since."
    if needed and not required:
        text += " The answer is 428 if neither this header nor If-None-Match is sent."
    return {**_header_parameter("If-Match", text, required, tags_schema()), "example": etag(7)}


def _none_match_parameter() -> JSON:
    text = "Versions that must not be changed. `*`: create the resource only if it does not exist."
    return {**_header_parameter("If-None-Match", text, False, tags_schema()), "example": "*"}


def _header_parameter(name: str, description: str, required: bool, schema: JSON) -> JSON:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


def _add_parameter(spec: JSON, operation: DocumentedOperation, ours: JSON) -> None:
    """Add a parameter. One that is described already keeps its words; whether it is required follows the rule."""
    own = operation.content["parameters"] = operation.content.get("parameters") or []
    shared = operation.item.get("parameters") or []  # by all methods of the path; overridden in this one
    known = next((each for each in [*own, *shared] if _is_header(_resolved(spec, each), ours["name"])), None)
    if known is not None:
        ours = _merged_parameter(_resolved(spec, known), ours)
    if known in own:
        own[own.index(known)] = ours
    else:
        own.append(ours)


def _merged_parameter(theirs: JSON, ours: JSON) -> JSON:
    merged = {**ours, **theirs, "required": ours["required"]}
    if "content" in theirs:  # which replaces a schema
        del merged["schema"]
    else:
        merged["schema"] = ours["schema"]
    if "content" in theirs or "examples" in theirs:
        merged.pop("example", None)
    return merged


def _is_header(parameter: Any, name: str) -> bool:
    if not isinstance(parameter, dict) or parameter.get("in") != "header":
        return False
    return str(parameter.get("name", "")).lower() == name.lower()


# -- the answers


def _responses(content: JSON) -> JSON:
    """Return the responses by status as text. YAML readers turn the statuses into numbers."""
    responses: JSON = {str(status): response for status, response in _part(content, "responses").items()}
    content["responses"] = responses
    return responses


def _part(holder: JSON, name: str) -> JSON:
    """Return the object of that name, created if it is missing or empty."""
    part: JSON = holder.get(name) or {}
    holder[name] = part
    return part


def _marks(rule: Idempotent, key_header: KeyHeader) -> JSON:
    mark = rule.replay_marker.title()
    values = ["true", "omitted"]
    text = "Only on a replay. `omitted`: the body was too large to be stored, or this route stores none."
    return {
        key_header.title: {"description": "The key of the request.", "schema": {"type": "string"}},
        mark: {"description": text, "schema": {"type": "string", "enum": values}},
    }


def _add_refusals(spec: JSON, responses: JSON, status: str, found: list[Refusal]) -> None:
    text = "; or ".join(each.when for each in found)
    responses.setdefault(status, {"description": ""})
    response = _owned(spec, responses, status)
    if "$ref" in response:  # to another document, which we cannot change
        return
    description = str(response.get("description", ""))
    if text.lower() not in description.lower():
        response["description"] = (
            f"{description.rstrip(' .')}; or {text}." if description else f"{text[0].upper()}{text[1:]}."
        )
    headers: JSON = {}
    if any(each.error.retryable for each in found):
        seconds = {"type": "integer", "minimum": 1}
        headers["Retry-After"] = {"description": "Seconds until the same request may be sent again.", "schema": seconds}
    if any(name == b"link" for each in found for name, _ in each.answer.headers):
        headers["Link"] = {"description": "A page that explains the errors.", "schema": {"type": "string"}}
    if headers:
        _add_headers(response, headers)
    content = _part(_part(response, "content"), PROBLEM_TYPE)
    content["schema"] = _beside(content.get("schema"))
    if "example" in content:  # which excludes "examples"
        _part(content, "examples")["other"] = {"value": content.pop("example")}
    examples = _part(content, "examples")
    for each in found:
        examples[each.code] = {"summary": each.body["title"], "value": each.body}


def _beside(schema: Any) -> JSON:
    """Return our schema, or theirs and ours."""
    if schema is None or schema == _REFERENCE:
        return dict(_REFERENCE)
    if isinstance(schema, dict) and set(schema) == {"anyOf"} and _REFERENCE in schema["anyOf"]:
        return schema
    return {"anyOf": [schema, dict(_REFERENCE)]}


def _add_headers(response: JSON, headers: JSON) -> None:
    if "$ref" in response:
        return
    there = _part(response, "headers")
    known = {name.lower() for name in there}
    for name, header in headers.items():
        if name.lower() not in known:
            there[name] = copy.deepcopy(header)


def _owned(spec: JSON, responses: JSON, status: Any) -> JSON:
    """Return the response. One that several operations share is copied for this operation first."""
    response = responses[status]
    resolved = _resolved(spec, response)
    if resolved is not response:
        responses[status] = resolved = copy.deepcopy(resolved)
    return resolved


def _resolved(spec: JSON, thing: Any) -> JSON:
    """Resolve a reference within the document. A reference to another document is returned as it is."""
    seen = 0
    while (
        isinstance(thing, dict) and isinstance(thing.get("$ref"), str) and thing["$ref"].startswith("#/") and seen < 8
    ):
        found: Any = spec
        for part in thing["$ref"][2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise ConfigurationError(f"the document has nothing at {thing['$ref']}")
        thing = found
        seen += 1
    resolved: JSON = thing
    return resolved


# -- schemas


PROBLEM: Final[dict[str, Any]] = {
    "title": PROBLEM_NAME,
    "description": "An error of the idempotency contract (RFC 9457).",
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance", "code", "retryable"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference", "description": "A stable name of the kind of problem."},
        "title": {"type": "string", "description": "The kind of problem, for people."},
        "status": {"type": "integer", "minimum": 400, "maximum": 599, "description": "The status of this answer."},
        "detail": {"type": "string", "description": "What is wrong with this request."},
        "instance": {"type": "string", "format": "uri-reference", "description": "The path of the request."},
        "code": {"type": "string", "enum": _codes(), "description": "The kind of problem, for programs."},
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request may be sent again with the same key.",
        },
        "retry_after": {
            "type": "integer",
            "minimum": 1,
            "description": "Seconds to wait before that, as in the Retry-After header.",
        },
    },
}


def key_schema(rule: Idempotent) -> dict[str, Any]:
    """Return the JSON Schema of the header that has the key, as the route reads it."""
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
    """Return the JSON Schema of If-Match and If-None-Match."""
    return {"type": "string", "pattern": rf"^[ \t,]*(?:\*|{_TAG}(?:[ \t]*,[ \t,]*{_TAG})*)[ \t,]*$"}


def _portable(pattern: re.Pattern[str]) -> str | None:
    """Return the pattern's text if other languages read it as Python does, else None."""
    if pattern.flags & ~re.UNICODE or _PYTHON_ONLY.search(pattern.pattern):
        return None
    return pattern.pattern


# -- the operations of a document, and the endpoint that each of them describes


@value
class DocumentedOperation:
    """One operation of a document. ``content`` is the document's own object: changing it changes the document."""

    method: str
    path: str
    item: dict[str, Any]
    content: dict[str, Any]

    @property
    def id(self) -> str:
        name = self.content.get("operationId")
        return name if isinstance(name, str) else ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def check_version(spec: object) -> None:
    """Raise ConfigurationError unless it is an OpenAPI 3 document."""
    if not isinstance(spec, Mapping):
        raise ConfigurationError(f"an OpenAPI document is a dict, as json.loads gives it, not {type(spec).__name__}")
    version = spec.get("openapi")
    if not isinstance(version, str) or not version.startswith("3."):
        stated = f"openapi: {version!r}" if "openapi" in spec else f"swagger: {spec.get('swagger')!r}"
        raise ConfigurationError(
            f"this is not an OpenAPI document of version 3.0 or later ({stated}): convert it first"
        )


def operations(spec: Mapping[str, Any]) -> Iterator[DocumentedOperation]:
    """Yield all operations below ``paths``. Webhooks and callbacks are left out: the service sends these requests."""
    for path, item in (spec.get("paths") or {}).items():
        if not isinstance(item, dict):
            continue
        for method in METHODS:
            if isinstance(item.get(method), dict):
                yield DocumentedOperation(method.upper(), path, item, item[method])


def template(method: str, path: str) -> Template:
    """Return method and path in the form in which they are compared."""
    return method.upper(), PARAMETER.sub("{}", path) or "/"


def as_endpoints(declared: Declarations) -> list[Endpoint]:
    """Return endpoints, also from the ``routes=`` of a middleware."""
    if isinstance(declared, Mapping):
        return [Endpoint(method, path, rule) for (method, path), rule in by_method_and_path(declared).items()]
    return list(declared)


class Matching:
    """Finds the endpoint that an operation describes."""

    def __init__(self, declared: Declarations, prefix: str = "") -> None:
        self._exact: dict[Template, Endpoint] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Endpoint]] = []
        for each in as_endpoints(declared):
            method, path = template(each.method, prefix + each.path)
            self._exact[method, path] = each
            if "{}" in path:
                literals = [re.escape(text) for text in path.split("{}")]
                self._patterns.append((method, re.compile("[^/]+".join(literals)), each))
        self._found: set[int] = set()

    def find(self, operation: DocumentedOperation, spec: Mapping[str, Any]) -> Endpoint | None:
        """Find it by its path, alone or below the path of a server, or else by a path with parameters that matches."""
        names = list(_names(operation, spec))
        endpoint = next((self._exact[name] for name in names if name in self._exact), None)
        if endpoint is None:
            endpoint = next(
                (
                    each
                    for method, path in names
                    for wanted, pattern, each in self._patterns
                    if wanted == method and pattern.fullmatch(path)
                ),
                None,
            )
        self._found.add(id(endpoint))
        return endpoint

    def left(self) -> list[Endpoint]:
        """Return the endpoints that no operation describes."""
        return [each for each in self._exact.values() if id(each) not in self._found]


def _names(operation: DocumentedOperation, spec: Mapping[str, Any]) -> Iterator[Template]:
    """Yield the templates that the operation's endpoint may have."""
    yield template(operation.method, operation.path)
    for holder in (operation.content, operation.item, spec):
        servers = holder.get("servers")
        if isinstance(servers, list) and servers:
            for prefix in map(_server_path, servers):
                if prefix:
                    yield template(operation.method, prefix + operation.path)
            return  # the innermost list overrides the others


def _server_path(server: Any) -> str:
    if not isinstance(server, Mapping) or not isinstance(server.get("url"), str):
        return ""
    variables = server.get("variables") or {}

    def default(match: re.Match[str]) -> str:
        variable = variables.get(match[1])
        return str(variable.get("default", "")) if isinstance(variable, Mapping) else ""

    try:
        return urlsplit(_PART.sub(default, server["url"])).path.rstrip("/")
    except ValueError:
        return ""
