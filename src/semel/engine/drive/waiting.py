"""Waiting in an event loop: for work that must not be cancelled, for threads, and tasks that start at once."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from semel.core.call import Raised, Returned
from semel.engine.drive.execution import Execution

T = TypeVar("T")
EAGER: Final[bool] = sys.version_info >= (3, 12)
"""Whether ``start_task`` may run a task at once. Otherwise it is the same as ``loop.create_task``."""


class LateResult(BaseException):
    """Raised when a thread has ended whose caller was cancelled before. A thread cannot be stopped."""

    def __init__(self, ending: Returned | Raised, cancelled: asyncio.CancelledError) -> None:
        super().__init__()
        self.ending = ending
        self.cancelled = cancelled


def start_task(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
    """Create a task. From Python 3.12 on it runs at once, up to where it first waits: work that never waits then costs
    no turn of the loop.

    A loop with a task factory creates the task itself, and it starts at the next turn, as it does in Python 3.11.
    """
    if sys.version_info >= (3, 12) and loop.get_task_factory() is None:
        return asyncio.Task(work, loop=loop, eager_start=True)
    return loop.create_task(work)


async def shielded(work: Awaitable[T], execution: Execution) -> T:
    """Wait for ``work`` to end even if we are cancelled. The cancellation is noted for when the record is settled."""
    task = asyncio.ensure_future(work)
    execution.cancelled = await outlast(task) or execution.cancelled
    return task.result()


async def outlast(task: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until the task has ended, even if we are cancelled meanwhile. Returns our cancellation, if there was one.

    Whether the task itself has returned, failed or was cancelled is for the caller to see.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled():
                cancelled = error
        except BaseException:
            if not task.done():
                raise  # not the task's own error
    return cancelled


async def run_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a plain function in a thread. A thread cannot be cancelled: if we are, raise LateResult when it has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled = await outlast(task)
    if cancelled is not None:
        failure = task.exception()
        raise LateResult(Returned(task.result()) if failure is None else Raised(failure), cancelled)
    result = task.result()
    return await result if inspect.isawaitable(result) else result
