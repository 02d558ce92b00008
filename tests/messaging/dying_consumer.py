"""A consumer that is killed where it hurts most, and started again until it lives: see ``test_killed_consumers.py``.

It consumes a Redis stream until nothing is left. It kills itself once after the effect of ``m-2`` and before its
commit, once between a commit and its acknowledgement, and always while it applies ``poison``. A process that only forks
starts it, because a new interpreter for each life would take most of the time. Prints how often it was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from semel import Policy, Semel
from semel.core.messaging.messages import Message
from semel.messaging.brokers.redis_streams import RedisStreamsSource
from semel.messaging.inbox import Inbox
from semel.messaging.ports import Delivery
from tests.messaging.desks import Desk


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingSource(RedisStreamsSource):
    folder: Path

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if any(delivery.message.id == "m-3" for delivery in deliveries):
            die_once(self.folder / "acknowledge")
        await super().acknowledge(deliveries)


def main(dialect: str, url: str, redis: str, folder: str, kind: str = "") -> None:
    """
    :param kind: ``"batches"``: the handler takes many messages. ``"guard"``: it uses the operations of a guard.
    """
    desk = Desk(dialect, url)
    inbox = Inbox(desk.store)

    def apply(message: Message, connection: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"INSERT INTO applied (id) VALUES ('{message.id}')")
        if message.id == "m-2":
            die_once(Path(folder) / "effect")
        if message.id == "poison":
            die()

    def apply_all(messages: list[Message], connection: Any) -> None:
        for message in messages:
            apply(message, connection)

    def apply_guarded(message: Message, op: Any) -> None:
        if message.id == "m-2":
            die_once(Path(folder) / "effect")
        if message.id == "poison":
            die()
        desk.sql(f"INSERT INTO applied (id) VALUES ('{message.id}')")

    settings: dict[str, Any] = {"tries": 2, "pause": 0.01}
    if kind == "guard":
        # The lease of the operation that was killed lasts for some deliveries of its message.
        guard = Semel(desk.store, policy=Policy(lease=0.3), sweep_every=None)
        consumer = inbox.handler("ledger", guard=guard, **settings)(apply_guarded)
    else:
        settings |= {"connect": lambda: contextlib.closing(desk.connect()), "in_batches": kind == "batches"}
        consumer = inbox.handler("ledger", **settings)(apply_all if kind == "batches" else apply)

    source = DyingSource(redis, stream="orders", group="ledger", consumer="one", ordered=False)
    source.folder = Path(folder)
    consumer.drain(source, idle=0.1 if kind != "guard" else 1)
    desk.close()


def live_until_done(main: Callable[..., None], *arguments: str) -> int:
    """Run it in a process, and in another one each time that it was killed. Returns how often it was."""
    deaths = 0
    while True:
        child = os.fork()
        if not child:
            main(*arguments)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            assert status == 0
            return deaths
        deaths += 1
        assert deaths < 10


if __name__ == "__main__":
    print(live_until_done(main, *sys.argv[1:]))
