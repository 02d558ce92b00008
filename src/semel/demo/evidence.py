"""The evidence of a storm: its effects, and what the clients saw. None of it comes from Semel's tables or events.

Effects go to a payment provider's ledger, or to rows in the store's own database. Neither deduplicates: a second charge
for a payment is a second line, which is how the verdict finds duplicates. What the clients saw is written as JSON
lines, one file per worker. Each line is one ``write`` to a file opened for appending, so a killed worker leaves whole
lines. A replay is an answer for which neither the handler nor the recover hook ran in this client. Only ``unsettled``
asks Semel's own records, as a cross-check at the end.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from semel.core.states import State
from semel.errors import StoreError, StoreURLError
from semel.sql.connections.adopt import adopt
from semel.sql.connections.errors import sqlite_error
from semel.sql.program import load_queries
from semel.stores.guard import Semel
from semel.stores.sqlite import SQLiteConnection, connect_file
from semel.stores.urls import open_any_store, sqlite_path

BUSY_TIMEOUT: Final = 30.0
DIALECTS: Final = {
    "sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip
"""The SQL dialect of each URL scheme that has one."""
_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS effect (
        receipt INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, payment INTEGER NOT NULL, amount INTEGER NOT NULL,
        pid INTEGER NOT NULL, attempt INTEGER NOT NULL, token INTEGER NOT NULL, what TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS effect_key ON effect (key);
    CREATE TABLE IF NOT EXISTS fence (key TEXT PRIMARY KEY, token INTEGER NOT NULL);
"""

_Q: Final = load_queries("semel.demo", "rows.sql")


def connect(url: str) -> Any:
    """Open a connection to the demo's own rows by the store's URL; its ``raw`` is the driver's own connection."""
    dialect = DIALECTS[url.partition(":")[0]]
    if dialect == "sqlite":
        try:
            raw = connect_file(sqlite_path(url), BUSY_TIMEOUT)
            raw.execute("PRAGMA journal_mode = WAL").fetchall()
            raw.execute("PRAGMA synchronous = NORMAL")  # processes are killed here, the machine is not
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
        return SQLiteConnection(raw)
    if dialect == "mysql":
        from semel.stores.mysql.connections import MySQLSettings, PyMySQL

        return PyMySQL().connect(MySQLSettings(url))
    from semel.stores.postgres.connections import PostgresSettings, Psycopg

    return Psycopg().connect(PostgresSettings(url))


class Fenced(Exception):
    """The ledger has seen a newer owner of this key."""


class Effect(NamedTuple):
    """One line of the ledger."""

    receipt: int
    key: str
    payment: int
    amount: int
    pid: int
    attempt: int
    token: int
    what: str = "charge"


class Ledger:
    """A payment provider's ledger, in its own file. A process that is killed leaves a whole line or none.

    It stands for any system outside of Semel, and offers what a good provider offers: it refuses a token that is older
    than one it has seen for the key. Otherwise an owner that was only slow could charge after its successor had looked,
    found nothing and charged too. No library can prevent that from the outside.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._raw = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
        self._raw.execute("PRAGMA journal_mode = WAL").fetchall()
        self._raw.execute("PRAGMA synchronous = OFF")  # processes are killed here, the machine is not
        self._raw.executescript(_TABLES)

    def charge(
        self, key: str, payment: int, amount: int, attempt: int, token: int, *, what: str = "charge", once: bool = False
    ) -> int:
        """Add a line and return its receipt. With ``once``, return the existing line of this key, if there is one."""
        with self._alone():
            if once:
                known = self._raw.execute("SELECT receipt FROM effect WHERE key = ?", (key,)).fetchone()
                if known is not None:
                    return int(known[0])
            seen = self._raw.execute("SELECT token FROM fence WHERE key = ?", (key,)).fetchone()
            if seen is not None and seen[0] > token:
                raise Fenced(f"payment {payment}: token {token} is older than {seen[0]}")
            line = (key, payment, amount, os.getpid(), attempt, token, what)
            cursor = self._raw.execute(
                "INSERT INTO effect (key, payment, amount, pid, attempt, token, what) VALUES (?, ?, ?, ?, ?, ?, ?)",
                line,
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def find(self, key: str, token: int) -> Effect | None:
        """Return what was charged under this key. From now on, owners with an older token are refused."""
        with self._alone():
            self._raw.execute(
                "INSERT INTO fence VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET token = max(token, excluded.token)",
                (key, token),
            )
            row = self._raw.execute("SELECT * FROM effect WHERE key = ? ORDER BY receipt LIMIT 1", (key,)).fetchone()
            return Effect(*row) if row is not None else None

    def effects(self) -> list[Effect]:
        """All lines, in order."""
        with self._lock:
            return [Effect(*row) for row in self._raw.execute("SELECT * FROM effect ORDER BY receipt")]

    def count(self) -> int:
        with self._lock:
            found: int = self._raw.execute("SELECT count(*) FROM effect").fetchone()[0]
            return found

    def close(self) -> None:
        self._raw.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A transaction that takes the write lock first, so that what it reads cannot change before it ends."""
        with self._lock:
            self._raw.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._raw.execute("COMMIT")
            except BaseException:
                self._raw.execute("ROLLBACK")
                raise


def refuse_without_transactions(store: str) -> None:
    """Raise if the store has no transaction in which payments could be written."""
    scheme = store.partition(":")[0]
    if scheme not in DIALECTS:
        raise StoreURLError(
            "in the transactional mode a payment is a row in the store's own database: "
            f"give a store of SQLite, PostgreSQL or MySQL, not {scheme}, or another --mode"
        )


class Rows:
    """The transactional mode: rows written in the transaction of the record. Each thread has its own connection."""

    def __init__(self, store: str, run: str) -> None:
        refuse_without_transactions(store)
        self._store = store
        self._run = run
        self._dialect = DIALECTS[store.partition(":")[0]]
        self._mine = threading.local()
        self._all: list[Any] = []

    def prepare(self) -> None:
        """Make the table, once, before the workers start."""
        adopt(self.connection()).execute(_Q[f"table_on_{self._dialect}"]())

    def connection(self) -> Any:
        """This thread's connection, without an open transaction."""
        raw = getattr(self._mine, "raw", None)
        if raw is None:
            raw = self._mine.raw = connect(self._store).raw
            self._all.append(raw)
        return raw

    def insert(self, payment: int, amount: int, attempt: int, token: int) -> int:
        """Write a row in this thread's transaction and return its receipt."""
        row = {"run": self._run, "payment": payment, "amount": amount, "attempt": attempt, "token": token}
        lent = adopt(self.connection())
        if self._dialect == "mysql":
            lent.execute(_Q["insert_on_mysql"](**row, pid=os.getpid()))
            return int(lent.execute(_Q["receipt_on_mysql"]())[0][0])
        return int(lent.execute(_Q["insert"](**row, pid=os.getpid()))[0][0])

    def tear(self) -> None:
        """Sabotage: commit the row without the record, and go on in a new transaction."""
        lent = adopt(self.connection())
        lent.execute(_Q["commit"]())
        lent.execute(_Q["begin_on_sqlite" if self._dialect == "sqlite" else "begin"]())

    def drop(self) -> None:
        """Close this thread's failed connection; the next call opens a new one."""
        raw = self.connection()
        self._mine.raw = None
        self._all.remove(raw)
        raw.close()

    def effects(self) -> list[Effect]:
        """All rows, in order."""
        return [Effect(*row) for row in adopt(self.connection()).execute(_Q["effects"](run=self._run))]

    def count(self) -> int:
        return int(adopt(self.connection()).execute(_Q["count"](run=self._run))[0][0])

    def close(self) -> None:
        for raw in self._all:
            raw.close()


class Sightings:
    """The file of one worker."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def see(self, what: str, payment: int, **details: Any) -> None:
        line = json.dumps({"saw": what, "payment": payment, **details}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Totals:
    """Totals over the files of all workers, read while they grow.

    The keys of ``counts`` that the verdict has too: calls, attempts (handler started), takeovers, recovered, failures
    (handler raised), refused (running elsewhere), fenced (this owner was replaced), store_errors, replays. The others
    are first (an answer that is no replay) and died (killed itself); for steps also ran (the step's function started)
    and marked (the step returned, so it is stored).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()
        self.begun: set[int] = set()
        """Payments that a client has asked for."""
        self.answers: dict[int, str] = {}
        """The first answer for each payment."""
        self.mismatched: set[int] = set()
        """Payments with two different answers."""
        self._ran: dict[tuple[int, str], int] = {}
        self._marked: dict[tuple[int, str], int] = {}
        """By payment and step: the last token under which it ran, and the first under which it was stored."""

    def update(self) -> None:
        """Read what was written since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1  # an unfinished line is read next time
            self._read[path] = self._read.get(path, 0) + whole
            for line in text[:whole].splitlines():
                self._take(json.loads(line))

    def answer(self, payment: int) -> Any:
        """The first answer for a payment."""
        return json.loads(self.answers[payment])

    def repeated(self) -> int:
        """How many steps ran again in a later attempt although they were stored."""
        return sum(self._ran.get(step, 0) > token for step, token in self._marked.items())

    def _take(self, line: dict[str, Any]) -> None:
        what, payment = line["saw"], line["payment"]
        self.counts[what] += 1
        if what == "calls":
            self.begun.add(payment)
        elif what == "ran":
            step = payment, line["step"]
            self._ran[step] = max(self._ran.get(step, 0), line["token"])
        elif what == "marked":
            self._marked.setdefault((payment, line["step"]), line["token"])
        elif what in ("first", "replays"):
            answer = json.dumps(line["answer"], sort_keys=True)
            if self.answers.setdefault(payment, answer) != answer:
                self.mismatched.add(payment)


def unsettled(store: str, operation: str, keys: Iterable[str], tenant: str | None = None) -> int:
    """How many payments are not done according to Semel's own records."""
    with Semel(open_any_store(store), sweep_every=None) as guard:

        def is_done(key: str) -> bool:
            try:
                record = guard.lookup(operation, key, tenant=tenant)
            except StoreError:
                return False
            return record is not None and record.state is State.DONE

        return sum(not is_done(key) for key in keys)
