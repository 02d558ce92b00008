"""The errors of Semel: one tree, and nothing of a driver's own ever leaves the library bare.

::

    SemelError
    ├── ConfigurationError          a mistake in the program: fix the code or the set-up
    │   ├── PolicyError             a wrong duration, an unknown word, a contradiction (also a ValueError)
    │   ├── StoreURLError           a store URL that cannot be read (also a ValueError)
    │   ├── MissingDependency       an extra is not installed (also an ImportError)
    │   ├── NotMigrated             the database lacks Semel's tables, or has older ones
    │   └── SchemaDrift             the database's tables are not the ones the migrations make
    ├── RequestError                the caller's request is refused; the record is untouched
    │   ├── KeyMissing        400
    │   ├── KeyInvalid        400
    │   ├── KeyReused         422   the same key came with another request
    │   ├── KeyExpired        422   the answer under this key has expired: use a new key
    │   ├── BodyTooLarge      413   an HTTP request is longer than its route takes
    │   ├── DocumentError     400   a JSON document is malformed, or has no canonical form (also a ValueError)
    │   ├── InProgress        409   the first still runs: retry later
    │   ├── TooManyKeys       429   the tenant holds as many live keys as its quota allows
    │   ├── PreconditionError
    │   │   ├── PreconditionInvalid   400   If-Match or If-None-Match is malformed
    │   │   ├── PreconditionFailed    412   the resource is not what the caller thinks it is
    │   │   └── PreconditionRequired  428   the route changes nothing unconditionally
    │   ├── ConditionFailed   409   a condition of the operation's own writes does not hold: none was made
    │   └── NotResolvable     409   resolve() or release() of an operation that is not in doubt
    ├── OutcomeError                the operation ran, or may have run
    │   ├── OutcomeUnknown    500   an attempt ended without a word; someone must resolve it
    │   ├── LeaseLost         409   this attempt was fenced off: another owner has the operation
    │   ├── StepMismatch      500   a re-run does not follow the steps of the first run
    │   ├── NotUndone         500   the operation failed, and some of its steps could not be undone
    │   ├── ResultNotStored   500   done and remembered, but the result could not be kept
    │   ├── SnapshotUnreadable 500  done and stored, but the stored result cannot be turned back into what it was
    │   └── RememberedFailure 500   the failure of the first run, replayed, of a type that is not rebuilt
    └── StoreError            503   the store did not do its part
        ├── StoreUnavailable        definitely not stored: it never reached the store, or was refused
        │   ├── RecordTooLarge 500  more than the store can hold: sent again, it would be refused again
        │   └── TransactionConflict the transaction met another: roll it back and run it again
        └── StoreUncertain          it was sent and no answer came: it may be stored, or not

Every error knows its HTTP status (``status``), a stable ``code``, and whether the same request may be sent again
(``retryable``, ``retry_after`` seconds). This module knows nothing of HTTP beyond those hints.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "BodyTooLarge",
    "ConditionFailed",
    "ConfigurationError",
    "DocumentError",
    "InProgress",
    "KeyExpired",
    "KeyInvalid",
    "KeyMissing",
    "KeyReused",
    "LeaseLost",
    "MissingDependency",
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
    """Base of everything this library raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "idempotency_error"
    retryable: ClassVar[bool] = False
    retry_after: float | None = None
    """Seconds after which the same request may be sent again, where that is known."""


class ConfigurationError(SemelError):
    """The program or its set-up is wrong; nothing was run and nothing was stored."""

    code = "idempotency_configuration"


class PolicyError(ConfigurationError, ValueError):
    """A policy that cannot be meant: a wrong duration, an unknown word, a contradiction."""


class StoreURLError(ConfigurationError, ValueError):
    """A store URL that names no store, or cannot be read."""


class MissingDependency(ConfigurationError, ImportError):
    """A driver or library is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'semel[{extra}]'")
        self.package = package
        self.extra = extra


class NotMigrated(ConfigurationError):
    """The database lacks Semel's tables, or has older ones: run ``semel migrate URL``."""


class SchemaDrift(ConfigurationError):
    """The database's tables are not the ones the migrations make."""


class RequestError(SemelError):
    """The request is refused. The record, if there is one, is untouched."""

    status = 400


class KeyMissing(RequestError):
    """The operation needs a key and none was given."""

    code = "idempotency_key_missing"


class KeyInvalid(RequestError):
    """The key is malformed, too long, or not of the format the operation asks for."""

    code = "idempotency_key_invalid"


class KeyReused(RequestError):
    """The same key came with another request; the first one's record is untouched."""

    status = 422
    code = "idempotency_key_reused"


class KeyExpired(RequestError):
    """The key was used so long ago that its answer is forgotten; it is not run again: use a new key."""

    status = 422
    code = "idempotency_key_expired"


class BodyTooLarge(RequestError):
    """The body of an HTTP request is longer than its route takes: nothing was run and nothing was stored."""

    status = 413
    code = "idempotency_body_too_large"


class DocumentError(RequestError, ValueError):
    """The JSON document is malformed, or has no canonical form."""

    code = "idempotency_document_invalid"


class InProgress(RequestError):
    """The first call with this key still runs."""

    status = 409
    code = "idempotency_key_in_use"
    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyKeys(RequestError):
    """The tenant holds as many live keys as its quota allows; keys that exist still work."""

    status = 429
    code = "idempotency_too_many_keys"
    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PreconditionError(RequestError):
    """The request's If-Match or If-None-Match is missing, malformed, or does not hold; nothing was changed."""

    code = "precondition_invalid"


class PreconditionInvalid(PreconditionError):
    """If-Match or If-None-Match is no ``*`` and no list of entity tags."""


class PreconditionFailed(PreconditionError):
    """The resource is not in the state that the request names: read it again, and decide anew."""

    status = 412
    code = "precondition_failed"


class PreconditionRequired(PreconditionError):
    """The route makes conditional changes only, and the request names no state."""

    status = 428
    code = "precondition_required"


class ConditionFailed(RequestError):
    """A condition of the operation's own writes does not hold: none of them was made, and the key is free again.

    ``writes`` are the places of those writes in what the operation asked for, from 0; ``items`` what stood there, for
    writes that asked to be shown it, and None for the others.
    """

    status = 409
    code = "idempotency_condition_failed"

    def __init__(self, message: str, writes: tuple[int, ...] = (), items: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.writes = writes
        self.items = items


class NotResolvable(RequestError):
    """resolve() or release() was asked of an operation that is not in doubt; it is left as it is."""

    status = 409
    code = "idempotency_not_resolvable"


class OutcomeError(SemelError):
    """The operation ran, or may have run."""


class OutcomeUnknown(OutcomeError):
    """An attempt ended without a word and the policy forbids another: resolve it by hand or by ``resolve``."""

    code = "idempotency_outcome_unknown"


class LeaseLost(OutcomeError):
    """This attempt's lease ended and another owner took the operation; its completion is refused."""

    status = 409
    code = "idempotency_lease_lost"
    retryable = True


class StepMismatch(OutcomeError):
    """A re-run does not follow the steps that the first run recorded."""

    code = "idempotency_step_mismatch"


class NotUndone(OutcomeError):
    """The operation failed, and the steps it had done could not all be undone: ``steps`` names those that stand."""

    code = "idempotency_not_undone"

    def __init__(self, message: str, steps: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.steps = steps


class ResultNotStored(OutcomeError):
    """The operation is done and will not run again, but its result could not be kept.

    ``result`` holds the value for the caller that ran it; a replay has none.
    """

    code = "idempotency_result_not_stored"

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class SnapshotUnreadable(OutcomeError):
    """A stored snapshot cannot be turned back into what it was; the message says why and what to do.

    The operation is done and is not run again; only its result cannot be shown.
    """

    code = "idempotency_snapshot_unreadable"


class RememberedFailure(OutcomeError):
    """The first run failed and that failure is replayed; its type is not one the policy names, so it is not rebuilt."""

    code = "idempotency_remembered_failure"

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message


class StoreError(SemelError):
    """The store did not do its part."""

    status = 503
    code = "idempotency_store_unavailable"
    retryable = True
    retry_after: float | None = 1.0
    result: Any = None
    """What the handler returned, where it had run and only its outcome could not be stored."""
    answered: bool = False
    """Whether the store has the answer, and could only not make sure of it: then nothing is run in its place, whatever
    the policy says of stores that fail."""


class StoreUnavailable(StoreError):
    """Definitely not stored: the request never reached the store, or the store refused it."""


class RecordTooLarge(StoreUnavailable):
    """The store cannot hold a record of this size. Nothing is stored, and sent again it would not be.

    An outcome that is refused so is remembered as done, without its result: nothing is run again for it.
    """

    status = 500
    code = "idempotency_record_too_large"
    retryable = False
    retry_after = None


class TransactionConflict(StoreUnavailable):
    """The transaction met another one, and only one of them can commit. Nothing is stored.

    Roll the transaction back and run the unit of work again, with the same key. ``own_transaction=True`` does so
    by itself.
    """

    code = "idempotency_transaction_conflict"
    retry_after = 0.05


class StoreUncertain(StoreError):
    """The request was sent and no answer came: it may be stored, or not."""
