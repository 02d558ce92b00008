"""``PrometheusMetrics``: a hook that counts events for Prometheus.

::

    metrics = PrometheusMetrics()
    guard = Semel(store, on_event=metrics)

The hook only notes how long each event took. What it has noted is added to the metrics of prometheus-client when those
are read, or when there is much of it: an update of a metric costs microseconds, most of all with
``PROMETHEUS_MULTIPROC_DIR``, where metrics are in files. There the process that is read is another one, so it is
written about once a second while there is any.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final

from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.engine.ports import Store
from semel.errors import ConfigurationError
from semel.observe import events
from semel.observe.events import Event
from semel.observe.metrics import BUCKETS, MAX_ROUTES, TIMED, LabelLimit
from semel.observe.store_state import EVERY, GAUGES, LOOK, StoreWatch, gauges
from semel.stores.settings import require

MOST_NOTES: Final = 500
"""How many events of one kind and route are noted before they are written."""
WRITE_EVERY: Final = 1.0
"""Seconds between two writes, if the metrics are in files."""


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
            published, swept = (
                client.Counter(name, what, registry=registry)
                for name, what in (
                    ("semel_messages_published", "Messages that relays have sent."),
                    ("semel_records_swept", "Expired records that sweeps have removed."),
                )
            )
        except ValueError as error:
            raise ConfigurationError(
                f"this registry has metrics of Semel already: make one PrometheusMetrics, and pass it to all guards, "
                f"relays and consumers ({error})"
            ) from error
        self._others: dict[type[Event], tuple[str, Callable[[list[float]], None]]] = {
            events.Started: ("seconds", _observer(store.labels("claim"))),
            events.Published: ("count", lambda counts: published.inc(sum(counts))),
            events.SweptEvent: ("removed", lambda counts: swept.inc(sum(counts))),
        }
        """What is noted of events that are not timed, and where it is added."""
        self._completions = _Tally("store_seconds", _observer(store.labels("complete")))
        survive_forks(self._forget)
        atexit.register(_write_at_exit, weakref.ref(self))

    def __call__(self, event: Event) -> None:
        kind, route = type(event), event.route or event.operation
        tally = self._tallies[kind].get((route, event.tenant) if self._tenants else route)
        if tally is None:
            tally = self._find_tally(kind, route, event.tenant)
        # No lock is needed: an append is atomic, and a writer takes away only what it has seen.
        notes = tally.notes
        notes.append(event.seconds if tally.timed else tally.read(event))  # type: ignore[attr-defined]
        if kind is events.Completed and event.store_seconds:  # type: ignore[attr-defined]
            self._completions.notes.append(event.store_seconds)  # type: ignore[attr-defined]
        if len(notes) >= MOST_NOTES:
            self.write(wait=False)
        if self._in_files and self._timer is None:
            self._start_timer()

    def write(self, *, wait: bool = True) -> None:
        """Add what was noted to the metrics. Done when they are read; once a second if they are in files.

        :param wait: False: do nothing if another thread writes at the moment.
        """
        if self._lock.acquire(blocking=wait):
            try:
                for tally in self._all():
                    tally.write()
            finally:
                self._lock.release()

    def _all(self) -> Iterable[_Tally]:
        return [*(tally for each in list(self._tallies.values()) for tally in each.values()), self._completions]

    def _find_tally(self, kind: type[Event], route: str, tenant: str) -> _Tally:
        with self._lock:
            labels = self._limit.labels(route, tenant)
            tallies, key = self._tallies[kind], labels if self._tenants else labels[0]
            if key not in tallies:
                counter = self._events.labels(*labels, kind.name)
                if kind in TIMED:
                    add = _observer(self._seconds.labels(*labels, kind.name))
                    tallies[key] = _Tally("seconds", add, counter)
                else:
                    field, others = self._others.get(kind, ("", None))
                    tallies[key] = _Tally(field, others, counter)
            return tallies[key]

    def _start_timer(self) -> None:
        self._timer = threading.Timer(WRITE_EVERY, self._write_in_time)
        self._timer.daemon = True
        self._timer.start()

    def _write_in_time(self) -> None:
        self._timer = None  # first: what is noted from now on needs another one
        self.write()

    def _forget(self) -> None:
        """In a forked child: what the parent has noted, it writes itself, and its timer is not here."""
        self._lock = threading.Lock()
        self._timer = None
        for tally in self._all():
            tally.notes.clear()


class _Tally:
    """The events of one kind and route since the last write."""

    __slots__ = ("_add", "_counter", "notes", "read", "timed")

    def __init__(self, field: str, add: Callable[[list[float]], None] | None, counter: Any = None) -> None:
        """
        :param field: the field of the event that is noted; empty if there is none.
        :param add: adds what was noted to a metric.
        :param counter: counts the events.
        """
        self._add = add
        self._counter = counter
        self.timed = field == "seconds"
        self.read: Callable[[Event], float] = attrgetter(field) if field else _nothing
        self.notes: list[float] = []

    def write(self) -> None:
        count = len(self.notes)
        if count:
            taken = self.notes[:count]
            del self.notes[:count]  # not clear(): another thread may have added one
            if self._counter is not None:
                self._counter.inc(count)
            if self._add is not None:
                self._add(taken)


def _nothing(event: Event) -> float:
    return 0.0


def _observer(histogram: Any) -> Callable[[list[float]], None]:
    """Return what ``Histogram.observe`` is for one time, for many at once: there is no public method for it."""

    def observe(times: list[float]) -> None:
        times.sort()
        before = 0
        for bucket, bound in zip(histogram._buckets, (*BUCKETS, math.inf), strict=True):
            count = bisect_right(times, bound)
            if count > before:
                bucket.inc(count - before)
            before = count
        histogram._sum.inc(sum(times))

    return observe


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
        :param look: how many of the newest records, and how many of the older ones, it reads to find unfinished ones.
            For the older ones, each look continues where the last one ended.
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
