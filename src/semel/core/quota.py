"""How many live keys a tenant may have, estimated without asking the store in every call.

A ``Meter`` knows the store's last count of each tenant, and how many keys this guard has claimed since. The store
counts again when a tenant is first seen, when the guard has used a share of the free room, and when the estimate
reaches the quota; while a tenant is over its quota, at most every ``recount_every``. So the quota is approximate:
guards that share a store see each other's keys only when they count. Ten guards that fill one tenant at the same time
may exceed it by about as much as there was room. A single guard exceeds it only by keys that expired unnoticed.

Nothing here asks a store or reads a clock by itself, and nothing is locked: if two threads lose an update, the estimate
is wrong by one until the next count.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from semel.core.ops import Count, Lookup, Op
from semel.core.policy import Duration, at_least_one, seconds
from semel.errors import StoreError, TooManyKeys
from semel.observe import events

if TYPE_CHECKING:
    from semel.core.call import Call

SHARE: Final = 10
"""A guard claims a tenth of the free room and then counts again, because other guards may have claimed as well."""
FEWEST: Final = 16
"""... but at least this many keys, so that a tenant near its quota does not cause a count for every key."""
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A limit of live keys per tenant. A new key beyond it is refused with TooManyKeys.

    Calls without a tenant share one quota.
    """

    live_keys: int = 10_000
    """How many live keys a tenant may have."""
    recount_every: Duration = 5.0
    """How often the keys of a tenant that is over its quota are counted again, at most."""
    tenants: int = 10_000
    """How many tenants a guard keeps estimates for. A forgotten one is counted again."""

    recount_seconds: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("live_keys", "tenants"):
            at_least_one(getattr(self, name), f"Quota: {name}")
        object.__setattr__(self, "recount_seconds", seconds(self.recount_every, "recount_every"))


def admit(call: Call, quota: Meter) -> Generator[Op[Any], Any, None]:
    """Let the call pass if its tenant has room, or if its key exists. Asks the store only if the meter has to."""
    tenant, question = call.tenant, "count"
    try:
        if quota.must_count(tenant):
            try:
                quota.set_count(tenant, (yield Count(tenant, quota.live_keys)))
            finally:
                quota.end_count(tenant)
        retry_after = quota.retry_after(tenant)
        if retry_after is None:
            return
        question = "lookup"
        if (yield Lookup(call.id)) is not None:
            return  # the key exists already; the claim decides what happens with it
    except StoreError as error:
        call.alert(events.StoreFailed, question, str(error))
        if not call.policy.fails_open:
            raise
        return  # the claim follows, and may succeed
    call.tell(events.OverQuota, quota.estimate(tenant))
    raise TooManyKeys(
        f"{call}: the tenant has {quota.live_keys} live keys or more, which is its quota; "
        f"retry in {retry_after:.0f} s, when some may have expired",
        retry_after=retry_after,
    )


class _Tenant:
    """The estimate of one tenant."""

    __slots__ = ("asking_since", "counted_at", "live", "recount_at")

    def __init__(self) -> None:
        self.live = 0
        """The last count, plus our own claims since then."""
        self.recount_at = 0
        """Count again when ``live`` reaches this number. 0: never counted."""
        self.counted_at = _NEVER
        self.asking_since = _NEVER


class Meter:
    """The tenants of one guard."""

    def __init__(self, quota: Quota, clock: Callable[[], float]) -> None:
        self.live_keys = quota.live_keys
        self._recount_every = quota.recount_seconds
        self._clock = clock
        self._most = quota.tenants
        self._recent: dict[str, _Tenant] = {}
        self._older: dict[str, _Tenant] = {}
        """Tenants that were not seen since ``_recent`` was started. They are dropped when it is full."""

    def must_count(self, tenant: str) -> bool:
        """Whether to ask the store. If so, the caller calls ``set_count`` if it gets an answer, and then ``end_count``.

        Only one call asks at a time; the others use the estimate. A call that was interrupted never ends its count, so
        after a while another one may ask.
        """
        state = self._find(tenant)
        if state.live < state.recount_at:
            return False
        now = self._clock()
        if now < state.asking_since + self._recount_every:
            return False
        if state.live >= self.live_keys and now < state.counted_at + self._recount_every:
            return False
        state.asking_since = now
        return True

    def set_count(self, tenant: str, live: int) -> None:
        state = self._find(tenant)
        was_full = state.live >= self.live_keys
        state.live = live
        state.recount_at = min(self.live_keys, live + max((self.live_keys - live) // SHARE, FEWEST))
        # A tenant that has just reached its quota is counted at once; one that stays there, only now and then.
        state.counted_at = self._clock() if was_full or live >= self.live_keys else _NEVER

    def end_count(self, tenant: str) -> None:
        self._find(tenant).asking_since = _NEVER

    def retry_after(self, tenant: str) -> float | None:
        """Return None if the tenant has room, else the seconds until it may be counted again."""
        state = self._find(tenant)
        if state.live < self.live_keys:
            return None
        return max(1.0, state.counted_at + self._recount_every - self._clock())

    def estimate(self, tenant: str) -> int:
        return self._find(tenant).live

    def add_key(self, tenant: str) -> None:
        """Count a key that was claimed."""
        self._find(tenant).live += 1

    def remove_key(self, tenant: str) -> None:
        """Discount a key that was released."""
        state = self._find(tenant)
        state.live = max(0, state.live - 1)

    def _find(self, tenant: str) -> _Tenant:
        found = self._recent.get(tenant)
        if found is None:
            found = self._older.get(tenant) or _Tenant()
            if len(self._recent) * 2 >= self._most:
                self._older, self._recent = self._recent, {}
            self._recent[tenant] = found
        return found
