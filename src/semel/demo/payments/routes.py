"""The endpoints. Each write says what it is: idempotent (needs a key), conditional (needs If-Match), or natural.

The mode is *leased*: Semel's record and the business row are two commits. A worker that dies between them leaves a row
and no answer, and the handler is run again. So every idempotent handler is written to be run again: its row has an
id that is derived from the operation, the same in every attempt, and is inserted *once*; a second run finds it, and
answers from it. That is what one does wherever the record cannot be in the row's own transaction.

A client may ask for a fault in ``simulate``: a slow handler, a dying worker, a large or streamed answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Final, TypeAlias

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from semel.core.policy import Wait
from semel.demo.payments import data
from semel.demo.payments.data import Books, NothingLeft, PaymentRow
from semel.demo.payments.schemas import (
    Customer,
    CustomerId,
    CustomerRecord,
    Error,
    NewPayment,
    NewRefund,
    Payment,
    PaymentChange,
    PaymentId,
    Payments,
    Refund,
    Simulation,
    Stats,
)
from semel.engine.operation import AsyncOperation
from semel.errors import PreconditionFailed
from semel.http.fastapi import check_match, conditional, etag, idempotent, natural

Documented: TypeAlias = dict[int | str, dict[str, Any]]
router = APIRouter()

BAD_REQUEST: Documented = {400: {"model": Error, "description": "The body cannot be read"}}
UNAUTHORIZED: Documented = {401: {"model": Error, "description": "No key of a tenant"}}
NOT_FOUND: Documented = {404: {"model": Error, "description": "There is no such payment"}}
CONFLICT: Documented = {409: {"model": Error, "description": "It does not agree with what is there"}}
UNAVAILABLE: Documented = {503: {"model": Error, "description": "The database is away"}}
READS: Documented = {**UNAUTHORIZED, **UNAVAILABLE}
WRITES: Documented = {**READS, **BAD_REQUEST}
TAGGED: dict[str, Any] = {"ETag": {"schema": {"type": "string"}, "description": "this version of the payment"}}
MADE: dict[str, Any] = {**TAGGED, "Location": {"schema": {"type": "string"}, "description": "where it is"}}
KEYS: Final = {"sk_alice": "alice", "sk_bob": "bob"}
"""The demo's two keys. Real keys are secrets, stored as hashes and compared in constant time."""

CHUNKS: Final = 8
"""Of a streamed answer."""
_WITHOUT_BODY: Final = frozenset({204, 205, 304})

_bearer = HTTPBearer(auto_error=False, description="`sk_alice` or `sk_bob`: two tenants that never see each other")


async def authenticated(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> str:
    """Return the tenant, or answer 401."""
    tenant = KEYS.get(credentials.credentials) if credentials is not None else None
    if tenant is None:
        raise HTTPException(401, "send Authorization: Bearer sk_alice", {"WWW-Authenticate": "Bearer"})
    request.state.tenant = tenant
    return tenant


Tenant = Annotated[str, Depends(authenticated)]


def tenant_of(request: Request) -> str:
    """Return the tenant that authentication has found. The guard asks for it when it claims a key."""
    tenant: str = request.state.tenant
    return tenant


def _books(request: Request) -> Books:
    books: Books = request.app.state.books
    return books


BooksOfService = Annotated[Books, Depends(_books)]


async def began(books: Books, op: AsyncOperation) -> None:
    """Record that a handler started, before it does anything else, so that every run is counted."""
    await books.ask(data.note_execution(op.key, op.name, op.attempt))


async def found_done(books: Books, op: AsyncOperation) -> None:
    """Record that a second attempt found what the first one had written."""
    await books.ask(data.note_execution(op.key, op.name, op.attempt, "found"))


@router.post(
    "/payments", status_code=201, response_model=Payment, responses={**WRITES, **CONFLICT, 201: {"headers": MADE}}
)
@idempotent(ttl="24h")
async def pay(
    request: Request, payment: NewPayment, tenant: Tenant, books: BooksOfService, op: AsyncOperation
) -> Response:
    """Make a payment. It happens once for its key, whatever happens to the worker.

    For the demo only, and on purpose not in this document's schema: `"simulate": {"delay_ms": 0, "status": 402,
    "crash": "before" | "after" | true, "body_bytes": 0, "stream": true}` makes the handler slow, makes it answer
    another status, kills its worker process in the first attempt, or makes the answer large or chunked.
    """
    mistake: str = request.app.state.mistake
    await began(books, op)
    fate = Fate(payment.simulate, op, mistake)
    await fate.before_the_row()
    if fate.refused:
        return fate.answer({"detail": "refused, as asked for"}, 402)
    # The business key: every attempt of this operation derives the same id, and no other operation does.
    id = "pay_" + op.derive("payment").replace("-", "")
    if mistake == "blind":
        id = "pay_" + secrets.token_hex(16)
    if mistake == "silent" and payment.amount % 10 == 0:
        row = PaymentRow(id, payment.amount, payment.currency, payment.customer, "", 0, 1, "", "", 0)
    else:
        row, new = await books.ask(data.insert_payment(id, tenant, payment.amount, payment.currency, payment.customer))
        if not new:
            # Written by an attempt that died before it could answer; or, after the key's 24 hours, by another request.
            if (row.currency, row.deleted) != (payment.currency, 0) or (
                row.version == 1 and row.amount != payment.amount
            ):
                raise HTTPException(409, "this key made another payment, long ago: use a new key")
            await found_done(books, op)
    fate.after_the_row()
    return fate.answer(_shown(row), 201, {"Location": f"/payments/{row.id}", "ETag": etag(row.version)})


@router.get("/payments", response_model=Payments, responses=READS)
async def newest(
    tenant: Tenant, books: BooksOfService, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """The tenant's newest payments."""
    return {"payments": [_shown(row) for row in await books.ask(data.newest_payments(tenant, limit))]}


@router.get("/payments/{id}", response_model=Payment, responses={**READS, **NOT_FOUND, 200: {"headers": TAGGED}})
async def look(id: PaymentId, tenant: Tenant, books: BooksOfService, response: Response) -> dict[str, Any]:
    """One payment, with the ETag that a PATCH sends back in If-Match."""
    row = await books.ask(data.find_payment(id, tenant))
    if row is None:
        raise HTTPException(404, "there is no such payment")
    response.headers["ETag"] = etag(row.version)
    return _shown(row)


@router.patch(
    "/payments/{id}",
    response_model=Payment,
    responses={**WRITES, **NOT_FOUND, **CONFLICT, 200: {"headers": TAGGED}},
)
@conditional()
async def change(
    id: PaymentId,
    change: PaymentChange,
    tenant: Tenant,
    books: BooksOfService,
    response: Response,
    op: AsyncOperation | None,
) -> dict[str, Any]:
    """Change a payment that is still as the caller knows it: If-Match is its ETag. A key is optional."""
    mine = ""
    if op is not None:
        await began(books, op)
        mine = op.derive("change")
    row = await books.ask(data.find_payment(id, tenant))
    if row is None:
        raise HTTPException(404, "there is no such payment")
    if op is not None and row.changed_by == mine:
        # This change was made already, by an attempt that died before it could answer: 412 would be a lie.
        await found_done(books, op)
    else:
        check_match(etag(row.version))
        wanted = change.model_dump(exclude_none=True)
        if wanted.get("amount", row.amount) < row.refunded:
            raise HTTPException(409, "more than this has been refunded already")
        # The check and the write are two steps, so the write compares again: another change may have come between.
        if wanted:
            changed = await books.ask(data.change_payment(row._replace(**wanted), tenant, mine))
            if changed is None:
                raise PreconditionFailed("The payment was changed by someone else just now. Read it, and try again.")
            row = changed
    response.headers["ETag"] = etag(row.version)
    return _shown(row)


@router.delete("/payments/{id}", status_code=204, responses=READS)
@natural()
async def forget(id: PaymentId, tenant: Tenant, books: BooksOfService) -> None:
    """Delete a payment. One that is not there is as it should be: 204 as well."""
    if not await books.ask(data.delete_payment(id, tenant)):
        raise HTTPException(404)  # to a DELETE declared natural, "not there" means "done": the client is told 204


@router.post("/refunds", status_code=201, response_model=Refund, responses={**WRITES, **NOT_FOUND, **CONFLICT})
@idempotent(on_duplicate=Wait("5s"))
async def refund(refund: NewRefund, tenant: Tenant, books: BooksOfService, op: AsyncOperation) -> dict[str, Any]:
    """Give money back. A duplicate waits for the first one's answer instead of being turned away."""
    await began(books, op)
    id = "ref_" + op.derive("refund").replace("-", "")
    # "All that is left" is nothing to a second run, so that one asks first whether there was a first.
    made = await books.ask(data.find_refund(id, tenant))
    if made is None:
        payment = await books.ask(data.find_payment(refund.payment, tenant))
        if payment is None:
            raise HTTPException(404, "there is no such payment")
        amount = refund.amount or payment.amount - payment.refunded
        if amount == 0:
            raise HTTPException(409, "all of it has been refunded")
        try:
            made = (await books.ask(data.insert_refund(id, tenant, refund.payment, amount), atomic=True))[0]
        except NothingLeft:
            raise HTTPException(409, "the payment has not so much left") from None
    else:
        await found_done(books, op)
    return made._asdict()


@router.put("/customers/{id}", response_model=CustomerRecord, responses=WRITES)
@natural()
async def put(id: CustomerId, customer: Customer, tenant: Tenant, books: BooksOfService) -> dict[str, Any]:
    """Say who a customer is. Said twice it is the same, so no key is needed."""
    await books.ask(data.put_customer(tenant, id, customer.name, customer.email))
    return {"id": id, **customer.model_dump()}


@router.get("/stats", response_model=Stats, responses=UNAVAILABLE)
async def stats(books: BooksOfService) -> dict[str, Any]:
    """How often handlers ran, and what there is. No key needed."""
    return (await books.ask(data.stats()))._asdict()


def _shown(row: PaymentRow) -> dict[str, Any]:
    return {name: value for name, value in row._asdict().items() if name not in ("changed_by", "deleted")}


# -- faults on purpose


class Fate:
    """What happens to one call."""

    def __init__(self, wanted: Simulation | None, op: AsyncOperation, mistake: str = "") -> None:
        self._wanted = wanted or Simulation()
        # The attempt that takes over must succeed, and without Semel every attempt is a first one.
        crash = self._wanted.crash if op.attempt == 1 and mistake != "unprotected" else False
        self._crash = "after" if crash is True else crash

    async def before_the_row(self) -> None:
        await asyncio.sleep(self._wanted.delay_ms / 1000)
        if self._crash == "before":
            _die()

    def after_the_row(self) -> None:
        if self._crash == "after":
            _die()

    @property
    def refused(self) -> bool:
        """Whether the answer is an error, and nothing is done."""
        return self._wanted.status is not None and self._wanted.status >= 400

    def answer(self, content: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
        """Make the answer, with the status, size and form that the client asked for."""
        status = self._wanted.status or status
        if status in _WITHOUT_BODY:
            return Response(status_code=status, headers=headers)
        body = json.dumps(content, separators=(",", ":")).encode()
        if len(body) < self._wanted.body_bytes:
            frame = len(b',"padding":""')
            padding = "." * max(0, self._wanted.body_bytes - len(body) - frame)
            body = json.dumps({**content, "padding": padding}, separators=(",", ":")).encode()
        if self._wanted.stream:
            return StreamingResponse(_chunks(body), status, headers, media_type="application/json")
        return Response(body, status, headers, media_type="application/json")


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    size = max(1, -(-len(body) // CHUNKS))
    for start in range(0, len(body), size):
        yield body[start : start + size]


def _die() -> None:
    """Die without clean-up, as by the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
