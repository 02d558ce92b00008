"""OpenTelemetry: the same counts as for Prometheus, and spans of replays that lead to the request they repeat."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from semel import AsyncSemel, AsyncSQLiteStore, Codec, KeyReused, KeyRing, MemoryStore, Semel, SQLiteStore
from semel.core.encoding.snapshot import Envelope, Kind
from semel.http import fastapi as glue
from semel.messaging import Outbox
from semel.observe import events
from semel.observe.metrics import BUCKETS
from semel.observe.otel import OpenTelemetryMetrics, OpenTelemetrySpans, OpenTelemetryStoreMetrics
from semel.observe.store_state import GAUGES


class Spans:
    """A tracer whose spans are looked at."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


def counted(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_metrics_have_the_names_and_numbers_of_those_for_prometheus() -> None:
    reader = InMemoryMetricReader()
    metrics = OpenTelemetryMetrics(MeterProvider([reader]), max_routes=1)
    with Semel(MemoryStore(), on_event=metrics, sweep_every=None) as guard:
        for key in ("a", "a", "b"):
            guard.run("ship", key=key, call=lambda: 1)
        guard.run("one too many", key="a", call=lambda: 1)
    metrics(events.Published("", "", "", 20))
    metrics(events.SweptEvent("", "", "", 7, 0))
    found = counted(reader)
    counts = {(point.attributes["route"], point.attributes["event"]): point.value for point in found["semel_events"]}
    assert counts["ship", "started"] == 2
    assert counts["ship", "replayed"] == 1
    assert counts["(other)", "started"] == 1
    (replays,) = (point for point in found["semel_operation_seconds"] if point.attributes["event"] == "replayed")
    assert (replays.count, replays.explicit_bounds) == (1, BUCKETS)
    assert {point.attributes["op"]: point.count for point in found["semel_store_seconds"]} == {
        "claim": 3,
        "complete": 3,
    }
    assert found["semel_messages_published"][0].value == 20
    assert found["semel_records_swept"][0].value == 7


def test_gauges(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    with closing(SQLiteStore(tmp_path / "a.db")) as store:
        with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
            Outbox(store).add(connection, "paid", {"n": 1}, destination="payments")
        metrics = OpenTelemetryStoreMetrics(store, MeterProvider([reader]), every="1h")
        metrics.look()
        found = counted(reader)
        metrics.close()
    assert set(found) == set(GAUGES)
    (depth,) = found["semel_outbox_messages"]
    assert (dict(depth.attributes), depth.value) == ({"destination": "payments"}, 1)


@pytest.mark.parametrize("codec", [None, Codec(cipher=KeyRing({"a": bytes(32)})), Codec(compress_above=0)])
def test_the_span_of_a_replay_is_linked_to_the_original_request(spans: Spans, codec: Codec | None) -> None:
    with Semel(MemoryStore(), on_event=[OpenTelemetrySpans(spans.provider)], codec=codec, sweep_every=None) as guard:
        for request in ("first", "second"):
            with spans.tracer.start_as_current_span(request):
                assert guard.run("ship", key="o-1", call=lambda: "P-1" * 1000) == "P-1" * 1000
    first, second = (spans.named(name)[0] for name in ("first", "second"))
    done, replay = spans.named("semel ship")
    assert done.attributes["semel.event"] == "completed"
    assert done.parent == first.context
    assert done.links == ()
    assert first.start_time <= done.start_time <= done.end_time <= first.end_time
    assert replay.attributes["semel.event"] == "replayed"
    assert replay.parent == second.context
    (link,) = replay.links
    assert (link.context.trace_id, link.context.span_id) == (first.context.trace_id, first.context.span_id)
    assert link.context.is_remote


def test_in_a_service_another_guard_is_linked_too(spans: Spans, tmp_path: Path) -> None:
    """The link is found in the stored answer, over HTTP and by a guard that never saw the first request."""

    async def post() -> bytes:
        app = FastAPI()
        hook = OpenTelemetrySpans(spans.provider)
        guard = AsyncSemel(AsyncSQLiteStore(tmp_path / "a.db"), on_event=hook, sweep_every=None)
        glue.install(app, guard=guard, tenant=lambda request: "t")

        @app.post("/orders/{number}", status_code=201)
        @glue.idempotent()
        async def order(number: int) -> dict[str, int]:
            return {"order": number}

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            with spans.tracer.start_as_current_span("request"):
                answer = await client.post("/orders/7", headers={"Idempotency-Key": "k-1"})
        await guard.close()
        return answer.content

    assert [asyncio.run(post()), asyncio.run(post())] == [b'{"order":7}'] * 2
    first, _ = spans.named("request")
    done, replay = spans.named("semel POST /orders/{number}")
    assert [span.attributes["semel.event"] for span in (done, replay)] == ["completed", "replayed"]
    assert [link.context.span_id for link in replay.links] == [first.context.span_id]


async def ship(kind: str, path: Path, provider: Any) -> str:
    """Send one request under a span of its own. Returns the identity of the span."""
    hook = OpenTelemetrySpans(provider)
    with provider.get_tracer("shop").start_as_current_span("request") as span:
        if kind == "async":
            async with AsyncSemel(AsyncSQLiteStore(path), on_event=hook, sweep_every=None) as guard:
                await guard.run("ship", key="o-1", call=lambda: "P-1")
        else:
            with (
                Semel(SQLiteStore(path), on_event=hook, sweep_every=None) as sync_guard,
                closing(sqlite3.connect(path, isolation_level=None)) as connection,
            ):
                if kind == "sync":
                    sync_guard.run("ship", key="o-1", call=lambda: "P-1")
                else:
                    own: dict[str, Any] = {"own_transaction": True}
                    sync_guard.run_in_transaction(connection, "ship", key="o-1", call=lambda: "P-1", **own)
        context = span.get_span_context()
    return f"{context.trace_id:x} {context.span_id:x}"


FIRST_PROCESS = """
import asyncio, sys
from pathlib import Path
from opentelemetry.sdk.trace import TracerProvider
from tests.observe.test_otel import ship

print(asyncio.run(ship(sys.argv[1], Path(sys.argv[2]), TracerProvider())))
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", ["sync", "async", "in a transaction"])
def test_a_replay_in_another_process_is_linked_to_the_original_request(spans: Spans, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.db"
    command = [sys.executable, "-c", FIRST_PROCESS, kind, path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    second = asyncio.run(ship(kind, path, spans.provider))
    (replay,) = spans.named("semel ship")
    assert replay.attributes["semel.event"] == "replayed"
    assert [f"{link.context.trace_id:x} {link.context.span_id:x}" for link in replay.links] == [ran.stdout.strip()]
    assert f"{replay.context.trace_id:x}" == second.split()[0], "it belongs to the trace of its own request"


def test_a_failure_is_marked_and_other_events_are_added_to_the_request(spans: Spans) -> None:
    def fail() -> None:
        raise ValueError("no")

    with Semel(MemoryStore(), on_event=OpenTelemetrySpans(spans.provider), sweep_every=None) as guard:
        with pytest.raises(ValueError, match="no"):
            guard.run("ship", key="o-1", call=fail)
        guard.run("ship", key="o-1", call=lambda: 1, fingerprint="a")
        with spans.tracer.start_as_current_span("request"), pytest.raises(KeyReused):
            guard.run("ship", key="o-1", call=lambda: 1, fingerprint="b")
    failed = spans.named("semel ship")[0]
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "ValueError('no')")
    assert [event.name for event in spans.named("request")[0].events] == ["semel.mismatched"]


def test_without_a_span_or_without_the_hook_the_stored_bytes_are_as_before(spans: Spans) -> None:
    stored = []
    for hook in (None, OpenTelemetrySpans(spans.provider)):
        store = MemoryStore()
        with Semel(store, on_event=hook, sweep_every=None) as guard:
            guard.run("ship", key="o-1", call=lambda: "P-1")
            record = guard.lookup("ship", "o-1")
            assert record is not None
            stored.append(record.snapshot)
    assert stored[0] == stored[1]


def test_a_trace_is_opened_by_any_codec_and_an_unreadable_one_is_none() -> None:
    trace = bytes(range(25))
    for codec in (Envelope(), Envelope(compress_above=0), Codec(cipher=KeyRing({"a": bytes(32)}), compress_above=0)):
        sealed = codec.seal(Kind.VALUE, "json", b"1" * 5000, b"i" * 16, "", trace)
        assert codec.open(sealed, b"i" * 16) == (Kind.VALUE, "json", b"1" * 5000)
        assert codec.open_trace(sealed, b"i" * 16) == trace
        assert codec.open_trace(codec.seal(Kind.VALUE, "json", b"1", b"i" * 16), b"i" * 16) == b""
        assert codec.open_trace(b"", b"i" * 16) == b""
    assert codec.open_trace(sealed, b"j" * 16) == b"", "that of another record"
    exact = Envelope(limit=5000, compress_above=0)
    sealed = exact.seal(Kind.VALUE, "json", b"1" * 5000, b"i" * 16, "", trace)
    assert exact.open(sealed, b"i" * 16).payload == b"1" * 5000, "the trace does not count towards the limit"
