"""DynamoDB: proofs of the conformance suite by the clock that a store has by default, the service's; and none told.

The suite itself (test_dynamodb.py) moves a clock of its own. Here time passes as it does, and what is judged by it is
judged by what two stores of one table know of the service's clock, each by itself. A machine that was paused has the
time wrong until it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from semel import AsyncSemel, ConfigurationError, InProgress, Semel, StoreUnavailable, StoreUncertain
from semel.core.ops import Claim, Claimed, Complete, CompleteWith, Existing, Lookup, Release, Renew, Resolve, SaveStep
from semel.core.states import State, Takeover
from semel.sql.connections.errors import Contention
from semel.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore, migrate
from semel.stores.dynamodb.failures import CallRetry
from semel.stores.dynamodb.settings import ServiceClock
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
        # One that has heard nothing yet will know the time to a second and its trip; and one that has heard more since
        # may have been ahead by as much when it wrote what is waited for.
        until = max(clock.now() for clock in known) + seconds + 1.5
        end = time.monotonic() + BOUND
        while min(clock.earliest() for clock in known) <= until:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture(scope="module")
def table(dynamodb: DynamoDBServer) -> str:
    url = dynamodb.table()
    migrate(url)
    return url


@pytest.mark.parametrize("proof", chosen(), ids=str)
def test_by_the_services_clock(table: str, proof: conformance.Proof) -> None:
    passing = PassingTime()
    conformance.play(proof, lambda: passing.opened(DynamoDBStore(table)), shared=proof.second, clock=passing)


@pytest.mark.parametrize("proof", [proof for proof in chosen() if proof.family in ("fencing", "replay")], ids=str)
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


# A machine that was paused


class Machine:
    """A worker's machine: ``pause`` stops it for a while, and nothing on it knows. ``then`` is done after the next
    answer."""

    def __init__(self, store: Any) -> None:
        self.behind = 0.0
        self.actions: list[str] = []
        self.then: Callable[[], None] = lambda: None
        store._settings.clock.local = lambda: time.monotonic() - self.behind
        real = store._send

        def sent(call: Any, tries: Any) -> Any:
            self.actions.append(call.action)
            answer = real(call, tries)
            self._go_on()
            return answer

        async def sent_async(call: Any, tries: Any) -> Any:
            self.actions.append(call.action)
            answer = await real(call, tries)
            self._go_on()
            return answer

        store._send = sent_async if isinstance(store, AsyncDynamoDBStore) else sent

    def pause(self, seconds: float) -> None:
        self.behind += seconds

    def _go_on(self) -> None:
        then, self.then = self.then, lambda: None
        then()


ABSENCE = 600.0


@pytest.fixture
def pair(table: str) -> Iterator[tuple[DynamoDBStore, Machine, DynamoDBStore]]:
    """A store on a machine that is paused, which knows the time already, and another beside it."""
    with contextlib.closing(DynamoDBStore(table)) as paused, contextlib.closing(DynamoDBStore(table)) as other:
        for store in (paused, other):
            store.execute(Lookup(bytes(16)))
        machine = Machine(paused)
        paused.execute(Lookup(bytes(16)))
        machine.actions.clear()
        yield paused, machine, other


def asked(id: bytes, nonce: int, *, takeover: Takeover = Takeover.RETRY) -> Claim:
    return Claim(id, nonce, b"", 30.0, 3600.0, takeover, "", "ship", "1")


def test_after_a_pause_a_claim_has_its_whole_lease(pair: tuple[DynamoDBStore, Machine, DynamoDBStore]) -> None:
    paused, machine, other = pair
    id = os.urandom(16)
    machine.pause(ABSENCE)
    claimed = paused.execute(asked(id, 1))
    assert machine.actions == ["put_item", "put_item"], "written again by the time that the first answer told"
    rival = other.execute(asked(id, 2))
    assert isinstance(claimed, Claimed)
    assert isinstance(rival, Existing)
    assert (rival.record.state, rival.record.token) == (State.RUNNING, claimed.token)
    assert 25 < rival.record.lease_left < 35
    assert 3590 < rival.record.expires_in < 3610
    assert rival.record.age < 10
    machine.actions.clear()
    assert isinstance(paused.execute(asked(os.urandom(16), 1)), Claimed)
    assert machine.actions == ["put_item"], "it knows by now"


def test_after_a_pause_two_workers_do_not_run_at_once(pair: tuple[DynamoDBStore, Machine, DynamoDBStore]) -> None:
    paused, machine, other = pair
    first, second = Semel(paused, sweep_every=None), Semel(other, sweep_every=None)
    key, ran = os.urandom(8).hex(), []

    def work() -> str:
        ran.append("paused")
        with pytest.raises(InProgress):
            second.run("pack", key=key, call=lambda: ran.append("other"))
        return "packed"

    machine.pause(ABSENCE)
    assert first.run("pack", key=key, call=work) == "packed"
    assert second.run("pack", key=key, call=work) == "packed"
    assert ran == ["paused"]


def test_awaited_a_claim_has_its_whole_lease_too(table: str) -> None:
    async def main() -> None:
        paused, other = AsyncDynamoDBStore(table), AsyncDynamoDBStore(table)
        machine = Machine(paused)
        id = os.urandom(16)
        await paused.execute(Lookup(id))
        machine.pause(ABSENCE)
        claimed, rival = await paused.execute(asked(id, 1)), await other.execute(asked(id, 2))
        assert isinstance(claimed, Claimed)
        assert isinstance(rival, Existing)
        assert rival.record.token == claimed.token
        assert machine.actions == ["describe_table", "get_item", "put_item", "put_item"]
        await paused.close()
        await other.close()

    asyncio.run(main())


def test_whoever_came_before_it_was_written_again_has_it(pair: tuple[DynamoDBStore, Machine, DynamoDBStore]) -> None:
    """Its lease had ended for everyone, so a rival took over; the one that was paused must not run beside it."""
    paused, machine, other = pair
    id, taken = os.urandom(16), []
    machine.pause(ABSENCE)
    machine.then = lambda: taken.append(other.execute(asked(id, 2)))
    answer = paused.execute(asked(id, 1))
    assert [(type(each), each.attempt) for each in taken] == [(Claimed, 2)]
    assert isinstance(answer, Existing)
    assert answer.record.token == taken[0].token
    assert other.execute(Renew(id, taken[0].token, 30.0))


def test_a_takeover_has_its_whole_lease_too(pair: tuple[DynamoDBStore, Machine, DynamoDBStore]) -> None:
    paused, machine, other = pair
    id = os.urandom(16)
    first = other.execute(asked(id, 1))
    assert isinstance(first, Claimed)
    assert other.execute(SaveStep(id, first.token, "one", b"1", 0))
    assert other.execute(Release(id, first.token, State.ABANDONED))
    machine.then = lambda: machine.pause(ABSENCE)  # when it has seen what stands there
    taken = paused.execute(asked(id, 2))
    assert machine.actions == ["put_item"] * 3
    assert isinstance(taken, Claimed)
    assert (taken.attempt, taken.steps) == (2, (("one", b"1"),))
    assert taken.token > first.token
    rival = other.execute(asked(id, 3))
    assert isinstance(rival, Existing)
    assert rival.record.lease_left > 25
    assert not other.execute(Complete(id, first.token, b"late", 60.0))


def test_a_claim_that_met_itself_after_the_pause_is_its_own(
    pair: tuple[DynamoDBStore, Machine, DynamoDBStore],
) -> None:
    """It was sent twice, for its first answer was lost, and by then its lease is over: nobody has run it yet."""
    paused, machine, other = pair
    id, real, lost = os.urandom(16), paused._open().put_item, []

    def lossy(**params: Any) -> Any:
        answer = real(**params)
        if not lost:
            lost.append(answer)
            raise ConnectionResetError("lost on purpose")
        return answer

    paused._open().put_item = lossy
    machine.pause(ABSENCE)
    claimed = paused.execute(asked(id, 1, takeover=Takeover.REJECT))
    assert isinstance(claimed, Claimed)
    assert claimed.attempt == 1
    rival = other.execute(asked(id, 2))
    assert isinstance(rival, Existing)
    assert (rival.record.state, rival.record.token) == (State.RUNNING, claimed.token)


def test_what_was_merely_slow_is_not_written_twice(pair: tuple[DynamoDBStore, Machine, DynamoDBStore]) -> None:
    """Throttled, perhaps: then more writes would be the last thing it needs."""
    paused, machine, _ = pair
    id = os.urandom(16)
    machine.pause(5.0)
    claimed = paused.execute(Claim(id, 1, b"", 120.0, 3600.0, Takeover.RETRY, "", "ship", "1"))
    assert isinstance(claimed, Claimed)
    machine.pause(5.0)
    assert paused.execute(Complete(id, claimed.token, b"answer", 3600.0)) is True
    assert machine.actions == ["put_item", "update_item"]


def test_after_a_write_that_was_answered_nobody_says_that_nothing_was_stored() -> None:
    tries = CallRetry(0.0)
    with pytest.raises(StoreUnavailable):
        tries.pause_after(Contention("throttled"), once=False)
    tries.note_write()
    with pytest.raises(StoreUncertain):
        tries.pause_after(Contention("throttled"), once=False)


def test_a_token_is_of_the_time_that_was_told_after_the_pause(
    pair: tuple[DynamoDBStore, Machine, DynamoDBStore],
) -> None:
    paused, machine, other = pair
    id = os.urandom(16)
    first = other.execute(asked(id, 1))
    assert isinstance(first, Claimed)
    assert other.execute(Release(id, first.token))
    machine.pause(ABSENCE)
    second = paused.execute(asked(id, 2))
    assert isinstance(second, Claimed)
    assert second.token > first.token - 1_500_000, "as well as the time is known; not by the length of the pause"


def test_after_a_pause_a_renewal_holds_the_lease(pair: tuple[DynamoDBStore, Machine, DynamoDBStore]) -> None:
    paused, machine, other = pair
    id = os.urandom(16)
    claimed = paused.execute(asked(id, 1))
    assert isinstance(claimed, Claimed)
    machine.actions.clear()
    machine.pause(20.0)
    assert paused.execute(Renew(id, claimed.token, 60.0))
    assert machine.actions == ["update_item", "update_item"]
    record = other.execute(Lookup(id))
    assert record is not None
    assert record.lease_left > 55


def test_after_a_pause_a_renewal_of_what_another_has_taken_is_refused(
    pair: tuple[DynamoDBStore, Machine, DynamoDBStore],
) -> None:
    paused, machine, other = pair
    id = os.urandom(16)
    claimed = paused.execute(asked(id, 1))
    assert isinstance(claimed, Claimed)
    machine.pause(20.0)

    def take() -> None:
        assert other.execute(Resolve(id, None, 60.0, force=True)) is State.RUNNING
        assert isinstance(other.execute(asked(id, 2)), Claimed)

    machine.then = take
    assert paused.execute(Renew(id, claimed.token, 60.0)) is False


def test_a_lease_that_is_over_with_every_answer_is_not_held(
    pair: tuple[DynamoDBStore, Machine, DynamoDBStore],
) -> None:
    """Whoever was told that it has the lease would run beside another."""
    paused, _, _ = pair
    id = os.urandom(16)
    claimed = paused.execute(asked(id, 1))
    assert isinstance(claimed, Claimed)
    clock = paused._settings.clock
    now = clock.now
    clock.now = lambda: now() - ABSENCE  # type: ignore[method-assign]
    for op in (asked(os.urandom(16), 1), Renew(id, claimed.token, 30.0)):
        with pytest.raises(StoreUncertain, match="the lease had ended"):
            paused.execute(op)


def test_after_a_pause_a_completion_is_kept_as_long_as_it_should_be(
    pair: tuple[DynamoDBStore, Machine, DynamoDBStore],
) -> None:
    paused, machine, other = pair
    for number, sort in enumerate((Complete, CompleteWith)):
        id = os.urandom(16)
        claimed = paused.execute(asked(id, 1))
        assert isinstance(claimed, Claimed)
        machine.actions.clear()
        machine.pause(ABSENCE)
        assert paused.execute(sort(id, claimed.token, b"done", 3600.0, *[()] * number)) is True
        assert machine.actions[1:] == ["update_item"]
        record = other.execute(Lookup(id))
        assert record is not None
        assert (record.state, record.snapshot) == (State.DONE, b"done")
        assert 3590 < record.expires_in < 3610
        item = other._open().get_item(TableName=other._settings.table, Key={"id": {"B": id}})["Item"]
        assert int(item["ttl"]["N"]) >= int(item["expires"]["N"]) / 1e6


def test_a_machine_that_sleeps_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system can tell: Linux's monotonic clock stands still meanwhile, and this one does not."""
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {7: 70_000.0}.__getitem__, raising=False)
    here = ServiceClock().local()
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    elsewhere = ServiceClock().local
    monkeypatch.undo()
    assert here == 70_000.0
    assert elsewhere is time.monotonic
