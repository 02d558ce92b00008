"""The errors of Semel. An error of a database driver is never raised as it is: it is the cause of one of these.

::

    SemelError
    ├── ConfigurationError          a mistake in the program or its set-up: fix it
    │   ├── PolicyError             a wrong, unknown or contradictory setting (also a ValueError)
    │   ├── StoreURLError           a store URL that cannot be parsed (also a ValueError)
    │   ├── MissingDependency       an extra is not installed (also an ImportError)
    │   ├── NotMigrated             Semel's tables are missing or outdated: run semel migrate
    │   └── SchemaDrift             the tables differ from those that the migrations make
    ├── RequestError                the request is refused; the record is unchanged
    │   ├── KeyMissing        400   the operation needs a key: send one
    │   ├── KeyInvalid        400   the key is malformed: send another
    │   ├── KeyReused         422   the key was used before with other arguments, or another request
    │   ├── KeyExpired        422   the answer of this key has expired: use a new key
    │   ├── BodyTooLarge      413   the body of an HTTP request is too long for its route
    │   ├── DocumentError     400   a JSON document is malformed or has no canonical form (also a ValueError)
    │   ├── InProgress        409   the first call still runs: retry later
    │   ├── TooManyKeys       429   the tenant's quota of live keys is used up: retry later
    │   ├── PreconditionError
    │   │   ├── PreconditionInvalid   400   If-Match or If-None-Match is malformed
    │   │   ├── PreconditionFailed    412   the resource has changed: read it again
    │   │   └── PreconditionRequired  428   the route needs If-Match or If-None-Match
    │   ├── ConditionFailed   409   a condition of the operation's writes does not hold; nothing was written
    │   └── NotResolvable     409   resolve() or release() of an operation that must stay as it is
    ├── OutcomeError                the operation ran, or may have run
    │   ├── OutcomeUnknown    500   an attempt ended without an outcome: resolve it
    │   │   └── NoAnswer            a client got no answer: send it again with the same key
    │   ├── LeaseLost         409   another owner took over this attempt
    │   ├── StepMismatch      500   a re-run takes other steps than the first run
    │   ├── NotUndone         500   the operation failed, and some of its steps could not be undone
    │   ├── ResultNotStored   500   done, but the result could not be stored
    │   ├── SnapshotUnreadable 500  done and stored, but the stored result cannot be read
    │   └── RememberedFailure 500   the failure of the first run, as text: its class is not rebuilt
    ├── BrokerUnavailable     503   the message broker was not reached: nothing is lost, try again later
    └── StoreError            503   the store failed
        ├── StoreUnavailable        not stored: the store was not reached, or refused
        │   ├── RecordTooLarge 500  the record is too large for the store: a retry does not help
        │   ├── JournalFull    500  a client's journal is full; nothing was sent
        │   └── TransactionConflict two transactions conflict: roll back and run it again
        └── StoreUncertain          no answer came: it may be stored or not

Every error has an HTTP status (``status``) and a stable ``code``, and says whether the same request may be sent again
(``retryable``, after ``retry_after`` seconds). This module knows nothing else of HTTP.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "BodyTooLarge",
    "BrokerUnavailable",
    "ConditionFailed",
    "ConfigurationError",
    "DocumentError",
    "InProgress",
    "JournalFull",
    "KeyExpired",
    "KeyInvalid",
    "KeyMissing",
    "KeyReused",
    "LeaseLost",
    "MissingDependency",
    "NoAnswer",
    "NotMigrated",
    "NotResolvable",
    "NotUndone",
    "OutcomeError",
    "OutcomeUnknown",
    "PolicyError",
    "PreconditionError",
    "PreconditionFailed",
    "PreconditionInvalid",
    "PreconditionRequired",
    "RecordTooLarge",
    "RememberedFailure",
    "RequestError",
    "ResultNotStored",
    "SchemaDrift",
    "SemelError",
    "SnapshotUnreadable",
    "StepMismatch",
    "StoreError",
    "StoreURLError",
    "StoreUnavailable",
    "StoreUncertain",
    "TooManyKeys",
    "TransactionConflict",
]


class SemelError(Exception):
    """The base of all errors that Semel raises."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "idempotency_error"
    retryable: ClassVar[bool] = False
    retry_after: float | None = None
    """Seconds after which the same request may be sent again; None if that is unknown."""


class ConfigurationError(SemelError):
    """The program or its set-up is wrong. Nothing was run and nothing was stored."""

    code = "idempotency_configuration"


class PolicyError(ConfigurationError, ValueError):
    """A setting is wrong, unknown, or contradicts another."""


class StoreURLError(ConfigurationError, ValueError):
    """A store URL cannot be parsed or names no store."""


class MissingDependency(ConfigurationError, ImportError):
    """A driver or library is not installed. The message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'semel[{extra}]'")
        self.package = package
        self.extra = extra


class NotMigrated(ConfigurationError):
    """Semel's tables are missing or outdated: run ``semel migrate URL``."""


class SchemaDrift(ConfigurationError):
    """The tables differ from those that the migrations make. The message lists the differences."""


class RequestError(SemelError):
    """The request is refused. Its record, if there is one, is unchanged."""

    status = 400


class KeyMissing(RequestError):
    """The operation needs a key and the request has none."""

    code = "idempotency_key_missing"


class KeyInvalid(RequestError):
    """The key is malformed, too long, or not of the format that the operation requires."""

    code = "idempotency_key_invalid"


class KeyReused(RequestError):
    """The key was used before with other arguments, or for another request, whose record is unchanged.

    The message names the arguments that are compared. A new request needs a new key. Leave out an argument that may
    differ between retries, such as a clock or a trace id, with ``exclude=``.
    """

    status = 422
    code = "idempotency_key_reused"


class KeyExpired(RequestError):
    """The answer of this key has expired, and the policy does not run it again: use a new key."""

    status = 422
    code = "idempotency_key_expired"


class BodyTooLarge(RequestError):
    """The body of an HTTP request is too long for its route. Nothing was run and nothing was stored."""

    status = 413
    code = "idempotency_body_too_large"


class DocumentError(RequestError, ValueError):
    """The JSON document is malformed or has no canonical form."""

    code = "idempotency_document_invalid"


class InProgress(RequestError):
    """The first call with this key still runs: retry after ``retry_after`` seconds."""

    status = 409
    code = "idempotency_key_in_use"
    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyKeys(RequestError):
    """The tenant holds as many live keys as its quota allows. Keys that exist still work; new ones are refused."""

    status = 429
    code = "idempotency_too_many_keys"
    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PreconditionError(RequestError):
    """If-Match or If-None-Match is missing, malformed, or does not hold. Nothing was changed."""

    code = "precondition_invalid"


class PreconditionInvalid(PreconditionError):
    """If-Match or If-None-Match is neither ``*`` nor a list of entity tags."""


class PreconditionFailed(PreconditionError):
    """The resource has changed since the caller read it: read it again, then decide."""

    status = 412
    code = "precondition_failed"


class PreconditionRequired(PreconditionError):
    """The route changes a resource only if the request has If-Match or If-None-Match: send one of them."""

    status = 428
    code = "precondition_required"


class ConditionFailed(RequestError):
    """A condition of the operation's own writes does not hold. Nothing was written, and the key is free again.

    ``writes`` are the positions of the failed writes, from 0. ``items`` are the items found there, for writes that
    asked for them, and None for the others.
    """

    status = 409
    code = "idempotency_condition_failed"

    def __init__(self, message: str, writes: tuple[int, ...] = (), items: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.writes = writes
        self.items = items


class NotResolvable(RequestError):
    """resolve() or release() was called for an operation that must stay as it is, such as one that is done. Nothing was
    changed.
    """

    status = 409
    code = "idempotency_not_resolvable"


class OutcomeError(SemelError):
    """The operation ran, or may have run."""


class OutcomeUnknown(OutcomeError):
    """An attempt ended without an outcome, and the policy forbids another: find out what happened and ``resolve()``.

    With ``on_unstored="withhold"`` also: the handler ran, and its outcome could not be stored. ``result`` is what it
    returned, for the caller that ran it.
    """

    code = "idempotency_outcome_unknown"

    def __init__(self, message: str = "", *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NoAnswer(OutcomeUnknown):
    """A client of ``semel.client`` got no answer. The request may have been executed.

    Send it again with the same ``key``, or ask the server what happened. The error of the HTTP library is the cause,
    and its general class is a base of this error: ``except httpx.TransportError`` catches it too.
    """

    outcome = "unknown"

    def __init__(self, message: str = "", *, key: str = "", attempts: int = 0) -> None:
        super().__init__(message)
        self.key = key
        self.attempts = attempts


class LeaseLost(OutcomeError):
    """The lease of this attempt ended and another owner took the operation over. Its outcome is refused."""

    status = 409
    code = "idempotency_lease_lost"
    retryable = True


class StepMismatch(OutcomeError):
    """A re-run takes other steps than the first run recorded."""

    code = "idempotency_step_mismatch"


class NotUndone(OutcomeError):
    """The operation failed, and not all of its steps could be undone. ``steps`` names those that remain."""

    code = "idempotency_not_undone"

    def __init__(self, message: str, steps: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.steps = steps


class ResultNotStored(OutcomeError):
    """The operation is done and is not run again, but its result could not be stored.

    ``result`` is the value, for the caller that ran the operation; it is None for a replay.
    """

    code = "idempotency_result_not_stored"

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class SnapshotUnreadable(OutcomeError):
    """A stored result cannot be read. The message says why, and what to do.

    The operation is done and is not run again.
    """

    code = "idempotency_snapshot_unreadable"


class RememberedFailure(OutcomeError):
    """The first run failed with an exception whose class the policy does not name, so the exception is not rebuilt."""

    code = "idempotency_remembered_failure"

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message


class BrokerUnavailable(SemelError):
    """The message broker was not reached, or did not answer. Nothing is lost: what is not acknowledged comes again."""

    status = 503
    code = "idempotency_broker_unavailable"
    retryable = True
    retry_after = 1.0


class StoreError(SemelError):
    """The store failed."""

    status = 503
    code = "idempotency_store_unavailable"
    retryable = True
    retry_after: float | None = 1.0
    result: Any = None
    """What the handler returned, if it ran and its transaction or its writes could not be stored with its outcome."""
    answered: bool = False
    """Whether the store knows the answer but could not confirm it. If so, the handler is not run, even under
    ``on_store_error="open"``."""


class StoreUnavailable(StoreError):
    """Nothing was stored: the request did not reach the store, or the store refused it."""


class RecordTooLarge(StoreUnavailable):
    """The store cannot hold a record of this size. Nothing was stored, and a retry does not help.

    An outcome of this size is remembered as done, without its result: the operation is not run again.
    """

    status = 500
    code = "idempotency_record_too_large"
    retryable = False
    retry_after = None


class JournalFull(StoreUnavailable):
    """The journal of a client has reached its ``max_bytes``. Nothing was sent: resume what is in it first."""

    status = 500
    code = "idempotency_journal_full"
    retryable = False
    retry_after = None


class TransactionConflict(StoreUnavailable):
    """The transaction conflicts with another one. Nothing was stored.

    Roll it back and run it again with the same key. With ``own_transaction=True`` Semel does so itself.
    """

    code = "idempotency_transaction_conflict"
    retry_after = 0.05


class StoreUncertain(StoreError):
    """The request was sent and no answer came: it may be stored or not."""
