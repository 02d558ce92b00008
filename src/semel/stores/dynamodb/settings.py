"""What the sync and the async DynamoDB store have in common: the URL, bounds, errors in our words, how often to try."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration, seconds
from semel.errors import (
    ConfigurationError,
    MissingDependency,
    NotMigrated,
    RecordTooLarge,
    SemelError,
    StoreUnavailable,
    StoreUncertain,
    StoreURLError,
)
from semel.sql.connections.errors import Contention, NoConnection, StatementRejected
from semel.stores.dynamodb.clock import Clock, GivenClock, ServiceClock
from semel.stores.dynamodb.programs import Call, Occupied
from semel.stores.dynamodb.transactions import TRANSACT, Cancelled, Invalid, cancelled

__all__ = ["Settings", "Tries", "answered", "named", "public"]

TIMEOUT: Final = 5.0
CONNECT_TIMEOUT: Final = 2.0
RETRY_FOR: Final = 2.0
FIRST_PAUSE: Final = 0.02
SLOWEST_PAUSE: Final = 0.5
CONNECTIONS: Final = 50
"""Calls at the same time; more wait for a free connection."""

_BUSY: Final = frozenset({
    "ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded",
    "TransactionConflictException", "ThrottledException", "TooManyRequestsException",
    "TransactionCanceledException",  # for reasons that are gone in a moment: the others are answers
})  # fmt: skip
_DENIED: Final = frozenset({
    "AccessDeniedException", "UnrecognizedClientException", "InvalidSignatureException",
    "MissingAuthenticationTokenException", "ExpiredTokenException", "IncompleteSignatureException",
})  # fmt: skip


class Settings:
    """One store's table and bounds."""

    __slots__ = ("clock", "connect_timeout", "endpoint", "region", "retry_for", "table", "timeout")

    def __init__(
        self,
        url: str,
        timeout: Duration,
        connect_timeout: Duration,
        retry_for: Duration,
        clock: Callable[[], float] | None,
    ) -> None:
        self.region, self.table, self.endpoint = _parsed(url)
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")
        self.clock: Clock = ServiceClock() if clock is None else GivenClock(clock)

    def client(self) -> dict[str, Any]:
        """What a client of boto3 or aiobotocore is told."""
        return {"service_name": "dynamodb", "region_name": self.region, "endpoint_url": self.endpoint}

    def config(self) -> dict[str, Any]:
        return {
            "connect_timeout": self.connect_timeout,
            "read_timeout": self.timeout,
            "max_pool_connections": CONNECTIONS,
            # Tries are ours: the driver's own would send twice what may be sent only once.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "user_agent_extra": "semel",
        }


def _parsed(url: str) -> tuple[str, str, str | None]:
    """``dynamodb://eu-central-1/table``, and ``?endpoint=http://localhost:8000`` for another server."""
    parts = urlsplit(url)
    region, table = parts.netloc, unquote(parts.path[1:])
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme != "dynamodb" or not region or not table or "/" in table or set(asked) - {"endpoint"}:
        raise StoreURLError("a DynamoDB URL is dynamodb://region/table, with ?endpoint=http://… for another server")
    if "@" in region:
        raise StoreURLError("a DynamoDB URL has no user or password: the AWS credentials of the process are used")
    return region, table, asked.get("endpoint")


def require(package: str, extra: str) -> Any:
    """The driver's module, or the words that say how to install it."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependency(package.partition(".")[0], extra) from error


def answered(error: Exception, call: Call) -> Occupied | Cancelled | Invalid | None:
    """What a condition that did not hold shows; None where the call failed otherwise."""
    from botocore.exceptions import ParamValidationError

    response: dict[str, Any] = getattr(error, "response", None) or {}
    if call.action == TRANSACT:
        text = " ".join(str(error).split())[:300]
        return Invalid(text) if isinstance(error, ParamValidationError) else cancelled(response, text)
    if response.get("Error", {}).get("Code") != "ConditionalCheckFailedException":
        return None
    return Occupied(response.get("Item") or None)


def named(error: Exception, table: str) -> SemelError:
    """An error of botocore in our words."""
    from botocore import exceptions as boto

    text = " ".join(str(error).split())[:300]
    if isinstance(error, boto.ClientError):
        return _refused(error.response, text, table)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return ConfigurationError(f"AWS credentials are missing: {text}")
    if isinstance(error, (boto.NoRegionError, boto.InvalidEndpointDiscoveryConfigurationError, ValueError)):
        return ConfigurationError(f"DynamoDB cannot be addressed: {text}")
    if isinstance(error, (boto.ParamValidationError, UnicodeError)):
        return StatementRejected(f"the driver cannot send this: {text}")
    if isinstance(error, (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)):
        return NoConnection(f"DynamoDB cannot be reached: {text}")
    return StoreUncertain(f"DynamoDB did not answer: {text}")


def public(error: SemelError) -> SemelError:
    """The same, by a name that a caller knows: how it is tried again is of no interest to it."""
    if isinstance(error, (Contention, StatementRejected, NoConnection)):
        return StoreUnavailable(str(error))
    return error


def _refused(response: dict[str, Any], text: str, table: str) -> SemelError:
    code = response.get("Error", {}).get("Code", "")
    if code == "ResourceNotFoundException":
        return NotMigrated(f"there is no table {table!r} ({text}): run `semel migrate dynamodb://region/{table}`")
    if code in _BUSY:
        return Contention(f"DynamoDB is asked for more than it gives: {text}")
    if code == "TransactionInProgressException":
        return StoreUncertain(f"DynamoDB is still at it: {text}")
    if code in _DENIED:
        return StoreUnavailable(f"DynamoDB refused the credentials or their rights: {text}")
    if response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return StoreUncertain(f"DynamoDB failed: {text}")
    if "size" in text.lower() and code == "ValidationException":
        return RecordTooLarge(f"too large for an item of DynamoDB, which is 400 KB at most; store less: {text}")
    return StatementRejected(f"DynamoDB refused ({code}): {text}")


READS: Final = frozenset({"describe_table", "get_item", "scan"})


class Tries:
    """How long a call is tried again; made once for each Op."""

    __slots__ = ("_pause", "_sent", "_until")

    def __init__(self, retry_for: float) -> None:
        self._until = time.monotonic() + retry_for
        self._pause = FIRST_PAUSE
        self._sent = False

    def wrote(self) -> None:
        """A write of the Op was answered: whatever fails after it, nobody can say that nothing was stored."""
        self._sent = True

    def pause_after(self, error: SemelError, once: bool) -> float:
        """Seconds to wait before the call is sent again; raises the error where it is given up."""
        uncertain = isinstance(error, StoreUncertain)
        self._sent = self._sent or uncertain
        again = isinstance(error, (Contention, NoConnection)) or (uncertain and not once)
        pause = self._pause
        if not again or time.monotonic() + pause > self._until:
            if isinstance(error, RecordTooLarge):
                raise error  # so it was whenever it was sent before
            if isinstance(error, StoreUnavailable):
                # Once anything was sent, nobody can say that nothing was stored.
                raise (StoreUncertain if self._sent else StoreUnavailable)(str(error)) from error.__cause__
            raise error
        self._pause = min(pause * 2, SLOWEST_PAUSE)
        return pause
