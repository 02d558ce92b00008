"""The kinds of stores in one table: URL schemes, classes, what to install, and what each kind promises.

``urls.py`` opens stores by it, and ``semel stores`` prints it. What a class declares (``counts``, ``resumes``,
``adopt``, ``accept``) is read from the class; everything else is written here. No guard decides by this table: it asks
the store that it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

AS_PRIMARY: Final = "as the primary"
"""What a tiered store promises: the store behind its cache decides."""


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """One kind of store. Classes and functions are named as ``module:name`` and imported when needed."""

    name: str
    example: str
    schemes: tuple[str, ...]
    """The URL schemes that open it."""
    sync: str
    """The sync store ..."""
    aio: str
    """... and the async one."""
    migrate: str | None = None
    """The function that creates its tables from a URL; None if it has none."""
    check: str | None = None
    """The function that compares its tables with those that ``migrate`` creates."""
    extra: str
    """What to install: ``semel[…]``; or ``none``."""
    shared_by: str
    survives: str
    clock: str
    wakes: bool | None
    """Whether waiters are woken. None: like the primary, and so is everything else that a class declares."""
    expiry: str
    atomic_by: str
    """What makes an Op one atomic step."""

    def store(self, *, awaited: bool = False) -> Any:
        """Return the class. Importing it needs no driver."""
        return load(self.aio if awaited else self.sync)

    def traits(self) -> dict[str, bool | str]:
        """Return what the kind promises, by the names of ``TRAITS``."""
        if self.wakes is None:
            declared: dict[str, bool | str] = dict.fromkeys(_DECLARED, AS_PRIMARY)
        else:
            store = self.store()
            values = (self.wakes, store.adopt is not None, store.accept is not None, store.counts, store.resumes)
            declared = dict(zip(_DECLARED, values, strict=True))
        promises = {**vars(self), **declared}
        return {name: promises[name] for name in TRAITS}


def load(name: str) -> Any:
    """Return the object that ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


_DECLARED: Final = ("wakes", "transactions", "writes", "counts", "resumes")
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
"""What is compared, and how it is called in the output."""

KINDS: Final = (
    StoreKind(
        name="memory", example="memory:", schemes=("memory",), extra="none",
        sync="semel.stores.memory:MemoryStore", aio="semel.stores.memory:AsyncMemoryStore",
        shared_by="one process", survives="nothing", clock="the process's",
        wakes=True, expiry="by sweeps", atomic_by="lock",
    ),
    StoreKind(
        name="SQLite", example="sqlite:///…", schemes=("sqlite",), extra="none",
        sync="semel.stores.sqlite:SQLiteStore", aio="semel.stores.sqlite:AsyncSQLiteStore",
        migrate="semel.stores.sqlite:migrate", check="semel.stores.sqlite:check",
        shared_by="one machine", survives="power cuts", clock="the machine's",
        wakes=False, expiry="by sweeps", atomic_by="transaction",
    ),
    StoreKind(
        name="PostgreSQL", example="postgresql://…", schemes=("postgresql", "postgres"), extra="postgres, asyncpg",
        sync="semel.stores.postgres:PostgresStore", aio="semel.stores.postgres:AsyncPostgresStore",
        migrate="semel.stores.postgres:migrate", check="semel.stores.postgres:check",
        shared_by="all machines", survives="as the server", clock="the server's",
        wakes=True, expiry="by sweeps", atomic_by="statement",
    ),
    StoreKind(
        name="MySQL", example="mysql://…", schemes=("mysql", "mariadb"), extra="mysql, asyncmy",
        sync="semel.stores.mysql:MySQLStore", aio="semel.stores.mysql:AsyncMySQLStore",
        migrate="semel.stores.mysql:migrate", check="semel.stores.mysql:check",
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
        migrate="semel.stores.dynamodb:migrate", check="semel.stores.dynamodb:check",
        shared_by="all machines", survives="as the service", clock="the service's",
        wakes=False, expiry="by themselves", atomic_by="conditional write",
    ),
    StoreKind(
        name="tiered", example="tiered:…,redis://…", schemes=("tiered",), extra="redis",
        sync="semel.stores.tiered:TieredStore", aio="semel.stores.tiered:AsyncTieredStore",
        shared_by=AS_PRIMARY, survives=AS_PRIMARY, clock="the primary's",
        wakes=None, expiry=AS_PRIMARY, atomic_by=AS_PRIMARY,
    ),
)  # fmt: skip
"""All kinds of stores."""

SCHEMES: Final = {scheme: kind for kind in KINDS for scheme in kind.schemes}
"""The kind that each URL scheme opens."""

_SQLALCHEMY: Final = re.compile(r"(sqlite|postgres|postgresql|mysql|mariadb)\+(\w+):")


def plain_url(url: str) -> str:
    """Return the URL without the driver that a URL of SQLAlchemy names: ``postgresql+asyncpg://…``. We choose ours."""
    named = _SQLALCHEMY.match(url)
    if named is None:
        return url
    plain = f"{named[1]}:{url[named.end() :]}"
    # What PostgreSQL's own URLs call sslmode, SQLAlchemy calls ssl in those for asyncpg.
    return re.sub(r"(?<=[?&])ssl=", "sslmode=", plain) if named[2] == "asyncpg" else plain
