"""Errors as ``application/problem+json`` (RFC 9457). They reveal nothing of what is stored."""

from __future__ import annotations

import json
import math
from typing import Final
from urllib.parse import quote

from semel.core.encoding.snapshot import StoredResponse
from semel.errors import (
    BodyTooLarge,
    ConditionFailed,
    InProgress,
    KeyExpired,
    KeyReused,
    SemelError,
    TooManyKeys,
    TransactionConflict,
)

__all__ = ["TITLES", "problem"]

TYPE: Final = "urn:semel:problem:"

TITLES: Final = {
    "idempotency_key_missing": "An idempotency key is needed",
    "idempotency_key_invalid": "The idempotency key is malformed",
    "idempotency_key_reused": "The idempotency key was used for another request",
    "idempotency_key_expired": "The idempotency key was used too long ago",
    "idempotency_key_in_use": "The first request with this key is still being processed",
    "idempotency_store_unavailable": "Requests cannot be recorded at the moment",
    "idempotency_body_too_large": "The request is too long",
    "idempotency_transaction_conflict": "The request met others that change the same",
    "idempotency_outcome_unknown": "What became of this request is not known",
    "idempotency_not_undone": "The request failed, and not all of it could be undone",
    "idempotency_too_many_keys": "Too many keys are in use",
    "idempotency_condition_failed": "The request does not fit what is there",
    "precondition_invalid": "The precondition is malformed",
    "precondition_failed": "The resource has changed",
    "precondition_required": "This request must be conditional",
}

_DETAILS: Final = {
    ConditionFailed.code: "A condition of the change does not hold, so nothing was changed.",
    KeyReused.code: (
        "This key was sent before with a different request, so nothing was done. Send a retry exactly as the first "
        "request was sent, and a new request with a new key."
    ),
    InProgress.code: "The first request with this key is still being processed. Send the same request again later.",
    KeyExpired.code: "This idempotency key was used too long ago, and its answer is forgotten. Use a new key.",
    BodyTooLarge.code: "The body of this request is longer than this route takes. Nothing was done.",
    TransactionConflict.code: "The request met others that change the same, and was not done. Send it again later.",
    TooManyKeys.code: "Too many keys are in use. Send the same request again later; keys that are in use still work.",
}
"""Sent instead of the error's own text, which names the operation and the key."""


def problem(error: SemelError, *, instance: str, status: int | None = None, docs: str | None = None) -> StoredResponse:
    """Return the answer to a request that ended in ``error``."""
    code = error.code
    real = status or error.status
    retry_after = None
    if error.retryable:
        retry_after = max(1, math.ceil(error.retry_after or 1))
    body: dict[str, object] = {
        "type": TYPE + code.removeprefix("idempotency_").replace("_", "-"),
        "title": TITLES.get(code, "The request could not be made to happen once"),
        "status": real,
        "detail": _DETAILS.get(code) or _detail(error),
        "instance": quote(instance, safe="/:@!$&'()*+,;=-._~", errors="replace"),
        "code": code,
        "retryable": error.retryable,
    }
    headers = [(b"content-type", b"application/problem+json"), (b"cache-control", b"no-store")]
    if retry_after is not None:
        body["retry_after"] = retry_after
        headers.append((b"retry-after", str(retry_after).encode()))
    if docs:
        headers.append((b"link", f'<{docs}>; rel="describedby"'.encode("latin-1", "replace")))
    return StoredResponse(real, headers, json.dumps(body).encode())


def _detail(error: SemelError) -> str:
    if error.status >= 500:
        return "See the service's logs."  # a store's own text is not for clients
    return str(error)
