"""Waiting in an event loop: for a flight to change, for work that must not be cancelled, and for threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from semel.core.flows import Raised, Returned
from semel.engine.drive import Drive
from semel.engine.flights import Flight

__all__ = ["Late", "change", "in_thread", "shielded"]

T = TypeVar("T")


class Late(BaseException):
    """A thread was let finish although its caller was cancelled: it cannot be stopped, and it holds the key."""

    def __init__(self, outcome: Returned | Raised, cancelled: asyncio.CancelledError) -> None:
        super().__init__()
        self.outcome = outcome
        self.cancelled = cancelled


async def change(flight: Flight, seconds: float | None = None) -> None:
    """Wait for the flight's next change."""
    changed = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not changed.done():
            changed.set_result(None)

    flight.wait(wake)
    try:
        await asyncio.wait([changed], timeout=seconds)
    finally:
        flight.leave(wake)


async def shielded(work: Awaitable[T], drive: Drive) -> T:
    """Wait for it to the end, whoever cancels us; the cancellation is kept for when the record is settled."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as cancelled:
            if task.cancelled():
                raise
            drive.cancelled = cancelled
        except Exception:
            break  # the task's own error: raised below
    return task.result()


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A plain function, in a thread. A thread cannot be cancelled: it is waited for, and what came of it is kept."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break  # the function's own error: seen below
    if cancelled is not None:
        failure = task.exception()
        raise Late(Returned(task.result()) if failure is None else Raised(failure), cancelled)
    result = task.result()
    return await result if inspect.isawaitable(result) else result
