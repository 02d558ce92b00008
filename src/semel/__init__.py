"""Semel makes writes happen once, however often they are asked for.

The public names, nothing else: each is imported when it is first used, so ``import semel`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semel.errors import *  # noqa: F403
from semel.errors import __all__ as _errors

if TYPE_CHECKING:
    from semel.core.keys import KeyFormat as KeyFormat
    from semel.core.ops import Record as Record
    from semel.core.ops import Swept as Swept
    from semel.core.outcomes import CANNOT_TELL as CANNOT_TELL
    from semel.core.outcomes import NOT_DONE as NOT_DONE
    from semel.core.outcomes import Outcome as Outcome
    from semel.core.outcomes import Recovered as Recovered
    from semel.core.policy import Policy as Policy
    from semel.core.policy import wait as wait
    from semel.core.serializers import Serializer as Serializer
    from semel.core.snapshot import Codec as Codec
    from semel.core.states import State as State
    from semel.engine.aio import AsyncSemel as AsyncSemel
    from semel.engine.compression import make_codec as make_codec
    from semel.engine.encryption import KeyRing as KeyRing
    from semel.engine.operation import INJECTED as INJECTED
    from semel.engine.operation import AsyncOperation as AsyncOperation
    from semel.engine.operation import Operation as Operation
    from semel.engine.operation import current_operation as current_operation
    from semel.engine.ports import AsyncStore as AsyncStore
    from semel.engine.ports import Store as Store
    from semel.engine.sync import Semel as Semel
    from semel.observe.logs import log_events as log_events
    from semel.stores.memory import AsyncMemoryStore as AsyncMemoryStore
    from semel.stores.memory import MemoryStore as MemoryStore
    from semel.stores.postgres import AsyncPostgresStore as AsyncPostgresStore
    from semel.stores.postgres import PostgresStore as PostgresStore
    from semel.stores.sqlite import AsyncSQLiteStore as AsyncSQLiteStore
    from semel.stores.sqlite import SQLiteStore as SQLiteStore
    from semel.stores.urls import migrate_store as migrate_store
    from semel.stores.urls import open_async_store as open_async_store
    from semel.stores.urls import open_store as open_store

__version__ = "0.1.0"

_HOMES = {
    "AsyncMemoryStore": "semel.stores.memory",
    "AsyncOperation": "semel.engine.operation",
    "AsyncPostgresStore": "semel.stores.postgres",
    "AsyncSQLiteStore": "semel.stores.sqlite",
    "AsyncSemel": "semel.engine.aio",
    "AsyncStore": "semel.engine.ports",
    "CANNOT_TELL": "semel.core.outcomes",
    "Codec": "semel.core.snapshot",
    "INJECTED": "semel.engine.operation",
    "KeyFormat": "semel.core.keys",
    "KeyRing": "semel.engine.encryption",
    "MemoryStore": "semel.stores.memory",
    "NOT_DONE": "semel.core.outcomes",
    "Operation": "semel.engine.operation",
    "Outcome": "semel.core.outcomes",
    "Policy": "semel.core.policy",
    "PostgresStore": "semel.stores.postgres",
    "Record": "semel.core.ops",
    "Recovered": "semel.core.outcomes",
    "SQLiteStore": "semel.stores.sqlite",
    "Semel": "semel.engine.sync",
    "Serializer": "semel.core.serializers",
    "State": "semel.core.states",
    "Store": "semel.engine.ports",
    "Swept": "semel.core.ops",
    "current_operation": "semel.engine.operation",
    "log_events": "semel.observe.logs",
    "make_codec": "semel.engine.compression",
    "migrate_store": "semel.stores.urls",
    "open_async_store": "semel.stores.urls",
    "open_store": "semel.stores.urls",
    "wait": "semel.core.policy",
}

__all__ = [*_errors, *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'semel' has no attribute {name!r}")
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
