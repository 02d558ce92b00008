"""The journal: requests that are sent or about to be sent, in a SQLite file, so that a crash does not lose their keys.

An entry is durable before the first byte of its request leaves, and is removed when the answer is in hand. What remains
is in doubt: it may have been executed. ``resume`` of a client sends it again with the same key.

An entry belongs to the process that sends it. When that process is dead, which ``owners.py`` knows by its lock, others
may take the entry over. Such locks and SQLite's own work on local disks only, so a network file system is refused.

Concurrent calls of a process share one commit, and so one fsync. Removing an entry needs none: if the machine loses it,
the request is sent again, and the server replays its answer. So a call that has its answer does not wait for the
removal if another thread is at work in the file: that one, or the next, takes it along.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from semel.client.flow import Intent, Written, bare_key, log
from semel.client.owners import Presence, enter, refuse_network, sync_folder
from semel.core.encoding.snapshot import Cipher
from semel.core.ops import Op
from semel.core.values import value
from semel.engine.forking import survive_forks
from semel.engine.ports import STORE_CLOSED
from semel.errors import ConfigurationError, JournalFull, KeyReused, SemelError, StoreUnavailable
from semel.sql.connections.errors import sqlite_error
from semel.stores.batching.aio_combiner import AsyncCombiner
from semel.stores.batching.combiner import Combiner
from semel.stores.sqlite import connect_file

R = TypeVar("R")
EntryState: TypeAlias = Literal["in flight", "in doubt", "expired"]

BUSY_TIMEOUT: Final = 10.0
MAX_BYTES: Final = 256 * 1024 * 1024
VERSION: Final = 1
APPLICATION: Final = 0x53454D4A  # "SEMJ"
STORED_HEADERS: Final = frozenset(
    [
        "accept",
        "accept-encoding",
        "accept-language",
        "content-encoding",
        "content-language",
        "content-type",
        "if-match",
        "if-none-match",
        "idempotency-parent",
        "idempotency-root",
        "prefer",
        "traceparent",
    ]
)
"""Headers that are written. No other one is, so that no secret is, unless ``Journal(headers=…)`` names it."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS semel_journal (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    method TEXT NOT NULL,
    url TEXT NOT NULL,
    created REAL NOT NULL,
    expires REAL NOT NULL,
    owner INTEGER,
    sealed INTEGER NOT NULL,
    request BLOB NOT NULL
)
"""
_COLUMNS: Final = "id, key, method, url, created, expires, owner, sealed, request"


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in the journal."""

    id: int
    value: str
    """The key as it is sent, quoted or not."""
    method: str
    url: str
    created: float
    """When it was first sent, or was about to be, in seconds since 1970."""
    expires: float
    """When it is not sent any more, because the server may forget the key soon."""
    state: EntryState
    """In flight: a living process waits for the answer."""
    size: int
    """Bytes that are stored for it."""
    headers: Mapping[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return bare_key(self.value)

    def first_use(self, lifetime: float) -> float:
        # When the key was first used, for a client that uses keys for so long. It is earlier than that if the client
        # that wrote the entry knew of a shorter window: then no more time is left than the entry has.
        return min(self.created, self.expires - lifetime)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the body and the headers."""
        names = ("key", "method", "url", "created", "expires", "state", "size")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class JournalReport:
    """What became of the entries that a ``resume`` found in doubt."""

    finished: list[Entry] = field(default_factory=list)
    """The server has executed them, now or before."""
    rejected: list[Entry] = field(default_factory=list)
    """The server has refused them. They are removed from the journal."""
    unknown: list[Entry] = field(default_factory=list)
    """Still in doubt, and still in the journal."""
    expired: list[Entry] = field(default_factory=list)
    """Too old to be sent again: ask the server what happened. They are removed from the journal."""

    def add(self, entry: Entry, outcome: str) -> None:
        lists = {"succeeded": self.finished, "rejected": self.rejected, "unknown": self.unknown}
        lists.get(outcome, self.expired).append(entry)

    def __len__(self) -> int:
        return len(self.finished) + len(self.rejected) + len(self.unknown) + len(self.expired)

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """The same as plain data, without bodies and headers."""
        lists = {name.name: getattr(self, name.name) for name in fields(self)}
        return {name: [entry.as_dict() for entry in entries] for name, entries in lists.items()}


@value
class WriteEntry(Op[Written]):
    """Make a request durable. KeyReused if the journal holds its key with another body."""

    id: int  # type: ignore[assignment]
    intent: Intent
    lifetime: float


@value
class SettleEntry(Op[None]):
    """This call is over. Remove the entry, or leave it in doubt."""

    id: int  # type: ignore[assignment]
    remove: bool
    key: str = ""
    """For the log."""


@value
class FindEntries(Op[list[int]]):
    """Return the ids of the entries that nobody waits for, the oldest first."""

    id: int = 0  # type: ignore[assignment]


@value
class TakeEntry(Op["Entry | None"]):
    """Own an entry. The answer is None if it is gone, or if somebody waits for it by now."""

    id: int  # type: ignore[assignment]


def entry_id(intent: Intent) -> int:
    """One key, method and URL is one entry, in every process. The number is a row id of SQLite."""
    text = "\0".join((intent.value, intent.method, _without_password(intent.url)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


class _Batches:
    """One connection to the file. Runs batches of Ops, one caller at a time."""

    gathers = True

    def __init__(self, journal: Journal, presence: Presence) -> None:
        self._journal = journal
        self._presence = presence
        self._raw: sqlite3.Connection | None = None
        self._parents: list[sqlite3.Connection | None] = []
        self._lock = threading.Lock()
        self._settled: deque[SettleEntry] = deque()
        """Calls that are over and that nobody waits for. Only the holder of the lock takes them out."""
        self._used: int | None = None
        """Bytes that are in use, once a batch has asked."""
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Keep a reference, never close it: a connection of SQLite must not be used after a fork, not even to close it.
        self._parents.append(self._raw)
        self._raw = None
        self._lock = threading.Lock()
        self._settled.clear()

    def connection(self) -> sqlite3.Connection:
        if self._raw is None:
            raw = connect_file(self._journal.path, BUSY_TIMEOUT)
            try:
                raw.execute("PRAGMA journal_mode = WAL").fetchall()
                raw.execute("PRAGMA synchronous = FULL")
                ((application,),) = raw.execute("PRAGMA application_id")
                ((version,),) = raw.execute("PRAGMA user_version")
                if application not in (0, APPLICATION) or version > VERSION:
                    raise ConfigurationError(
                        f"{self._journal.path!r} is no journal, or one of a newer version of Semel"
                    )
                if not version:
                    raw.execute("BEGIN IMMEDIATE")
                    raw.execute(_SCHEMA)
                    raw.execute(f"PRAGMA application_id = {APPLICATION}")
                    raw.execute(f"PRAGMA user_version = {VERSION}")
                    raw.execute("COMMIT")
                    sync_folder(self._journal.path)
            except BaseException:
                raw.close()
                raise
            self._raw = raw
        return self._raw

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        answers = self._run(ops)
        if self._settled and not self._journal.waits:
            self.flush()
        return answers

    def settle(self, op: SettleEntry) -> bool:
        """Run the Op with the next batch. Returns whether a flush is needed: nobody is at work who would do it."""
        self._settled.append(op)
        return not self._lock.locked()

    @property
    def others(self) -> bool:
        """Whether other calls of this process are in flight, besides the one that is about to be settled."""
        return len(self._presence.in_flight) > len(self._settled) + 1

    def flush(self) -> None:
        """Run what was settled. If another thread is at work, it does this when it is done."""
        while self._settled and not self._lock.locked():
            self._run(())

    def _run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        with self._lock, self._presence.lock:
            settled = list(self._settled)
            answers = self._commit_all([*settled, *ops]) if settled or ops else []
            for _ in settled:  # only now: an interruption must not lose them, and to settle a call twice does no harm
                self._settled.popleft()
        for op, answer in zip(settled, answers, strict=False):
            if isinstance(answer, SemelError):
                log.warning("the entry of the key %r stays in the journal: %s", op.key, answer)
        return answers[len(settled) :]

    def _commit_all(self, ops: Sequence[Op[Any]]) -> list[Any]:
        try:
            return self._commit(ops)
        except (SemelError, sqlite3.Error) as error:
            if len(ops) > 1:  # each alone, so that the others succeed if possible
                return [self._commit_all([op])[0] for op in ops]
            return [self._refused(ops[0], error)]

    def _refused(self, op: Op[Any], error: Exception) -> SemelError:
        if type(op) is SettleEntry:
            self._end_call(op.id)  # the call is over, whatever the file says
        return sqlite_error(error, self._journal.path) if isinstance(error, sqlite3.Error) else cast(SemelError, error)

    def _end_call(self, id: int) -> bool:
        """Returns whether it was the last call in flight with this entry."""
        in_flight = self._presence.in_flight
        left = in_flight.pop(id, 0) - 1
        if left > 0:
            in_flight[id] = left
        return left <= 0

    def _commit(self, ops: Sequence[Op[Any]]) -> list[Any]:
        raw = self.connection()
        durable = any(type(op) in (WriteEntry, TakeEntry) for op in ops)
        if not durable:
            raw.execute("PRAGMA synchronous = NORMAL")  # the next commit that is durable takes these along
        before, self._used = self._presence.in_flight.copy(), None
        try:
            raw.execute("BEGIN IMMEDIATE")
            try:
                first = next((place for place, op in enumerate(ops) if type(op) is not SettleEntry), len(ops))
                if first:  # those that nobody waits for, all in one go
                    self._settle(raw, cast("Sequence[SettleEntry]", ops[:first]))
                answers = [None] * first + [self._apply(raw, op) for op in ops[first:]]
                raw.execute("COMMIT")
            except BaseException:
                if raw.in_transaction:
                    raw.execute("ROLLBACK")
                self._presence.in_flight = before
                raise
        finally:
            if not durable:
                raw.execute("PRAGMA synchronous = FULL")
        return answers

    def _apply(self, raw: sqlite3.Connection, op: Op[Any]) -> Any:
        if type(op) is WriteEntry:
            return self._write(raw, op)
        if type(op) is SettleEntry:
            return self._settle(raw, [op])
        if type(op) is TakeEntry:
            return self._take(raw, op.id)
        rows = raw.execute("SELECT id, owner FROM semel_journal ORDER BY created, id").fetchall()
        living: dict[int, bool] = {}  # the requests are not read, which may be large, nor is an owner asked for twice
        return [id for id, owner in rows if not self.in_flight(id, owner, living)]

    def _write(self, raw: sqlite3.Connection, op: WriteEntry) -> Written:
        intent, presence, journal = op.intent, self._presence, self._journal
        sealed, request = journal.seal(op.id, intent)
        used = _used_bytes(raw) if self._used is None else self._used
        now = time.time()
        url = _without_password(intent.url)
        inserted = raw.execute(
            f"INSERT INTO semel_journal ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (op.id, intent.value, intent.method, url, now, now + op.lifetime, presence.owner, sealed, request),
        ).rowcount
        presence.in_flight[op.id] += 1
        if not inserted:
            return self._join(raw, op)
        self._used = used + len(request)
        if self._used > journal.max_bytes:
            raise JournalFull(
                f"the journal {journal.path!r} would have {self._used} bytes, and max_bytes is {journal.max_bytes}. "
                "Nothing was sent. `semel client list` shows what is in doubt, `semel client resume` finishes it."
            )
        return Written(now, False)

    def _join(self, raw: sqlite3.Connection, op: WriteEntry) -> Written:
        """The entry is there already: another call has the same key, or an earlier one has left it in doubt."""
        presence = self._presence
        row = raw.execute(f"SELECT {_COLUMNS} FROM semel_journal WHERE id = ?", (op.id,)).fetchone()
        entry = self._journal.entry(row)
        if entry.body != op.intent.body:
            raise KeyReused(
                f"the journal holds the key {op.intent.key!r} with another body for {entry.method} {entry.url}: "
                "nothing was sent. A new request needs a new key."
            )
        if row[6] is None or not presence.alive(row[6]):
            raw.execute("UPDATE semel_journal SET owner = ? WHERE id = ?", (presence.owner, op.id))
        return Written(entry.first_use(op.lifetime), True)

    def _settle(self, raw: sqlite3.Connection, ops: Sequence[SettleEntry]) -> None:
        removed, released = [], []
        for op in ops:
            over = self._end_call(op.id)
            if op.remove:
                removed.append((op.id,))
            elif over:
                released.append((op.id, self._presence.owner))
        if removed:
            raw.executemany("DELETE FROM semel_journal WHERE id = ?", removed)
        if released:
            raw.executemany("UPDATE semel_journal SET owner = NULL WHERE id = ? AND owner = ?", released)

    def _take(self, raw: sqlite3.Connection, id: int) -> Entry | None:
        row = raw.execute(f"SELECT {_COLUMNS} FROM semel_journal WHERE id = ?", (id,)).fetchone()
        if row is None or self.in_flight(id, row[6], {}):
            return None
        if row[7] and not self._journal.encrypted:
            raise ConfigurationError(f"the journal {self._journal.path!r} is encrypted: open it with its cipher")
        entry = self._journal.entry(row)
        self._presence.in_flight[id] += 1
        raw.execute("UPDATE semel_journal SET owner = ? WHERE id = ?", (self._presence.owner, id))
        return entry

    def in_flight(self, id: int, owner: int | None, living: dict[int, bool]) -> bool:
        """Whether a call of a living process waits for the answer. ``living`` remembers what is known of owners."""
        if owner is None or owner == self._presence.owner:
            return bool(self._presence.in_flight[id])
        if owner not in living:
            living[owner] = self._presence.alive(owner)
        return living[owner]

    def rows(self) -> list[Any]:
        """Return all entries as rows, the oldest first, without those that are settled."""
        self.run(())
        with self._lock:
            try:
                found = self.connection().execute(f"SELECT {_COLUMNS} FROM semel_journal ORDER BY created, id")
                return found.fetchall()
            except sqlite3.Error as error:
                raise sqlite_error(error, self._journal.path) from error

    def close(self) -> None:
        with self._lock:
            if self._raw is not None:
                self._raw.close()
            self._raw = None


class _Thread:
    """Runs the batches of an event loop in a thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        batches = self._journal.batches
        return await asyncio.get_running_loop().run_in_executor(self._journal.thread, batches.run, ops)

    async def close(self) -> None:
        """The journal closes the connection."""


class Journal:
    """Requests whose answer is not in hand yet, kept through a crash. Safe for several threads, loops and processes.

    ``IdempotencyTransport(journal="calls.db")`` opens one by itself. Make one to change its settings, or to share it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        headers: Iterable[str] = (),
        cipher: Cipher | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """
        :param path: the file, on a local disk. If it does not exist, it is created, and only its owner may read it.
        :param headers: names of further headers to write. Name no header that holds a secret.
        :param cipher: encrypts bodies and headers, usually a ``KeyRing``. The method, URL and key are not encrypted.
        :param max_bytes: how large the journal may grow. Beyond it calls raise JournalFull, and nothing is sent.
        """
        if os.name != "posix":
            raise ConfigurationError("a journal needs the file locks of POSIX, which this system does not have")
        self.path = os.path.abspath(os.fspath(path))
        self.max_bytes = max_bytes
        self._headers = STORED_HEADERS | {name.lower() for name in headers}
        self._cipher = cipher
        self.encrypted = cipher is not None
        refuse_network(self.path)
        self._presence = enter(self.path)
        self._closed = self._flushing = False
        self.batches = _Batches(self, self._presence)
        self._combiner = Combiner([self.batches])
        self._loops: dict[asyncio.AbstractEventLoop, AsyncCombiner] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="semel-journal")  # it starts when it is first used
        survive_forks(self._forked)
        try:
            self.batches.connection()
        except sqlite3.Error as error:
            self.close()
            raise sqlite_error(error, self.path) from error
        except SemelError:
            self.close()
            raise

    def _forked(self) -> None:
        self._loops, self._flushing = {}, False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="semel-journal")

    def execute(self, op: Op[R]) -> R:
        return self._combiner.execute(op)

    async def execute_async(self, op: Op[R]) -> R:
        if self._closed:
            raise StoreUnavailable(STORE_CLOSED)
        loop = asyncio.get_running_loop()
        combiner = self._loops.get(loop)
        if combiner is None:
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            combiner = self._loops[loop] = AsyncCombiner([_Thread(self)])
        return await combiner.execute(op)

    def write(self, intent: Intent, lifetime: float) -> WriteEntry:
        # The Op that makes a request durable.
        return WriteEntry(entry_id(intent), intent, lifetime)

    @property
    def waits(self) -> bool:
        # Whether a thread is about to run the next batch.
        return bool(self._combiner._queue)

    def settle(self, id: int, *, remove: bool, key: str = "") -> None:
        # A call whose entry is written is over. It needs nothing more from the journal, so with other calls under way
        # it waits for nobody. A call alone does it here, and needs no thread.
        self._settle(SettleEntry(id, remove, key), soon=self.batches.others)

    def settle_async(self, id: int, *, remove: bool, key: str = "") -> None:
        # The same in a loop, which never waits for the file.
        self._settle(SettleEntry(id, remove, key), soon=True)

    def _settle(self, op: SettleEntry, soon: bool) -> None:
        if self._closed:
            log.warning("the entry of the key %r stays in the journal, which is closed", op.key)
        elif not self.batches.settle(op):
            return
        elif not soon:
            self.batches.flush()
        elif not self._flushing:
            self._flushing = True
            try:
                self.thread.submit(self._flush)
            except RuntimeError:  # the interpreter shuts down, or the journal was closed in the meantime
                self._flush()

    def _flush(self) -> None:
        self._flushing = False  # first: what is settled from now on needs another one
        self.batches.flush()

    def take(self, id: int) -> Entry | None:
        # Own an entry that FindEntries has found.
        return self.execute(TakeEntry(id))

    async def take_async(self, id: int) -> Entry | None:
        # The same in a loop. If the caller is cancelled meanwhile, the entry is given back when it is there.
        taking = asyncio.ensure_future(self.execute_async(TakeEntry(id)))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)
            raise

    def _give_back(self, taking: asyncio.Future[Entry | None]) -> None:
        if not taking.cancelled() and taking.exception() is None and (entry := taking.result()) is not None:
            self.settle_async(entry.id, remove=False, key=entry.key)

    def abandon(self, id: int) -> None:
        # A call was interrupted: leave its entry in doubt.
        with contextlib.suppress(SemelError):
            self.execute(SettleEntry(id, False))

    def abandon_async(self, id: int) -> None:
        # The same in a loop. It is not awaited, and done after all that was submitted before.
        with contextlib.suppress(SemelError):
            self._loops[asyncio.get_running_loop()].submit(SettleEntry(id, False))

    def entries(self) -> list[Entry]:
        """Return all entries, the oldest first. Raises StoreUnavailable if the journal is closed."""
        if self._closed:
            raise StoreUnavailable(STORE_CLOSED)
        return [self.entry(row, self._state(row)) for row in self.batches.rows()]

    def forget(self, key: str) -> int:
        """Remove the entries of a key, for a call that you have settled in another way. Returns how many there were."""
        found = [entry for entry in self.entries() if key in (entry.key, entry.value)]
        for entry in found:
            self.execute(SettleEntry(entry.id, True))
        return len(found)

    def close(self) -> None:
        """Close the file. Entries that are left belong to nobody any more."""
        if self._closed:
            return
        self._closed = True
        self.thread.shutdown()
        self.batches.run(())
        self._combiner.close()
        self.batches.close()
        self._presence.leave()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the batches need

    def _state(self, row: Sequence[Any]) -> EntryState:
        if self.batches.in_flight(row[0], row[6], {}):
            return "in flight"
        return "expired" if row[5] <= time.time() else "in doubt"

    def entry(self, row: Sequence[Any], state: EntryState = "in doubt") -> Entry:
        id, value, method, url, created, expires, _, sealed, request = row
        size = len(request)
        headers, body = {}, b""
        if sealed and self._cipher is not None:
            request, sealed = self._cipher.decrypt(request, _context(id)), False
        if not sealed:
            split = 4 + int.from_bytes(request[:4])
            headers, body = json.loads(request[4:split]), request[split:]
        return Entry(id, value, method, url, created, expires, state, size, headers, body)

    def seal(self, id: int, intent: Intent) -> tuple[bool, bytes]:
        # What is stored of the request: the headers that may be written, and the body.
        allowed = {
            name: text.decode("latin-1") if isinstance(text, bytes) else text
            for name, text in (intent.headers or {}).items()
            if name.lower() in self._headers
        }
        headers = json.dumps(allowed).encode()
        request = len(headers).to_bytes(4) + headers + intent.body
        if self._cipher is None:
            return False, request
        return True, self._cipher.encrypt(request, _context(id))


def _context(id: int) -> bytes:
    return b"semel.journal.1:%d" % id


def _used_bytes(raw: sqlite3.Connection) -> int:
    used = [raw.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")]
    return int((used[0] - used[1]) * used[2])


def _without_password(url: str) -> str:
    if "@" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
