"""The meter by itself: when it asks, what it believes, and that it forgets."""

from semel.core.quota import FEWEST, SHARE, Meter, Quota


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def count(meter: Meter, tenant: str, live: int) -> None:
    assert meter.must_count(tenant)
    meter.set_count(tenant, live)
    meter.end_count(tenant)


def test_a_guard_counts_again_when_it_used_its_share_of_the_room() -> None:
    meter = Meter(Quota(live_keys=1000), Clock())
    count(meter, "t", 0)
    for _ in range(1000 // SHARE):
        assert not meter.must_count("t")
        meter.add_key("t")
    count(meter, "t", 500)  # others were there too
    for _ in range(500 // SHARE):
        assert not meter.must_count("t")
        meter.add_key("t")
    assert meter.must_count("t")


def test_near_the_quota_it_does_not_count_for_every_key() -> None:
    meter = Meter(Quota(live_keys=1000), Clock())
    count(meter, "t", 980)
    asked = 0
    for _ in range(FEWEST):
        asked += meter.must_count("t")
        meter.add_key("t")
    assert asked == 0


def test_only_one_asks_at_a_time() -> None:
    meter = Meter(Quota(live_keys=10), Clock())
    assert meter.must_count("t")
    assert not meter.must_count("t")
    meter.end_count("t")
    assert meter.must_count("t")


def test_a_tenant_at_its_quota_is_counted_again_only_after_a_while() -> None:
    clock = Clock()
    meter = Meter(Quota(live_keys=2, recount_every=5), clock)
    count(meter, "t", 2)
    assert meter.retry_after("t") == 5.0
    clock.now += 3
    assert not meter.must_count("t")
    assert meter.retry_after("t") == 2.0
    clock.now += 2.5
    count(meter, "t", 1)
    assert meter.retry_after("t") is None
    meter.add_key("t")
    assert meter.retry_after("t") is not None
    assert not meter.must_count("t"), "it was counted a moment ago"


def test_tenants_not_seen_for_long_are_forgotten_and_those_in_use_are_not() -> None:
    meter = Meter(Quota(live_keys=10, tenants=100), Clock())
    count(meter, "busy", 1)
    for i in range(1000):
        count(meter, f"t{i}", 1)
        assert not meter.must_count("busy")
    assert len(meter._recent) + len(meter._older) <= 100
    assert meter.must_count("t0")


def test_released_keys_never_count_below_nothing() -> None:
    meter = Meter(Quota(live_keys=10), Clock())
    count(meter, "t", 0)
    meter.remove_key("t")
    assert meter.estimate("t") == 0
