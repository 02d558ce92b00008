"""Run the parts of a ``Together``, in threads or in tasks. Both are written by hand: they start and end differently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

PATIENCE: Final = 90.0
"""Seconds after which the proof fails if the store has not answered."""


def run_together(parts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each part in a thread. All of them start at one barrier."""
    answers: list[Any] = [None] * len(parts)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(parts))

    def run(index: int) -> None:
        try:
            barrier.wait(PATIENCE)
            answers[index] = parts[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"the store did not answer within {PATIENCE:.0f} s"
    if errors:
        raise errors[0]
    return answers


async def run_together_async(parts: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Run each part in a task."""
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*(part() for part in parts), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
