"""Stores by URL, for the command line and for configuration: ``sqlite:///app.db``, ``postgresql://…``, ``memory:``.

All kinds of stores are in one table: their URL schemes, classes, what to install, and what each kind promises.
``semel stores`` prints it. What a class declares (``counts``, ``resumes``, ``adopt``, ``accept``) is read from the
class; everything else is written here. No guard decides by this table: it asks the store that it has.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from semel.core.ops import Op
from semel.engine.ports import AsyncStore, Store, check_trails
from semel.errors import ConfigurationError, MissingDependency, StoreURLError
from semel.stores.risks import Risk
from semel.stores.settings import plain_url

AS_PRIMARY: Final = "as the primary"
"""What a tiered store promises: the store behind its cache decides."""


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """One kind of store."""

    name: str
    example: str
    schemes: tuple[str, ...]
    """The URL schemes that open it."""
    module: str
    """The module of its classes and functions, imported when needed."""
    class_name: str
    """The sync store. The async one has the same name with ``Async`` before it."""
    functions: tuple[str, ...] = ()
    """``migrate`` creates its tables from a URL, ``check`` compares them with those that ``migrate`` creates, and
    ``risks`` returns how the settings of its server can lose records."""
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
        return load(f"{self.module}:{'Async' if awaited else ''}{self.class_name}")

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
"""What ``semel stores`` compares, and the words for it."""

KINDS: Final = (
    StoreKind(
        name="memory", example="memory:", schemes=("memory",), extra="none",
        module="semel.stores.memory", class_name="MemoryStore",
        shared_by="one process", survives="nothing", clock="the process's",
        wakes=True, expiry="by sweeps", atomic_by="lock",
    ),
    StoreKind(
        name="SQLite", example="sqlite:///…", schemes=("sqlite",), extra="none",
        module="semel.stores.sqlite", class_name="SQLiteStore", functions=("migrate", "check"),
        shared_by="one machine", survives="power cuts", clock="the machine's",
        wakes=False, expiry="by sweeps", atomic_by="transaction",
    ),
    StoreKind(
        name="PostgreSQL", example="postgresql://…", schemes=("postgresql", "postgres"), extra="postgres, asyncpg",
        module="semel.stores.postgres", class_name="PostgresStore", functions=("migrate", "check", "risks"),
        shared_by="all machines", survives="as the server", clock="the server's",
        wakes=True, expiry="by sweeps", atomic_by="statement",
    ),
    StoreKind(
        name="MySQL", example="mysql://…", schemes=("mysql", "mariadb"), extra="mysql, asyncmy",
        module="semel.stores.mysql", class_name="MySQLStore", functions=("migrate", "check", "risks"),
        shared_by="all machines", survives="as the server", clock="the server's",
        wakes=False, expiry="by sweeps", atomic_by="transaction",
    ),
    StoreKind(
        name="Redis", example="redis://…",
        schemes=("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster",
                 "unix"),
        extra="redis", module="semel.stores.redis", class_name="RedisStore", functions=("risks",),
        shared_by="all machines", survives="as it is set up", clock="the server's",
        wakes=True, expiry="by themselves", atomic_by="script",
    ),
    StoreKind(
        name="DynamoDB", example="dynamodb://region/table", schemes=("dynamodb",), extra="dynamodb, aiobotocore",
        module="semel.stores.dynamodb", class_name="DynamoDBStore", functions=("migrate", "check"),
        shared_by="all machines", survives="as the service", clock="the service's",
        wakes=False, expiry="by themselves", atomic_by="conditional write",
    ),
    StoreKind(
        name="tiered", example="tiered:…,redis://…", schemes=("tiered",), extra="redis",
        module="semel.stores.tiered", class_name="TieredStore",
        shared_by=AS_PRIMARY, survives=AS_PRIMARY, clock="the primary's",
        wakes=None, expiry=AS_PRIMARY, atomic_by=AS_PRIMARY,
    ),
)  # fmt: skip
"""All kinds of stores."""

SCHEMES: Final = {scheme: kind for kind in KINDS for scheme in kind.schemes}
"""The kind that each URL scheme opens."""


R = TypeVar("R")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(url: str) -> Store:
    """Open a sync store. ``migrate_store`` creates its tables."""
    store: Store = _open(url, awaited=False)
    return store


def open_async_store(url: str) -> AsyncStore:
    """Open an async store."""
    store: AsyncStore = _open(url, awaited=True)
    return store


def _open(url: str, *, awaited: bool) -> Any:
    kind, url = _kind_of(url)
    store = kind.store(awaited=awaited)
    if kind.name != "tiered":
        return store(*_arguments(kind, url))
    primary, cache = tiers(url)
    redis_cache = load(f"semel.stores.tiered:{'AsyncRedisCache' if awaited else 'RedisCache'}")
    return store(_open(primary, awaited=awaited), redis_cache(cache))


def open_any_store(url: str) -> Store:
    """Open a store to use in this thread, by whichever driver is installed. For commands; services open their own."""
    try:
        return open_store(url)
    except MissingDependency as missing:
        try:
            return BridgedStore(lambda: open_async_store(url))
        except MissingDependency:
            raise missing from None


def migrate_store(url: str) -> list[str]:
    """Create or update the store's tables. Returns the names of the migrations that were applied."""
    return _call("migrate", url) or []


def check_store(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the store's tables are what ``migrate_store`` makes. Changes nothing."""
    _call("check", url)


def store_risks(url: str) -> list[Risk]:
    """Return the ways in which the settings of the store's server can lose records.

    The Redis in front of a tiered store is not asked: what it loses, the primary has.
    """
    return _call("risks", url) or []


def has_tables(url: str) -> bool:
    """Whether the store has tables to create or check. Redis and memory need none."""
    return "migrate" in _kind_with_tables(url)[0].functions


def has_outbox(url: str) -> bool:
    """Whether the store is in a database that holds messages too: an outbox, an inbox, dead letters."""
    return _kind_with_tables(url)[0].store().adopt is not None


def check_trails_of(url: str) -> None:
    """Raise ConfigurationError if the store of this URL keeps no history of events."""
    check_trails(_kind_with_tables(url)[0].store())


def sqlite_path(url: str) -> str:
    """Return the path of ``sqlite:///relative.db`` or ``sqlite:////absolute.db``."""
    try:
        parts = urlsplit(plain_url(url))
    except ValueError:
        parts = urlsplit("")
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path in ("", "/") or parts.query:
        raise StoreURLError("this is no SQLite URL: write sqlite:///file.db, or sqlite:////absolute/file.db")
    return path[1:]


def tiers(url: str) -> tuple[str, str]:
    """Return the two URLs of ``tiered:postgresql://…,redis://…``: the primary store and the cache in front of it.

    They are separated by the last comma before a Redis scheme, because commas also separate the hosts of Redis. The
    URL needs no quotes in a shell. In a password a comma is written %2C.
    """
    found = re.fullmatch(r"tiered:(.+),((?:rediss?(?:\+sentinel|\+cluster)?|unix)://.*)", url, re.DOTALL)
    if found is None or found[1].startswith("tiered:"):
        raise StoreURLError(
            "a tiered store is the one that decides, a comma, and the Redis in front of it: "
            "write tiered:postgresql://user@host/database,redis://host:6379"
        )
    return plain_url(found[1]), found[2]


def _kind_of(url: str) -> tuple[StoreKind, str]:
    """Return the kind of store that the URL opens, and the URL without a driver of SQLAlchemy.

    Errors quote at most a scheme: what is no URL may be a libpq string, and any part of it the password.
    """
    url = plain_url(url)
    name, colon, _ = url.partition(":")
    if colon and name in SCHEMES:
        return SCHEMES[name], url
    scheme = _SCHEME.match(url)
    if scheme:
        raise StoreURLError(f"no store is called {scheme[1][:40]!r}; there are: {', '.join(SCHEMES)}")
    raise StoreURLError(
        "this is no URL: write sqlite:///app.db for a file, or postgresql://user:password@host/database for a server; "
        f"there are also: {', '.join(SCHEMES)}"
    )


def _kind_with_tables(url: str) -> tuple[StoreKind, str]:
    """Return the same as ``_kind_of``. A tiered store has the tables of its primary."""
    kind, url = _kind_of(url)
    return _kind_of(tiers(url)[0]) if kind.name == "tiered" else (kind, url)


def _arguments(kind: StoreKind, url: str) -> tuple[str, ...]:
    """Return what the class takes: the URL; SQLite takes a path, and memory takes nothing."""
    if kind.name == "memory":
        return ()
    return (sqlite_path(url) if kind.name == "SQLite" else url,)


def _call(name: str, url: str) -> Any:
    """Call a function of the store's module, if it has it. Where only the async driver is installed, its async one."""
    kind, url = _kind_with_tables(url)
    if name not in kind.functions:
        return None
    arguments = _arguments(kind, url)
    try:
        return load(f"{kind.module}:{name}")(*arguments)
    except MissingDependency as missing:
        try:
            return asyncio.run(load(f"{kind.module}:{name}_async")(*arguments))
        except (MissingDependency, AttributeError):
            raise missing from None


def _refuse_connection(connection: object) -> NoReturn:
    raise ConfigurationError(
        "only the async driver of this database is installed, so no sync connection can take part in a transaction: "
        "install psycopg (semel[postgres]) or PyMySQL (semel[mysql])"
    )


class BridgedStore:
    """A sync store that runs an async one in an event loop of its own. Not for several threads."""

    wakes = False

    def __init__(self, open_store: Callable[[], AsyncStore]) -> None:
        """:param open_store: opens the async store; called inside the event loop."""

        async def opened() -> AsyncStore:
            return open_store()

        self._runner = asyncio.Runner()
        try:
            self._store = self._runner.run(opened())
        except BaseException:
            self._runner.close()
            raise
        self._closed = False
        self.counts = self._store.counts
        self.resumes = self._store.resumes
        self.lists = self._store.lists
        self.trails = self._store.trails
        self.accept = self._store.accept
        self.adopt = None if self._store.adopt is None else _refuse_connection

    def execute(self, op: Op[R]) -> R:
        return self._runner.run(self._store.execute(op))

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return self._runner.run(self._store.execute_many(ops))

    def wait(self, id: bytes, seconds: float) -> None:
        self._runner.run(self._store.wait(id, seconds))

    def open(self) -> None:
        if self._closed:
            self._closed = False
            self._runner = asyncio.Runner()
            self._store.open()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._runner.run(self._store.close())
            self._runner.close()
