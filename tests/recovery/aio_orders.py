"""The resumer of the same orders under an async guard."""

from __future__ import annotations

import asyncio
import os

from semel import INJECTED, AsyncOperation, AsyncSemel, Policy, open_async_store
from tests.recovery.orders import Order, effect

guard = AsyncSemel(open_async_store(os.environ["ORDERS_STORE"]), policy=Policy(lease="1s"), sweep_every=None)


@guard.once(key="order.id", operation="ship", resumable=True)
async def ship(order: Order, op: AsyncOperation = INJECTED) -> str:
    await op.step("charge", awaited, "charged", order, op.derive("charge"))
    await op.step("book", awaited, "booked", order, op.derive("book"))
    return f"shipped {' and '.join(order.lines)}"


async def awaited(kind: str, order: Order, key: str) -> None:
    await asyncio.to_thread(effect, kind, order, key)
