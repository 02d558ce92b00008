"""Leases that are held, and when each must be renewed: bookkeeping without clock or I/O, for both keepers.

A lease is first renewed after a third of its span, so a short handler costs no renewal at all. A renewal that fails is
tried again soon; only when the whole span has passed without one getting through is the lease given up for lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from semel.core.call import Call
from semel.core.ops import Renew
from semel.observe import events

__all__ = ["Lease", "Leases"]

RENEW_AFTER: Final = 1 / 3
"""Of the span: when a lease is renewed."""
RETRY_AFTER: Final = 1 / 12
"""Of the span: when a failed renewal is tried again."""
TOGETHER: Final = 1 / 10
"""Of the span: leases due this soon are renewed in the same round trip."""


class Lease:
    """One attempt's hold on its record."""

    __slots__ = ("attempt", "call", "due", "ends", "lent", "lost", "on_lost", "span", "token")

    def __init__(self, call: Call, token: int, attempt: int, began: float) -> None:
        self.call = call
        self.token = token
        self.attempt = attempt
        self.span = call.policy.lease_seconds
        self.due = began + self.span * RENEW_AFTER
        self.ends = began + self.span
        self.lent = False
        """Whether a step's mark was written in a transaction of the caller's, which may hold the record still."""
        self.lost = False
        self.on_lost: Callable[[], object] | None = None

    def renewal(self) -> Renew:
        return Renew(self.call.id, self.token, self.span)


class Leases:
    """All leases of one engine."""

    __slots__ = ("_held", "begun", "shortest")

    def __init__(self) -> None:
        self._held: dict[int, Lease] = {}
        self.shortest = 30.0
        """The shortest span seen: how soon a lease that begins now may need care."""
        self.begun = 0
        """How many have been held so far: whether there is traffic."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, lease: Lease) -> None:
        self._held[id(lease)] = lease
        self.begun += 1
        if lease.span < self.shortest:  # noqa: PLR1730 (min() costs more than all the rest)
            self.shortest = lease.span

    def drop(self, lease: Lease) -> None:
        self._held.pop(id(lease), None)

    def next_due(self, now: float) -> float:
        """When to look again. With nothing held: about when a lease that begins now would first be due."""
        dues = [lease.due for lease in list(self._held.values())]
        return min(dues, default=now + self.shortest * RENEW_AFTER)

    def due(self, now: float) -> list[Lease]:
        """The leases to renew now."""
        return [lease for lease in list(self._held.values()) if lease.due <= now + lease.span * TOGETHER]

    def trips(self, now: float) -> list[list[Lease]]:
        """The same in the trips that they travel in: what may have to wait for a caller's transaction goes last, and
        the others do not wait with it.
        """
        due = self.due(now)
        trips = [lease for lease in due if not lease.lent], [lease for lease in due if lease.lent]
        return [trip for trip in trips if trip]

    def expire(self, now: float) -> None:
        """Give up the leases that have ended while a renewal is still on its way: others may have taken over."""
        for lease in list(self._held.values()):
            if now >= lease.ends:
                self._lose(lease)

    def renewed(self, leases: Iterable[Lease], answers: Iterable[Any], sent: float, now: float) -> None:
        """Take in the answers to renewals that were sent at ``sent``: the new span counts from then, not from the
        answer.
        """
        for lease, answer in zip(leases, answers, strict=True):
            if id(lease) not in self._held:
                continue  # over meanwhile, so a stale answer only says that it completed
            if answer is True:
                lease.due = sent + lease.span * RENEW_AFTER
                lease.ends = sent + lease.span
                lease.call.tell(events.Renewed, lease.attempt)
            elif answer is not False:  # a StoreError, or whatever a store gives that breaks its contract
                lease.call.tell(events.RenewalFailed, str(answer) or type(answer).__name__)
                lease.due = now + lease.span * RETRY_AFTER
                if now >= lease.ends:
                    self._lose(lease)
            else:
                self._lose(lease)

    def _lose(self, lease: Lease) -> None:
        self.drop(lease)
        lease.lost = True
        if lease.on_lost is not None:
            lease.on_lost()
