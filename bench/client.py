"""The client: a call through the httpx transport beside httpx alone, and the journal's shared fsync.

The service is another process, which answers without looking, so that what is measured is the client.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

from bench.contest import Contestant, Match
from bench.turns import threads
from semel.client import Journal
from semel.client.flow import Intent
from semel.client.httpx import IdempotencyTransport

ALONE: Final = "httpx alone"
WITH_KEYS: Final = "with keys and retries"
WITH_JOURNAL: Final = "with a journal"
ONE_FSYNC_PER_CALL: Final = "one fsync per call"
SHARED_FSYNC: Final = "Semel"

_SERVICE: Final = """
import asyncio

HEAD = b"HTTP/1.1 201 Created\\r\\nContent-Type: application/json\\r\\nContent-Length: 11\\r\\n\\r\\n"


class Service(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        if data.endswith((b"}", b"\\r\\n\\r\\n")):  # the end of a small request
            self.transport.write(HEAD + b'{"id": 777}')


async def main():
    server = await asyncio.get_running_loop().create_server(Service, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
"""


@contextmanager
def service() -> Iterator[str]:
    """The URL of a service that answers every request."""
    with subprocess.Popen([sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/payments"
        finally:
            process.kill()


@contextmanager
def matches(callers: int) -> Iterator[list[Match]]:
    with ExitStack() as stack:
        url = stack.enter_context(service())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))

        def post(transport: httpx.BaseTransport, name: str, yardstick: bool = False) -> Contestant:
            client = stack.enter_context(httpx.Client(transport=transport))
            body = {"amount": 10, "currency": "EUR"}
            call = threads(lambda _: client.post(url, json=body).raise_for_status(), 1)
            return Contestant(name, "first", 1, call, yardstick=yardstick)

        yield [
            Match("client", "httpx over loopback", [
                post(httpx.HTTPTransport(), ALONE, yardstick=True),
                post(IdempotencyTransport(), WITH_KEYS),
                post(IdempotencyTransport(journal=folder / "calls.db"), WITH_JOURNAL),
            ]),
            Match("client", "the journal: write and clear", [
                _journal(stack, folder / "alone.db", ONE_FSYNC_PER_CALL, callers, shared=False),
                _journal(stack, folder / "shared.db", SHARED_FSYNC, callers, shared=True),
            ]),
        ]  # fmt: skip


def _journal(stack: ExitStack, path: Path, name: str, callers: int, shared: bool) -> Contestant:
    journal = stack.enter_context(Journal(path))
    if not shared:
        journal._combiner._max_batch = 1
    numbers = itertools.count()

    def call(_: int) -> None:
        writing = journal.write(Intent("POST", "http://pay.example/", str(next(numbers)), {}, body=b"{}"), 1000)
        journal.execute(writing)
        journal.settle(writing.id, remove=True)

    return Contestant(name, "first", callers, threads(call, callers), yardstick=not shared)
