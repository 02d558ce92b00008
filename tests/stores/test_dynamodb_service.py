"""DynamoDB: what is its own: calls, the service's clock, its limits and refusals, the table and who may use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

import boto3
import botocore.exceptions as boto
import pytest

from semel import (
    AsyncSemel,
    ConfigurationError,
    NotMigrated,
    SchemaDrift,
    Semel,
    StoreUnavailable,
    StoreUncertain,
    migrate_store,
    open_async_store,
    open_store,
)
from semel.cli import main
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Release, Renew, Resolve, Sweep
from semel.core.states import State, Takeover
from semel.errors import StoreURLError
from semel.stores.dynamodb import (
    AsyncDynamoDBStore,
    DynamoDBStore,
    aio,
    check,
    cloudformation,
    iam_policy,
    migrate,
    terraform,
)
from semel.stores.dynamodb.failures import CallRetry, error_of
from semel.stores.dynamodb.settings import DynamoDBSettings, ServiceClock
from semel.testing.conformance import ManualClock
from tests.servers import DynamoDBServer


@pytest.fixture
def table(dynamodb: DynamoDBServer) -> str:
    url = dynamodb.table()
    migrate(url)
    return url


@pytest.fixture
def store(table: str) -> Iterator[DynamoDBStore]:
    with contextlib.closing(DynamoDBStore(table)) as opened:
        yield opened


def claim(
    name: str, *, nonce: int = 1, takeover: Takeover = Takeover.RETRY, lease: float = 30.0, ttl: float = 60.0
) -> Claim:
    return Claim(name.ljust(16).encode(), nonce, b"", lease, ttl, takeover, "", "op", name)


def client(url: str) -> Any:
    settings = DynamoDBSettings(url, 1, 1, 1, None)
    return boto3.client(**settings.client())


def item(url: str, op: Claim) -> dict[str, Any]:
    found: Any = client(url).get_item(TableName=DynamoDBSettings(url, 1, 1, 1, None).table, Key={"id": {"B": op.id}})
    kept: dict[str, Any] = found.get("Item", {})
    return kept


# Calls


class Calls:
    """Calls that a store has sent."""

    def __init__(self, store: Any) -> None:
        self.sent: list[str] = []
        sent = store._send

        def counting(call: Any, tries: Any) -> Any:
            self.sent.append(call.action)
            return sent(call, tries)

        store._send = counting

    def new(self) -> list[str]:
        fresh, self.sent = self.sent, []
        return fresh


def test_a_first_execution_is_two_calls_and_a_replay_one(store: DynamoDBStore) -> None:
    calls = Calls(store)
    with Semel(store, sweep_every=None) as guard:
        guard.run("ship", key="0", call=lambda: 0)
        assert calls.new() == ["describe_table", "put_item", "update_item"], "the first answer of all tells the time"
        assert guard.run("ship", key="1", call=lambda: 7) == 7
        assert calls.new() == ["put_item", "update_item"]
        assert guard.run("ship", key="1", call=lambda: 8) == 7
        assert calls.new() == ["put_item"]


def test_an_async_first_execution_is_two_calls_and_a_replay_one(table: str) -> None:
    async def main() -> None:
        store = AsyncDynamoDBStore(table)
        calls = Calls(store)
        async with AsyncSemel(store, sweep_every=None) as guard:

            async def call() -> int:
                return 7

            await guard.run("ship", key="0", call=call)
            calls.new()
            assert await guard.run("ship", key="1", call=call) == 7
            assert calls.new() == ["put_item", "update_item"]
            assert await guard.run("ship", key="1", call=call) == 7
            assert calls.new() == ["put_item"]

    asyncio.run(main())


def test_a_cancelled_call_that_is_asked_again_is_sent_once(table: str) -> None:
    async def main() -> None:
        store = AsyncDynamoDBStore(table)
        await store.execute(Lookup(b"x" * 16))
        calls = Calls(store)
        op = claim("a")
        first: asyncio.Task[Any] = asyncio.create_task(store.execute(op))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        answer: Any = await store.execute(op)
        assert isinstance(answer, Claimed)
        assert calls.new() == ["put_item"]
        await store.close()

    asyncio.run(main())


def test_a_client_that_is_created_while_the_store_is_closed_is_closed_too(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Op cannot create a client, and close() waits for it. The next Op creates one meanwhile."""
    opened: list[Any] = []
    closed: list[Any] = []

    async def main() -> None:
        fails, goes_on, creating = asyncio.Event(), asyncio.Event(), asyncio.Event()
        create = aio.open_client_async

        async def open_client(settings: DynamoDBSettings) -> Any:
            if not fails.is_set():
                await fails.wait()
                raise StoreUnavailable("the credentials cannot be read")
            creating.set()
            await goes_on.wait()
            client = await create(settings)
            opened.append(client)
            end = client.close

            async def close() -> None:
                closed.append(client)
                await end()

            client.close = close
            return client

        monkeypatch.setattr(aio, "open_client_async", open_client)
        store = AsyncDynamoDBStore(table, retry_for=0)
        first = asyncio.create_task(store.execute(Lookup(b"x" * 16)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        second = asyncio.create_task(store.execute(Lookup(b"y" * 16)))
        await asyncio.sleep(0)
        fails.set()
        with pytest.raises(StoreUnavailable, match="credentials"):
            await first
        await creating.wait()
        goes_on.set()
        await asyncio.wait_for(closing, 20)
        with contextlib.suppress(StoreUnavailable):  # it may have been answered before
            await second
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.execute(Lookup(b"z" * 16))

    asyncio.run(main())
    assert (len(opened), closed) == (1, opened)


# The clock


class Monotonic:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(clock: ServiceClock, here: Monotonic, service: float, *, trip: float = 0.01) -> None:
    """An answer of a service whose clock is at ``service`` when it answers, half way of the trip."""
    sent = here.now
    here.now += trip
    clock.learn(formatdate(service + trip / 2, usegmt=True), sent, here.now)


def test_the_time_is_known_to_a_second_at_first_and_closer_with_every_answer() -> None:
    here = Monotonic()
    clock = ServiceClock(here)
    assert not clock.known()
    ahead = 1_700_000_000.3 - here.now  # the service's clock less ours
    told(clock, here, here.now + ahead)
    assert clock.known()
    assert abs(clock.now() - (here.now + ahead)) < 0.52
    for _ in range(40):
        here.now += 0.37
        told(clock, here, here.now + ahead)
        assert clock.earliest() <= here.now + ahead, "never later than it is"
    assert abs(clock.now() - (here.now + ahead)) < 0.06


def test_a_clock_that_was_set_is_followed() -> None:
    here = Monotonic()
    clock = ServiceClock(here)
    told(clock, here, 1_700_000_000.0)
    told(clock, here, 1_700_000_900.0)
    assert abs(clock.now() - 1_700_000_900.0) < 0.6


def test_an_answer_without_a_date_teaches_nothing() -> None:
    here = Monotonic()
    clock = ServiceClock(here)
    for date in (None, "", "yesterday"):
        clock.learn(date, here.now, here.now)
    assert not clock.known()


def test_a_worker_with_a_wrong_clock_judges_leases_by_the_services(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(DynamoDBStore(table)) as right, contextlib.closing(DynamoDBStore(table)) as wrong:
        first = right.execute(claim("a", lease=30.0))
        assert isinstance(first, Claimed)
        right_time = time.time
        monkeypatch.setattr("time.time", lambda: right_time() + 3600)
        answer = wrong.execute(claim("a", nonce=2))
        monkeypatch.undo()
        assert isinstance(answer, Existing)
        assert answer.record.state is State.RUNNING
        assert 20 < answer.record.lease_left < 33


def test_only_what_has_ended_for_everyone_is_taken_over(table: str, store: DynamoDBStore) -> None:
    """The time is known to about a second: a lease that ended a moment ago may not have ended elsewhere."""
    assert isinstance(store.execute(claim("a", lease=0.001)), Claimed)
    ended, clock = int(item(table, claim("a"))["lease_end"]["N"]) / 1e6, store._settings.clock
    clock.earliest = lambda: ended - 0.5  # type: ignore[method-assign]
    again = store.execute(claim("a", nonce=2))
    assert isinstance(again, Existing)
    assert again.record.state is State.RUNNING
    clock.earliest = lambda: ended + 0.5  # type: ignore[method-assign]
    taken = store.execute(claim("a", nonce=2))
    assert isinstance(taken, Claimed)
    assert taken.attempt == 2


def test_what_was_given_up_may_be_taken_over_at_once(store: DynamoDBStore) -> None:
    """Also by those who know the time less well than whoever gave it up."""
    won = store.execute(claim("a"))
    assert isinstance(won, Claimed)
    assert store.execute(Release(claim("a").id, won.token, State.ABANDONED)) is True
    now, clock = store._settings.clock.now(), store._settings.clock
    clock.earliest = lambda: now - 1.0  # type: ignore[method-assign]
    taken = store.execute(claim("a", nonce=2))
    assert isinstance(taken, Claimed)
    assert taken.attempt == 2


# What the service removes


def test_only_what_nobody_would_miss_has_a_time_to_live(table: str, store: DynamoDBStore) -> None:
    for takeover in Takeover:
        op = claim(f"k{takeover}", takeover=takeover, lease=30.0, ttl=10.0)
        won = store.execute(op)
        assert isinstance(won, Claimed)
        kept = item(table, op)
        if takeover is Takeover.RETRY:
            assert int(kept["ttl"]["N"]) * 1e6 >= int(kept["lease_end"]["N"]), "not while it runs"
            assert store.execute(Renew(op.id, won.token, 100.0)) is True
            kept = item(table, op)
            assert int(kept["ttl"]["N"]) * 1e6 >= int(kept["lease_end"]["N"]), "nor when its lease was prolonged"
        else:
            assert "ttl" not in kept, "what is in doubt stays"
        assert store.execute(Complete(op.id, won.token, b"x", 60.0)) is True
        kept = item(table, op)
        assert int(kept["ttl"]["N"]) * 1e6 >= int(kept["expires"]["N"])


def test_the_service_removes_what_was_released(table: str, store: DynamoDBStore) -> None:
    """It ignores a time to live of years ago, so that is not what a released record has."""
    claimed = store.execute(claim("released"))
    assert isinstance(claimed, Claimed)
    store.execute(Complete(claim("released").id, claimed.token, b"failed", 3600.0))
    assert store.execute(Resolve(claim("released").id, None, 60.0, False, claimed.token)) is State.DONE
    kept = item(table, claim("released"))
    assert abs(int(kept["ttl"]["N"]) - time.time()) < 600
    assert "snapshot" not in kept


def test_an_unknown_outcome_has_none(table: str, store: DynamoDBStore) -> None:
    won = store.execute(claim("a"))
    assert isinstance(won, Claimed)
    assert store.execute(Release(claim("a").id, won.token, State.UNKNOWN)) is True
    assert "ttl" not in item(table, claim("a"))


@pytest.mark.slow
def test_the_service_removes_what_has_expired_and_nothing_in_doubt(private_dynamodb: DynamoDBServer) -> None:
    """On a server of its own: it looks through all tables in turn, and those of the other tests are many."""
    table = private_dynamodb.table()
    migrate(table)
    with contextlib.closing(DynamoDBStore(table, clock=lambda: time.time() - 100)) as store:
        for takeover in (Takeover.RETRY, Takeover.REJECT):
            store.execute(claim(f"running {takeover}", takeover=takeover, lease=1.0, ttl=1.0))
            # Not expired by the server's clock yet: it could remove it before it is done.
            won = store.execute(claim(f"done {takeover}", takeover=takeover, ttl=3600.0))
            assert isinstance(won, Claimed)
            assert store.execute(Complete(claim(f"done {takeover}").id, won.token, b"x", 1.0)) is True
        end = time.monotonic() + 90
        while len(left := client(table).scan(TableName=DynamoDBSettings(table, 1, 1, 1, None).table)["Items"]) > 1:
            assert time.monotonic() < end, "it looks every ten seconds or so"
            time.sleep(0.5)
        assert [kept["key"]["S"] for kept in left] == [f"running {Takeover.REJECT}"]


def test_a_slow_sweep_does_not_remove_what_was_claimed_anew_meanwhile(table: str) -> None:
    """It has read the old record; that one goes, and a new one of the same version takes its place."""
    clock = ManualClock(4_000_000_000.0)  # the server itself removes what has expired by its own clock
    with contextlib.closing(DynamoDBStore(table, clock=clock)) as store:
        store.execute(claim("a", lease=1.0, ttl=1.0))
        clock.advance(10.0)
        sweep = store._programs.of(Sweep(10))
        tries = CallRetry(1.0)
        call = next(sweep)
        while call.action != "delete_item":
            call = sweep.send(store._send(call, tries))
        assert store.execute(Sweep(10)).removed == 1
        new = store.execute(claim("a", nonce=2))
        assert isinstance(new, Claimed)
        with pytest.raises(StopIteration) as swept:
            sweep.send(store._send(call, tries))
        assert swept.value.value.removed == 0
        record = store.execute(Lookup(claim("a").id))
        assert record is not None
        assert record.token == new.token


# Refusals


def test_what_does_not_fit_into_an_item_is_refused_with_the_reason(store: DynamoDBStore) -> None:
    won = store.execute(claim("a"))
    assert isinstance(won, Claimed)
    with pytest.raises(StoreUnavailable, match="400 KB"):
        store.execute(Complete(claim("a").id, won.token, b"x" * 500_000, 60.0))
    assert store.execute(Complete(claim("a").id, won.token, b"x" * 300_000, 60.0)) is True


def test_without_a_table_nothing_runs(dynamodb: DynamoDBServer) -> None:
    url = dynamodb.table()
    ran: list[int] = []
    with contextlib.closing(DynamoDBStore(url)) as store, pytest.raises(NotMigrated, match="semel migrate"):
        Semel(store, sweep_every=None).run("ship", key=1, call=lambda: ran.append(1))
    assert ran == []
    assert migrate_store(url) == [f"table {url.split('/')[3].split('?')[0]}", "time to live"]
    assert migrate_store(url) == []
    with contextlib.closing(open_store(url)) as store:
        assert Semel(store, sweep_every=None).run("ship", key=1, call=lambda: 1) == 1


@pytest.mark.slow
def test_a_server_that_is_away_is_unavailable_and_nothing_is_run() -> None:
    url = "dynamodb://eu-central-1/semel?endpoint=http://127.0.0.1:1"
    ran: list[int] = []
    with (
        contextlib.closing(DynamoDBStore(url, retry_for=0.05)) as store,
        pytest.raises(StoreUnavailable, match="reached"),
    ):
        Semel(store, sweep_every=None).run("ship", key=1, call=lambda: ran.append(1))

    async def main() -> None:
        store = open_async_store(url)
        store._settings.retry_for = 0.05  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailable, match="reached"):
            await store.execute(claim("a"))
        await store.close()

    asyncio.run(main())
    assert ran == []


def error(code: str, status: int = 400, text: str = "no") -> boto.ClientError:
    return boto.ClientError(
        {"Error": {"Code": code, "Message": text}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "PutItem",
    )


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (error("ProvisionedThroughputExceededException"), StoreUnavailable, "throttling or busy"),
        (error("AccessDeniedException"), StoreUnavailable, "rights"),
        (error("ResourceNotFoundException"), NotMigrated, "semel migrate"),
        (error("InternalServerError", 500), StoreUncertain, "failed"),
        (error("ValidationException", text="Item size has exceeded"), StoreUnavailable, "400 KB"),
        (boto.NoCredentialsError(), ConfigurationError, "credentials"),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), StoreUnavailable, "reached"),
        (boto.ReadTimeoutError(endpoint_url="http://x"), StoreUncertain, "did not answer"),
        (boto.ConnectionClosedError(endpoint_url="http://x"), StoreUncertain, "did not answer"),
    ],
)
def test_what_the_service_says_in_our_words(failure: Exception, kind: type[Exception], words: str) -> None:
    found = error_of(failure, "semel")
    assert isinstance(found, kind)
    assert words in str(found)


def test_a_throttled_call_is_tried_again_and_a_resolution_without_an_answer_is_not() -> None:
    throttled = error_of(error("ThrottlingException"), "semel")
    lost = error_of(boto.ReadTimeoutError(endpoint_url="http://x"), "semel")
    tries = CallRetry(10.0)
    assert [tries.pause_after(throttled, once=True) for _ in range(3)] == [0.02, 0.04, 0.08]
    assert CallRetry(10.0).pause_after(lost, once=False) > 0
    with pytest.raises(StoreUncertain):
        CallRetry(10.0).pause_after(lost, once=True)
    tries = CallRetry(0.03)
    assert tries.pause_after(lost, once=False)
    with pytest.raises(StoreUncertain):  # once anything was sent, nobody can say that nothing was stored
        tries.pause_after(throttled, once=False)
    with pytest.raises(StoreUnavailable):
        CallRetry(0.0).pause_after(throttled, once=False)


def test_a_resolution_is_written_once(store: DynamoDBStore) -> None:
    store.execute(claim("a"))
    sent: list[Any] = []
    real = store._send

    def noting(call: Any, tries: Any) -> Any:
        sent.append(call)
        return real(call, tries)

    store._send = noting  # type: ignore[method-assign]
    assert store.execute(Resolve(claim("a").id, b"x", 60.0, force=True)) is State.RUNNING
    assert [(call.action, call.once) for call in sent] == [("get_item", False), ("put_item", True)]


@pytest.mark.parametrize(
    "url",
    ["dynamodb://eu-central-1", "dynamodb:///table", "dynamodb://key:secret@eu-central-1/t", "dynamodb://r/t?x=1"],
)
def test_a_url_that_cannot_be_meant_says_what_can(url: str) -> None:
    with pytest.raises(StoreURLError) as refused:
        DynamoDBStore(url)
    assert "secret" not in str(refused.value)


def test_a_forked_child_makes_a_client_of_its_own(store: DynamoDBStore) -> None:
    first = store.execute(claim("a"))
    mine = store._client
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "?"
        with contextlib.suppress(BaseException):
            answer = f"{store.execute(claim('a')) == first} {store._client is not mine}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"True True"
    assert store.execute(claim("a")) == first
    os.close(reader)
    os.close(writer)


# The table


def test_the_table_is_the_same_however_it_is_made(table: str) -> None:
    name = DynamoDBSettings(table, 1, 1, 1, None).table
    made = client(table).describe_table(TableName=name)["Table"]
    ttl = client(table).describe_time_to_live(TableName=name)["TimeToLiveDescription"]
    template = json.loads(cloudformation(name))["Resources"]["Semel"]["Properties"]
    assert made["KeySchema"] == template["KeySchema"]
    assert made["AttributeDefinitions"] == template["AttributeDefinitions"]
    assert ttl["AttributeName"] == template["TimeToLiveSpecification"]["AttributeName"] == "ttl"
    assert f'name         = "{name}"' in terraform(name)
    assert unquote(table).endswith(f"127.0.0.1:{table.rpartition('%3A')[2]}")


def test_the_command_line_makes_the_table_and_checks_it(
    dynamodb: DynamoDBServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = dynamodb.table()
    name = DynamoDBSettings(url, 1, 1, 1, None).table
    assert main(["migrate", "--check", url]) == 1
    assert main(["migrate", url]) == 0
    assert main(["migrate", "--check", url]) == 0
    assert capsys.readouterr().out == f"applied table {name}\napplied time to live\nup to date\n"
    client(url).update_time_to_live(TableName=name, TimeToLiveSpecification={"AttributeName": "ttl", "Enabled": False})
    with pytest.raises(SchemaDrift, match="time to live"):
        check(url)


def test_the_policy_has_the_rights_that_the_programs_use() -> None:
    (statement,) = json.loads(iam_policy("semel", region="eu-central-1", account="1"))["Statement"]
    assert statement["Resource"] == "arn:aws:dynamodb:eu-central-1:1:table/semel"
    used = {"put_item", "update_item", "get_item", "delete_item", "scan", "describe_table"}
    assert set(statement["Action"]) == {
        "dynamodb:" + "".join(word.title() for word in action.split("_")) for action in used
    }
