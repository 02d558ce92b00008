"""The benchmark of HTTP runs and says what it should. Never a time: those are for `python -m bench.http`."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bench import http as command
from bench import http_services, http_wire, job
from bench.aims import judge
from bench.contest import Contestant, Pace
from bench.http_cost import BODY, RequestCost
from bench.http_wire import BY_THE_CLOCK, BY_THE_CPU, WireMatch

TINY = Pace(rounds=2, seconds=0.01, count=10)


@pytest.fixture(autouse=True)
def few_known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "KNOWN", 8)


def measured(*frameworks: str) -> tuple[str, dict[str, Any]]:
    found = command.measure(TINY, frameworks, wire=False, redis=None, progress=lambda what: None)
    return found.as_text(), json.loads(json.dumps(found.as_json()))


def test_each_framework_is_measured_beside_the_unprotected_route() -> None:
    text, plain = measured(*http_services.FRAMEWORKS)
    seen = {(cost["framework"], cost["contestant"], cost["job"]) for cost in plain["costs"]}
    for framework in http_services.FRAMEWORKS:
        assert framework in text
        for who in ("unprotected", "Semel"):
            assert {(framework, who, "first"), (framework, who, "replay")} <= seen
    assert all(cost["microseconds"] > 0 for cost in plain["costs"])
    peers = [cost for cost in plain["costs"] if cost["contestant"] not in ("unprotected", "Semel")]
    assert len(plain["aims"]) == len(peers)


def test_peers_that_are_not_installed_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_services, "_installed", lambda name: False)
    assert http_services.contestants("FastAPI") == (["unprotected", "Semel"], ["asgi-idempotency-header", "idemptx"])
    assert http_services.contestants("Starlette", "redis://there") == (
        ["unprotected", "two bare commands", "Semel", "Semel, claimed at the edge"],
        ["asgi-idempotency-header", "aws-lambda-powertools"],
    )
    _, plain = measured("FastAPI")
    assert {cost["contestant"] for cost in plain["costs"]} == {"unprotected", "Semel"}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the applications open and, being servers, never close."""
    import redis
    import redis.asyncio

    found: list[Any] = []

    def kept(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **settings: Any) -> Any:
            found.append(make(*args, **settings))
            return found[-1]

        return made

    monkeypatch.setattr(http_services, "_guard", kept(http_services._guard))
    monkeypatch.setattr(redis.Redis, "from_url", kept(redis.Redis.from_url))
    monkeypatch.setattr(redis.asyncio.Redis, "from_url", kept(redis.asyncio.Redis.from_url))
    return found


async def asked(app: Any, times: int, opened: list[Any]) -> list[httpx.Response]:
    """The answers to one request, sent so often."""
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bench") as client:
            headers = {"Content-Type": "application/json", "Idempotency-Key": job.fresh_key()}
            return [await client.post(http_services.PATH, content=BODY, headers=headers) for _ in range(times)]
    finally:
        while opened:
            one = opened.pop()
            closing = one.aclose() if hasattr(one, "aclose") else one.close()
            if inspect.isawaitable(closing):
                await closing


@pytest.mark.parametrize("framework", ["Starlette", "FastAPI"])
def test_on_redis_each_contestant_answers_a_retry_as_it_did_the_first_time(
    framework: str, redis_url: str, opened: list[Any]
) -> None:
    for who in http_services.contestants(framework, redis_url)[0]:
        answers = asyncio.run(asked(http_services.make(framework, who, redis_url), 2, opened))
        assert [(answer.status_code, answer.json()) for answer in answers] == [(200, job.RESULT)] * 2, who


def test_only_a_claim_at_the_edge_spares_a_replay_the_framework(redis_url: str, opened: list[Any]) -> None:
    """Both are measured, because that is the difference between them."""
    reached: list[str] = []
    for who in (http_services.SEMEL, http_services.EDGE):
        app = http_services.make("Starlette", who, redis_url)
        router = app.router.middleware_stack

        async def counting(scope: Any, receive: Any, send: Any, who: str = who, router: Any = router) -> None:
            reached.append(who)
            await router(scope, receive, send)

        app.router.middleware_stack = counting
        asyncio.run(asked(app, 3, opened))
    assert reached == [http_services.SEMEL] * 3 + [http_services.EDGE]


def test_the_aims_of_http_are_judged_by_the_clock_on_redis() -> None:
    def played(store: str, measure: str) -> WireMatch:
        rates = {"unprotected": 100.0, "Semel": 60.0, "Semel, claimed at the edge": 120.0, "idemptx": 300.0}
        contestants = [
            Contestant(who, kind, 32, lambda seconds: 0.0, yardstick=who == "unprotected", rates=[rate])
            for kind in ("first", "replay")
            for who, rate in rates.items()
        ]
        return WireMatch("Starlette", store, measure, contestants)

    assert judge([], [played("memory", BY_THE_CLOCK), played("Redis", BY_THE_CPU)], 32) == []
    found = judge([], [played("Redis", BY_THE_CLOCK)], 32)
    assert [(verdict.figure, verdict.met) for verdict in found] == [
        (0.6, True), (1.2, True), (0.6, False), (1.2, True),
    ]  # fmt: skip


def test_a_contestant_that_refuses_is_no_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_services, "PATH", "/nowhere")
    app = http_services.make("Starlette", "unprotected")
    monkeypatch.setattr(http_services, "make", lambda *_: app)
    monkeypatch.setattr(http_services, "PATH", "/elsewhere")
    with pytest.raises(RuntimeError, match="404"):
        measured("Starlette")


def test_the_cost_is_what_is_over_the_unprotected_route_of_the_same_round() -> None:
    found = command.Findings()
    found.costs = [
        RequestCost("ASGI", "unprotected", "first", [10.0, 20.0]),
        RequestCost("ASGI", "Semel", "first", [60.0, 70.0], over=50.0),
        RequestCost("ASGI", "idemptx", "first", [100.0, 100.0], over=85.0),
    ]
    assert [(verdict.figure, verdict.met) for verdict in found.verdicts()] == [(0.65, True)]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["ASGI", "WSGI"])
def test_wrk_asks_a_server_of_its_own(framework: str) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed; install: wrk")
    with http_wire.Served(framework, "Semel", None) as served:
        for kind in ("first", "replay"):
            assert served.turn(kind)(0.1) > 0
            assert served.clocked(kind)(0.1) > 0, "the same turn by the clock"


def test_without_wrk_the_rest_is_measured_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = command.measure(TINY, ("ASGI",), wire=True, redis=None, progress=lambda what: None)
    assert found.costs
    assert "wrk is not installed" in found.as_text()
