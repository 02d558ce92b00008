"""The order service: the order, its event and the stored response commit together."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI
from pydantic import BaseModel

from semel import AsyncOperation, AsyncPostgresStore, AsyncSemel
from semel.http.fastapi import idempotent, install

DATABASE = os.environ["DATABASE"]
guard = AsyncSemel(AsyncPostgresStore(DATABASE), tenant="shop")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await guard.close()


@asynccontextmanager
async def connect() -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(DATABASE, autocommit=True) as connection:
        yield connection


app = FastAPI(lifespan=lifespan)
install(app, guard=guard)


class Order(BaseModel):
    customer: str
    cents: int


@app.post("/orders", status_code=201)
@idempotent(connection=connect, connection_parameter="connection")
async def place(order: Order, connection: psycopg.AsyncConnection, op: AsyncOperation) -> dict[str, str]:
    id = f"o-{op.derive('order')[:6]}"  # the same in every attempt
    await connection.execute("INSERT INTO orders VALUES (%s, %s, %s)", (id, order.customer, order.cents))
    event = await op.emit("order.placed", {"order": id, **order.model_dump()}, stream=id, destination="orders")
    print(f"orders    {id} placed with the key {op.key}; emits order.placed {event[:6]}", flush=True)
    return {"order": id}
