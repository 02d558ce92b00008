"""The dashboard and the alerts: their form, their rules by promtool, and every query of theirs by a real Prometheus."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sqlite3
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry, start_http_server

from semel import SQLiteStore
from semel.messaging import Outbox
from semel.observe.events import EVENTS
from semel.observe.prometheus import PrometheusMetrics, StoreMetrics
from semel.testing.faults import until
from tests.http.payments_service import new_key, serving
from tests.observe.test_logs import example
from tests.servers import PrometheusServer

ROOT = Path(__file__).parents[2]
ALERTS = Path(str(files("semel.observe") / "alerts" / "semel.yml"))
DASHBOARD: dict[str, Any] = json.loads((files("semel.observe") / "dashboards" / "semel.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
NAMED = set(re.findall(r'event=~?"([a-z_|.*]+)"', json.dumps(DASHBOARD).replace('\\"', '"') + ALERTS.read_text()))


# Form


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_has_queries_a_unit_and_words(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [target["refId"] for target in panel["targets"]] == [*"ABC"][: len(panel["targets"])]
    for target in panel["targets"]:
        assert target["expr"]
        assert target["legendFormat"] or panel["type"] == "stat"


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def schema_mistakes(dashboard: dict[str, Any]) -> list[str]:
    """What Grafana's own models of a dashboard, its panels and its queries say against it."""
    read = Dashboard.from_json(copy.deepcopy(dashboard))
    return [*unknown_fields(dashboard, json.loads(JSONEncoder().encode(read))), *wrong_types(read, Dashboard, "$")]


def unknown_fields(written: Any, read: Any, at: str = "$") -> Iterator[str]:
    """What the models have not read."""
    if isinstance(written, dict) and isinstance(read, dict):
        yield from (f"{at}.{name} is unknown" for name in written.keys() - read.keys())
        for name in written.keys() & read.keys():
            yield from unknown_fields(written[name], read[name], f"{at}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, pair in enumerate(zip(written, read, strict=True)):
            yield from unknown_fields(*pair, f"{at}[{number}]")
    elif written != read:
        yield f"{at} is {written!r}, and is read as {read!r}"


def wrong_types(found: Any, wanted: Any, at: str) -> Iterator[str]:
    """What is not of the type that the models declare."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        mistakes = [list(wrong_types(found, part, at)) for part in parts]
        if all(mistakes):  # say what is wrong with the one that fits best
            yield from max(mistakes, key=lambda each: len(each[0].partition(":")[0]))
    elif origin is typing.Literal:
        if found not in parts:
            yield f"{at}: {found!r} is none of {parts}"
    elif wanted is typing.Any:
        return
    elif isinstance(wanted, type) and issubclass(wanted, Enum):
        if found not in [each.value for each in wanted]:
            yield f"{at}: {found!r} is no {wanted}"
    elif not isinstance(found, (int, float) if wanted is float else origin or wanted):
        yield f"{at}: {found!r} is no {wanted}"
    elif origin is list:
        for number, each in enumerate(found):
            yield from wrong_types(each, parts[0], f"{at}[{number}]")
    elif type(found).__module__.startswith("grafana_foundation_sdk."):
        for name, kind in typing.get_type_hints(type(found)).items():
            if hasattr(found, name):
                yield from wrong_types(getattr(found, name), kind, f"{at}.{name}")


def test_it_follows_the_schema_of_grafana() -> None:
    register_default_plugins()
    assert schema_mistakes(DASHBOARD) == []
    assert schema_mistakes({**DASHBOARD, "titel": "Semel"}) == ["$.titel is unknown"]
    for change, mistake in (
        ({"targets": [{"refId": "A", "exp": "up"}]}, "exp is unknown"),
        ({"gridPos": {"x": 0, "y": 0, "w": "24", "h": 8}}, "grid_pos.w: '24' is no"),
        ({"options": {"legend": {"placement": "left"}}}, "placement: 'left' is no"),
    ):
        panel = {**next(each for each in PANELS if each["type"] == "timeseries"), **change}
        assert mistake in "".join(schema_mistakes({**DASHBOARD, "panels": [panel]}))


def test_each_alert_has_a_severity_and_a_section_in_the_runbook() -> None:
    headings = re.findall("^## (.*)$", (ROOT / "docs/runbook/alerts.md").read_text(), re.MULTILINE)
    alerts = {rule["alert"]: rule for rule in RULES if "alert" in rule}
    assert list(alerts) == sorted(alerts, key=list(alerts).index)
    assert set(headings) == set(alerts)
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"runbook/alerts.html#{name.lower()}"


def test_each_event_that_is_named_exists() -> None:
    names = {event.name for event in EVENTS}
    for pattern in NAMED:
        for name in pattern.split("|"):
            assert any(re.fullmatch(name, each) for each in names), name


# promtool


@pytest.mark.prometheus
@pytest.mark.server
def test_each_alert_fires_when_it_should(tmp_path: Path, prometheus: PrometheusServer) -> None:
    tests = sorted(Path(__file__).parent.glob("alerts*_test.yml"))
    for file in (ALERTS, *tests):
        shutil.copy(file, tmp_path)
    prometheus.promtool("check", "rules", ALERTS)
    prometheus.promtool("test", "rules", *(tmp_path / file.name for file in tests))
    tested = "".join(file.read_text() for file in tests)
    assert all(rule["alert"] in tested for rule in RULES if "alert" in rule)


# Every query, by a Prometheus that scrapes the demo, and a process in which each event has happened


class Scraped:
    """A Prometheus that scrapes, while payments flow and events happen."""

    def __init__(self, prometheus: PrometheusServer, happen: Callable[[], None]) -> None:
        self.ask = prometheus.ask
        self._happen = happen

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Let things happen until the condition holds: a busy machine may miss a scrape, and then nothing is found."""

        def holds() -> object:
            self._happen()
            return condition()

        until(holds, 60, what)

    def until_found(self, query: str, where: str) -> None:
        self.until(lambda: self.ask("query", query=query)["result"], f"{where}: {query} finds something")


@pytest.fixture
def scraped(prometheus: PrometheusServer, tmp_path: Path, starts_process: None) -> Iterator[Scraped]:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    with closing(SQLiteStore(tmp_path / "a.db")) as store:
        with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
            Outbox(store).add(connection, "paid", {"n": 1}, destination="payments")
        StoreMetrics(store, registry).look()
        server, thread = start_http_server(0, "127.0.0.1", registry)
        (tmp_path / "demo").mkdir()
        with serving(tmp_path / "demo", None, workers=2) as payments:
            prometheus.scrape(f"127.0.0.1:{server.server_port}", payments.url.removeprefix("http://"))

            def happen() -> None:
                for event in EVENTS:
                    metrics(example(event))
                key = new_key()
                payments.pay(key)
                payments.pay(key)

            def both_are_scraped() -> bool:
                return all(
                    len(prometheus.ask("query", query=query)["result"]) > 1
                    for query in ('rate(semel_events_total{event="replayed"}[10s]) > 0', "semel_store_up == 1")
                )

            scraped = Scraped(prometheus, happen)
            scraped.until(both_are_scraped, "both are scraped, and their counters grow")
            yield scraped
            prometheus.scrape()
        server.shutdown()
        server.server_close()
        thread.join()


def filled(query: str) -> str:
    """The query, with the variables of Grafana filled in."""
    for name, text in {"$__rate_interval": "10s", "$__range": "1m", "$job": ".*", "$route": ".*"}.items():
        query = query.replace(name, text)
    assert "$" not in query
    return query


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_query_finds_something(scraped: Scraped) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            scraped.until_found(filled(target["expr"]), panel["title"])
    for variable in DASHBOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        assert scraped.ask(f"label/{label}/values", **{"match[]": filled(metric)})

    # What an alert compares is there, whatever the comparison says.
    scraped.until_found('semel:hit_rate:10m{route="POST /payments"}', "the rules are evaluated")
    for rule in RULES:
        for selector in sorted(set(re.findall(r"semel[\w:]+(?:\{[^}]*\})?", rule["expr"]))):
            scraped.until_found(selector, rule["expr"])
        scraped.ask("query", query=rule["expr"])

    def states() -> list[dict[str, Any]]:
        return [rule for group in scraped.ask("rules")["groups"] for rule in group["rules"]]

    scraped.until(lambda: all(rule["health"] == "ok" for rule in states()), "all rules can be evaluated")
    assert len(states()) == len(RULES)
    scraped.until(
        lambda: any(rule["name"] == "SemelKeyMayHaveRunTwice" and rule["state"] == "firing" for rule in states()),
        "an alert fires, because an attempt has lost its lease",
    )
