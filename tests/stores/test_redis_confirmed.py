"""A Redis store that waits for replicas: which answers it hands out, and who waits for whom.

A record says who has confirmed its answer. Where it does not say so, a replay makes sure itself before it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from semel import AsyncRedisStore, AsyncSemel, OutcomeUnknown, RedisStore, Semel, StoreUncertain
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Op, Record, Release, Renew, Resolve, SaveStep
from semel.core.states import State
from tests.servers import RedisServer
from tests.servers.base import LOOPBACK
from tests.servers.freezing import freeze
from tests.stores.test_redis_server import claim, commands, number

pytestmark = pytest.mark.server

STRICT: dict[str, Any] = {"wait_replicas": 1, "wait_timeout": "200ms", "retry_for": 0}
"""Gives up soon: for what no replica confirms."""
PATIENT: dict[str, Any] = {"wait_replicas": 1, "wait_timeout": "20s", "timeout": "40s"}
"""A replica may take its time, on a busy machine."""


@pytest.fixture
def replica(private_redis: RedisServer) -> Iterator[RedisServer]:
    with RedisServer("--replicaof", f"{LOOPBACK} {private_redis.port}") as server:
        until(lambda: "state=online" in private_redis.cli("INFO", "replication"))
        yield server


@contextlib.contextmanager
def frozen(replica: RedisServer) -> Iterator[None]:
    """For the master it is still there, and says nothing."""
    assert replica.pid is not None
    freeze(replica.pid)
    try:
        yield
    finally:
        os.kill(replica.pid, signal.SIGCONT)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


async def answer(store: RedisStore | AsyncRedisStore, op: Op[Any]) -> Any:
    return store.execute(op) if isinstance(store, RedisStore) else await store.execute(op)


async def shut(store: RedisStore | AsyncRedisStore) -> None:
    closing = store.close()
    if closing is not None:
        await closing


def finished(url: str, **settings: Any) -> Claim:
    """A claim whose operation is done, by a store with these settings."""
    with contextlib.closing(RedisStore(url, **settings)) as store:
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        assert store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
    return op


def confirmed(server: RedisServer, op: Claim) -> str:
    """The byte that says who has the answer, as redis-cli shows it."""
    return server.cli("--no-raw", "GETRANGE", f"semel:{op.id.hex()}", "3", "3").strip()


async def snapshot(store: RedisStore | AsyncRedisStore, op: Op[Any]) -> bytes | None:
    found = await answer(store, op)
    record: Record | None = found.record if isinstance(found, Existing) else found
    assert record is not None
    assert record.state is State.DONE
    return record.snapshot


# Which answers are handed out


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_an_answer_that_no_replica_has_is_not_handed_out(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, replica: RedisServer
) -> None:
    op = finished(private_redis.url)  # by an owner who waits for nobody

    async def main() -> None:
        store, lenient = kind(private_redis.url, **STRICT), kind(private_redis.url)
        with frozen(replica):
            for asked in (claim(op.id, 2), Lookup(op.id)):
                with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
                    await answer(store, asked)
                assert await snapshot(lenient, asked) == b"answer", "who does not ask for replicas gets it"
        await shut(store)
        await shut(lenient)
        store = kind(private_redis.url, **PATIENT)
        assert await snapshot(store, claim(op.id, 3)) == b"answer"
        await asyncio.to_thread(until, lambda: confirmed(private_redis, op) == '"\\x01"')
        commands(private_redis)
        assert await snapshot(store, claim(op.id, 4)) == b"answer"
        assert commands(private_redis) == {"set": 1}, "it was written down that a replica has it"
        await shut(store)

    asyncio.run(main())


@pytest.mark.parametrize("on_unstored", ["deliver", "withhold"])
def test_nobody_is_told_that_an_outcome_is_stored_before_a_replica_has_it(
    private_redis: RedisServer, replica: RedisServer, on_unstored: Any
) -> None:
    """The operation's own caller and the next one, in another process: neither is told what a failover would forget."""
    ran: list[int] = []

    def charge() -> str:
        ran.append(1)
        freeze(replica.pid)
        return "charged"

    claims: dict[str, Any] = {**STRICT, "wait_timeout": "3s"}  # its claim is to be confirmed, its answer is not
    owner = Semel(RedisStore(private_redis.url, **claims), sweep_every=None)
    other = Semel(RedisStore(private_redis.url, **STRICT), sweep_every=None)
    assert replica.pid is not None
    try:
        with owner, other:
            if on_unstored == "deliver":
                unconfirmed = owner.run_outcome("charge", key=1, call=charge, completion_timeout="10ms")
                assert (unconfirmed.value, unconfirmed.stored) == ("charged", False)
            else:
                with pytest.raises(OutcomeUnknown, match="only 0 of 1 replicas"):
                    owner.run("charge", key=1, call=charge, completion_timeout="10ms", on_unstored="withhold")
            with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
                other.run("charge", key=1, call=charge)
    finally:
        os.kill(replica.pid, signal.SIGCONT)
    with Semel(RedisStore(private_redis.url, **PATIENT), sweep_every=None) as guard:
        outcome = guard.run_outcome("charge", key=1, call=charge)
        assert (outcome.value, outcome.replayed) == ("charged", True)
    assert ran == [1]


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_the_owner_writes_down_that_it_was_confirmed_and_waits_no_more_for_that(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, replica: RedisServer
) -> None:
    async def main() -> None:
        store = kind(private_redis.url, **PATIENT)
        warm = claim()
        await answer(store, Complete(warm.id, (await answer(store, warm)).token, b"", 60.0))
        await asyncio.to_thread(until, lambda: confirmed(private_redis, warm) == '"\\x01"')
        commands(private_redis)
        op = claim()
        won = await answer(store, op)
        assert commands(private_redis) == {"set": 1, "evalsha": 1, "setrange": 1, "wait": 1}
        assert await answer(store, Complete(op.id, won.token, b"answer", 60.0)) is True
        assert await snapshot(store, claim(op.id, 2)) == b"answer"
        await asyncio.to_thread(until, lambda: confirmed(private_redis, op) == '"\\x01"')
        # The answer, WAIT, the word that it is confirmed; and a replay.
        assert commands(private_redis) == {"set": 2, "get": 1, "evalsha": 2, "setrange": 1, "wait": 1}
        await shut(store)
        assert confirmed(private_redis, finished(private_redis.url)) == '"\\x00"', "without replicas: not a word"

    asyncio.run(main())


def test_a_word_for_fewer_replicas_is_not_enough_for_more(private_redis: RedisServer, replica: RedisServer) -> None:
    op = finished(private_redis.url, **PATIENT)
    until(lambda: confirmed(private_redis, op) == '"\\x01"')
    with (
        contextlib.closing(RedisStore(private_redis.url, **STRICT)) as one,
        contextlib.closing(RedisStore(private_redis.url, **{**STRICT, "wait_replicas": 2})) as two,
        frozen(replica),
    ):
        assert isinstance(one.execute(claim(op.id, 2)), Existing)
        with pytest.raises(StoreUncertain, match="of 2 replicas"):
            two.execute(claim(op.id, 3))


def test_a_word_that_comes_late_says_nothing_of_another_record(private_redis: RedisServer) -> None:
    """By then the record may be gone, or another owner's: no key is made of it, and no other answer vouched for."""
    # Commands go straight over its connection here, where nothing tries again after a timeout.
    with contextlib.closing(RedisStore(private_redis.url, timeout="40s")) as store:
        confirm = store._programs._scripts["confirm"]
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        key, token = f"semel:{op.id.hex()}".encode(), won.token.to_bytes(8)

        def say(token: bytes) -> int:
            link = store._combiner._connections[0]._connection(store._servers.topology.address_of(key))  # type: ignore[attr-defined]
            (told,) = link.exchange([confirm.call(key, token, b"\x01")])
            return int(told)

        assert say(token) == 0, "it runs: that byte says that somebody waits"
        assert confirmed(private_redis, op) == '"\\x00"'
        assert store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
        assert say((won.token + 1).to_bytes(8)) == 0
        assert confirmed(private_redis, op) == '"\\x00"'
        assert say(token) == 1
        private_redis.cli("DEL", key.decode())
        assert say(token) == 0
        assert private_redis.cli("EXISTS", key.decode()) == "0\n"


def test_an_answer_that_a_person_gave_is_confirmed_by_the_first_who_asks(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    with contextlib.closing(RedisStore(private_redis.url, **PATIENT)) as store:
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        assert store.execute(Release(op.id, won.token, State.UNKNOWN)) is True
        assert store.execute(Resolve(op.id, b"it was sent", 60.0)) is State.UNKNOWN
        assert isinstance(store.execute(claim(op.id, 2)), Existing)
        until(lambda: confirmed(private_redis, op) == '"\\x01"')


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_scripts_that_the_server_forgot_are_waited_for_when_they_are_sent_again(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, replica: RedisServer
) -> None:
    """The first WAIT stood behind a script that was not carried out."""

    async def main() -> None:
        patient, store = kind(private_redis.url, **PATIENT), kind(private_redis.url, **STRICT)
        op = claim()
        won = await answer(patient, op)
        assert await answer(store, Lookup(os.urandom(16))) is None
        assert await answer(store, Lookup(os.urandom(16))) is None
        with frozen(replica):
            for said in (SaveStep(op.id, won.token, "a", b"1", 0), Complete(op.id, won.token, b"answer", 60.0)):
                private_redis.cli("SCRIPT", "FLUSH")
                with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
                    await answer(store, said)
        assert await answer(patient, Complete(op.id, won.token, b"answer", 60.0)) is True
        await shut(store)
        await shut(patient)

    asyncio.run(main())


def test_those_who_ask_in_one_turn_share_a_barrier_that_stands_behind_all_of_them(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, **STRICT)
        with contextlib.suppress(StoreUncertain):
            await store.execute(claim())
        claims = [claim() for _ in range(30)]
        with frozen(replica):
            commands(private_redis)
            told = await asyncio.gather(*map(store.execute, claims), return_exceptions=True)
            assert [type(each) for each in told] == [StoreUncertain] * 30
            assert commands(private_redis)["wait"] <= 3
        await store.close()
        patient = AsyncRedisStore(private_redis.url, **PATIENT)
        again = await asyncio.gather(*map(patient.execute, claims))
        assert {type(each) for each in again} == {Claimed}
        await patient.close()

    asyncio.run(main())


# Who waits for whom


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_replays_and_renewals_do_not_stand_behind_those_who_wait(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, replica: RedisServer
) -> None:
    op = finished(private_redis.url, **PATIENT)
    until(lambda: confirmed(private_redis, op) == '"\\x01"')

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
        store = kind(private_redis.url, **PATIENT)

        async def ask(op: Op[Any]) -> Any:
            return await (asyncio.to_thread(store.execute, op) if isinstance(store, RedisStore) else store.execute(op))

        async def renewed(*ops: Op[Any]) -> Any:
            if isinstance(store, RedisStore):
                return await asyncio.to_thread(store.execute_many, ops)
            return await store.execute_many(ops)

        running = claim()
        won = await ask(running)
        assert isinstance(won, Claimed)
        with frozen(replica):
            waiting = [asyncio.create_task(ask(claim())) for _ in range(8)]  # more than there are lanes
            await asyncio.to_thread(until, lambda: number(private_redis, "clients", "blocked_clients") > 0)
            waiting.append(asyncio.create_task(ask(SaveStep(running.id, won.token, "charge", b"1", 0))))
            async with asyncio.timeout(15):  # WAIT takes longer: the replica is frozen
                for nonce in range(2, 6):
                    assert (await ask(claim(op.id, nonce))).record.snapshot == b"answer"
                assert await renewed(Renew(running.id, won.token, 60.0)) == [True]
                assert await ask(Renew(running.id, won.token, 60.0)) is True
            assert not any(task.done() for task in waiting)
        answers = await asyncio.gather(*waiting)
        assert [type(each) for each in answers] == [Claimed] * 8 + [bool]
        assert await ask(Release(running.id, won.token)) is True
        await shut(store)

    asyncio.run(main())


def test_a_store_that_waits_for_nobody_has_one_connection(private_redis: RedisServer) -> None:
    async def main() -> None:
        async with AsyncSemel(AsyncRedisStore(private_redis.url), sweep_every=None) as guard:
            await guard.run("ship", key=1, call=lambda: asyncio.sleep(0, "sent"))
            assert private_redis.cli("CLIENT", "LIST").count("name=semel") == 1

    asyncio.run(main())


def test_the_second_connection_is_opened_again_when_it_is_lost(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, **{**PATIENT, "retry_for": "20s"})
        for _ in range(3):
            op = claim()
            won = await store.execute(op)
            assert isinstance(won, Claimed)
            (second,) = store._servers._durable_connections.values()
            (first,) = store._servers._connections.values()
            assert second._transport is not None
            second._transport.abort()
            assert await store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
            assert await snapshot(store, claim(op.id, 2)) == b"answer"
            assert list(store._servers._connections.values()) == [first], "the first was not to blame"
        await store.close()
        await asyncio.to_thread(until, lambda: "name=semel" not in private_redis.cli("CLIENT", "LIST"))

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_a_claim_that_was_written_and_cannot_be_waited_for_is_uncertain(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, replica: RedisServer
) -> None:
    """The second connection cannot be opened: the first has written already."""

    async def main() -> None:
        store = kind(private_redis.url, **STRICT)
        assert await answer(store, Lookup(os.urandom(16))) is None
        private_redis.cli("CONFIG", "SET", "maxclients", "1")
        op = claim()
        with pytest.raises(StoreUncertain, match="not confirmed"):
            await answer(store, op)
        assert await answer(store, Lookup(op.id)) is not None
        await shut(store)

    asyncio.run(main())


# Whose answer it is, and who shares a barrier


def waits(server: RedisServer) -> dict[str, int]:
    """How often some commands ran so far."""
    found = re.findall(r"cmdstat_(set|evalsha|wait):calls=(\d+)", server.cli("INFO", "commandstats"))
    return {"set": 0, "evalsha": 0, "wait": 0} | {name: int(calls) for name, calls in found}


def test_those_who_come_while_a_barrier_is_under_way_share_the_next(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    """The server takes one barrier of a connection after the other: one for each caller would add up."""

    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, **PATIENT)
        assert isinstance(await store.execute(claim()), Claimed)
        with frozen(replica):
            commands(private_redis)
            waiting = []
            for each in range(1, 13):
                waiting.append(asyncio.create_task(store.execute(claim())))
                await asyncio.to_thread(until, lambda each=each: waits(private_redis)["set"] == each)
            await asyncio.to_thread(until, lambda: number(private_redis, "clients", "blocked_clients") == 1)
            assert not any(task.done() for task in waiting)
        assert {type(each) for each in await asyncio.gather(*waiting)} == {Claimed}
        ran = waits(private_redis)
        assert ran["evalsha"] == 12, "each has touched its record"
        assert ran["wait"] <= 3
        (second,) = store._servers._durable_connections.values()
        assert (second._held, second._sent_wait) == (0, None)
        await store.close()

    asyncio.run(main())


def test_no_more_are_held_behind_a_barrier_than_may_be_in_flight(
    private_redis: RedisServer, replica: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, **{**PATIENT, "retry_for": 0})
        assert isinstance(await store.execute(claim()), Claimed)
        (second,) = store._servers._durable_connections.values()
        with frozen(replica):
            waiting = [asyncio.create_task(store.execute(claim()))]
            await asyncio.to_thread(until, lambda: number(private_redis, "clients", "blocked_clients") == 1)
            for held in range(1, 5):
                waiting.append(asyncio.create_task(store.execute(claim())))
                await asyncio.to_thread(until, lambda held=held: second._held == held)
            monkeypatch.setattr("semel.stores.redis.aio_connection.MAX_IN_FLIGHT", 4)
            with pytest.raises(StoreUncertain, match="4 commands wait"):
                await store.execute(claim())
            gone = waiting.pop()
            gone.cancel()
            await asyncio.wait([gone])
            assert second._held == 3, "who went away is not held"
        assert {type(each) for each in await asyncio.gather(*waiting)} == {Claimed}
        await store.close()

    asyncio.run(main())


def test_what_ran_is_not_run_again_where_its_answer_cannot_be_confirmed_although_the_policy_fails_open(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    ran: list[str] = []

    def charge() -> str:
        ran.append("charged")
        return "charged"

    async def charged() -> str:
        return charge()

    with Semel(RedisStore(private_redis.url), sweep_every=None) as lenient:
        assert lenient.run("charge", key=1, call=charge) == "charged"

    async def main() -> None:
        async with AsyncSemel(AsyncRedisStore(private_redis.url, **STRICT), sweep_every=None) as guard:
            with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
                await guard.run("charge", key=1, call=charged, on_store_error="open")

    with frozen(replica):
        with (
            Semel(RedisStore(private_redis.url, **STRICT), sweep_every=None) as guard,
            pytest.raises(StoreUncertain, match="only 0 of 1 replicas"),
        ):
            guard.run("charge", key=1, call=charge, on_store_error="open")
        asyncio.run(main())
    assert ran == ["charged"]


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_an_error_says_whether_there_is_an_answer(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, replica: RedisServer
) -> None:
    op = finished(private_redis.url)

    async def said(store: RedisStore | AsyncRedisStore, op: Op[Any]) -> bool:
        with pytest.raises(StoreUncertain) as told:
            await answer(store, op)
        return told.value.answered

    async def main() -> None:
        store = kind(private_redis.url, **STRICT)
        with frozen(replica):
            assert await said(store, claim(op.id, 2))
            assert await said(store, Lookup(op.id))
            assert not await said(store, claim())
            many = [claim(op.id, 3), claim()]
            told = store.execute_many(many) if isinstance(store, RedisStore) else await store.execute_many(many)
            assert [each.answered for each in told] == [True, False]
        await shut(store)
        # Now no second connection can be opened.
        store = kind(private_redis.url, **STRICT)
        assert await answer(store, Lookup(os.urandom(16))) is None
        private_redis.cli("CONFIG", "SET", "maxclients", "1")
        assert await said(store, claim(op.id, 4))
        assert not await said(store, claim())
        await shut(store)

    asyncio.run(main())


def test_of_those_whose_barrier_is_lost_only_they_have_an_answer_who_found_one(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    """They share the barrier, and with it its error."""
    op = finished(private_redis.url)

    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, **{**PATIENT, "retry_for": 0})
        assert isinstance(await store.execute(claim()), Claimed)
        (second,) = store._servers._durable_connections.values()
        with frozen(replica):
            waiting = [asyncio.create_task(store.execute(each)) for each in (claim(), claim(op.id, 2), claim())]
            await asyncio.to_thread(until, lambda: number(private_redis, "clients", "blocked_clients") == 1)
            assert second._held == 0
            assert second._transport is not None
            second._transport.abort()
            told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [(type(each), getattr(each, "answered", None)) for each in told] == [
            (StoreUncertain, False), (StoreUncertain, True), (StoreUncertain, False)
        ]  # fmt: skip
        await store.close()

    asyncio.run(main())


def test_a_word_for_less_does_not_take_back_one_for_more(private_redis: RedisServer) -> None:
    """Of two that speak of different things, memory of replicas and disks, the later stands: they do not add up."""
    op = finished(private_redis.url)
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        confirm = store._programs._scripts["confirm"]
        record = store.execute(Lookup(op.id))
        assert record is not None
        key = f"semel:{op.id.hex()}".encode()
        link = store._combiner._connections[0]._connection(store._servers.topology.address_of(key))  # type: ignore[attr-defined]
        for told, stands in ((2, "\\x02"), (1, "\\x02"), (128, "\\x80"), (3, "\\x03"), (129, "\\x81")):
            assert link.exchange([confirm.call(key, record.token.to_bytes(8), told.to_bytes())]) == [1]
            assert confirmed(private_redis, op) == f'"{stands}"'
