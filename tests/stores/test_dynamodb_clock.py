"""DynamoDB: proofs of the conformance suite by the clock that a store has by default, the service's; and none told.

The suite itself (test_dynamodb.py) moves a clock of its own. Here time passes as it does, and what is judged by it is
judged by what two stores of one table know of the service's clock, each by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from semel import AsyncSemel, ConfigurationError, Semel
from semel.core.ops import Claim, Claimed, Existing, Lookup
from semel.core.states import Takeover
from semel.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore, migrate
from semel.testing import conformance
from tests.servers import DynamoDBServer

PROOFS = {
    "claim": ("a_record_is_shown_to_every_instance", "the_same_takeover_sent_again_is_answered_alike"),
    "lease": (
        "a_renewed_lease_outlives_its_first_end",
        "a_lost_owner_may_still_say_that_it_happened",
        "let_go_with_its_steps_the_next_try_takes_over_at_once",
    ),
    "fencing": ("a_replaced_owner_is_refused_across_instances",),
    "replay": (
        "a_completion_sent_again_is_answered_alike",
        "the_answer_of_a_later_attempt_comes_back",
        "a_completion_is_seen_by_every_instance_at_once",
    ),
    "steps": ("steps_come_back_to_another_instance",),
}
"""Those that do not ask for more than is known: of some the times must be exact, and here they are to a second."""


def chosen() -> list[conformance.Proof]:
    found = [
        proof for family in conformance.FAMILIES for proof in family.proofs if proof.name in PROOFS.get(family.name, ())
    ]
    assert len(found) == sum(map(len, PROOFS.values())), "a proof has another name now"
    return found


BOUND = 30.0


class PassingTime:
    """The clock of a stage: waits until the time has passed for all stores, by what each knows of the service's."""

    def __init__(self) -> None:
        self.stores: list[Any] = []

    def opened(self, store: Any) -> Any:
        self.stores.append(store)
        return store

    def advance(self, seconds: float) -> None:
        clocks = [store._settings.clock for store in self.stores]
        known = [clock for clock in clocks if clock.known()]
        # One that has heard nothing yet will know the time to a second and its trip.
        unsure = 1.5 if len(known) < len(clocks) else 0.0
        until = max(clock.now() for clock in known) + seconds + unsure
        end = time.monotonic() + BOUND
        while min(clock.earliest() for clock in known) <= until:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture(scope="module")
def table(dynamodb: DynamoDBServer) -> str:
    url = dynamodb.table()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", "test")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "test")
        migrate(url)
    return url


@pytest.mark.parametrize("proof", chosen(), ids=str)
def test_by_the_services_clock(table: str, proof: conformance.Proof) -> None:
    passing = PassingTime()
    conformance.play(proof, lambda: passing.opened(DynamoDBStore(table)), shared=proof.second, clock=passing)


@pytest.mark.parametrize("proof", chosen(), ids=str)
def test_awaited_by_the_services_clock(table: str, proof: conformance.Proof) -> None:
    passing = PassingTime()
    conformance.play_async(proof, lambda: passing.opened(AsyncDynamoDBStore(table)), shared=proof.second, clock=passing)


def test_nothing_is_younger_than_nothing(table: str) -> None:
    """Of another's record the age is reckoned by the earliest time that it can be, which may be before it was made."""
    ops = [Claim(b"age".ljust(16), nonce, b"", 30.0, 60.0, Takeover.RETRY, "", "ship", "1") for nonce in (1, 2)]
    with contextlib.closing(DynamoDBStore(table)) as store:
        assert isinstance(store.execute(ops[0]), Claimed)
        clock = store._settings.clock
        made = clock.now()
        clock.earliest = lambda: made - 0.9  # type: ignore[method-assign]
        again, record = store.execute(ops[1]), store.execute(Lookup(ops[0].id))
    assert isinstance(again, Existing)
    assert record is not None
    assert again.record.age == record.age == 0.0


# An endpoint that does not tell the time


class Timeless(ThreadingHTTPServer):
    """Before a server, and keeps its Date headers to itself; ``url`` is the table's through it."""

    daemon_threads = True

    def __init__(self, table: str) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        head, _, endpoint = table.partition("?endpoint=")
        self.target = urlsplit(unquote(endpoint))
        self.url = f"{head}?endpoint={quote(f'http://127.0.0.1:{self.server_port}', safe='')}"
        self.asked: list[str] = []


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Timeless

    def do_POST(self) -> None:
        self.server.asked.append(self.headers["X-Amz-Target"].partition(".")[2])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with contextlib.closing(HTTPConnection(str(self.server.target.hostname), self.server.target.port)) as onward:
            onward.request("POST", self.path, body, dict(self.headers.items()))
            answer = onward.getresponse()
            said = answer.read()
        self.send_response_only(answer.status)
        for name in ("Content-Type", "x-amzn-RequestId", "x-amz-crc32"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what is asked is noted."""


@pytest.fixture
def timeless(table: str) -> Iterator[Timeless]:
    with Timeless(table) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_endpoint_that_tells_no_time_is_named_and_nothing_is_run(timeless: Timeless) -> None:
    ran: list[int] = []
    told = pytest.raises(ConfigurationError, match=r"no Date header.*clock=")
    with Semel(DynamoDBStore(timeless.url), sweep_every=None) as guard, told:
        guard.run("ship", key=1, call=lambda: ran.append(1))

    async def awaited() -> None:
        async def call() -> None:
            ran.append(1)

        async with AsyncSemel(AsyncDynamoDBStore(timeless.url), sweep_every=None) as guard:
            with pytest.raises(ConfigurationError, match=r"no Date header.*clock="):
                await guard.run("ship", key=1, call=call)

    asyncio.run(awaited())
    assert ran == []
    assert timeless.asked == ["DescribeTable"] * 2


def test_there_a_clock_that_is_given_will_do(timeless: Timeless) -> None:
    with Semel(DynamoDBStore(timeless.url, clock=time.time), sweep_every=None) as guard:
        assert [guard.run("give", key=1, call=lambda: 7) for _ in range(2)] == [7, 7]
    assert timeless.asked == ["PutItem", "UpdateItem", "PutItem"]
