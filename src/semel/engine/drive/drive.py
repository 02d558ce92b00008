"""One call on its way through an engine: the flow, and what is held for it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.core.call import Call, Flow
from semel.core.flows import perform
from semel.core.ops import Claimed
from semel.engine.drive.flights import Flight
from semel.engine.drive.leases import Lease

__all__ = ["Drive", "ignoring"]


def ignoring(hook: Callable[[], Any] | None) -> Callable[[Any], Any]:
    """A recover hook in a handler's place: it is not handed the operation."""
    return lambda op: hook() if hook is not None else None


class Drive:
    """Made for each call. An engine advances it, and gives back at the end what it holds."""

    __slots__ = ("began", "call", "cancelled", "finished", "flight", "flow", "lease")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.flow: Flow = perform(call)
        self.began = 0.0
        """When the claim was sent: the lease counts from then, not from the answer."""
        self.flight: Flight | None = None
        self.lease: Lease | None = None
        self.finished = False
        """Whether all that it held was given back."""
        self.cancelled: BaseException | None = None
        """The caller's cancellation, kept until the record is settled."""

    def hold(self, claimed: Claimed | None) -> Lease | None:
        """The lease of this attempt, one for the recover hook and the handler alike; None when run unprotected."""
        if claimed is not None and self.lease is None:
            self.call.has_steps = bool(claimed.steps)
            self.lease = Lease(self.call, claimed.token, claimed.attempt, self.began)
        return self.lease
