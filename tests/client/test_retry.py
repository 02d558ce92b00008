"""When a request is sent again: the order of the hints, the waits, the budgets and the quota."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.client.retry import MARGIN, RETRIED_STATUSES, Advice, Retry, RetryQuota, advice, origin_of, retry_after
from semel.errors import PolicyError

NOW = 1_800_000_000.0
STATUSES = st.integers(400, 599)
FLAGS = st.sampled_from([None, True, False])
SECONDS = st.one_of(st.none(), st.integers(0, 100_000))


class Headers(dict[str, str]):
    """Found by any spelling, as in the HTTP libraries."""

    def get(self, name: str, default: Any = None) -> Any:
        return {key.lower(): text for key, text in self.items()}.get(name.lower(), default)


def answer(status: int, headers: dict[str, str] | None = None, problem: Any = None) -> Advice:
    found = Headers(headers or {})
    if problem is not None:
        found["content-type"] = "application/problem+json"
    return advice(status, found, lambda: json.dumps(problem).encode(), NOW)


@given(STATUSES, FLAGS, FLAGS, SECONDS)
def test_the_strongest_hint_decides(status: int, body: bool | None, header: bool | None, after: int | None) -> None:
    headers = {}
    if header is not None:
        headers["stripe-should-retry"] = str(header).lower()
    if after is not None:
        headers["retry-after"] = str(after)
    found = answer(status, headers, {} if body is None else {"retryable": body})
    expected = next(
        hint
        for hint in (body, header, True if after is not None else None, status in RETRIED_STATUSES)
        if hint is not None
    )
    assert found == Advice(expected, float(after or 0))


@given(st.integers(100, 399), SECONDS)
def test_what_is_no_error_is_never_retried(status: int, after: int | None) -> None:
    headers = {} if after is None else {"Retry-After": str(after)}
    assert answer(status, headers, {"retryable": True}) == Advice(False)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_a_refusal_without_a_hint_is_final(status: int) -> None:
    assert not answer(status).retry


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_failure_without_a_hint_is_retried(status: int) -> None:
    assert answer(status).retry


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"retryable": "yes"}', "[" * 70_000, ""])
def test_a_body_that_says_nothing_is_no_hint(text: str) -> None:
    found = advice(400, Headers({"Content-Type": "application/json"}), text.encode, NOW)
    assert found == Advice(False)


def test_the_body_of_another_type_is_not_read() -> None:
    def body() -> bytes:
        raise AssertionError

    assert advice(503, Headers({"Content-Type": "text/html"}), body, NOW).retry


def test_the_wait_may_be_in_the_body() -> None:
    assert answer(409, problem={"retryable": True, "retry_after": 2.5}) == Advice(True, 2.5)
    assert answer(409, problem={"retryable": True, "retry_after": True}) == Advice(True, 0.0)


@given(st.integers(0, 10_000), st.integers(-5_000, 5_000))
def test_a_date_is_compared_with_the_clock_of_the_server(wait: int, skew: int) -> None:
    date, sent = formatdate(NOW + skew + wait, usegmt=True), formatdate(NOW + skew, usegmt=True)
    assert retry_after(Headers({"Retry-After": date, "Date": sent}), NOW) == wait
    assert retry_after(Headers({"Retry-After": date}), NOW) == max(0, wait + skew)


@given(st.text(max_size=30))
def test_any_text_of_retry_after_is_harmless(text: str) -> None:
    found = retry_after(Headers({"Retry-After": text}), NOW)
    assert found is None or found >= 0


@pytest.mark.parametrize("text", ["-1", "1.5", "soon", "٣", ""])
def test_a_retry_after_that_cannot_be_read_is_none(text: str) -> None:
    assert retry_after(Headers({"Retry-After": text}), NOW) is None


UNIT = st.floats(0, 1)


@given(
    attempts=st.integers(1, 100),
    after=st.floats(0, 1e6),
    elapsed=st.floats(0, 1e6),
    age=st.floats(0, 1e6),
    chance=UNIT,
    limit=st.integers(1, 50),
    time=st.floats(0, 1e5),
    base=st.floats(0, 100),
    cap=st.floats(0, 100),
    window=st.floats(0, 1e6),
)
def test_a_wait_keeps_to_every_bound(
    attempts: int,
    after: float,
    elapsed: float,
    age: float,
    chance: float,
    limit: int,
    time: float,
    base: float,
    cap: float,
    window: float,
) -> None:
    retry = Retry(attempts=limit, time=time, base=base, cap=cap, window=window)
    wait = retry.wait(attempts, after, elapsed, age, chance)
    if wait is None:
        return
    assert attempts < limit
    assert after <= wait <= after + cap
    assert elapsed + wait <= time
    assert age + wait <= window - min(MARGIN, window / 10)


@given(st.integers(1, 7), UNIT)
def test_the_random_part_doubles_up_to_the_cap(attempts: int, chance: float) -> None:
    wait = Retry(base=1, cap=16, time="1h").wait(attempts, 0.0, 0.0, 0.0, chance)
    assert wait == pytest.approx(chance * min(16, 2 ** (attempts - 1)))


def test_it_stops_rather_than_wait_in_vain() -> None:
    assert Retry(time="10s").wait(1, 11.0, 0.0, 0.0, 0.0) is None
    assert Retry(window="1h").wait(1, 0.0, 0.0, 3300.0, 1.0) is None
    assert Retry(attempts=1).wait(1, 0.0, 0.0, 0.0, 0.0) is None


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"attempts": True}, {"time": "soon"}, {"base": -1}])
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Retry(**wrong)


@given(st.lists(st.sampled_from(["retry", "success", "retried success"])))
def test_the_quota_is_never_overdrawn_nor_overfilled(events: list[str]) -> None:
    quota = RetryQuota(20)
    for event in events:
        before = quota.left("a")
        if event == "retry":
            assert quota.take("a") == (before >= 5)
        else:
            quota.give_back("a", event == "retried success")
        assert 0 <= quota.left("a") <= 20
        assert quota.left("b") == 20


def test_an_outage_empties_the_purse_and_success_fills_it() -> None:
    quota = RetryQuota(20)
    assert [quota.take("a") for _ in range(6)] == [True] * 4 + [False] * 2
    for _ in range(5):
        quota.give_back("a", False)
    assert quota.take("a")
    assert not quota.take("a")


def test_many_servers_do_not_fill_the_memory() -> None:
    quota = RetryQuota()
    for number in range(3000):
        quota.take(str(number))
    assert len(quota._spent) == 1000


def test_a_quota_of_nonsense_is_refused() -> None:
    with pytest.raises(PolicyError):
        RetryQuota(5, cost=0)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Pay.example/a?b#c", "https://pay.example"),
        ("https://pay.example:443?x=/", "https://pay.example"),
        ("HTTP://u:p@pay.example:80/", "http://pay.example"),
        ("http://pay.example:443/", "http://pay.example:443"),
        ("http://[::1]:8000/a", "http://[::1]:8000"),
    ],
)
def test_the_origin_of_a_url(url: str, origin: str) -> None:
    assert origin_of(url) == origin
