"""The benchmark of HTTP runs and says what it should. Never a time: those are for `python -m bench.http`."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from bench import http as command
from bench import http_services, http_wire, job
from bench.contest import Pace
from bench.http_cost import RequestCost

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
    assert len([aim for aim in plain["aims"] if "under 60 µs" in aim["aim"]]) == 8


def test_peers_that_are_not_installed_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_services, "_installed", lambda name: False)
    assert http_services.contestants("FastAPI") == (["unprotected", "Semel"], ["asgi-idempotency-header", "idemptx"])
    _, plain = measured("FastAPI")
    assert {cost["contestant"] for cost in plain["costs"]} == {"unprotected", "Semel"}


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
    assert [(verdict.figure, verdict.met) for verdict in found.verdicts()] == [(50.0, True), (0.65, True)]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["ASGI", "WSGI"])
def test_wrk_asks_a_server_of_its_own(framework: str) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed; install: wrk")
    with http_wire.Served(framework, "Semel", None) as served:
        assert all(served.turn(kind)(0.1) > 0 for kind in ("first", "replay"))


def test_without_wrk_the_rest_is_measured_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = command.measure(TINY, ("ASGI",), wire=True, redis=None, progress=lambda what: None)
    assert found.costs
    assert "wrk is not installed" in found.as_text()
