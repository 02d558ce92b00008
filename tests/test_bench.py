"""The benchmark runs and says what it should: contestants, ratios, aims. Never a time: those are for `make bench`."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from bench import __main__ as command
from bench import job
from bench.aims import judge
from bench.contest import Contestant, Match, Pace
from bench.memory import Cost
from bench.transactional import BARE, IN_THE_CALLERS, OPENED_BY_SEMEL
from tests.servers import PostgresServer, RedisServer, ServerMissing

TINY = Pace(rounds=2, seconds=0.01, count=20)
CALLERS = 3


@pytest.fixture(autouse=True)
def few_known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "KNOWN", 8)


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
    assert len(found["aims"]) == 4
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
    assert len(found["aims"]) == 4, "the same path, one commit per Op; and the bare driver"
    for match in found["matches"]:
        assert all(one["times_bare"] > 0 for one in semel(match))
        assert names(match, "first", CALLERS) == [
            "two bare statements, one connection, a lock",
            "two bare statements, a connection each",
            "Semel",
            "Semel, one commit per Op",
        ]


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
    [("postgres", 80, [True]), ("postgres", 79, [False]), ("sqlite", 499, [False, False]), ("sqlite", 500, [True] * 2)],
)
def test_an_aim_is_met_or_not_by_its_figure(store: str, rate: float, met: list[bool]) -> None:
    bare = Contestant("bare", "first", 32, lambda seconds: 0.0, yardstick=True, rates=[100.0])
    alone = Contestant("Semel, one commit per Op", "first", 32, lambda seconds: 0.0, rates=[100.0])
    ours = Contestant("Semel", "first", 32, lambda seconds: 0.0, rates=[rate])
    assert [verdict.met for verdict in judge([], [Match(store, store, [bare, ours, alone])], 32)] == met


def test_the_overhead_is_what_the_guard_adds() -> None:
    cost = Cost("Semel", "first", "sync", [16.0, 20.0], 15.5)
    assert [(verdict.figure, verdict.met) for verdict in judge([cost], [], 32)] == [(15.5, False)]


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
        assert [one["contestant"] for one in match["standings"]] == [BARE, OPENED_BY_SEMEL, IN_THE_CALLERS]
    assert len(found["aims"]) == 2 * len(found["matches"]) == 4
