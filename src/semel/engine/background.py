"""Work in the background: in a thread of its own for sync programs, and in a task for async ones.

Written by hand as a pair: a thread is joined and does not survive a fork, a task is awaited and can be cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from semel.engine.forking import survive_forks


class BackgroundThread:
    """Runs a function in a daemon thread. The function returns soon after ``stopping`` is set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()
        survive_forks(self._reset)

    def _reset(self) -> None:
        """Begin without a thread, also in a forked child: the thread stayed in the parent."""
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start the thread. Does nothing if it runs."""
        if self._thread is None:
            # A new event: a thread that outlived the timeout of stop() must still end.
            self.stopping = threading.Event()
            self._thread = threading.Thread(target=work, name=self._name, daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Set ``stopping``, and wait for the thread to end, for at most ``timeout`` seconds."""
        self.stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


class BackgroundTask:
    """Runs a coroutine in a task of the running event loop. It returns soon after ``stopping`` is set."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.stopping = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    def start(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start the task. Does nothing if it runs."""
        if self._task is None:
            # A new event: the former one may belong to another event loop, or to a task that is still ending.
            self.stopping = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(work(), name=self._name)

    async def stop(self, timeout: float | None = None) -> None:
        """Set ``stopping``, and wait for the task to end. Cancel it after ``timeout`` seconds."""
        self.stopping.set()
        task, self._task = self._task, None
        if task is None:
            return
        # With 0 it is cancelled before anything is awaited. A caller that is cancelled itself would leave behind a task
        # that looks at no ``stopping``, such as one that renews the messages of a source.
        if timeout != 0:
            done, _ = await asyncio.wait([task], timeout=timeout)
            if done:
                return
        task.cancel()
        await asyncio.wait([task])
