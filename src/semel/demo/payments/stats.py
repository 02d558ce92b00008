"""``GET /stats``: what really happened, counted from the tables, and the rows that are counted."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from semel.demo.payments import data
from semel.demo.payments.data import Books
from semel.demo.payments.schemas import Error, Stats
from semel.engine.operation.operation import AsyncOperation

__all__ = ["BooksOfService", "began", "found_done", "router"]

router = APIRouter()


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


@router.get("/stats", response_model=Stats, responses={503: {"model": Error, "description": "The database is away"}})
async def stats(books: BooksOfService) -> dict[str, Any]:
    """How often handlers ran, and what there is. No key needed."""
    return (await books.ask(data.stats()))._asdict()
