"""A payments service whose writes happen once. Run it: uvicorn --app-dir examples/payments app:app --port 8080

Two tenants, `sk_alice` and `sk_bob`. Records and business rows are in one SQLite file (PAYMENTS_DB, or payments.db).
Semel's record and the row are two commits here. So the row's id is derived from the operation, and is the same in every
attempt. If a worker dies between the two commits, the next attempt finds the row and does not insert a second one.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Path, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field

from semel import AsyncSemel, AsyncSQLiteStore, Operation, Wait
from semel.errors import PreconditionFailed
from semel.http.fastapi import check_match, conditional, etag, idempotent, install, natural

FILE = os.environ.get("PAYMENTS_DB", "payments.db")
TENANTS = {"sk_alice": "alice", "sk_bob": "bob"}
COLUMNS = "id, amount, currency, customer, refunded, version"
TABLES = """
    CREATE TABLE IF NOT EXISTS payment (
        id TEXT PRIMARY KEY, tenant TEXT, amount INT, currency TEXT, customer TEXT, refunded INT DEFAULT 0,
        version INT DEFAULT 1, changed_by TEXT DEFAULT '', deleted INT DEFAULT 0, CHECK (refunded <= amount));
    CREATE TABLE IF NOT EXISTS refund (id TEXT PRIMARY KEY, payment TEXT, amount INT);
    CREATE TABLE IF NOT EXISTS customer (tenant TEXT, id TEXT, name TEXT, PRIMARY KEY (tenant, id));
"""
Amount = Annotated[int, Field(ge=1, le=10**12, description="in minor units: 1250 is 12.50")]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")]
Id = Annotated[str, Path(pattern=r"^[\w-]{1,64}$")]


class NewPayment(BaseModel):
    amount: Amount
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    customer: Name


class Change(BaseModel):
    customer: Name


class NewRefund(BaseModel):
    payment: Name
    amount: Amount


class Customer(BaseModel):
    name: Name


def tenant(request: Request, bearer: Annotated[Any, Depends(HTTPBearer(auto_error=False))]) -> str:
    """Return who is calling. A dependency runs before a key is claimed, so a stranger never gets a replay."""
    known: HTTPAuthorizationCredentials | None = bearer
    name = TENANTS.get(known.credentials) if known else None
    if name is None:
        raise HTTPException(401, headers={"WWW-Authenticate": "Bearer"})
    request.state.tenant = name
    return name


def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(FILE, timeout=20, check_same_thread=False, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        yield connection
    finally:
        connection.close()


Tenant = Annotated[str, Depends(tenant)]
Database = Annotated[sqlite3.Connection, Depends(database)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> Any:
    yield
    await guard.close()


guard = AsyncSemel(AsyncSQLiteStore(FILE))
app = FastAPI(title="Payments", lifespan=lifespan)
install(app, guard=guard, tenant=lambda request: request.state.tenant)
with sqlite3.connect(FILE) as _first:
    _first.executescript(TABLES)
_first.close()


def find(db: sqlite3.Connection, id: str, tenant: str) -> sqlite3.Row:
    row = db.execute("SELECT * FROM payment WHERE id = ? AND tenant = ? AND NOT deleted", (id, tenant)).fetchone()
    if row is None:
        raise HTTPException(404, "there is no such payment")
    return row  # type: ignore[no-any-return]


def shown(row: sqlite3.Row) -> dict[str, Any]:
    return {name: row[name] for name in COLUMNS.split(", ")}


@app.post("/payments", status_code=201)
@idempotent(ttl="24h")
def pay(payment: NewPayment, tenant: Tenant, db: Database, op: Operation) -> dict[str, Any]:
    id = "pay_" + op.derive("payment")
    db.execute(
        "INSERT INTO payment (id, tenant, amount, currency, customer) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (id, tenant, payment.amount, payment.currency, payment.customer),
    )
    return shown(db.execute("SELECT * FROM payment WHERE id = ?", (id,)).fetchone())


@app.get("/payments")
def newest(tenant: Tenant, db: Database) -> list[dict[str, Any]]:
    rows = db.execute(f"SELECT {COLUMNS} FROM payment WHERE tenant = ? AND NOT deleted ORDER BY rowid DESC", (tenant,))
    return [dict(row) for row in rows.fetchmany(100)]


@app.get("/payments/{id}")
def look(id: Id, tenant: Tenant, db: Database, response: Response) -> dict[str, Any]:
    row = find(db, id, tenant)
    response.headers["ETag"] = etag(row["version"])
    return shown(row)


@app.patch("/payments/{id}")
@conditional()
def change(
    id: Id, change: Change, tenant: Tenant, db: Database, response: Response, op: Operation | None
) -> dict[str, Any]:
    row = find(db, id, tenant)
    mine = op.derive("change") if op else ""
    if not mine or row["changed_by"] != mine:  # otherwise a dead attempt has made this change, and 412 would be wrong
        check_match(etag(row["version"]))
        cursor = db.execute(  # compares again: someone else may have written since the row was read
            "UPDATE payment SET customer = ?, changed_by = ?, version = version + 1 WHERE id = ? AND version = ?",
            (change.customer, mine, id, row["version"]),
        )
        if cursor.rowcount == 0:
            raise PreconditionFailed("The payment was changed by someone else just now. Read it, and try again.")
    return look(id, tenant, db, response)


@app.delete("/payments/{id}", status_code=204)
@natural()
def forget(id: Id, tenant: Tenant, db: Database) -> None:
    find(db, id, tenant)  # 404 means that it is gone, as a DELETE wants: the client gets 204
    db.execute("UPDATE payment SET deleted = 1, version = version + 1 WHERE id = ?", (id,))


@app.post("/refunds", status_code=201)
@idempotent(on_duplicate=Wait("5s"))
def refund(refund: NewRefund, tenant: Tenant, db: Database, op: Operation) -> dict[str, Any]:
    find(db, refund.payment, tenant)
    id = "ref_" + op.derive("refund")
    try:
        with db:
            db.execute("BEGIN IMMEDIATE")
            values = (id, refund.payment, refund.amount)
            if db.execute("INSERT INTO refund VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values).rowcount:
                db.execute(
                    "UPDATE payment SET refunded = refunded + ?, version = version + 1 WHERE id = ?",
                    (refund.amount, refund.payment),
                )
    except sqlite3.IntegrityError:
        raise HTTPException(409, "the payment has not so much left") from None
    return {"id": id, **refund.model_dump()}


@app.put("/customers/{id}")
@natural()
def put(id: Id, customer: Customer, tenant: Tenant, db: Database) -> dict[str, str]:
    values = (tenant, id, customer.name)
    db.execute("INSERT INTO customer VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET name = excluded.name", values)
    return {"id": id, "name": customer.name}
