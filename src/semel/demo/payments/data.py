"""The business rows: SQL programs that run beside Semel's records, in SQLite or PostgreSQL.

A program yields statements, like Semel's own programs, so it does not depend on a driver. ``Books`` has one connection
and one thread, which is enough for a demo and keeps the event loop free.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypeVar

from semel.demo.evidence import connect
from semel.errors import StoreError, StoreURLError
from semel.sql.program import Program, load_queries
from semel.sql.sync import Connection, run

R = TypeVar("R")
QUERIES: Final = load_queries("semel.demo.payments", "queries.sql")
_TABLES: Final = ("payment_table", "payment_index", "refund_table", "customer_table", "execution_table")


class PaymentRow(NamedTuple):
    """One payment. Rows are never removed, so that a second attempt finds what the first one wrote."""

    id: str
    amount: int
    currency: str
    customer: str
    note: str
    refunded: int
    version: int
    created: str
    changed_by: str
    """The change that made this version: a repeated PATCH recognizes its own work by it."""
    deleted: int


class RefundRow(NamedTuple):
    id: str
    payment: str
    amount: int
    created: str


class Counts(NamedTuple):
    executions: int
    payments: int
    refunds: int
    customers: int
    taken_over: int
    found_done: int


def has_books(store: str) -> bool:
    """Whether the business rows can be in the store's own database."""
    scheme = store.partition(":")[0]
    return scheme == "sqlite" or (scheme in ("postgresql", "postgres") and find_spec("psycopg") is not None)


class Books:
    """One connection to the business rows. Threads take turns."""

    def __init__(self, url: str) -> None:
        if not has_books(url):
            raise StoreURLError(f"the payments are kept in SQLite or PostgreSQL, not in {url.partition(':')[0]!r}")
        self._url = url
        self._sqlite = url.startswith("sqlite:")
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="demo-books")
        self._connection: Any = None

    def prepare(self) -> None:
        """Create the tables, before the workers start."""
        try:
            for name in _TABLES:
                self.run(_one(name))
        finally:
            self._drop()

    async def ask(self, program: Program[R], *, atomic: bool = False) -> R:
        """Run a program without holding up the event loop; ``atomic``: as one transaction."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self.run(program, atomic=atomic))

    def run(self, program: Program[R], *, atomic: bool = False) -> R:
        with self._lock:
            if self._connection is None:
                self._connection = connect(self._url)
            try:
                return self._atomically(program) if atomic else run(program, self._connection)
            except StoreError:
                self._drop()  # it may be broken; the next call opens a new one
                raise

    def close(self) -> None:
        self._thread.shutdown()
        with self._lock:
            self._drop()

    def _atomically(self, program: Program[R]) -> R:
        connection: Connection = self._connection
        connection.execute(QUERIES["begin_on_sqlite" if self._sqlite else "begin"]())
        try:
            result = run(program, connection)
        except StoreError:
            raise  # the connection is dropped, which rolls back
        except BaseException:
            connection.execute(QUERIES["rollback"]())
            raise
        connection.execute(QUERIES["commit"]())
        return result

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.raw.close()
            self._connection = None


# -- programs


def _one(name: str) -> Program[None]:
    yield QUERIES[name]()


def note_execution(key: str, operation: str, attempt: int, what: str = "run") -> Program[None]:
    """Record that a handler runs, before it does anything. ``GET /stats`` counts these rows."""
    yield QUERIES["note_execution"](key=key, operation=operation, attempt=attempt, what=what, worker=os.getpid())


def insert_payment(id: str, tenant: str, amount: int, currency: str, customer: str) -> Program[tuple[PaymentRow, bool]]:
    """Return the row of this id, and whether it is new. However often this runs, there is one row."""
    rows = yield QUERIES["insert_payment"](
        id=id, tenant=tenant, amount=amount, currency=currency, customer=customer, created=_now()
    )
    if rows:
        return PaymentRow(*rows[0]), True
    rows = yield QUERIES["find_payment"](id=id, tenant=tenant)
    return PaymentRow(*rows[0]), False


def find_payment(id: str, tenant: str) -> Program[PaymentRow | None]:
    row = _payment((yield QUERIES["find_payment"](id=id, tenant=tenant)))
    return None if row is None or row.deleted else row


def newest_payments(tenant: str, most: int) -> Program[list[PaymentRow]]:
    rows = yield QUERIES["newest_payments"](tenant=tenant, most=most)
    return [PaymentRow(*row) for row in rows]


def change_payment(row: PaymentRow, tenant: str, changed_by: str) -> Program[PaymentRow | None]:
    """Compare and set: None when the row has another version by now."""
    return _payment(
        (
            yield QUERIES["change_payment"](
                id=row.id,
                tenant=tenant,
                version=row.version,
                amount=row.amount,
                customer=row.customer,
                note=row.note,
                changed_by=changed_by,
            )
        )
    )


def delete_payment(id: str, tenant: str) -> Program[bool]:
    rows = yield QUERIES["delete_payment"](id=id, tenant=tenant)
    return bool(rows)


def find_refund(id: str, tenant: str) -> Program[RefundRow | None]:
    rows = yield QUERIES["find_refund"](id=id, tenant=tenant)
    return RefundRow(*rows[0]) if rows else None


class NothingLeft(Exception):
    """The payment has less than this amount left to refund."""


def insert_refund(id: str, tenant: str, payment: str, amount: int) -> Program[tuple[RefundRow, bool]]:
    """Return the refund of this id, and whether it is new. Run it in a transaction: it writes two rows."""
    rows = yield QUERIES["insert_refund"](id=id, tenant=tenant, payment=payment, amount=amount, created=_now())
    if not rows:
        found = yield QUERIES["find_refund"](id=id, tenant=tenant)
        return RefundRow(*found[0]), False
    if not (yield QUERIES["take_back"](id=payment, tenant=tenant, amount=amount)):
        raise NothingLeft
    return RefundRow(*rows[0]), True


def put_customer(tenant: str, id: str, name: str, email: str) -> Program[None]:
    yield QUERIES["put_customer"](tenant=tenant, id=id, name=name, email=email)


def stats() -> Program[Counts]:
    rows = yield QUERIES["stats"]()
    return Counts(*rows[0])


def _payment(rows: Sequence[Sequence[Any]]) -> PaymentRow | None:
    return PaymentRow(*rows[0]) if rows else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
