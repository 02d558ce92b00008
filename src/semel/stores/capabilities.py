"""What each kind of store promises, side by side: for ``semel stores``, and for people who choose.

What a class declares (``counts``, ``resumes``, ``adopt``, ``accept``) is read from it; what it cannot declare stands in
the table here, and a test holds ``wakes`` to the stores. Nothing decides by this table: a guard asks the store that it
has.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

__all__ = ["STORES", "TRAITS", "StoreKind"]


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """One kind of store."""

    name: str
    example: str
    schemes: tuple[str, ...]
    """The URL schemes that open it."""
    sync: str
    """``module:class`` of the sync store ..."""
    aio: str
    """... and of the async one."""
    extra: str
    """What to install: ``semel[…]``; empty: nothing."""
    shared_by: str
    survives: str
    clock: str
    wakes: bool | None
    """None: whatever the store behind it does; so with all that is declared."""
    expiry: str
    atomic_by: str
    """What makes an Op one step."""

    def store(self, *, awaited: bool = False) -> Any:
        """The class; importing it needs no driver."""
        module, _, name = (self.aio if awaited else self.sync).partition(":")
        return getattr(import_module(module), name)

    def traits(self) -> dict[str, bool | str]:
        """What is compared, by the names of ``TRAITS``."""
        names = ("wakes", "transactions", "writes", "counts", "resumes")
        declared: dict[str, bool | str] = dict.fromkeys(names, BEHIND)
        if self.wakes is not None:
            store = self.store()
            declared = {
                "wakes": self.wakes,
                "transactions": store.adopt is not None,
                "writes": store.accept is not None,
                "counts": store.counts,
                "resumes": store.resumes,
            }
        told = {**vars(self), **declared}
        return {name: told[name] for name in TRAITS}


BEHIND: Final = "as the primary"
"""Said of a tiered store: the store behind its cache decides."""
TRAITS: Final = {
    "extra": "extra to install",
    "shared_by": "shared by",
    "survives": "survives",
    "clock": "whose clock",
    "wakes": "wakes waiters",
    "transactions": "in your transaction",
    "writes": "with your writes (op.write)",
    "counts": "counts keys (quota)",
    "resumes": "lists what to resume",
    "expiry": "expired records go",
    "atomic_by": "an Op is one",
}
"""What is compared, in words."""

STORES: Final = (
    StoreKind(
        name="memory", example="memory:", schemes=("memory",), extra="none",
        sync="semel.stores.memory:MemoryStore", aio="semel.stores.memory:AsyncMemoryStore",
        shared_by="one process", survives="nothing", clock="the process's",
        wakes=True, expiry="by sweeps", atomic_by="lock",
    ),
    StoreKind(
        name="SQLite", example="sqlite:///…", schemes=("sqlite",), extra="none",
        sync="semel.stores.sqlite:SQLiteStore", aio="semel.stores.sqlite:AsyncSQLiteStore",
        shared_by="one machine", survives="power cuts", clock="the machine's",
        wakes=False, expiry="by sweeps", atomic_by="transaction",
    ),
    StoreKind(
        name="PostgreSQL", example="postgresql://…", schemes=("postgresql", "postgres"), extra="postgres, asyncpg",
        sync="semel.stores.postgres:PostgresStore", aio="semel.stores.postgres:AsyncPostgresStore",
        shared_by="all machines", survives="as the server", clock="the server's",
        wakes=True, expiry="by sweeps", atomic_by="statement",
    ),
    StoreKind(
        name="MySQL", example="mysql://…", schemes=("mysql", "mariadb"), extra="mysql, asyncmy",
        sync="semel.stores.mysql:MySQLStore", aio="semel.stores.mysql:AsyncMySQLStore",
        shared_by="all machines", survives="as the server", clock="the server's",
        wakes=False, expiry="by sweeps", atomic_by="transaction",
    ),
    StoreKind(
        name="Redis", example="redis://…",
        schemes=("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster",
                 "unix"),
        extra="redis", sync="semel.stores.redis:RedisStore", aio="semel.stores.redis:AsyncRedisStore",
        shared_by="all machines", survives="as it is set up", clock="the server's",
        wakes=True, expiry="by themselves", atomic_by="script",
    ),
    StoreKind(
        name="DynamoDB", example="dynamodb://region/table", schemes=("dynamodb",), extra="dynamodb, aiobotocore",
        sync="semel.stores.dynamodb:DynamoDBStore", aio="semel.stores.dynamodb:AsyncDynamoDBStore",
        shared_by="all machines", survives="as the service", clock="the service's",
        wakes=False, expiry="by themselves", atomic_by="conditional write",
    ),
    StoreKind(
        name="tiered", example="tiered:…,redis://…", schemes=("tiered",), extra="redis",
        sync="semel.stores.tiered:TieredStore", aio="semel.stores.tiered:AsyncTieredStore",
        shared_by=BEHIND, survives=BEHIND, clock="the primary's",
        wakes=None, expiry=BEHIND, atomic_by=BEHIND,
    ),
)  # fmt: skip
"""All kinds there are."""
