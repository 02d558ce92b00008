"""``PrometheusMetrics``: a hook that counts events for Prometheus.

::

    metrics = PrometheusMetrics()
    guard = Semel(store, on_event=metrics)

The hook adds to numbers of its own, and they are added to the metrics of prometheus-client when those are read. An
update of a metric costs microseconds, most of all with ``PROMETHEUS_MULTIPROC_DIR``, where metrics are in files. There
the process that is read is another one, so the numbers are written about once a second while there are any.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.engine.ports import Store
from semel.errors import ConfigurationError
from semel.observe import events
from semel.observe.events import Event
from semel.observe.labels import MAX_ROUTES, LabelLimit
from semel.observe.store_state import EVERY, GAUGES, LOOK, StoreWatch, gauges
from semel.stores.settings import require

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds."""
WRITE_EVERY: Final = 1.0
"""Seconds between two writes, if the metrics are in files."""
TIMED: Final = (
    events.Completed, events.Prepared, events.FailureRemembered, events.Released, events.Replayed, events.AppliedEvent,
    events.Skipped, events.CallEnded, events.CallUnknown,
)  # fmt: skip
"""Events whose ``seconds`` say how long a call or a message took."""


class PrometheusMetrics:
    """Counts events. One object serves all guards, relays and consumers of a process."""

    def __init__(self, registry: Any = None, *, tenants: bool = False, max_routes: int = MAX_ROUTES) -> None:
        """
        :param registry: a ``CollectorRegistry``; by default the one that ``start_http_server`` and ``make_asgi_app``
            show.
        :param tenants: add a label with the tenant. Each tenant has time series of its own then.
        :param max_routes: how many routes, with ``tenants`` pairs of route and tenant, have time series of their own.
            The others are counted together, as ``(other)``.
        """
        client = require("prometheus_client", "prometheus", "prometheus-client")
        registry = client.REGISTRY if registry is None else registry
        self._tenants = tenants
        self._limit = LabelLimit(max_routes, tenants)
        self._lock = threading.Lock()
        self._tallies: defaultdict[type[Event], dict[Any, _Tally]] = defaultdict(dict)
        """By kind of event, and by route, or by route and tenant."""
        self._timer: threading.Timer | None = None
        self._in_files = "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ
        labels = ("route", "tenant") if tenants else ("route",)
        try:
            if not self._in_files:
                registry.register(_Reading(self))  # first, so that it adds what was counted before the others are read
            self._events = client.Counter(
                "semel_events", "Events, by their name: see the table of events.", (*labels, "event"), registry=registry
            )
            self._seconds = client.Histogram(
                "semel_operation_seconds", "How long calls and messages took, by the event that ended them.",
                (*labels, "event"), registry=registry, buckets=BUCKETS,
            )  # fmt: skip
            store = client.Histogram(
                "semel_store_seconds", "How long the store took.", ("op",), registry=registry, buckets=BUCKETS
            )
            self._amounts: dict[type[Event], Any] = {
                kind: client.Counter(name, what, registry=registry)
                for kind, name, what in (
                    (events.Published, "semel_messages_published", "Messages that relays have sent."),
                    (events.SweptEvent, "semel_records_swept", "Expired records that sweeps have removed."),
                )
            }
        except ValueError as error:
            raise ConfigurationError(
                f"this registry has metrics of Semel already: make one PrometheusMetrics, and pass it to all guards, "
                f"relays and consumers ({error})"
            ) from error
        self._store_times = {
            events.Started: (_Times(store.labels("claim")), "seconds"),
            events.Completed: (_Times(store.labels("complete")), "store_seconds"),
        }
        survive_forks(self._forget)
        atexit.register(_write_at_exit, weakref.ref(self))

    def __call__(self, event: Event) -> None:
        kind = type(event)
        with self._lock:
            route = event.route or event.operation
            key = (route, event.tenant) if self._tenants else route
            tally = self._tallies[kind].get(key) or self._new_tally(kind, route, event.tenant)
            tally.count += 1
            for times, field in tally.times:
                seconds = getattr(event, field)
                times.counts[bisect_left(BUCKETS, seconds)] += 1
                times.sum += seconds
            if tally.amount is not None:
                tally.amount.inc(event.count if kind is events.Published else event.removed)  # type: ignore[attr-defined]
            if self._in_files and self._timer is None:
                self._start_timer()

    def write(self) -> None:
        """Add what was counted to the metrics. Done when they are read; once a second if they are in files."""
        with self._lock:
            self._timer = None
            for tally in self._all():
                tally.write()

    def _all(self) -> Iterable[_Tally]:
        return {id(tally): tally for tallies in self._tallies.values() for tally in tallies.values()}.values()

    def _new_tally(self, kind: type[Event], route: str, tenant: str) -> _Tally:
        labels = self._limit.labels(route, tenant)
        key = labels if self._tenants else labels[0]
        if key in self._tallies[kind]:
            return self._tallies[kind][key]
        times = [(_Times(self._seconds.labels(*labels, kind.name)), "seconds")] if kind in TIMED else []
        if kind in self._store_times:
            times.append(self._store_times[kind])
        tally = _Tally(self._events.labels(*labels, kind.name), tuple(times), self._amounts.get(kind))
        self._tallies[kind][key] = tally
        return tally

    def _start_timer(self) -> None:
        self._timer = threading.Timer(WRITE_EVERY, self.write)
        self._timer.daemon = True
        self._timer.start()

    def _forget(self) -> None:
        """In a forked child: what the parent has counted, it writes itself, and its timer is not here."""
        self._lock = threading.Lock()
        self._timer = None
        for tally in self._all():
            tally.reset()


class _Tally:
    """The events of one kind and route since the last write."""

    __slots__ = ("_child", "amount", "count", "times")

    def __init__(self, child: Any, times: tuple[tuple[_Times, str], ...], amount: Any) -> None:
        """
        :param times: with the fields of the event that hold them.
        :param amount: a counter to which such an event adds its own number.
        """
        self._child = child
        self.count = 0
        self.times = times
        self.amount = amount

    def write(self) -> None:
        if self.count:
            self._child.inc(self.count)
            for times, _ in self.times:
                times.write()
            self.count = 0

    def reset(self) -> None:
        self.count = 0
        for times, _ in self.times:
            times.reset()


class _Times:
    """The times of one histogram since the last write."""

    __slots__ = ("_child", "counts", "sum")

    def __init__(self, child: Any) -> None:
        self._child = child
        self.reset()

    def write(self) -> None:
        if any(self.counts):
            # As Histogram.observe does, for many at once: there is no public method for it.
            for bucket, count in zip(self._child._buckets, self.counts, strict=True):
                if count:
                    bucket.inc(count)
            self._child._sum.inc(self.sum)
            self.reset()

    def reset(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0


class _Reading:
    """Tells when the metrics of a registry are read. It has none of its own."""

    def __init__(self, metrics: PrometheusMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Any]:
        return ()

    def collect(self) -> Iterable[Any]:
        self._metrics.write()
        return ()


def _write_at_exit(metrics: weakref.ref[PrometheusMetrics]) -> None:
    found = metrics()
    if found is not None:
        found.write()


class StoreMetrics:
    """Gauges of what is in a store: how many records, what is not finished, the outbox and the dead letters.

    They are read in the background, so a scrape never waits for the store. The first scrape has none of them.
    """

    def __init__(self, store: Store | str, registry: Any = None, *, every: Duration = EVERY, look: int = LOOK) -> None:
        """
        :param store: a sync store, or the URL of a store. In an event loop, pass the URL.
        :param registry: defaults to that of prometheus-client. If you merge the metrics of several processes, pass the
            registry of the ``MultiProcessCollector``.
        :param every: how often the store is looked into, at most.
        :param look: how many records it looks at to find those that are not finished, the newest ones first.
        """
        client = require("prometheus_client", "prometheus", "prometheus-client")
        self._watch = StoreWatch(store, every=every, look=look)
        (client.REGISTRY if registry is None else registry).register(self)

    def look(self) -> None:
        """Look into the store now, and wait for it."""
        self._watch.look()

    def close(self) -> None:
        """Close the store, if it was opened here from a URL."""
        self._watch.close()

    def describe(self) -> Iterable[Any]:
        return ()

    def collect(self) -> Iterable[Any]:
        """Return the gauges, for prometheus-client."""
        from prometheus_client.core import GaugeMetricFamily

        for name, labels, values in gauges(self._watch.latest()):
            family = GaugeMetricFamily(name, GAUGES[name], labels=labels)
            for label, number in values.items():
                family.add_metric(label, number)
            yield family
