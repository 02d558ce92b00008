"""Waiting in an event loop: for work that must not be cancelled, for threads, and tasks that start at once."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from semel.core.call import Raised, Returned
from semel.engine.drive.execution import Execution

__all__ = ["LateResult", "run_in_thread", "shielded", "start_task"]

T = TypeVar("T")


class LateResult(BaseException):
    """Raised when a thread has ended whose caller was cancelled before. A thread cannot be stopped."""

    def __init__(self, ending: Returned | Raised, cancelled: asyncio.CancelledError) -> None:
        super().__init__()
        self.ending = ending
        self.cancelled = cancelled


def start_task(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
    """Create a task and run it up to where it first waits: work that never waits then costs no turn of the loop.

    A loop with a task factory creates the task itself, and it starts at the next turn.
    """
    if loop.get_task_factory() is not None:
        return loop.create_task(work)
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, eager_start=True)
    else:  # spelled out for type checkers, which read this for one version at a time
        return _with_first_step(work, loop)


def _with_first_step(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
    """What ``eager_start`` does, for Python 3.11, whose internals no longer change.

    A new task calls ``loop.call_soon`` with its first step. That method is replaced for a moment, so that the step can
    be run here. If the loop does not allow that, the task starts at the next turn.
    """
    outer, soon, kind = asyncio.current_task(loop), loop.call_soon, type(loop)
    if outer is None or soon != kind.call_soon.__get__(loop, kind):  # somebody else has replaced it
        return loop.create_task(work)
    steps: list[tuple[Callable[[], object], Context]] = []

    def catch(callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        task = getattr(callback, "__self__", None)
        if context is None or not isinstance(task, asyncio.Task) or task.get_coro() is not work:
            return soon(callback, *args, context=context)  # a call by a finalizer, or by another thread
        steps.append((callback, context))
        return None

    try:
        loop.call_soon = catch  # type: ignore[method-assign, assignment]
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


async def shielded(work: Awaitable[T], execution: Execution) -> T:
    """Wait for ``work`` to end even if we are cancelled. The cancellation is noted for when the record is settled."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as cancelled:
            if task.cancelled():
                raise
            execution.cancelled = cancelled
        except Exception:
            break  # the task's own error: raised below
    return task.result()


async def run_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a plain function in a thread. A thread cannot be cancelled: if we are, raise LateResult when it has ended."""
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
        raise LateResult(Returned(task.result()) if failure is None else Raised(failure), cancelled)
    result = task.result()
    return await result if inspect.isawaitable(result) else result
