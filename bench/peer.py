"""The peer: aws-lambda-powertools' idempotency utility: on a dict, where only its own work counts, and on Redis."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Final

from bench import job

__all__ = ["NAME", "WHERE_NOT", "powertools", "powertools_on_redis"]

NAME: Final = "aws-lambda-powertools"
WHERE_NOT: Final = (
    "aws-lambda-powertools keeps its records in DynamoDB or Redis only: on SQLite and PostgreSQL there is nothing to"
    " compare, and its idempotent_function does not await"
)


def powertools() -> Callable[[str], Any] | None:
    """The job under a key, guarded by the peer; None where it is not installed."""
    try:
        import aws_lambda_powertools.utilities.idempotency  # noqa: F401
        from aws_lambda_powertools.utilities.idempotency.exceptions import (
            IdempotencyItemAlreadyExistsError,
            IdempotencyItemNotFoundError,
        )
        from aws_lambda_powertools.utilities.idempotency.persistence.base import BasePersistenceLayer
    except ImportError:
        return None

    class Records(BasePersistenceLayer):  # type: ignore[misc, unused-ignore]
        """The least that the contract asks for; it hands the standing record back with the refusal, as DynamoDB can."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
            self._rows: dict[str, Any] = {}
            self._lock = threading.Lock()

        def _get_record(self, idempotency_key: str) -> Any:
            try:
                return self._rows[idempotency_key]
            except KeyError:
                raise IdempotencyItemNotFoundError from None

        def _put_record(self, data_record: Any) -> None:
            with self._lock:
                standing = self._rows.setdefault(data_record.idempotency_key, data_record)
            if standing is not data_record:
                raise IdempotencyItemAlreadyExistsError(old_data_record=standing)

        def _update_record(self, data_record: Any) -> None:
            with self._lock:
                self._rows[data_record.idempotency_key] = data_record

        def _delete_record(self, data_record: Any) -> None:
            with self._lock:
                self._rows.pop(data_record.idempotency_key, None)

    return _guarded(Records())  # type: ignore[no-untyped-call, unused-ignore]


def powertools_on_redis(url: str) -> Callable[[str], Any] | None:
    """The same with its records in Redis, by the layer and the client that it brings for that."""
    try:
        from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
    except ImportError:
        return None
    from redis import Redis

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the layer derives from one that it says is going
        client: Any = Redis.from_url(url, decode_responses=True)
        return _guarded(CachePersistenceLayer(client=client))


def _guarded(records: Any) -> Callable[[str], Any]:
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function

    class Context:
        """It asks a Lambda context how long the call may take, and warns at every call when there is none."""

        @staticmethod
        def get_remaining_time_in_millis() -> int:
            return 30_000

    config = IdempotencyConfig(lambda_context=Context())  # type: ignore[arg-type, unused-ignore]

    @idempotent_function(data_keyword_argument="key", persistence_store=records, config=config)  # type: ignore[untyped-decorator, unused-ignore]
    def pay(*, key: str) -> dict[str, Any]:
        return job.handler()

    return lambda key: pay(key=key)
