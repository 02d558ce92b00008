"""Redis that cannot or may not store, and the words for it; what its settings put at risk; what replicas confirm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncRedisStore, ConfigurationError, RedisStore, Semel, SemelError, StoreUnavailable, StoreUncertain
from semel.cli import main
from semel.core.ops import Claimed, Complete, Existing, Lookup, Op, Renew, SaveStep
from semel.core.states import State
from semel.errors import MissingDependency, StoreURLError
from semel.stores.redis import failures
from semel.stores.redis import settings as settings_module
from semel.stores.redis.risks import QUESTIONS, Risk, assess
from semel.stores.redis.settings import Address, RedisSettings
from semel.stores.urls import open_async_store, open_store
from tests.servers import RedisServer
from tests.servers.base import LOOPBACK
from tests.servers.freezing import freeze
from tests.stores.test_redis_server import claim, commands, run, told

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"


def refused(url: str, kind: type[SemelError], words: str, **settings: Any) -> None:
    """The sync and the async store say the same, and nothing is run."""
    ran: list[int] = []
    with Semel(RedisStore(url, retry_for=0, **settings), sweep_every=None) as guard:
        with pytest.raises(kind, match=words) as error:
            guard.run("ship", key=1, call=lambda: ran.append(1))
        assert error.value.__cause__ is not None or kind is ConfigurationError, "the driver's own error is behind it"
        assert "s3cret" not in f"{error.value!r} {error.value.__cause__!r}"

    async def main() -> None:
        store = AsyncRedisStore(url, retry_for=0, **settings)
        with pytest.raises(kind, match=words) as error:
            await store.execute(claim())
        assert "s3cret" not in f"{error.value!r} {error.value.__cause__!r}"
        await store.close()

    run(main)
    assert ran == []


def test_a_replica_takes_no_claims(private_redis: RedisServer) -> None:
    with RedisServer("--replicaof", f"{LOOPBACK} {private_redis.port}") as replica:
        refused(replica.url, StoreUnavailable, "it is a replica")


def test_a_server_that_may_not_write_without_replicas_says_so(private_redis: RedisServer) -> None:
    private_redis.cli("CONFIG", "SET", "min-replicas-to-write", "1")
    refused(private_redis.url, StoreUnavailable, "too few replicas")


def test_passwords_are_asked_for_and_never_shown(private_redis: RedisServer) -> None:
    private_redis.cli("CONFIG", "SET", "requirepass", "s3cret")
    port = private_redis.port
    refused(f"redis://{LOOPBACK}:{port}/0", StoreUnavailable, "password")
    refused(f"redis://:s3cret-not@{LOOPBACK}:{port}/0", StoreUnavailable, "does not know this user and password")
    with contextlib.closing(RedisStore(f"redis://:s3cret@{LOOPBACK}:{port}/0")) as store:
        assert isinstance(store.execute(claim()), Claimed)

    async def main() -> None:
        store = AsyncRedisStore(f"redis://default:s3cret@{LOOPBACK}:{port}/1")
        assert isinstance(await told(store, claim()), Claimed)
        await store.close()

    run(main)
    private_redis.cli("-a", "s3cret", "--no-auth-warning", "CONFIG", "SET", "requirepass", "")


def test_a_user_with_the_rights_that_the_page_names_is_enough(private_redis: RedisServer) -> None:
    named = re.search(r"^ACL SETUSER semel on >password (.*)$", PAGE.read_text(), re.MULTILINE)
    assert named
    rights = [right for right in named[1].split() if right not in ("+config|get", "+info")]
    assert private_redis.cli("ACL", "SETUSER", "semel", "on", ">s3cret", *rights) == "OK\n"
    url = f"redis://semel:s3cret@{LOOPBACK}:{private_redis.port}/0"
    with Semel(RedisStore(url), sweep_every=None) as guard:
        assert guard.run("ship", key=1, call=lambda: "sent") == "sent"
        assert guard.run("ship", key=1, call=lambda: "again") == "sent"
        assert guard.sweep().removed == 0
        guard.store.wait(os.urandom(16), 0.05)
        (unreadable,) = guard.store.risks()  # type: ignore[attr-defined]
        assert unreadable.name == "unreadable"
    op = claim()
    with contextlib.closing(RedisStore(url, wait_replicas=1, wait_timeout="50ms", retry_for=0)) as store:
        with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
            store.execute(op)
        with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
            store.execute(claim(op.id))  # its own claim, said again: the scripts are allowed as well
    private_redis.cli("ACL", "SETUSER", "semel", "-set")
    refused(url, StoreUnavailable, "does not allow this user")


def test_a_user_with_the_further_rights_may_size_and_tier(
    private_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = re.search(r"^ACL SETUSER semel on >password (.*)$", PAGE.read_text(), re.MULTILINE)
    more = re.findall(r"^\|.*\| `(~[^`]*)` \|$", PAGE.read_text(), re.MULTILINE)
    assert named
    assert len(more) == 2
    rights = " ".join([named[1], *more]).replace("\\|", "|").split()
    assert private_redis.cli("ACL", "SETUSER", "semel", "on", ">s3cret", *rights) == "OK\n"
    url = f"redis://semel:s3cret@{LOOPBACK}:{private_redis.port}/0"
    size = ["size", "--qps", "1", "--records", "20"]
    assert main([*size, "--store", url]) == 0, capsys.readouterr().err
    assert main([*size, "--store", f"tiered:memory:,{url}"]) == 0, capsys.readouterr().err
    assert main(["migrate", f"sqlite:///{tmp_path}/app.db"]) == 0
    with Semel(f"tiered:sqlite:///{tmp_path}/app.db,{url}", sweep_every=None) as guard:
        store: Any = guard.store
        assert store.cache.connect(20)
        assert guard.run("ship", key=1, call=lambda: "sent") == "sent"
        assert guard.run("ship", key=1, call=lambda: "again") == "sent"
        store.cache.settle(b"")
    assert "semel-tier:" in private_redis.cli("KEYS", "*")


def test_a_channel_that_is_not_allowed_does_not_undo_the_answer(private_redis: RedisServer) -> None:
    private_redis.cli("ACL", "SETUSER", "semel", "on", ">s3cret", "~semel:*", "resetchannels", "+@all")
    with contextlib.closing(RedisStore(f"redis://semel:s3cret@{LOOPBACK}:{private_redis.port}/0")) as store:
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        with contextlib.closing(RedisStore(private_redis.url)) as other:
            other.wait(op.id, 0.05)
        assert store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
        shown = store.execute(claim(op.id, 2))
        assert isinstance(shown, Existing)
        assert (shown.record.state, shown.record.snapshot) == (State.DONE, b"answer")


def test_who_may_not_listen_looks_for_itself(private_redis: RedisServer) -> None:
    private_redis.cli("ACL", "SETUSER", "semel", "on", ">s3cret", "~semel:*", "resetchannels", "+@all", "-subscribe")
    url = f"redis://semel:s3cret@{LOOPBACK}:{private_redis.port}/0"

    async def main() -> None:
        sync, aio = RedisStore(url), AsyncRedisStore(url)
        op = claim()
        won = await aio.execute(op)
        assert isinstance(won, Claimed)
        began = time.monotonic()
        await asyncio.gather(asyncio.to_thread(sync.wait, op.id, 60.0), aio.wait(op.id, 60.0))
        assert time.monotonic() - began < 30
        sync.close()
        await aio.close()

    run(main)


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", failures.NoMemory, "no memory left"),
        ("READONLY You can't write against a read only replica.", failures.NotMaster, "replica"),
        ("LOADING Redis is loading the dataset in memory", failures.ServerUnreachable, "loading"),
        ("MASTERDOWN Link with MASTER is down", failures.NotMaster, "master"),
        ("CLUSTERDOWN The cluster is down", failures.NotMaster, "down"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", failures.ServerUnreachable, "moving"),
        ("BUSY Redis is busy running a script.", failures.ServerUnreachable, "busy"),
        ("MISCONF Redis is configured to save RDB snapshots", failures.CommandRefused, "disk"),
        ("NOREPLICAS Not enough good replicas to write.", failures.CommandRefused, "too few replicas"),
        ("NOSCRIPT No matching script.", failures.NoScript, "does not know a script"),
        ("WRONGTYPE Operation against a key", ConfigurationError, "prefix"),
        ("ERR syntax error", failures.CommandRefused, "7.0"),
        ("ERR unknown command 'WAITAOF'", failures.CommandRefused, "7.0"),
        ("unknown command 'WAITAOF'", failures.CommandRefused, "7.0"),  # as redis-py hands it on
        ("ERR WAIT cannot be used with replica instances.", failures.Unconfirmed, "cannot confirm"),
        ("WAITAOF cannot be used when numlocal is set but appendonly is disabled.", failures.Unconfirmed, "cannot"),
        ("UNBLOCKED force unblock from blocking operation", failures.Unconfirmed, "stopped waiting"),
        ("ERR whatever", failures.CommandRefused, "refused the command"),
    ],
)
def test_what_the_server_says_in_our_words(reply: str, kind: type[SemelError], words: str) -> None:
    error = failures.error_of_reply(reply)
    assert type(error) is kind
    assert words in str(error)


def test_redirections_are_read() -> None:
    moved = failures.error_of_reply("MOVED 3999 10.0.0.1:6381")
    asked = failures.error_of_reply("ASK 3999 ::1:6381")
    assert isinstance(moved, failures.Moved)
    assert isinstance(asked, failures.Moved)
    assert (moved.slot, moved.host, moved.port, moved.asking) == (3999, "10.0.0.1", 6381, False)
    assert (asked.slot, asked.host, asked.port, asked.asking) == (3999, "::1", 6381, True)


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_a_package_that_is_missing_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for kind in (RedisStore, AsyncRedisStore):
        with pytest.raises(MissingDependency, match=rf"^{package} is not installed: pip install 'semel\[redis\]'"):
            kind("redis://localhost")


# What the settings put at risk


def names(risks: list[Risk]) -> list[str]:
    return sorted(risk.name for risk in risks)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"save": "", "appendonly": "no"}, ["no-persistence"]),
        ({"save": "3600 1", "appendonly": "no"}, ["snapshots-only"]),
        ({"appendonly": "yes", "appendfsync": "everysec"}, ["lazy-fsync"]),
        ({"appendonly": "yes", "appendfsync": "always"}, []),
        ({"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "allkeys-lru"}, []),
        (
            {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"},
            ["eviction"],
        ),
        (
            {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "volatile-ttl", "maxmemory": "100mb"},
            ["eviction"],
        ),
        ({"appendonly": "yes", "appendfsync": "always", "maxmemory": "100mb"}, []),
    ],
)
def test_risks_are_named(private_redis: RedisServer, config: dict[str, str], found: list[str]) -> None:
    for name, value in config.items():
        private_redis.cli("CONFIG", "SET", name, value)
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        risks = store.risks()
    assert names(risks) == found
    assert all(risk.what and risk.remedy for risk in risks)

    async def main() -> list[Risk]:
        store = AsyncRedisStore(private_redis.url)
        try:
            return await store.risks()
        finally:
            await store.close()

    assert run(main) == risks


def test_risks_are_logged_once_when_the_store_first_connects(
    private_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "semel.redis"), contextlib.closing(RedisStore(private_redis.url)) as store:
        assert caplog.records == []
        for _ in range(3):
            store.execute_many([claim() for _ in range(5)])
        store.risks()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no-persistence: neither appendonly nor save is set" in said
    assert "set appendonly yes" in said


def test_what_cannot_be_read_is_a_risk_of_its_own() -> None:
    no = StoreUnavailable("NOPERM")
    (risk,) = assess([no] * len(QUESTIONS), wait_replicas=0, wait_aof=False)
    assert risk.name == "unreadable"
    assert "maxmemory-policy" in risk.what
    assert "INFO replication" in risk.what


# What replicas confirm


@pytest.fixture
def replica(private_redis: RedisServer) -> Iterator[RedisServer]:
    with RedisServer("--replicaof", f"{LOOPBACK} {private_redis.port}") as server:
        until = time.monotonic() + 20
        while "state=online" not in private_redis.cli("INFO", "replication"):
            assert time.monotonic() < until, "the replica does not come up"
            time.sleep(0.02)
        yield server


def test_replicas_are_a_risk_until_they_confirm(private_redis: RedisServer, replica: RedisServer) -> None:
    private_redis.cli("CONFIG", "SET", "appendonly", "yes")
    private_redis.cli("CONFIG", "SET", "appendfsync", "always")
    for confirming, found in ((0, ["asynchronous-replicas"]), (1, [])):
        with contextlib.closing(RedisStore(private_redis.url, wait_replicas=confirming)) as store:
            assert names(store.risks()) == found


def test_writes_that_matter_wait_for_the_replica_and_replays_do_not(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    async def main() -> None:
        sync = RedisStore(private_redis.url, wait_replicas=1, retry_for="20s")
        aio = AsyncRedisStore(private_redis.url + "?wait_replicas=1", retry_for="20s")
        sync.execute(claim())
        await aio.execute(claim())
        commands(private_redis)
        op = claim()
        won = sync.execute(op)
        assert isinstance(won, Claimed)
        assert commands(private_redis)["wait"] == 1
        assert sync.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
        assert commands(private_redis)["wait"] == 1
        assert isinstance(sync.execute(claim(op.id, 2)), Existing)
        assert isinstance(await told(aio, claim(op.id, 3)), Existing)
        assert sync.execute(Renew(op.id, won.token, 60.0)) is False
        assert "wait" not in commands(private_redis)
        # Those who wait in the same turn wait together.
        claims = [claim() for _ in range(20)]
        await asyncio.gather(*map(aio.execute, claims))
        assert commands(private_redis)["wait"] <= 3
        sync.execute_many(claims)
        assert commands(private_redis)["wait"] <= 3
        sync.close()
        await aio.close()

    run(main)


def test_too_few_confirmations_leave_it_uncertain_and_the_same_claim_may_try_again(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"wait_replicas": 1, "wait_timeout": 0.1, "retry_for": 0}
        sync, aio = RedisStore(private_redis.url, **settings), AsyncRedisStore(private_redis.url, **settings)
        assert sync.execute(Lookup(os.urandom(16))) is None
        assert await aio.execute(Lookup(os.urandom(16))) is None
        replica.cli("REPLICAOF", "NO", "ONE")
        one, two = claim(), claim()
        with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
            sync.execute(one)
        links = dict(aio._servers._connections)
        with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
            await aio.execute(two)
        assert aio._servers._connections == links, "the connection is good, and others use it"
        sync.close()  # a new connection, which has written nothing yet: WAIT must not be content with that
        sync = RedisStore(private_redis.url, **settings)
        with pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
            sync.execute(one)
        sync.close()
        await aio.close()
        replica.cli("REPLICAOF", LOOPBACK, str(private_redis.port))
        sync = RedisStore(private_redis.url, wait_replicas=1, retry_for="30s")
        aio = AsyncRedisStore(private_redis.url, wait_replicas=1, retry_for="30s")
        for found in (sync.execute(one), await aio.execute(two)):
            assert isinstance(found, Claimed)
            assert found.attempt == 1
        sync.close()
        await aio.close()

    run(main)


def test_what_is_said_again_on_a_new_connection_is_confirmed_anew(
    private_redis: RedisServer, replica: RedisServer
) -> None:
    """WAIT speaks of what its own connection has written: one that has written nothing may be told that all is well."""
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        claimed, done = claim(), claim()
        won, finished = store.execute_many([claimed, done])
        assert replica.pid is not None
        freeze(replica.pid)  # for the master it is still there
        try:
            saved = SaveStep(claimed.id, won.token, "charge", b"1", 0)
            assert store.execute(saved) is True
            completed = Complete(done.id, finished.token, b"answer", 60.0)
            assert store.execute(completed) is True
            said: tuple[Op[Any], ...] = (claimed, saved, completed)
            for op in said:
                strict = RedisStore(private_redis.url, wait_replicas=1, wait_timeout="100ms", retry_for=0)
                commands(private_redis)
                with contextlib.closing(strict), pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
                    strict.execute(op)
                assert commands(private_redis)["setrange"] == 1, "nothing was written that could be waited for"
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        with contextlib.closing(RedisStore(private_redis.url, wait_replicas=1, retry_for="20s")) as strict:
            again = strict.execute(claimed)
            assert isinstance(again, Claimed)
            assert again.token == won.token
            assert strict.execute(completed) is True


def test_waiting_for_the_disk_needs_a_server_that_can(private_redis: RedisServer) -> None:
    if _knows_waitaof(private_redis):
        refused(private_redis.url, ConfigurationError, "appendonly", wait_aof=True)  # it is off
    else:
        refused(private_redis.url, ConfigurationError, "wait_aof needs Redis 7.2", wait_aof=True)


def _knows_waitaof(server: RedisServer) -> bool:
    return "unknown command" not in server.cli("WAITAOF", "0", "0", "1")


@pytest.fixture
def on_disk(redis: RedisServer) -> Iterator[RedisServer]:
    """A server that keeps an append-only file, as Redis does by itself: flushed once a second."""
    if not _knows_waitaof(redis):
        pytest.skip("this server is older than WAITAOF")
    with RedisServer("--appendonly", "yes") as server:
        yield server


def waits(server: RedisServer) -> int:
    found = re.search(r"^cmdstat_waitaof:calls=(\d+)", server.cli("INFO", "commandstats"), re.MULTILINE)
    return int(found[1]) if found else 0


async def answer(store: RedisStore | AsyncRedisStore, op: Op[Any]) -> Any:
    return store.execute(op) if isinstance(store, RedisStore) else await store.execute(op)


def test_with_its_own_settings_a_store_waits_until_the_disk_has_it(on_disk: RedisServer) -> None:
    """The server confirms once a second: claims and answers that follow each other closely wait for that."""

    async def main() -> None:
        sync = RedisStore(on_disk.url, wait_aof=True, retry_for=0)
        aio = AsyncRedisStore(on_disk.url, wait_aof=True, retry_for=0)
        for store in (sync, aio):
            op = claim()
            won = await answer(store, op)
            assert isinstance(won, Claimed)
            asked = waits(on_disk)
            assert await answer(store, Complete(op.id, won.token, b"x" * 20, 60.0)) is True
            assert waits(on_disk) == asked + 1
            replayed = await answer(store, op)
            assert isinstance(replayed, Existing)
            assert waits(on_disk) == asked + 1, "a replay waits for nothing"
        sync.close()
        await aio.close()

    run(main)


def test_what_is_written_and_cannot_be_confirmed_is_uncertain(on_disk: RedisServer) -> None:
    """Someone turns the append-only file off: what was written before the question stands."""

    async def main() -> None:
        sync = RedisStore(on_disk.url, wait_aof=True, retry_for=0)
        aio = AsyncRedisStore(on_disk.url, wait_aof=True, retry_for=0)
        for store in (sync, aio):
            assert isinstance(await answer(store, claim()), Claimed)
        on_disk.cli("CONFIG", "SET", "appendonly", "no")
        for store in (sync, aio):
            op = claim()
            with pytest.raises(StoreUncertain, match="cannot confirm"):
                await answer(store, op)
            assert await answer(store, Lookup(op.id)) is not None
        sync.close()
        await aio.close()

    run(main)


def test_whatever_the_confirmation_is_refused_with_the_record_is_written(private_redis: RedisServer) -> None:
    """Here by a user who may not WAIT: the command before it was carried out."""
    private_redis.cli("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-wait")
    url = private_redis.url.replace("redis://", "redis://app:pw@")

    async def main() -> None:
        sync = RedisStore(url, wait_replicas=1, retry_for=0)
        aio = AsyncRedisStore(url, wait_replicas=1, retry_for=0)
        for store in (sync, aio):
            op = claim()
            with pytest.raises(StoreUncertain, match="not confirmed"):
                await answer(store, op)
            assert await answer(store, Lookup(op.id)) is not None
        sync.close()
        await aio.close()

    run(main)


# URLs


def test_a_disk_is_given_more_time_than_replicas() -> None:
    """It confirms once a second, when it is quick."""
    assert settings("redis://", wait_timeout=None).wait_ms == 1000
    assert settings("redis://?wait_aof=yes", wait_timeout=None).wait_ms == 3000
    assert settings("redis://?wait_aof=yes", wait_timeout=2).wait_ms == 2000
    assert settings("redis://?wait_aof=yes", wait_timeout=None, timeout=2.5).wait_ms == 2000, (
        "and Redis must answer first"
    )


def settings(url: str, **more: Any) -> RedisSettings:
    given: dict[str, Any] = {
        "prefix": None, "connections": 2, "timeout": 10, "connect_timeout": 5, "retry_for": 1,
        "wait_replicas": None, "wait_aof": None, "wait_timeout": 1, **more,
    }  # fmt: skip
    return RedisSettings(url, **given)


@pytest.mark.parametrize(
    ("url", "kind", "addresses", "service", "db"),
    [
        ("redis://", "redis", [("localhost", 6379)], "", 0),
        ("redis://cache", "redis", [("cache", 6379)], "", 0),
        ("redis://cache:7000/3", "redis", [("cache", 7000)], "", 3),
        ("redis://[::1]:7000/3", "redis", [("::1", 7000)], "", 3),
        ("rediss://u:p@cache", "redis", [("cache", 6379)], "", 0),
        ("unix:///run/redis.sock?db=2", "redis", [("/run/redis.sock", 0)], "", 2),
        ("redis+sentinel://a,b:1/shop", "sentinel", [("a", 26379), ("b", 1)], "shop", 0),
        ("rediss+sentinel://a/shop/4", "sentinel", [("a", 26379)], "shop", 4),
        ("redis+cluster://a:1,b:2,[::1]:3", "cluster", [("a", 1), ("b", 2), ("::1", 3)], "", 0),
    ],
)
def test_urls_are_read(url: str, kind: str, addresses: list[tuple[str, int]], service: str, db: int) -> None:
    found = settings(url)
    assert (found.kind, found.addresses, found.service, found.db) == (
        kind, [Address(*each) for each in addresses], service, db,
    )  # fmt: skip
    assert found.tls is url.startswith("rediss")


def test_users_passwords_and_options_are_read() -> None:
    found = settings("rediss://us%40er:p%3Aw%2F@h?ssl_cert_reqs=none&prefix=a:&wait_replicas=2&ssl_check_hostname=no")
    assert (found.credentials(), found.prefix, found.wait_replicas) == (("us@er", "p:w/"), "a:", 2)
    assert found.ssl == {"cert_reqs": "none", "check_hostname": False}
    assert settings("redis://:pw@h").credentials() == (None, "pw")
    assert settings("redis://h?prefix=a:", prefix="b:").prefix == "b:"


@pytest.mark.parametrize(
    "url",
    [
        "http://s3cret@h", "redis+other://s3cret@h", "redis://:s3cret@h:port", "redis://:s3cret@h/db",
        "redis://:s3cret@a,b", "redis+sentinel://:s3cret@h", "redis://:s3cret@h?colour=red", "redis://:s3cret@h/1/2",
        "redis+cluster://:s3cret@h/1", "redis://:s3cret@h?db=x", "rediss://:s3cret@h?ssl_check_hostname=perhaps",
        "redis://:s3cret@h:0", "redis://:s3cret@h:-5", "redis://:s3cret@h:99999", "redis://:s3cret@h:",
        "redis+cluster://:s3cret@h,[::1]:65536", "redis+cluster://:s3cret@a,,b", "redis://:s3cret@a..b",
        "redis+sentinel://:s3cret@a..b/shop", "redis://:s3cret@" + "a" * 64, "rediss://:s3cret@h?ssl_cert_reqs=nonne",
        "redis://:s3cret@h?ssl_cert_reqs=required", "redis+cluster://:s3cret@h?ssl_ca_certs=/s3cret",
        "unix://:s3cret@/redis.sock?ssl_check_hostname=no", "unix://", "unix:///", "unix://s3cret/redis.sock",
        "redis://:s3cret@h#fragment", "redis://:s3#cret@h", "redis://:s3cret@h/-1", "redis://:s3cret@h?db=-1",
        "redis://:s3cret@[::1]x6379", "redis+cluster://:s3cret@a,[::1]6379", "redis://:s3cret@x%00y",
        "redis+sentinel://:s3cret@x%0Ay/shop", "unix:///s3cret%00.sock",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_read_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(StoreURLError) as error:
        settings(url)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h:99999", "a port is a number from 1 to 65535"),
        ("rediss://h?ssl_cert_reqs=nonne", "ssl_cert_reqs of a Redis URL is none, optional or required"),
        ("redis://h?wait_replicas=1.5", "wait_replicas of a Redis URL is a number"),
        ("redis://h?wait_aof=perhaps", "wait_aof of a Redis URL is yes or no"),
        ("redis://h?ssl_check_hostname=no", "ssl_check_hostname is an option for TLS, .* write rediss://"),
        ("redis://a..b", "no valid host name"),
        ("redis://:pass#word@h", "write a # in a password as %23"),
        ("unix://run/redis.sock", "write unix:///run/redis.sock"),
        ("redis://h/-1", "a database is a number from 0 on"),
    ],
)
def test_what_is_wrong_with_a_url_is_named(url: str, words: str) -> None:
    with pytest.raises(StoreURLError, match=words):
        settings(url)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"connections": 0}, "1 to 64"),
        ({"connections": "2"}, "1 to 64, not '2'"),
        ({"wait_replicas": -1}, "wait_replicas"),
        ({"wait_replicas": 1.5}, "wait_replicas is the number of replicas that must confirm a write, not 1.5"),
        ({"wait_replicas": True}, "wait_replicas"),
        ({"wait_aof": "yes"}, "wait_aof is True or False, not 'yes'"),
        ({"prefix": 7}, "prefix is the text"),
        ({"wait_timeout": 10, "wait_replicas": 1}, "wait_timeout must be shorter"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings("redis://h", **wrong)


@pytest.mark.parametrize("url", [123, None, b"redis://h"])
def test_a_url_that_is_no_text_is_refused(url: Any) -> None:
    for kind in (RedisStore, AsyncRedisStore):
        with pytest.raises(ConfigurationError, match="the store's URL is text, not"):
            kind(url)


@pytest.mark.parametrize("address", [Address("a..b", 6379), Address(LOOPBACK, 99999)])
def test_an_address_that_no_server_can_have_is_not_available(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL with one is refused; a Cluster or a sentinel may name it."""
    monkeypatch.setattr("semel.stores.redis.settings._address", lambda text, port: address)
    refused("redis://h", StoreUnavailable, "cannot be reached")


def test_tls_settings_that_the_driver_refuses_are_a_mistake_in_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings_module.URL_OPTIONS, "ssl_cert_reqs", str)

    async def main() -> None:
        store = AsyncRedisStore("rediss://localhost:1?ssl_cert_reqs=nonne")
        with pytest.raises(ConfigurationError, match="TLS settings"):
            await store.execute(claim())
        await store.close()

    run(main)


def test_stores_are_opened_by_url() -> None:
    for url in ("redis://localhost:1", "rediss://localhost:1", "redis+cluster://localhost:1", "unix:///run/redis.sock"):
        store = open_store(url)
        assert isinstance(store, RedisStore)
        store.close()

    async def main() -> None:
        store = open_async_store("redis+sentinel://localhost:1/shop/2")
        assert isinstance(store, AsyncRedisStore)
        await store.close()

    run(main)
