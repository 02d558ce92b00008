"""What the metrics of Prometheus and OpenTelemetry have in common: which events are timed, and the limit of labels."""

from __future__ import annotations

from typing import Final

from semel.observe import events

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds."""
TIMED: Final = (
    events.Completed, events.Prepared, events.FailureRemembered, events.Released, events.Replayed, events.AppliedEvent,
    events.Skipped, events.CallEnded, events.CallUnknown,
)  # fmt: skip
"""Events whose ``seconds`` say how long a call or a message took."""
MAX_ROUTES: Final = 200
"""How many routes have time series of their own."""
OTHER: Final = "(other)"
"""The route of all events whose route is one too many."""


class LabelLimit:
    """Lets the first routes through, with ``tenants`` pairs of route and tenant, and replaces all later ones."""

    def __init__(self, most: int, tenants: bool) -> None:
        self._most = most
        self._tenants = tenants
        self._known: set[tuple[str, ...]] = set()

    def labels(self, route: str, tenant: str) -> tuple[str, ...]:
        """Return the values of the labels."""
        wanted = (route, tenant) if self._tenants else (route,)
        if wanted not in self._known:
            if len(self._known) >= self._most:  # not remembered: a client may send a new one with each request
                return (OTHER, "") if self._tenants else (OTHER,)
            self._known.add(wanted)
        return wanted
