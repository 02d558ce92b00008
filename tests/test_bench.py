"""The benchmark runs and says what it should: contestants, ratios, aims. Never a time: those are for `make bench`."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import job, large, relay
from bench.aims import judge, judge_large
from bench.contest import Contestant, Match, Pace
from bench.large import JOBS, Large, Measured
from bench.large_postgres import FullPostgres
from bench.memory import WITH_METRICS, Cost
from bench.peer_outboxes import FASTSTREAM, TXOUTBOX
from bench.transactional import BARE, BY_HAND, IN_THE_CALLERS, LEASED, ONE_STATEMENT, OPENED_BY_SEMEL
from tests.servers import KafkaServer, PostgresServer, RedisServer, ServerMissing

TINY = Pace(rounds=2, seconds=0.01, count=20)
CALLERS = 3


@pytest.fixture(autouse=True)
def few_known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "KNOWN", 8)
    gc.freeze()  # each turn begins with a collection, and what the tests before have left is large


def measured(only: str, url: str | None = None) -> dict[str, Any]:
    said: list[str] = []
    found = command.measure(TINY, [only], callers=CALLERS, url=url, progress=said.append)
    assert any("round 2 of 2" in line for line in said)
    text, plain = found.as_text(), json.loads(json.dumps(found.as_json()))
    assert plain["environment"]["fsync_us"] > 0
    assert plain["environment"]["cores"] >= 1
    for match in plain["matches"]:
        assert match["title"] in text
        for standing in match["standings"]:
            assert 0 < standing["low"] <= standing["per_second"] <= standing["high"], standing
    for aim in plain["aims"]:
        assert aim["aim"] in text
        assert isinstance(aim["met"], bool)
    return plain  # type: ignore[no-any-return]


def names(match: dict[str, Any], kind: str, callers: int) -> list[str]:
    return [one["contestant"] for one in match["standings"] if (one["job"], one["callers"]) == (kind, callers)]


def peers(match: dict[str, Any]) -> list[str]:
    return [one["contestant"] for one in match["standings"] if one["contestant"] in (TXOUTBOX, FASTSTREAM)]


def semel(match: dict[str, Any]) -> list[dict[str, Any]]:
    found = [one for one in match["standings"] if one["contestant"] == "Semel"]
    assert {(one["job"], one["callers"]) for one in found} == {
        (kind, callers) for kind in ("first", "replay") for callers in (1, CALLERS)
    }
    return found


@pytest.mark.slow
def test_memory_is_measured_beside_the_bare_call() -> None:
    found = measured("memory")
    measured_costs = {(cost["contestant"], cost["shell"], cost["job"]) for cost in found["overhead"]}
    for who in ("unprotected", "Semel"):
        assert {(who, shell, kind) for shell in ("sync", "async") for kind in ("first", "replay")} <= measured_costs
    assert [match["title"] for match in found["matches"]] == ["Memory, threads", "Memory, asyncio"]
    for match in found["matches"]:
        semel(match)
    peers = {cost["contestant"] for cost in found["overhead"]} - {"Semel", "unprotected"}
    assert len(found["aims"]) == 2 * len(peers)
    assert any("DynamoDB or Redis only" in note for note in found["matches"][0]["notes"])


@pytest.mark.slow
def test_the_peer_stands_beside_semel_where_it_is_installed() -> None:
    pytest.importorskip("aws_lambda_powertools.utilities.idempotency", reason="pip install --group bench")
    found = measured("memory")
    assert all(one["times_peer"] > 0 for one in semel(found["matches"][0]))


@pytest.mark.slow
def test_without_the_peer_the_rest_is_measured_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aws_lambda_powertools.utilities.idempotency", None)
    found = measured("memory")
    assert all(one["times_peer"] is None for one in semel(found["matches"][0]))
    assert any("not installed" in note for note in found["matches"][0]["notes"])


@pytest.mark.slow
def test_sqlite_is_compared_with_one_commit_per_op() -> None:
    found = measured("sqlite")
    assert len(found["matches"]) == 2
    assert [aim["aim"].endswith("one commit per Op") for aim in found["aims"]] == [True], "with threads"
    for match in found["matches"]:
        assert all(one["times_bare"] > 0 for one in semel(match))
        assert names(match, "first", CALLERS) == [
            "two bare statements, one connection, a lock",
            "two bare statements, a connection each",
            "Semel",
            "Semel, one commit per Op",
        ]


@pytest.mark.slow
def test_the_client_is_compared_with_httpx_alone_and_with_one_fsync_per_call() -> None:
    found = measured("client")
    assert names(found["matches"][0], "first", 1) == ["httpx alone", "with keys and retries", "with a journal"]
    assert names(found["matches"][1], "first", CALLERS) == ["one fsync per call", "Semel"]
    assert len(found["aims"]) == 2


def test_postgres_is_compared_with_two_bare_statements_by_each_driver(postgres_url: str) -> None:
    found = measured("postgres", postgres_url)
    assert [match["title"].split(", ")[1] for match in found["matches"]] == [
        "threads (psycopg)",
        "asyncio (asyncpg)",
        "asyncio (psycopg)",
    ]
    for match in found["matches"]:
        assert all(one["times_bare"] > 0 for one in semel(match))
        assert names(match, "first", 1) == ["two bare statements", "Semel"]
    assert len(found["aims"]) == 3


def test_redis_is_compared_with_the_same_two_commands_by_redis_asyncio(redis: RedisServer) -> None:
    found = measured("redis")
    (match,) = found["matches"]
    assert names(match, "first", CALLERS) == [
        "the same two commands by redis.asyncio",
        "Semel's store: claim and complete",
        "Semel",
    ]
    assert all(one["times_bare"] > 0 for one in semel(match))
    assert [aim["aim"].endswith("by redis.asyncio") for aim in found["aims"]] == [True]


def test_a_missing_server_is_named_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PostgresServer) -> None:
        raise ServerMissing("postgres is not installed; install: postgresql")

    monkeypatch.setattr(PostgresServer, "start", missing)
    found = command.measure(TINY, ["postgres"], callers=CALLERS, url=None, progress=lambda what: None)
    assert found.matches == []
    assert "PostgreSQL was not measured: postgres is not installed" in found.as_text()


def test_a_ratio_is_taken_within_each_round_against_the_fastest_yardstick() -> None:
    """The machine was twice as slow in round 2, and the third round was spoilt: neither shows in the ratio."""

    def played(name: str, *rates: float, yardstick: bool = False) -> Contestant:
        return Contestant(name, "first", 32, lambda seconds: 0.0, yardstick=yardstick, rates=list(rates))

    slow, fast = (
        played("slow", 50, 25, 50, yardstick=True),
        played("fast", 100, 50, 100, yardstick=True),
    )
    match = Match("postgres", "PostgreSQL", [slow, fast, played("Semel", 90, 45, 1)])
    standing = match.standings()[2]
    assert (standing.times_bare, standing.rate, standing.low, standing.high) == (0.9, 45, 1, 90)
    [verdict] = judge([], [match], 32)
    assert (verdict.figure, verdict.met) == (0.9, True)


@pytest.mark.parametrize(
    ("store", "rate", "met"),
    [("postgres", 80, True), ("postgres", 79, False), ("sqlite", 499, False), ("sqlite", 500, True)],
)
def test_an_aim_is_met_or_not_by_its_figure(store: str, rate: float, met: bool) -> None:
    bare = Contestant("bare", "first", 32, lambda seconds: 0.0, yardstick=True, rates=[100.0])
    alone = Contestant("Semel, one commit per Op", "first", 32, lambda seconds: 0.0, rates=[100.0])
    ours = Contestant("Semel", "first", 32, lambda seconds: 0.0, rates=[rate])
    match = Match(store, f"{store}, threads", [bare, ours, alone])
    assert [verdict.met for verdict in judge([], [match], 32)] == [met]


@pytest.mark.parametrize(("driver", "met"), [("asyncpg", [True, False]), ("psycopg", [False, False])])
def test_a_transaction_of_the_caller_is_judged_by_its_driver(driver: str, met: list[bool]) -> None:
    bare = Contestant(BARE, "first", 16, lambda seconds: 0.0, yardstick=True, rates=[100.0])
    within = Contestant(IN_THE_CALLERS, "first", 16, lambda seconds: 0.0, rates=[55.0])
    opened = Contestant(OPENED_BY_SEMEL, "first", 16, lambda seconds: 0.0, rates=[67.0])
    match = Match("transactional", f"Transactions, asyncio ({driver}), 16 clients", [bare, within, opened])
    assert [verdict.met for verdict in judge([], [match], 32)] == met


def test_a_call_in_process_is_to_be_cheaper_than_a_peer() -> None:
    costs = [
        Cost("unprotected", "first", "sync", [0.5], 0.5),
        Cost("Semel", "first", "sync", [16.0], 15.0),
        Cost("Semel", "first", "async", [16.0], 15.0),
        Cost("peer", "first", "sync", [30.5], 30.0),
        Cost(WITH_METRICS, "first", "sync", [20.0], 20.0),
    ]
    assert [(verdict.figure, verdict.met) for verdict in judge(costs, [], 32)] == [(0.5, True), (2.5, True)]


@pytest.mark.slow
def test_the_command_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", TINY)
    assert command.main(["--quick", "--only", "memory", "--json"]) == 0
    printed = capsys.readouterr()
    assert {"environment", "overhead", "matches", "aims", "notes"} <= set(json.loads(printed.out))
    assert "Engine overhead" in printed.err


def test_transactions_are_measured_beside_unprotected_ones(postgres: PostgresServer, postgres_url: str) -> None:
    found = measured("transactional", postgres_url)
    for match in found["matches"]:
        contestants = [one["contestant"] for one in match["standings"]]
        assert {BARE, ONE_STATEMENT, OPENED_BY_SEMEL, IN_THE_CALLERS, LEASED} <= set(contestants)
        by_hand = [name for name in contestants if name.startswith(BY_HAND)]
        assert len(by_hand) == (0 if "asyncio (psycopg)" in match["title"] else 2)
        beside = [name for name in contestants if name.startswith("DBOS")]
        assert len(beside) == 2 or any("DBOS" in note for note in match["notes"]) or "threads" not in match["title"]
    assert len(found["aims"]) == 4 * len(found["matches"]) == 12


def test_messages_are_measured_beside_the_transaction_alone(postgres_url: str) -> None:
    found = measured("outbox", postgres_url)
    assert [len(match["standings"]) - len(peers(match)) for match in found["matches"]] == [4, 4, 4]
    assert len(found["aims"]) == 6
    if importlib.util.find_spec("txoutbox") and importlib.util.find_spec("faststream_outbox"):
        assert [peers(match) for match in found["matches"]] == [[TXOUTBOX], [], [FASTSTREAM]]


def test_batches_of_the_inbox_are_measured_beside_their_effects_alone(postgres_url: str) -> None:
    found = measured("inbox", postgres_url)
    assert [len(match["standings"]) for match in found["matches"]] == [3]
    assert [aim["unit"] for aim in found["aims"]] == ["messages/s"]


def test_a_relay_is_measured_beside_a_bare_loop(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "BATCH", 50)
    found = measured("relay", postgres_url)
    (match,) = found["matches"]
    assert len(match["standings"]) - len(peers(match)) == 5
    assert "from the commit" in match["notes"][0]
    assert len(found["aims"]) == 2


def test_a_relay_to_kafka_is_measured_beside_its_library(postgres_url: str, kafka: KafkaServer) -> None:
    with relay.kafka_matches(postgres_url, kafka.topic()) as (match,):
        match.play(TINY, lambda what: None)
    assert [standing.times_bare is not None for standing in match.standings()] == [True] * 4
    assert [verdict.unit for verdict in judge([], [match], 1)] == ["×", "×"]


def test_a_large_store_is_measured_beside_a_small_one(
    redis: RedisServer, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here() -> contextlib.AbstractContextManager[FullPostgres]:
        return contextlib.nullcontext(FullPostgres(postgres, postgres.create_database()))

    monkeypatch.setattr(large, "full_postgres", here)
    monkeypatch.setattr(large, "SWEEP_EVERY", 0.01)
    monkeypatch.setattr(large, "EXPIRIES", 500.0)
    pace = Pace(rounds=2, seconds=0.02)
    found = command.measure(pace, ["large"], callers=CALLERS, url=None, records=300, progress=lambda what: None)
    text, plain = found.as_text(), json.loads(json.dumps(found.as_json()))
    assert [one["store"] for one in plain["large"]] == ["Redis", "PostgreSQL"]
    for one in plain["large"]:
        assert one["store"] in text
        assert {(done["job"], done["records"]) for done in one["jobs"]} == {
            (kind, n) for kind in JOBS for n in (30, 300)
        }
        assert all(done["p99"] >= done["p50"] > 0 for done in one["jobs"])
        assert one["sweep"]["expired"] > 0
    assert plain["large"][1]["sweep"]["left"] == 0, "they are swept"
    assert len(plain["aims"]) == 5 + 6


def test_a_large_store_is_judged_by_what_it_costs_more_than_a_small_one() -> None:
    def measured_at(*microseconds: float) -> Measured:
        return Measured(list(microseconds), list(microseconds), list(microseconds))

    found = Large("PostgreSQL", 10, 1000, quiet=[0.001] * 200, swept=[0.001] * 190 + [0.003] * 10, left=5000)
    found.jobs = {
        (JOBS[0], 10): measured_at(10, 20, 10), (JOBS[0], 1000): measured_at(15, 30, 99),
        (JOBS[1], 10): measured_at(10, 20, 10), (JOBS[1], 1000): measured_at(16, 32, 1),
    }  # fmt: skip
    assert [verdict.met for verdict in judge_large([found])] == [True, True, False, False, False, False]
    assert [round(verdict.figure, 2) for verdict in judge_large([found])] == [1.5, 1.5, 1.6, 1.6, 3.0, 5000]
    assert len(judge_large([Large("Redis", 10, 1000, found.jobs, [0.001], [0.001], sweeps=False)])) == 5


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_packages_of_the_benchmark_are_installed_apart_from_those_of_the_tests() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "bench", "PYTHON=python3"],
        cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert set(re.findall(r"^(\S+) -m (pip|bench)\b", planned, re.MULTILINE)) == {
        (".venv-bench/bin/python", "pip"), (".venv-bench/bin/python", "bench"),
    }  # fmt: skip
