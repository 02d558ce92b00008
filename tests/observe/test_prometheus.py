"""The metrics for Prometheus: what is counted, how many time series there are at most, and that no process is lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from semel import MemoryStore, Semel, SQLiteStore
from semel.errors import ConfigurationError
from semel.observe import events
from semel.observe.events import EVENTS, Event
from semel.observe.metrics import BUCKETS
from semel.observe.prometheus import PrometheusMetrics
from tests.observe.test_logs import example


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The value of a time series; 0 if there is none."""
    return registry.get_sample_value(name, labels) or 0.0


def test_a_guard_counts_first_calls_and_replays_by_route() -> None:
    registry = CollectorRegistry()
    with Semel(MemoryStore(), on_event=PrometheusMetrics(registry), sweep_every=None) as guard:
        for key in ("a", "a", "a", "b"):
            guard.run("ship", key=key, call=lambda: 1)
    counts = {
        name: sample(registry, "semel_events_total", route="ship", event=name) for name in ("started", "replayed")
    }
    assert counts == {"started": 2, "replayed": 2}
    assert sample(registry, "semel_operation_seconds_count", route="ship", event="completed") == 2
    assert sample(registry, "semel_operation_seconds_count", route="ship", event="replayed") == 2
    assert sample(registry, "semel_store_seconds_count", op="claim") == 2
    assert sample(registry, "semel_store_seconds_count", op="complete") == 2


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_every_event_is_counted_and_no_label_holds_its_key(event: type[Event]) -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    metrics(example(event))
    metrics(example(event))
    assert sample(registry, "semel_events_total", route="route", event=event.name) == 2
    text = generate_latest(registry).decode()
    assert "secret-key" not in text
    assert "acme" not in text


def test_seconds_fall_into_the_buckets_in_which_prometheus_client_puts_them() -> None:
    """The buckets are added to without its own method, so they are compared with what that does."""
    from prometheus_client import Histogram

    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = PrometheusMetrics(ours)
    histogram = Histogram("h", "h", registry=theirs, buckets=BUCKETS)
    for seconds in (0.0, 0.0009, 0.001, 0.0011, 0.3, 59.9, 60.0, 61.0, 1e9):
        metrics(events.Replayed("op", "", "k", 1.0, 1, seconds, route="r"))
        histogram.observe(seconds)
    for bound in (*map(str, BUCKETS), "+Inf"):
        found = sample(ours, "semel_operation_seconds_bucket", route="r", event="replayed", le=bound)
        assert found == sample(theirs, "h_bucket", le=bound), bound
    assert sample(ours, "semel_operation_seconds_sum", route="r", event="replayed") == sample(theirs, "h_sum")


def test_no_event_of_many_threads_is_lost_while_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook takes no lock, and what it has noted is taken away while other threads note more."""
    monkeypatch.setattr("semel.observe.prometheus.MOST_NOTES", 7)
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            work = [pool.submit(count, metrics, number) for number in range(6)]
            while not all(each.done() for each in work):
                generate_latest(registry)
            for each in work:
                each.result()
    finally:
        sys.setswitchinterval(interval)
    for name in ("replayed", "completed"):
        for route in ("r0", "r1"):
            assert sample(registry, "semel_events_total", route=route, event=name) == 3 * 2000
            assert sample(registry, "semel_operation_seconds_count", route=route, event=name) == 3 * 2000
    assert sample(registry, "semel_store_seconds_count", op="complete") == 6 * 2000


def count(metrics: PrometheusMetrics, number: int) -> None:
    for _ in range(2000):
        metrics(events.Replayed("op", "", "k", 1.0, 1, 0.01, route=f"r{number % 2}"))
        metrics(events.Completed("op", "", "k", 1, 1, 0.01, 0.01, route=f"r{number % 2}"))


def test_the_latency_of_the_store_has_no_completion_that_was_not_measured(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    metrics(events.Completed("op", "", "k", 1, 1, 0.5))
    assert sample(registry, "semel_store_seconds_count", op="complete") == 0
    path = tmp_path / "a.db"
    with (
        Semel(SQLiteStore(path), on_event=metrics, sweep_every=None) as guard,
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
    ):
        guard.run_in_transaction(connection, "ship", key="k", call=lambda: 1, own_transaction=True)
    assert sample(registry, "semel_store_seconds_count", op="complete") == 1
    assert sample(registry, "semel_store_seconds_sum", op="complete") > 0


def test_amounts() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    metrics(events.Published("", "", "", 20))
    metrics(events.Published("", "", "", 3))
    metrics(events.SweptEvent("", "", "", 7, 0))
    assert sample(registry, "semel_messages_published_total") == 23
    assert sample(registry, "semel_records_swept_total") == 7


def test_a_message_is_counted_under_its_type() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    for type in ("paid", "shipped", "paid"):
        metrics(events.AppliedEvent(type, "", "m-1", "ledger", 0.1))
    found = [sample(registry, "semel_events_total", route=type, event="applied") for type in ("paid", "shipped")]
    assert found == [2, 1]


def test_routes_that_are_too_many_are_counted_together_and_not_remembered() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry, max_routes=2)
    for number in range(100):
        metrics(events.Mismatched("op", "", "k", route=f"POST /made/up/{number}"))
    assert sample(registry, "semel_events_total", route="(other)", event="mismatched") == 98
    assert sum(len(tallies) for tallies in metrics._tallies.values()) == 3


def test_tenants_only_if_asked() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry, tenants=True, max_routes=2)
    for tenant in ("a", "b", "c", "a"):
        metrics(events.Mismatched("op", tenant, "k", route="r"))
    found = {
        (route, tenant): sample(registry, "semel_events_total", route=route, tenant=tenant, event="mismatched")
        for route, tenant in (("r", "a"), ("r", "b"), ("r", "c"), ("(other)", ""))
    }
    assert found == {("r", "a"): 2, ("r", "b"): 1, ("r", "c"): 0, ("(other)", ""): 1}


def test_a_second_one_for_the_same_registry_is_refused_with_the_way_out() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    with pytest.raises(ConfigurationError, match="make one PrometheusMetrics, and pass it to all guards"):
        PrometheusMetrics(registry)


WORKER = textwrap.dedent(
    """
    import os, sys, time
    from semel import Semel, SQLiteStore, Wait
    from semel.observe.prometheus import PrometheusMetrics

    with Semel(SQLiteStore(sys.argv[1]), on_event=PrometheusMetrics(), sweep_every=None) as guard:
        for number in range(100):
            guard.run("ship", key=str(number), call=lambda: 1, on_duplicate=Wait("20s"))
        print("done", flush=True)
        if sys.argv[2] == "ends":
            sys.exit()
        sys.stdin.read()  # it is idle, and killed
    """
)


@pytest.mark.process
def test_the_counts_of_two_processes_are_one_sum(tmp_path: Path) -> None:
    """One of them ends at once. The other one is idle: what it has counted is written all the same, and outlives it."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, tmp_path / "a.db", how],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for how in ("ends", "idles")
    ]  # fmt: skip
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"done\n"
        workers[0].wait(20)
        wait_for(lambda: read(folder) == (100, 100, 100), folder)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert read(folder) == (100, 100, 100)


@pytest.mark.process
def test_a_forked_worker_counts_only_its_own(tmp_path: Path) -> None:
    """What the parent has not written yet is in the memory of its child too, and must not be written twice."""
    program = """
        import os
        from semel import MemoryStore, Semel
        from semel.observe.prometheus import PrometheusMetrics

        guard = Semel(MemoryStore(), on_event=PrometheusMetrics(), sweep_every=None)
        guard.run("ship", key="before", call=lambda: 1)
        child = os.fork()
        guard.run("ship", key=f"of {child > 0}", call=lambda: 1)
        if child:
            os.waitpid(child, 0)
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60)
    assert read(tmp_path) == (3, 0, 3)


def read(folder: Path) -> tuple[float, ...]:
    """Started, replayed and timed claims of all processes, as a scrape finds them."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    found = [sample(registry, "semel_events_total", route="ship", event=name) for name in ("started", "replayed")]
    return *found, sample(registry, "semel_store_seconds_count", op="claim")


def wait_for(condition: Any, folder: Path) -> None:
    from semel.testing.faults import until

    until(condition, 20, f"all is written to {folder}")
