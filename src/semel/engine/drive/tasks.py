"""Waiting in an event loop: for a flight to change, for work that must not be cancelled, and for threads."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from semel.core.call import Raised, Returned
from semel.engine.drive.drive import Drive
from semel.engine.drive.flights import Flight

__all__ = ["Late", "change", "in_thread", "shielded", "started"]

T = TypeVar("T")


class Late(BaseException):
    """A thread was let finish although its caller was cancelled: it cannot be stopped, and it holds the key."""

    def __init__(self, outcome: Returned | Raised, cancelled: asyncio.CancelledError) -> None:
        super().__init__()
        self.outcome = outcome
        self.cancelled = cancelled


def started(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
    """A task that has begun: it runs up to where it first waits, so that work which never does costs no turn of the
    loop. A loop that makes its tasks itself is left to it.
    """
    if loop.get_task_factory() is not None:
        return loop.create_task(work)
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, eager_start=True)
    else:  # spelled out for type checkers, which read this for one version at a time
        return _with_first_step(work, loop)


def _with_first_step(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
    """What ``eager_start`` does, for Python 3.11, whose insides no longer change: a new task asks its loop to take the
    first step soon, and that is heard in the loop's place. A loop that cannot be asked so makes the task as ever.
    """
    outer, soon, kind = asyncio.current_task(loop), loop.call_soon, type(loop)
    if outer is None or soon != kind.call_soon.__get__(loop, kind):  # others listen in on it
        return loop.create_task(work)
    steps: list[tuple[Callable[[], object], Context]] = []

    def hear(callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        task = getattr(callback, "__self__", None)
        if context is None or not isinstance(task, asyncio.Task) or task.get_coro() is not work:
            return soon(callback, *args, context=context)  # of a finalizer, or another thread
        steps.append((callback, context))
        return None

    try:
        loop.call_soon = hear  # type: ignore[method-assign, assignment]
    except AttributeError:
        return loop.create_task(work)
    try:
        task = loop.create_task(work)
    finally:
        del loop.call_soon
    for step, context in steps:
        asyncio._leave_task(loop, outer)
        try:
            context.run(step)
        finally:
            asyncio._enter_task(loop, outer)
    return task


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
