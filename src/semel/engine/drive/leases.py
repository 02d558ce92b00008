"""The leases of running handlers, and when each must be renewed: bookkeeping without clock or I/O, for both keepers.

A lease is first renewed after a third of its span, so a short handler needs no renewal at all. A renewal that fails is
tried again soon. A lease is lost when its whole span has passed without a renewal, or when its handler has run for
longer than the policy's ``max_run_time``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from semel.core.call import Call
from semel.core.ops import Renew
from semel.observe import events

RENEW_AFTER: Final = 1 / 3
"""Of the span: when a lease is renewed."""
RETRY_AFTER: Final = 1 / 12
"""Of the span: when a failed renewal is tried again."""
TOGETHER: Final = 1 / 10
"""Of the span: leases due this soon are renewed in the same round trip."""


class Lease:
    """One attempt's hold on its record."""

    __slots__ = ("attempt", "call", "due", "ends", "latest", "lost", "maybe_locked", "on_lost", "span", "token")

    def __init__(self, call: Call, token: int, attempt: int, began: float) -> None:
        self.call = call
        self.token = token
        self.attempt = attempt
        self.span = call.policy.lease_seconds
        self.ends = began + self.span
        self.latest = began + call.policy.max_run_seconds
        """When the handler has run for as long as it may. From then on the lease is not renewed."""
        self.due = min(began + self.span * RENEW_AFTER, self.latest)
        self.maybe_locked = False
        """Whether a step was marked in the caller's transaction, which may still hold a lock on the record."""
        self.lost = False
        self.on_lost: Callable[[], object] | None = None

    def renewal(self) -> Renew:
        return Renew(self.call.id, self.token, self.span)


class Leases:
    """All leases of one engine."""

    __slots__ = ("_on_lost", "begun", "held", "shortest")

    def __init__(self, on_lost: Callable[[Lease], object] | None = None) -> None:
        """:param on_lost: called with each lease that is lost, after its own ``on_lost``."""
        self._on_lost = on_lost
        self.held: dict[int, Lease] = {}
        """The leases by their ids."""
        self.shortest = 30.0
        """The shortest span so far: how soon a lease that begins now may have to be renewed."""
        self.begun = 0
        """How many leases have begun so far: shows whether there is traffic."""

    def __len__(self) -> int:
        return len(self.held)

    def hold(self, lease: Lease) -> None:
        """Renew the lease until it is dropped or lost."""
        self.held[id(lease)] = lease
        self.begun += 1
        if lease.span < self.shortest:  # noqa: PLR1730 - faster than min(), in every call
            self.shortest = lease.span

    def drop(self, lease: Lease) -> None:
        """Stop renewing the lease. Safe to call again."""
        self.held.pop(id(lease), None)

    def next_due(self, now: float) -> float:
        """When to look again. Without leases: about when one that begins now would first be due."""
        dues = [lease.due for lease in list(self.held.values())]
        return min(dues, default=now + self.shortest * RENEW_AFTER)

    def due(self, now: float) -> list[Lease]:
        """The leases to renew now. Those whose handlers have run for too long are lost instead."""
        due = [lease for lease in list(self.held.values()) if lease.due <= now + lease.span * TOGETHER]
        for lease in due:
            if lease.latest <= now:
                self._lose(lease)
        return [lease for lease in due if not lease.lost]

    def trips(self, now: float) -> list[list[Lease]]:
        """The leases to renew now, by round trip.

        Those that may have to wait for a caller's transaction go last, so that the others do not wait with them.
        """
        due = self.due(now)
        trips = [lease for lease in due if not lease.maybe_locked], [lease for lease in due if lease.maybe_locked]
        return [trip for trip in trips if trip]

    def expire(self, now: float) -> None:
        """Lose the leases that have ended while a renewal is still on its way: others may have taken over."""
        for lease in list(self.held.values()):
            if now >= lease.ends:
                self._lose(lease)

    def note_renewals(self, leases: Iterable[Lease], answers: Iterable[Any], sent: float, now: float) -> None:
        """Note the answers to renewals. The new span counts from ``sent``, when they were sent, not from the answer."""
        for lease, answer in zip(leases, answers, strict=True):
            if id(lease) not in self.held:
                continue  # it has ended meanwhile, and a refusal only means that it is completed
            if answer is True:
                lease.due = min(sent + lease.span * RENEW_AFTER, lease.latest)
                lease.ends = sent + lease.span
                lease.call.tell(events.Renewed, lease.attempt)
            elif answer is not False:  # a StoreError, or something else if the store breaks its contract
                lease.call.tell(events.RenewalFailed, str(answer) or type(answer).__name__)
                lease.due = min(now + lease.span * RETRY_AFTER, lease.latest)
                if now >= lease.ends:
                    self._lose(lease)
            else:
                self._lose(lease)

    def _lose(self, lease: Lease) -> None:
        self.drop(lease)
        lease.lost = True
        if lease.call.log is not None:  # now, and not when the handler ends: that may be never
            lease.call.log(lease.call, events.LeaseLostEvent, (lease.attempt, lease.token))
        if lease.on_lost is not None:
            lease.on_lost()
        if self._on_lost is not None:
            self._on_lost(lease)
