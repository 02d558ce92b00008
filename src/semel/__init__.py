"""Semel makes writes happen once, however often they are asked for.

The public names, nothing else: each is imported when it is first used, so ``import semel`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semel.errors import ConditionFailed as ConditionFailed
from semel.errors import ConfigurationError as ConfigurationError
from semel.errors import InProgress as InProgress
from semel.errors import JournalFull as JournalFull
from semel.errors import KeyExpired as KeyExpired
from semel.errors import KeyInvalid as KeyInvalid
from semel.errors import KeyMissing as KeyMissing
from semel.errors import KeyReused as KeyReused
from semel.errors import LeaseLost as LeaseLost
from semel.errors import NoAnswer as NoAnswer
from semel.errors import NotMigrated as NotMigrated
from semel.errors import NotResolvable as NotResolvable
from semel.errors import NotUndone as NotUndone
from semel.errors import OutcomeError as OutcomeError
from semel.errors import OutcomeUnknown as OutcomeUnknown
from semel.errors import PolicyError as PolicyError
from semel.errors import PreconditionFailed as PreconditionFailed
from semel.errors import RememberedFailure as RememberedFailure
from semel.errors import RequestError as RequestError
from semel.errors import ResultNotStored as ResultNotStored
from semel.errors import SchemaDrift as SchemaDrift
from semel.errors import SemelError as SemelError
from semel.errors import SnapshotUnreadable as SnapshotUnreadable
from semel.errors import StepMismatch as StepMismatch
from semel.errors import StoreError as StoreError
from semel.errors import StoreUnavailable as StoreUnavailable
from semel.errors import StoreUncertain as StoreUncertain
from semel.errors import TooManyKeys as TooManyKeys
from semel.errors import TransactionConflict as TransactionConflict
from semel.errors import __all__ as _errors

if TYPE_CHECKING:
    from semel.codec import Codec as Codec
    from semel.codec import KeyRing as KeyRing
    from semel.core.call import CANNOT_TELL as CANNOT_TELL
    from semel.core.call import NOT_DONE as NOT_DONE
    from semel.core.call import Outcome as Outcome
    from semel.core.call import Recovered as Recovered
    from semel.core.encoding.serializers import Serializer as Serializer
    from semel.core.keys import KeyFormat as KeyFormat
    from semel.core.ops import Listing as Listing
    from semel.core.ops import Record as Record
    from semel.core.ops import Size as Size
    from semel.core.ops import Swept as Swept
    from semel.core.policy import Policy as Policy
    from semel.core.policy import Wait as Wait
    from semel.core.quota import Quota as Quota
    from semel.core.resume import ResumeReport as ResumeReport
    from semel.core.states import State as State
    from semel.core.transactional import StatementResult as StatementResult
    from semel.engine.aio_resumer import AsyncResumer as AsyncResumer
    from semel.engine.operation import INJECTED as INJECTED
    from semel.engine.operation import AsyncOperation as AsyncOperation
    from semel.engine.operation import Operation as Operation
    from semel.engine.operation import current_operation as current_operation
    from semel.engine.operation.propagation import OutgoingCall as OutgoingCall
    from semel.engine.operation.propagation import derive_key as derive_key
    from semel.engine.operation.propagation import in_context as in_context
    from semel.engine.operation.propagation import outgoing_call as outgoing_call
    from semel.engine.operation.propagation import outgoing_headers as outgoing_headers
    from semel.engine.operation.propagation import outgoing_key as outgoing_key
    from semel.engine.operation.propagation import outgoing_metadata as outgoing_metadata
    from semel.engine.ports import AsyncStore as AsyncStore
    from semel.engine.ports import Store as Store
    from semel.engine.resumer import Resumer as Resumer
    from semel.observe.logs import log_events as log_events
    from semel.stores.aio_guard import AsyncSemel as AsyncSemel
    from semel.stores.dynamodb import AsyncDynamoDBStore as AsyncDynamoDBStore
    from semel.stores.dynamodb import DynamoDBStore as DynamoDBStore
    from semel.stores.guard import Semel as Semel
    from semel.stores.memory import AsyncMemoryStore as AsyncMemoryStore
    from semel.stores.memory import MemoryStore as MemoryStore
    from semel.stores.mysql import AsyncMySQLStore as AsyncMySQLStore
    from semel.stores.mysql import MySQLStore as MySQLStore
    from semel.stores.postgres import AsyncPostgresStore as AsyncPostgresStore
    from semel.stores.postgres import PostgresStore as PostgresStore
    from semel.stores.redis import AsyncRedisStore as AsyncRedisStore
    from semel.stores.redis import RedisStore as RedisStore
    from semel.stores.sqlite import AsyncSQLiteStore as AsyncSQLiteStore
    from semel.stores.sqlite import SQLiteStore as SQLiteStore
    from semel.stores.tiered import AsyncRedisCache as AsyncRedisCache
    from semel.stores.tiered import AsyncTieredStore as AsyncTieredStore
    from semel.stores.tiered import RedisCache as RedisCache
    from semel.stores.tiered import TieredStore as TieredStore
    from semel.stores.urls import migrate_store as migrate_store
    from semel.stores.urls import open_async_store as open_async_store
    from semel.stores.urls import open_store as open_store

__version__ = "0.1.0"

_HOMES = {
    "AsyncDynamoDBStore": "semel.stores.dynamodb",
    "AsyncMemoryStore": "semel.stores.memory",
    "AsyncMySQLStore": "semel.stores.mysql",
    "AsyncOperation": "semel.engine.operation",
    "AsyncPostgresStore": "semel.stores.postgres",
    "AsyncRedisCache": "semel.stores.tiered",
    "AsyncRedisStore": "semel.stores.redis",
    "AsyncResumer": "semel.engine.aio_resumer",
    "AsyncSQLiteStore": "semel.stores.sqlite",
    "AsyncSemel": "semel.stores.aio_guard",
    "AsyncStore": "semel.engine.ports",
    "AsyncTieredStore": "semel.stores.tiered",
    "CANNOT_TELL": "semel.core.call",
    "Codec": "semel.codec",
    "DynamoDBStore": "semel.stores.dynamodb",
    "INJECTED": "semel.engine.operation",
    "KeyFormat": "semel.core.keys",
    "KeyRing": "semel.codec",
    "Listing": "semel.core.ops",
    "MemoryStore": "semel.stores.memory",
    "MySQLStore": "semel.stores.mysql",
    "NOT_DONE": "semel.core.call",
    "Operation": "semel.engine.operation",
    "Outcome": "semel.core.call",
    "OutgoingCall": "semel.engine.operation.propagation",
    "Policy": "semel.core.policy",
    "PostgresStore": "semel.stores.postgres",
    "Quota": "semel.core.quota",
    "Record": "semel.core.ops",
    "Recovered": "semel.core.call",
    "RedisCache": "semel.stores.tiered",
    "RedisStore": "semel.stores.redis",
    "ResumeReport": "semel.core.resume",
    "Resumer": "semel.engine.resumer",
    "SQLiteStore": "semel.stores.sqlite",
    "Semel": "semel.stores.guard",
    "Serializer": "semel.core.encoding.serializers",
    "Size": "semel.core.ops",
    "State": "semel.core.states",
    "StatementResult": "semel.core.transactional",
    "Store": "semel.engine.ports",
    "Swept": "semel.core.ops",
    "TieredStore": "semel.stores.tiered",
    "Wait": "semel.core.policy",
    "current_operation": "semel.engine.operation",
    "derive_key": "semel.engine.operation.propagation",
    "in_context": "semel.engine.operation.propagation",
    "log_events": "semel.observe.logs",
    "migrate_store": "semel.stores.urls",
    "open_async_store": "semel.stores.urls",
    "open_store": "semel.stores.urls",
    "outgoing_call": "semel.engine.operation.propagation",
    "outgoing_headers": "semel.engine.operation.propagation",
    "outgoing_key": "semel.engine.operation.propagation",
    "outgoing_metadata": "semel.engine.operation.propagation",
}

__all__ = [*(name for name in _errors if name in globals()), *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'semel' has no attribute {name!r}")
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
