"""Errors of botocore as errors of our own, and how a call is retried.

The errors tell apart what was certainly not stored, what may have been stored, and what is worth a retry. The sync and
the async store share these decisions: they only make the call, and sleep.
"""

from __future__ import annotations

from typing import Any, Final

from semel.errors import (
    ConfigurationError,
    NotMigrated,
    RecordTooLarge,
    SemelError,
    StoreUnavailable,
    StoreUncertain,
)
from semel.sql.connections.errors import Contention, NoConnection, StatementRejected
from semel.stores.dynamodb.programs import ApiCall, ConditionNotMet, Reply
from semel.stores.dynamodb.settings import DynamoDBSettings
from semel.stores.dynamodb.transactions import TRANSACT, TransactionCancelled, TransactionInvalid, answer_of_transaction
from semel.stores.retries import Backoff, public_error

SLOWEST_PAUSE: Final = 0.5
_READS: Final = frozenset({"describe_table", "get_item", "scan"})
_BUSY: Final = frozenset({
    "ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded",
    "TransactionConflictException", "ThrottledException", "TooManyRequestsException",
    "TransactionCanceledException",  # for reasons that pass in a moment: all others are answers
})  # fmt: skip
_DENIED: Final = frozenset({
    "AccessDeniedException", "UnrecognizedClientException", "InvalidSignatureException",
    "MissingAuthenticationTokenException", "ExpiredTokenException", "IncompleteSignatureException",
})  # fmt: skip


class CallRetry:
    """How long the calls of one Op are retried."""

    __slots__ = ("_backoff", "_sent")

    def __init__(self, retry_for: float) -> None:
        self._backoff = Backoff(retry_for, SLOWEST_PAUSE)
        self._sent = False

    def note_write(self) -> None:
        """A write of the Op has succeeded: whatever fails later, nobody can say that nothing was stored."""
        self._sent = True

    def pause_after(self, error: SemelError, once: bool) -> float:
        """Return the seconds to wait before the call is sent again, or raise the error to give up.

        :param once: the call must not be sent again if it may have been carried out.
        """
        uncertain = isinstance(error, StoreUncertain)
        self._sent = self._sent or uncertain
        again = isinstance(error, (Contention, NoConnection)) or (uncertain and not once)
        pause = self._backoff.next_pause() if again else None
        if pause is None:
            raise public_error(error, self._sent)
        return pause


def take_reply(
    reply: dict[str, Any], call: ApiCall, retry: CallRetry, settings: DynamoDBSettings, sent: float
) -> dict[str, Any]:
    """Take in the reply to a call that was sent at ``sent``, and return it."""
    settings.learn_time(reply, sent)
    if call.action not in _READS:
        retry.note_write()
    return reply


def take_error(
    error: Exception, call: ApiCall, retry: CallRetry, settings: DynamoDBSettings, sent: float
) -> Reply | float:
    """Take in the error of a call. Return the answer that it is, or the pause before the next try; raise to give up."""
    settings.learn_time(getattr(error, "response", None) or {}, sent)
    answer = answer_of(error, call)
    if answer is not None:
        return answer
    failure = error_of(error, settings.table)
    failure.__cause__ = error
    return retry.pause_after(failure, call.once)


def answer_of(error: Exception, call: ApiCall) -> ConditionNotMet | TransactionCancelled | TransactionInvalid | None:
    """Return the answer that an error is, such as a condition that did not hold; None if the call has failed."""
    from botocore.exceptions import ParamValidationError

    response: dict[str, Any] = getattr(error, "response", None) or {}
    if call.action == TRANSACT:
        text = _short(error)
        if isinstance(error, ParamValidationError):
            return TransactionInvalid(text)
        return answer_of_transaction(response, text)
    if response.get("Error", {}).get("Code") != "ConditionalCheckFailedException":
        return None
    return ConditionNotMet(response.get("Item") or None)


def error_of(error: Exception, table: str) -> SemelError:
    """Return our error for an error of botocore."""
    from botocore import exceptions as boto

    text = _short(error)
    if isinstance(error, boto.ClientError):
        return _error_of_response(error.response, text, table)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return ConfigurationError(f"AWS credentials are missing: {text}")
    if isinstance(error, (boto.NoRegionError, boto.InvalidEndpointDiscoveryConfigurationError, ValueError)):
        return ConfigurationError(f"DynamoDB cannot be addressed: {text}")
    if isinstance(error, (boto.ParamValidationError, UnicodeError)):
        return StatementRejected(f"the driver cannot send this: {text}")
    if isinstance(error, (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)):
        return NoConnection(f"DynamoDB cannot be reached: {text}")
    return StoreUncertain(f"DynamoDB did not answer: {text}")


def _error_of_response(response: dict[str, Any], text: str, table: str) -> SemelError:
    code = response.get("Error", {}).get("Code", "")
    if code == "ResourceNotFoundException":
        return NotMigrated(f"there is no table {table!r} ({text}): run `semel migrate dynamodb://region/{table}`")
    if code in _BUSY:
        return Contention(f"DynamoDB is throttling or busy: {text}")
    if code == "TransactionInProgressException":
        return StoreUncertain(f"DynamoDB is still working on it: {text}")
    if code in _DENIED:
        return StoreUnavailable(f"DynamoDB refused the credentials or their rights: {text}")
    if response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return StoreUncertain(f"DynamoDB failed: {text}")
    if "size" in text.lower() and code == "ValidationException":
        return RecordTooLarge(f"too large for an item of DynamoDB, which is 400 KB at most; store less: {text}")
    return StatementRejected(f"DynamoDB refused ({code}): {text}")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
