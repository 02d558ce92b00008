"""What one operation of an OpenAPI document gets from its rule: headers, errors with examples, ``x-idempotency``.

Everything is added beside what stands there: a response that the operation describes already keeps its description, its
schemas and its examples. What was added once is found again, and not added twice.
"""

from __future__ import annotations

import copy
from itertools import groupby
from typing import Any, Final, TypeAlias

from semel.core.keys import header_value
from semel.core.policy import Policy
from semel.errors import ConfigurationError
from semel.http.contract.conditional import etag
from semel.http.contract.rules import Conditional, Idempotent, Natural, Rule
from semel.http.describe.paths import Operation, example_path
from semel.http.describe.plain_rules import EXTENSION, duration_text, plain_rule
from semel.http.describe.problem_schemas import PROBLEM, PROBLEM_NAME, key_schema, tags_schema
from semel.http.describe.refusals import Refusal, example_key, refusals

__all__ = ["add_components", "describe_operation"]

JSON: TypeAlias = dict[str, Any]
PROBLEM_TYPE: Final = "application/problem+json"
_REFERENCE: Final = {"$ref": f"#/components/schemas/{PROBLEM_NAME}"}
_ABSENT: Final = "It is not there, or not any more."


def describe_operation(
    spec: JSON, operation: Operation, rule: Rule, policy: Policy | None, *, quota: bool, docs: str | None
) -> bool:
    """Write the rule into the operation; whether it can now answer with a problem."""
    content = operation.content
    content[EXTENSION] = plain_rule(rule, policy)
    if isinstance(rule, Natural):
        if operation.method == "DELETE" and rule.absent:
            _responses(content).setdefault("204", {"description": _ABSENT})
        return False
    if not isinstance(rule, Idempotent):
        return False
    rule = rule.under(policy or Policy())
    for parameter in _parameters(operation, rule):
        _add_parameter(spec, operation, parameter)
    responses = _responses(content)
    for status in list(responses):
        if status[:1] in ("2", "3"):
            _add_headers(_owned(spec, responses, status), _marks(rule))
    found = refusals(rule, quota=quota, path=example_path(operation.path), docs=docs)
    for status, group in groupby(found, key=lambda each: each.status):
        _add_refusals(spec, responses, str(status), list(group))
    return True


def add_components(spec: JSON) -> None:
    """The schema that all problems share."""
    schemas = _part(_part(spec, "components"), "schemas")
    taken = schemas.get(PROBLEM_NAME)
    if taken is not None and taken.get("description") != PROBLEM["description"]:
        raise ConfigurationError(f"the document has a schema of its own called {PROBLEM_NAME}: call it something else")
    schemas[PROBLEM_NAME] = copy.deepcopy(PROBLEM)


# -- the request


def _parameters(operation: Operation, rule: Idempotent) -> list[JSON]:
    found = [_key_parameter(rule)]
    if isinstance(rule, Conditional):
        created = operation.method == "PUT"  # the one that can make a thing: If-None-Match: *
        found.append(_match_parameter(rule.precondition_required and not created, rule.precondition_required))
        if created:
            found.append(_none_match_parameter())
    return found


def _key_parameter(rule: Idempotent) -> JSON:
    window = duration_text(rule.policy.ttl_seconds)
    text = "Names this request: one new key for each new request, and the same key for each retry of it. "
    text += "The first answer is remembered " + (f"for {window}" if window else "for ever") + ", and given again. "
    if isinstance(rule, Conditional) and not rule.required:
        text += "Without a key, the retry of a change that was made is refused with 412. "
    elif not rule.required:
        text += "Without a key the request is not protected: a retry happens again. "
    if rule.scope == "tenant":
        text += "A key is good for one request in the whole service. "
    if rule.key_format.name != "any":
        text += f"Expected: {rule.key_format.expected}. "
    if rule.key_format.max_length and rule.key_format.name not in ("uuid", "ulid"):
        text += f"At most {rule.key_format.max_length} characters. "
    if rule.key_mode == "strict":
        text += "Sent in quotes, as a Structured Field String."
    elif rule.key_mode == "auto":
        text += "Sent bare, or in quotes as a Structured Field String: both are the same key."
    parameter = _header_parameter("Idempotency-Key", text.strip(), rule.required, key_schema(rule))
    example = example_key(rule)
    if example is not None:
        parameter["example"] = header_value(example, quote=rule.key_mode == "strict")
    return parameter


def _match_parameter(required: bool, needed: bool) -> JSON:
    text = "The ETag of the state that is to be changed, as it was read; if the resource has changed since, 412."
    if needed and not required:
        text += " Without it, and without If-None-Match, 428."
    return {**_header_parameter("If-Match", text, required, tags_schema()), "example": etag(7)}


def _none_match_parameter() -> JSON:
    text = "States in which nothing is to be changed; `*`: only if there is nothing yet."
    return {**_header_parameter("If-None-Match", text, False, tags_schema()), "example": "*"}


def _header_parameter(name: str, description: str, required: bool, schema: JSON) -> JSON:
    return {"name": name, "in": "header", "required": required, "description": description, "schema": schema}


def _add_parameter(spec: JSON, operation: Operation, ours: JSON) -> None:
    """Beside the others. Where it is described already, the words stay, and the rule says what is required."""
    parameters = operation.content["parameters"] = operation.content.get("parameters") or []
    for at, parameter in enumerate(parameters):
        theirs = _resolved(spec, parameter)
        if _is_header(theirs, ours["name"]):
            parameters[at] = _merged_parameter(theirs, ours)
            return
    for parameter in operation.item.get("parameters") or []:  # of all methods of the path: left alone, overridden here
        theirs = _resolved(spec, parameter)
        if _is_header(theirs, ours["name"]):
            parameters.append(_merged_parameter(theirs, ours))
            return
    parameters.append(ours)


def _merged_parameter(theirs: JSON, ours: JSON) -> JSON:
    merged = {**ours, **theirs, "required": ours["required"]}
    if "content" in theirs:  # it takes the place of a schema
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
    """By status as text; a YAML reader makes numbers of them."""
    found: JSON = {str(status): response for status, response in _part(content, "responses").items()}
    content["responses"] = found
    return found


def _part(holder: JSON, name: str) -> JSON:
    """The object of that name, made if it is missing or empty."""
    found: JSON = holder.get(name) or {}
    holder[name] = found
    return found


def _marks(rule: Idempotent) -> JSON:
    mark = rule.replay_marker.title()
    values = ["true", "omitted"]
    text = (
        "Only on an answer that was given before. `omitted`: its body was too large to be kept, or is not kept at all."
    )
    return {
        "Idempotency-Key": {"description": "The key of the request.", "schema": {"type": "string"}},
        mark: {"description": text, "schema": {"type": "string", "enum": values}},
    }


def _add_refusals(spec: JSON, responses: JSON, status: str, found: list[Refusal]) -> None:
    text = "; or ".join(each.when for each in found)
    responses.setdefault(status, {"description": ""})
    response = _owned(spec, responses, status)
    if "$ref" in response:  # in another document, which is not ours to change
        return
    said = str(response.get("description", ""))
    if text.lower() not in said.lower():
        response["description"] = f"{said.rstrip(' .')}; or {text}." if said else f"{text[0].upper()}{text[1:]}."
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
    if "example" in content:  # it excludes ours
        _part(content, "examples")["other"] = {"value": content.pop("example")}
    examples = _part(content, "examples")
    for each in found:
        examples[each.code] = {"summary": each.body["title"], "value": each.body}


def _beside(schema: Any) -> JSON:
    """Our schema, or theirs and ours."""
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
    """The response itself, where it is one that operations share: a copy of this operation's own."""
    found = responses[status]
    resolved = _resolved(spec, found)
    if resolved is not found:
        responses[status] = resolved = copy.deepcopy(resolved)
    return resolved


def _resolved(spec: JSON, thing: Any) -> JSON:
    """What a reference within the document leads to; one that leads elsewhere stays as it is."""
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
