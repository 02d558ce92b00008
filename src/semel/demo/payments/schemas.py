"""The request and response models: bounded numbers, bounded texts without control characters.

Control characters are refused because databases differ: PostgreSQL takes no NUL in a text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints
from pydantic.json_schema import SkipJsonSchema

LARGEST_AMOUNT = 1_000_000_000_000
LARGEST_BODY = 8 * 1024 * 1024
LONGEST_DELAY_MS = 30_000
_PAYMENT = r"^pay_[0-9a-f]{32}$"
_PRINTED = r"^[^\x00-\x1f\x7f]*$"


def _number(value: Any) -> Any:
    """Lax integers take "5" and true as well; JSON Schema's take 5 and 5.0."""
    if isinstance(value, (bool, str)):
        raise ValueError("a number is wanted")
    return value


Amount = Annotated[
    int, Field(ge=1, le=LARGEST_AMOUNT, description="in minor units: 1250 is 12.50"), BeforeValidator(_number)
]
Currency = Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=_PRINTED)]
Note = Annotated[str, StringConstraints(max_length=200, pattern=_PRINTED)]
PaymentId = Annotated[str, Path(pattern=_PAYMENT)]
CustomerId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Simulation(BaseModel):
    """Faults to simulate, for the demo only."""

    delay_ms: Annotated[int, Field(ge=0, le=LONGEST_DELAY_MS)] = 0
    """How long the handler takes."""
    status: Annotated[int, Field(ge=200, le=599)] | None = None
    """The status of the answer. From 400 on, the payment is declined and no row is written."""
    crash: bool | Literal["before", "after"] = False
    """Kill this worker process in the first attempt: before the row, or after it is committed (also: true)."""
    body_bytes: Annotated[int, Field(ge=0, le=LARGEST_BODY)] = 0
    """The minimum size of the answer's body."""
    stream: bool = False
    """The answer comes in chunks, without a Content-Length."""


class NewPayment(BaseModel):
    """A payment to be made."""

    amount: Amount
    currency: Currency
    customer: Text
    # Not in the OpenAPI document: a tool that tries everything in it would kill the service.
    simulate: SkipJsonSchema[Simulation | None] = None


class PaymentChange(BaseModel):
    """Changes to a payment. Fields that are missing or null stay as they are."""

    amount: Amount | None = None
    customer: Text | None = None
    note: Note | None = None


class Payment(BaseModel):
    """A payment as it stands."""

    id: str
    amount: int
    currency: str
    customer: str
    note: str
    refunded: int
    version: int
    created: str


class Payments(BaseModel):
    """The newest payments."""

    payments: list[Payment]


class NewRefund(BaseModel):
    """A refund to make; without an amount, all that is left."""

    payment: Annotated[str, StringConstraints(pattern=_PAYMENT)]
    amount: Amount | None = None


class Refund(BaseModel):
    """A refund that was made."""

    id: str
    payment: str
    amount: int
    created: str


class Customer(BaseModel):
    """A customer. A PUT replaces all of it."""

    name: Text
    email: Note = ""


class CustomerRecord(Customer):
    """A customer as stored."""

    id: str


class Stats(BaseModel):
    """What really happened, over all workers and tenants, counted from the service's own tables."""

    executions: int = Field(description="runs of a handler that needs a key; replays run none")
    payments: int
    refunds: int
    customers: int
    taken_over: int = Field(description="executions that took over from an attempt whose worker died")
    found_done: int = Field(description="of these, how many found their row written already, and wrote no second one")


class Error(BaseModel):
    """Why the request failed."""

    detail: str
