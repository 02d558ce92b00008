"""From an outbox to an inbox over a real broker, with a relay that is killed and a consumer that dies and fails.

Nothing is lost, nothing is applied twice, and every stream stays in order.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from semel.core.messaging.messages import Message
from semel.messaging import Inbox, Outbox, open_source
from tests.messaging.desks import Desk
from tests.messaging.test_nats import create_stream
from tests.messaging.test_relay_processes import wait_until
from tests.servers import NATSServer

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
STREAMS, EACH = 8, 40
TOTAL = STREAMS * EACH


class Died(BaseException):
    """The process of the consumer ends."""


@pytest.fixture
def urls(nats: NATSServer) -> tuple[str, str]:
    """The URLs to send to, and to consume from. The ledger runs on every broker: `tests/examples/test_ledger.py`."""
    subject = nats.subject()
    asyncio.run(create_stream(nats.url, subject))
    return f"{nats.url}/{subject}", f"{nats.url}/{subject}?durable=ledger"


@contextmanager
def relay(store: str, broker: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "semel", "relay", f"sqlite:///{store}", "--to", broker]
    options = ["--lease", "1s", "--batch", "20", "--pause", "100ms"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_nothing_is_lost_or_repeated_on_the_way(urls: tuple[str, str], open_desk: Callable[[str], Desk]) -> None:
    desk = open_desk("sqlite")
    broker, source = urls
    outbox, inbox = Outbox(desk.store), Inbox(desk.store)
    with desk.transaction(desk.conn):
        for number in range(TOTAL):
            outbox.add(desk.conn, "counted", number, stream=f"s{number % STREAMS}")

    def waiting() -> int:
        return int(desk.sql("SELECT count(*) FROM semel_outbox")[0][0])

    with relay(desk.url, broker):
        wait_until(lambda: waiting() < TOTAL * 3 // 4)  # and here it is killed
    assert waiting()
    with relay(desk.url, broker) as second:
        wait_until(lambda: not waiting())
        second.terminate()
        assert second.wait(30) == 0

    desk.sql("CREATE TABLE IF NOT EXISTS ledger (stream text, sequence integer)")
    desk.sql("DELETE FROM ledger")
    calls = Counter[str]()

    @contextmanager
    def connect() -> Iterator[Any]:
        with ExitStack() as stack:
            connection = desk.connect()
            stack.callback(connection.close)
            yield connection

    @inbox.handler("ledger", connect=connect, ordered=True, pause="50ms", batch=30)
    def apply(message: Message, connection: Any) -> None:
        calls[message.id] += 1
        desk.sql("INSERT INTO ledger VALUES (%s, %s)", message.stream, message.sequence, conn=connection)
        if message.sequence == EACH // 2 and message.stream == "s0" and calls[message.id] == 1:
            raise Died
        if message.sequence % 10 == 3 and calls[message.id] <= 2:
            raise ValueError("this message fails twice")

    with pytest.raises(Died):
        apply.drain(open_source(source), idle="20s")
    report = apply.drain(open_source(source), idle="3s")
    assert report.dead == 0
    applied: dict[str, list[int]] = {}
    for stream, sequence in desk.sql("SELECT stream, sequence FROM ledger ORDER BY rowid"):
        applied.setdefault(stream, []).append(sequence)
    assert applied == {f"s{number}": list(range(1, EACH + 1)) for number in range(STREAMS)}
    assert sum(calls.values()) > TOTAL
