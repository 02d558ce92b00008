"""A broker in memory that records what it takes. Tests say what it answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from semel.core.messaging.messages import Message, Result, Sent
from semel.messaging.ports import Capabilities


class RecordingBroker:
    """Takes messages from the event loop of one relay; any thread may look at them."""

    def __init__(self, *, ordered: bool = True, pipelines: bool = True, largest: int = 1 << 20) -> None:
        self.capabilities = Capabilities("Recording", ordered=ordered, pipelines=pipelines, largest=largest)
        self.taken: list[Message] = []
        self.calls = 0
        self.closed = 0
        self.answer: Callable[[Message], Result] = lambda message: Sent()
        self.before: Callable[[], Any] = lambda: None
        self._changed = threading.Condition()

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        assert time.monotonic() < deadline
        self.calls += 1
        waited = self.before()
        if waited is not None:
            await waited
        await asyncio.sleep(0)
        results: list[Result] = []
        ended: dict[str, Result] = {}  # as a broker that pipelines: what follows a failure fails
        for message in messages:
            results.append(ended.get(message.stream) or self.answer(message))
            if message.stream and not isinstance(results[-1], Sent):
                ended[message.stream] = results[-1]
        with self._changed:
            self.taken += [each for each, result in zip(messages, results, strict=True) if isinstance(result, Sent)]
            self._changed.notify_all()
        return results

    async def close(self) -> None:
        self.closed += 1

    def ids(self) -> list[str]:
        return [message.id for message in self.taken]

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.taken) >= count, 30), f"{len(self.taken)} of {count}"

    async def wait_for_async(self, count: int) -> None:
        await asyncio.to_thread(self.wait_for, count)
