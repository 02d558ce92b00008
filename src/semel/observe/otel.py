"""OpenTelemetry: ``OpenTelemetryMetrics`` counts events, ``OpenTelemetrySpans`` makes spans of them.

::

    guard = Semel(store, on_event=[OpenTelemetryMetrics(), OpenTelemetrySpans()])

The span of a replay has a link to the span of the request whose outcome it is. For that, the span's identity is stored
with the outcome: 25 bytes. The metrics have the names of those for Prometheus, so that the same dashboard shows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from semel.core.policy import Duration
from semel.engine.ports import Store
from semel.observe import events
from semel.observe.events import Event, TracingHook
from semel.observe.metrics import BUCKETS, MAX_ROUTES, TIMED, LabelLimit
from semel.observe.store_state import EVERY, GAUGES, LOOK, StoreWatch, gauges
from semel.stores.settings import require

_PACKAGE: Final = "opentelemetry-api"
_FAILED: Final = (events.FailureRemembered, events.Released, events.CallUnknown)


class OpenTelemetryMetrics:
    """Counts events. One object serves all guards, relays, consumers and clients of a process."""

    def __init__(self, meter_provider: Any = None, *, tenants: bool = False, max_routes: int = MAX_ROUTES) -> None:
        """
        :param meter_provider: defaults to the global one.
        :param tenants: add an attribute with the tenant.
        :param max_routes: how many routes, with ``tenants`` pairs of route and tenant, have time series of their own.
            The others are counted together, as ``(other)``.
        """
        meter = _meter(meter_provider)
        buckets = list(BUCKETS)
        self._events = meter.create_counter("semel_events", "{event}", "Events, by their name.")
        self._seconds = meter.create_histogram(
            "semel_operation_seconds", "s", "How long calls and messages took, by the event that ended them.",
            explicit_bucket_boundaries_advisory=buckets,
        )  # fmt: skip
        self._store = meter.create_histogram(
            "semel_store_seconds", "s", "How long the store took.", explicit_bucket_boundaries_advisory=buckets
        )
        self._published = meter.create_counter(
            "semel_messages_published", "{message}", "Messages that relays have sent."
        )
        self._swept = meter.create_counter("semel_records_swept", "{record}", "Expired records that were removed.")
        self._limit = LabelLimit(max_routes, tenants)

    def __call__(self, event: Event) -> None:
        labels = self._limit.labels(event.route or event.operation, event.tenant)
        attributes = dict(zip(("route", "tenant"), labels, strict=False)) | {"event": event.name}
        self._events.add(1, attributes)
        if isinstance(event, TIMED):
            self._seconds.record(event.seconds, attributes)
        if isinstance(event, events.Started):
            self._store.record(event.seconds, {"op": "claim"})
        elif isinstance(event, events.Completed) and event.store_seconds:
            self._store.record(event.store_seconds, {"op": "complete"})
        elif isinstance(event, events.Published):
            self._published.add(event.count)
        elif isinstance(event, events.SweptEvent):
            self._swept.add(event.removed)


class OpenTelemetrySpans(TracingHook):
    """Makes a span of each call that ends, and adds other events to the span of the request."""

    def __init__(self, tracer_provider: Any = None) -> None:
        """
        :param tracer_provider: defaults to the global one.
        """
        trace = self._api = require("opentelemetry.trace", "opentelemetry", _PACKAGE)
        self._tracer = trace.get_tracer("semel", tracer_provider=tracer_provider)
        super().__init__(self._make_span, self._current)

    def _current(self) -> bytes:
        context = self._api.get_current_span().get_span_context()
        if not context.is_valid:
            return b""
        packed: bytes = (
            context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big") + bytes((context.trace_flags,))
        )
        return packed

    def _make_span(self, event: Event) -> None:
        route = event.route or event.operation
        attributes = {"semel.event": event.name, "semel.operation": event.operation, "semel.route": route}
        if event.id:
            attributes["semel.record"] = event.id.hex()
        if not isinstance(event, TIMED):
            if event.level > events.DEBUG:
                self._api.get_current_span().add_event(f"semel.{event.name}", attributes)
            return
        # It has ended already, so it is not the parent of what the handler did: the span of the request is.
        end = time.time_ns()
        span = self._tracer.start_span(
            f"semel {route}", attributes=attributes, start_time=end - int(event.seconds * 1e9),
            links=self._links(event.trace) if isinstance(event, events.Replayed) else None,
        )  # fmt: skip
        if isinstance(event, _FAILED):
            reason = event.reason if isinstance(event, events.CallUnknown) else event.error
            span.set_status(self._api.StatusCode.ERROR, reason)
        span.end(end)

    def _links(self, traceparent: str) -> list[Any] | None:
        if not traceparent:
            return None
        _, trace, span, flags = traceparent.split("-")
        api = self._api
        return [api.Link(api.SpanContext(int(trace, 16), int(span, 16), True, api.TraceFlags(int(flags, 16))))]


class OpenTelemetryStoreMetrics:
    """Gauges of what is in a store: how many records, what is not finished, the outbox and the dead letters."""

    def __init__(
        self, store: Store | str, meter_provider: Any = None, *, every: Duration = EVERY, look: int = LOOK
    ) -> None:
        """
        :param store: a sync store, or the URL of a store. In an event loop, pass the URL.
        :param meter_provider: defaults to the global one.
        :param every: how often the store is looked into, at most.
        :param look: how many of the newest records, and how many of the older ones, it reads to find unfinished ones.
            For the older ones, each look continues where the last one ended.
        """
        self._watch = StoreWatch(store, every=every, look=look)
        meter = _meter(meter_provider)
        for name, what in GAUGES.items():
            meter.create_observable_gauge(name, [self._observe(name)], description=what)

    def look(self) -> None:
        """Look into the store now, and wait for it."""
        self._watch.look()

    def close(self) -> None:
        """Close the store, if it was opened here from a URL."""
        self._watch.close()

    def _observe(self, name: str) -> Callable[[Any], Iterable[Any]]:
        observation = require("opentelemetry.metrics", "opentelemetry", _PACKAGE).Observation

        def observe(options: Any) -> Iterable[Any]:
            for found, labels, values in gauges(self._watch.latest()):
                if found == name:
                    for label, number in values.items():
                        yield observation(number, dict(zip(labels, label, strict=True)))

        return observe


def _meter(provider: Any) -> Any:
    return require("opentelemetry.metrics", "opentelemetry", _PACKAGE).get_meter("semel", meter_provider=provider)
