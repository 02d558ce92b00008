"""How many live keys a tenant may hold, kept track of without asking the store for every call.

A *meter* knows of each tenant what the store counted last and how many keys this guard has claimed since. The store is
asked again when a tenant is first seen, when the guard has used up a share of the room it saw, and when the estimate
reaches the quota; while a tenant is over it, at most every ``recount_every``. So the quota is near, not exact: guards
that share a store see each other's keys only when they count. Ten guards that fill one tenant at the same time may
exceed it by about as much as they had room for; a single guard keeps it, but for keys that expired unnoticed.

Nothing here asks a store or reads a clock by itself, and nothing is locked: an update lost between two threads makes an
estimate wrong by one, until the next count.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from semel.core.ops import Count, Lookup, Op
from semel.core.policy import Duration, seconds
from semel.errors import PolicyError, StoreError, TooManyKeys
from semel.observe import events

if TYPE_CHECKING:
    from semel.core.call import Call

__all__ = ["Meter", "Quota", "admit"]

SHARE: Final = 10
"""A guard claims a tenth of the room it saw, then counts again: others may have claimed as well."""
FEWEST: Final = 16
"""... but no fewer keys than this, so that a tenant near its quota does not cost a count for every key."""
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """At most so many live keys for each tenant; a new key beyond is refused with TooManyKeys.

    Calls without a tenant share the quota of the empty one: it is over all keys of guards that name no tenant.
    """

    live_keys: int = 10_000
    recount_every: Duration = 5.0
    """How often, at most, the keys of a tenant that is over its quota are counted again."""
    tenants: int = 10_000
    """How many tenants are kept in mind; one that was forgotten is counted anew."""

    recount_seconds: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("live_keys", "tenants"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise PolicyError(f"Quota: {name} is a whole number from 1, not {number!r}")
        object.__setattr__(self, "recount_seconds", seconds(self.recount_every, "recount_every"))


def admit(call: Call, quota: Meter) -> Generator[Op[Any], Any, None]:
    """Let the call pass if its tenant has room, or its key exists. Asks the store only where the meter has to."""
    tenant = call.tenant
    if quota.must_count(tenant):
        try:
            quota.counted(tenant, (yield Count(tenant, quota.live_keys)))
        except StoreError as error:
            call.tell(events.StoreFailed, "count", str(error))
            if not call.policy.fails_open:
                raise
            return  # the claim follows, and has its own luck
        finally:
            quota.asked(tenant)
    retry_after = quota.full(tenant)
    if retry_after is None:
        return
    try:
        if (yield Lookup(call.id)) is not None:
            return  # it holds a key already; whether this one is answered, waits or takes over is the claim's affair
    except StoreError as error:
        call.tell(events.StoreFailed, "lookup", str(error))
        if not call.policy.fails_open:
            raise
        return
    call.tell(events.OverQuota, quota.estimate(tenant))
    raise TooManyKeys(
        f"{call}: the tenant holds {quota.live_keys} live keys or more, which is its quota; "
        f"retry in {retry_after:.0f} s, when some may have expired",
        retry_after=retry_after,
    )


class _Tenant:
    """What is known of one tenant."""

    __slots__ = ("asking_since", "counted_at", "known", "recount_at")

    def __init__(self) -> None:
        self.known = 0
        """The last count, and our own claims since."""
        self.recount_at = 0
        """Count again once ``known`` is this much; 0: never counted."""
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
        """Tenants not seen since ``_recent`` was begun; forgotten when that is full."""

    def must_count(self, tenant: str) -> bool:
        """Whether the store is to be asked; if so, ``counted`` or nothing follows, and then ``asked``.

        One call asks at a time: the others of this guard go by what is known. One that was interrupted says nothing
        more, so after a while another may ask.
        """
        known = self._of(tenant)
        if known.known < known.recount_at:
            return False
        now = self._clock()
        if now < known.asking_since + self._recount_every:
            return False
        if known.known >= self.live_keys and now < known.counted_at + self._recount_every:
            return False
        known.asking_since = now
        return True

    def counted(self, tenant: str, live: int) -> None:
        known = self._of(tenant)
        was_full = known.known >= self.live_keys
        known.known = live
        known.recount_at = min(self.live_keys, live + max((self.live_keys - live) // SHARE, FEWEST))
        # A tenant that only now reaches its quota is counted at once; one that stays there, only now and then.
        known.counted_at = self._clock() if was_full or live >= self.live_keys else _NEVER

    def asked(self, tenant: str) -> None:
        self._of(tenant).asking_since = _NEVER

    def full(self, tenant: str) -> float | None:
        """None where the tenant has room; else the seconds after which it may be counted again."""
        known = self._of(tenant)
        if known.known < self.live_keys:
            return None
        return max(1.0, known.counted_at + self._recount_every - self._clock())

    def estimate(self, tenant: str) -> int:
        return self._of(tenant).known

    def claimed(self, tenant: str) -> None:
        """A new key was claimed."""
        self._of(tenant).known += 1

    def released(self, tenant: str) -> None:
        """A key is free again: nothing had happened under it."""
        known = self._of(tenant)
        known.known = max(0, known.known - 1)

    def _of(self, tenant: str) -> _Tenant:
        found = self._recent.get(tenant)
        if found is None:
            found = self._older.get(tenant) or _Tenant()
            if len(self._recent) * 2 >= self._most:
                self._older, self._recent = self._recent, {}
            self._recent[tenant] = found
        return found
