"""Which errors a route can answer with, each with an example that the real code has made.

Documents and pages about a service are written from this; nothing here is a second copy of a code, a title or a text.
"""

from __future__ import annotations

import json
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
from semel.http.contract.exchange import KEY, Exchange
from semel.http.contract.problems import problem
from semel.http.contract.rules import Conditional, Idempotent, Rule

__all__ = ["Refusal", "example_key", "refusals"]

_KEYS: Final = {
    "any": "8e03978e-40d5-43dd-bc93-6894a57f9324",
    "uuid": "8e03978e-40d5-43dd-bc93-6894a57f9324",
    "ulid": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
}
_HALF_QUOTED: Final = b'"8e03978e'


@value
class Refusal:
    """One error that a route can answer with."""

    error: SemelError
    when: str
    """In words, for a page."""
    answer: StoredResponse
    """As it is sent."""

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def code(self) -> str:
        return self.error.code

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.answer.body)
        return found


def example_key(rule: Idempotent) -> str | None:
    """A key that the route accepts; None where only its author knows one."""
    key = _KEYS.get(rule.key_format.name)
    return key if key is None or len(key) <= rule.key_format.max_length else None


def refusals(
    rule: Rule | None, policy: Policy | None = None, *, quota: bool = False, path: str = "/", docs: str | None = None
) -> list[Refusal]:
    """All errors of ours that a route under this rule can answer with, by status.

    :param policy: the guard's, which the rule changes.
    :param quota: whether the guard has one.
    :param path: of the request in the examples.
    """
    if not isinstance(rule, Idempotent):
        return []
    rule = rule.under(policy or Policy())
    found: list[Refusal] = []

    def add(error: SemelError, when: str, status: int | None = None) -> None:
        found.append(Refusal(error, when, problem(error, instance=path, status=status, docs=docs)))

    if rule.required:
        add(_raised(lambda: _exchange().read_key(rule)), "no Idempotency-Key was sent")
    add(
        _raised(lambda: _exchange((KEY, b"" if rule.key_mode == "raw" else _HALF_QUOTED)).read_key(rule)),
        "the Idempotency-Key is malformed, too long, or sent twice",
    )
    if isinstance(rule, Conditional):
        add(_raised(lambda: preconditions([(IF_MATCH, b"7")])), "If-Match or If-None-Match is malformed")
    add(InProgress(""), _in_progress(rule))
    add(BodyTooLarge(), "the body is longer than this route takes")
    add(KeyReused(), "the Idempotency-Key came before with another request", rule.reused_status)
    if rule.policy.reject_seconds:
        add(KeyExpired(), "the Idempotency-Key was used so long ago that its answer is forgotten")
    if quota:
        add(TooManyKeys(""), "the caller holds as many live keys as it may")
    if isinstance(rule, Conditional):
        changed = _raised(lambda: Preconditions(match=(etag(7),)).check(etag(8)))
        add(changed, "the resource is not in the state that the precondition names")
        if rule.precondition_required:
            add(_raised(lambda: preconditions([], required=True)), "no precondition was sent")
    if rule.policy.takeover is not Takeover.RETRY:
        add(OutcomeUnknown(), "an attempt ended without a word, and may have happened")
    if rule.connection is not None:
        add(TransactionConflict(), "the request met others that change the same, as often as it was run")
    if not rule.policy.fails_open:
        add(StoreUnavailable(), "the store of the records cannot be reached")
    return sorted(found, key=lambda each: each.status)


def _in_progress(rule: Idempotent) -> str:
    text = "the first request with this key is still being processed"
    waits = rule.policy.wait_seconds
    return f"{text}, and was for the {waits:g} s that this one has waited" if waits else text


def _exchange(*headers: tuple[bytes, bytes]) -> Exchange:
    return Exchange("POST", "/", b"", headers)


def _raised(asked: Callable[[], object]) -> SemelError:
    """The error itself, as a client's request would meet it."""
    try:
        asked()
    except SemelError as error:
        return error
    raise AssertionError("the example of a refused request was accepted")
