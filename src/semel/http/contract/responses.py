"""HTTP responses: how they are stored, and those that Semel makes itself, with problem documents for errors.

It knows nothing of the request: what a response to one request has in addition, such as its key, is in ``exchange.py``.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final
from urllib.parse import quote

from semel.core.encoding.snapshot import Kind, NotSerializable, StoredResponse, decode_response, encode_response
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

UNSTORED: Final = (b"idempotent-stored", b"false")
"""Marks an answer that could not be stored before it was sent. A client that has it must not retry."""
SETTLED: Final = StoredResponse(204, [], b"")
"""The answer to a DELETE of a resource that does not exist."""
FAILED: Final = StoredResponse(500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
"""The stored answer of a handler that raised, if the rule stores such errors."""


def as_response(value: Any) -> StoredResponse:
    """Convert a result of ``resolve`` or of a recover hook: a StoredResponse stays as it is, data becomes JSON."""
    if isinstance(value, StoredResponse):
        return value
    if value is None:
        return StoredResponse(204, [], b"")
    try:
        body = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise NotSerializable(
            f"an HTTP answer is a StoredResponse or plain data, not {type(value).__name__}"
        ) from error
    return StoredResponse(200, [(b"content-type", b"application/json")], body)


class ResponseSerializer:
    """Stores results that are HTTP responses. See ``semel.core.encoding.serializers.ResultSerializer``."""

    name: Final = ""
    kind: Final = Kind.RESPONSE

    def encode(self, value: Any) -> bytes:
        status, headers, body, omitted = value if type(value) is StoredResponse else as_response(value)
        try:
            return encode_response(status, headers, body, body_omitted=omitted)
        except ValueError as error:
            raise NotSerializable(str(error)) from error

    def shorten(self, value: Any) -> StoredResponse | None:
        """Return the response without its body. The client gets all of it; a replay says that the body is missing."""
        try:
            response = as_response(value)
        except NotSerializable:  # an exception that is remembered
            return None
        return response._replace(body=b"", body_omitted=True) if response.body else None

    def has_effect(self, value: Any) -> bool:
        """An error response is stored without the handler's writes, as it is without its rows in a transaction."""
        return as_response(value).status < 400

    decode = staticmethod(decode_response)
    convert = staticmethod(as_response)


RESPONSES: Final = ResponseSerializer()


# -- errors as application/problem+json (RFC 9457), which reveal nothing of what is stored

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
    body: dict[str, object] = {
        "type": TYPE + code.removeprefix("idempotency_").replace("_", "-"),
        "title": TITLES.get(code, "The request could not be made to happen once"),
        "status": real,
        # A store's own text is not for clients.
        "detail": _DETAILS.get(code) or (str(error) if error.status < 500 else "See the service's logs."),
        "instance": quote(instance, safe="/:@!$&'()*+,;=-._~", errors="replace"),
        "code": code,
        "retryable": error.retryable,
    }
    headers = [(b"content-type", b"application/problem+json"), (b"cache-control", b"no-store")]
    if error.retryable:
        body["retry_after"] = retry_after = max(1, math.ceil(error.retry_after or 1))
        headers.append((b"retry-after", str(retry_after).encode()))
    if docs:
        headers.append((b"link", f'<{docs}>; rel="describedby"'.encode("latin-1", "replace")))
    return StoredResponse(real, headers, json.dumps(body).encode())
