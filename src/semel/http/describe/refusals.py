"""The errors that a route can answer with, each with an example.

The examples come from the code that answers requests, so no code, title or text is written down twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from semel.core.encoding.snapshot import StoredResponse
from semel.core.policy import Policy
from semel.core.states import Takeover
from semel.core.values import value
from semel.errors import (
    BodyTooLarge,
    InProgress,
    KeyExpired,
    KeyReused,
    OutcomeUnknown,
    SemelError,
    StoreUnavailable,
    TooManyKeys,
    TransactionConflict,
)
from semel.http.contract.conditional import IF_MATCH, Preconditions, etag, preconditions
from semel.http.contract.exchange import KEY_HEADER, Exchange, KeyHeader
from semel.http.contract.responses import problem
from semel.http.contract.rules import Conditional, Idempotent, Rule

_KEYS: Final = {
    "any": "8e03978e-40d5-43dd-bc93-6894a57f9324",
    "uuid": "8e03978e-40d5-43dd-bc93-6894a57f9324",
    "ulid": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
}
PARAMETER: Final = re.compile(r"\{[^{}]*\}|<[^<>]*>")
"""A parameter in the path of a route."""
_HALF_QUOTED: Final = b'"8e03978e'


@value
class Refusal:
    """One error that a route can answer with."""

    error: SemelError
    when: str
    """The condition, for a page."""
    answer: StoredResponse
    """The answer, as it is sent."""

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def code(self) -> str:
        return self.error.code

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.answer.body)
        return body


def example_key(rule: Idempotent) -> str | None:
    """Return a key that the route accepts, or None if its format is the author's own."""
    key = _KEYS.get(rule.key_format.name)
    return key if key is None or len(key) <= rule.key_format.max_length else None


def example_path(path: str) -> str:
    """Return a path that a request could have."""
    return PARAMETER.sub("42", path)


def refusals(
    rule: Rule | None,
    policy: Policy | None = None,
    *,
    quota: bool = False,
    path: str = "/",
    docs: str | None = None,
    key_header: KeyHeader = KEY_HEADER,
) -> list[Refusal]:
    """Return all errors of ours that a route with this rule can answer with, by status.

    :param policy: the guard's policy, which the rule changes.
    :param quota: whether the guard has a quota.
    :param path: the path of the request in the examples.
    """
    if not isinstance(rule, Idempotent):
        return []
    rule = rule.under(policy or Policy())
    result: list[Refusal] = []

    def add(error: SemelError, when: str, status: int | None = None) -> None:
        result.append(Refusal(error, when, problem(error, instance=path, status=status, docs=docs)))

    if rule.required:
        add(_raised(lambda: _exchange(key_header).read_key(rule)), f"no {key_header.title} was sent")
    malformed = b"" if rule.key_mode == "raw" else _HALF_QUOTED
    add(
        _raised(lambda: _exchange(key_header, (key_header.name, malformed)).read_key(rule)),
        f"the {key_header.title} is malformed, too long, or sent twice",
    )
    if isinstance(rule, Conditional):
        add(_raised(lambda: preconditions([(IF_MATCH, b"7")])), "If-Match or If-None-Match is malformed")
    add(InProgress(""), _in_progress(rule), rule.in_use_status)
    add(BodyTooLarge(), "the body is longer than this route accepts")
    add(KeyReused(), f"the {key_header.title} was used before with a different request", rule.reused_status)
    if rule.policy.reject_seconds:
        add(KeyExpired(), f"the {key_header.title} was used so long ago that its answer has expired")
    if quota:
        add(TooManyKeys(""), "the caller has reached its limit of live keys")
    if isinstance(rule, Conditional):
        changed = _raised(lambda: Preconditions(match=(etag(7),)).check(etag(8)))
        add(changed, "the resource is not in the version that the precondition names")
        if rule.precondition_required:
            add(_raised(lambda: preconditions([], required=True)), "no precondition was sent")
    if rule.policy.takeover is not Takeover.RETRY or (
        rule.policy.on_unstored == "withhold" and rule.connection is None
    ):
        add(OutcomeUnknown(), "an attempt ended without a result, and may have had its effect")
    if rule.connection is not None:
        add(TransactionConflict(), "the request conflicted with others in every attempt to run it")
    if not rule.policy.fails_open:
        add(StoreUnavailable(), "the store cannot be reached")
    return sorted(result, key=lambda each: each.status)


def _in_progress(rule: Idempotent) -> str:
    text = "the first request with this key is still being processed"
    waits = rule.policy.wait_seconds
    return f"{text}, also after this one has waited for {waits:g} s" if waits else text


def _exchange(key_header: KeyHeader, *headers: tuple[bytes, bytes]) -> Exchange:
    return Exchange("POST", "/", b"", headers, key_header=key_header)


def _raised(request: Callable[[], object]) -> SemelError:
    """Return the error that a client's request would cause."""
    try:
        request()
    except SemelError as error:
        return error
    raise AssertionError("the example of a refused request was accepted")
