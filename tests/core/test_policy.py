"""Policies: durations, the table of guarantees, and every contradiction refused in plain words."""

import contextlib
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.ops import FOREVER
from semel.core.policy import Policy, Wait, duration, seconds
from semel.core.states import Takeover
from semel.errors import ConfigurationError, PolicyError


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (30, 30.0),
        (0, 0.0),
        (0.5, 0.5),
        ("250ms", 0.25),
        ("30s", 30.0),
        ("1.5m", 90.0),
        ("24h", 86400.0),
        ("7d", 604800.0),
        ("2w", 1209600.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        (timedelta(hours=1), 3600.0),
    ],
)
def test_durations(duration: Any, expected: float) -> None:
    assert seconds(duration) == pytest.approx(expected)


@pytest.mark.parametrize(
    "duration",
    [
        "", "s", "10", "10 parsecs", "-5s", "1h-", "h1", "1e3s", "9" * 50 + "s", -1, -0.1, float("nan"),
        float("inf"), 10**20, 10**400, True, False, None, [], b"1s", timedelta(seconds=-1), "1" * 10_000,
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_its_name(duration: Any) -> None:
    with pytest.raises(PolicyError, match="lease") as refused:
        seconds(duration, "lease")
    assert len(str(refused.value)) < 300
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, ConfigurationError)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-1, "0s"), (0, "0s"), (1e-9, "0s"), (2e-5, "20µs"), (0.00099999, "1ms"), (0.0042, "4.2ms"), (0.25, "250ms")),
        *((0.9999, "1s"), (3.14159, "3.14s"), (9.999, "10s"), (59, "59s"), (61, "1m1s"), (150, "2m30s"), (3600, "1h")),
        *((86400, "1d"), (86460, "1d1m"), (273_900, "3d4h"), (666_000, "7d17h"), (10**9, "11574d1h")),
        (FOREVER, "1002y"),
    ],
)
def test_durations_for_people_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(min_value=0.001, max_value=3e9))
def test_a_duration_for_people_is_also_one_for_settings(number: float) -> None:
    text = duration(number)
    assert seconds(text) == pytest.approx(number, rel=0.05)
    assert duration(seconds(text)) == text


@given(st.text(alphabet="0123456789.smhdw ", max_size=30))
def test_any_text_is_a_duration_or_an_error(text: str) -> None:
    with contextlib.suppress(PolicyError):
        assert 0 <= seconds(text) <= FOREVER


def test_the_table_of_guarantees() -> None:
    once, most, least = Policy(), Policy(guarantee="at_most_once"), Policy(guarantee="at_least_once")
    assert (once.takeover, once.fails_open, once.remembered) == (Takeover.RETRY, False, ())
    assert (most.takeover, most.fails_open, most.remembered) == (Takeover.REJECT, False, (Exception,))
    assert (least.takeover, least.fails_open, least.remembered) == (Takeover.RETRY, True, ())


def test_the_defaults() -> None:
    policy = Policy()
    assert policy.guarantee == "effectively_once"
    assert policy.lease_seconds == 30.0
    assert policy.ttl_seconds == 86400.0
    assert policy.wait_seconds == 0.0
    assert policy.completion_seconds == 5.0
    assert Policy(ttl=None).ttl_seconds == FOREVER
    assert Policy(on_duplicate=Wait("5s")).wait_seconds == 5.0
    assert Wait(2) == Wait(2.0)


GUARANTEES = ["effectively_once", "at_most_once", "at_least_once"]
COMBINATIONS = list(
    product(
        [None, "retry", "reject"],
        [None, len],
        [None, "closed", "open"],
        [None, "all", KeyError, (KeyError, Exception)],
    )
)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_every_combination_is_either_meant_or_refused(guarantee: Any) -> None:
    for on_abandoned, recover, on_store_error, remember in COMBINATIONS:
        contradicts = (
            (recover is not None and on_abandoned is not None)
            or (guarantee == "at_most_once" and on_abandoned == "retry")
            or (guarantee == "at_most_once" and on_store_error == "open")
            or (guarantee == "at_most_once" and remember is KeyError)
        )
        settings: dict[str, Any] = {
            "guarantee": guarantee, "on_abandoned": on_abandoned, "recover": recover, "on_store_error": on_store_error,
            "remember_errors": remember,
        }  # fmt: skip
        if contradicts:
            with pytest.raises(PolicyError):
                Policy(**settings)
            continue
        policy = Policy(**settings)
        if recover is not None:
            expected = Takeover.RECOVER
        elif on_abandoned == "reject" or guarantee == "at_most_once":
            expected = Takeover.REJECT
        else:
            expected = Takeover.RETRY
        assert policy.takeover is expected, settings
        fails_open = on_store_error == "open" or (on_store_error is None and guarantee == "at_least_once")
        assert policy.fails_open is fails_open, settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"guarantee": "exactly_once"}, 'guarantee is one of "effectively_once", "at_most_once", "at_least_once"'),
        ({"guarantee": None}, "guarantee"),
        ({"on_abandoned": "recover"}, 'on_abandoned is one of "retry", "reject"'),
        ({"on_store_error": "ignore"}, 'on_store_error is one of "closed", "open"'),
        ({"on_duplicate": "wait"}, r'on_duplicate is "raise" or Wait\(seconds\)'),
        ({"on_duplicate": 5}, "on_duplicate"),
        ({"recover": "find_out"}, "recover is a function"),
        ({"lease": 0}, "lease must be longer than 0 s"),
        ({"lease": None}, "lease"),
        ({"ttl": 0}, "ttl must be longer than 0 s"),
        ({"ttl": "for ever"}, "ttl"),
        ({"completion_timeout": -1}, "completion_timeout"),
        ({"reject_expired_for": -1}, "reject_expired_for"),
        ({"reject_expired_for": "1h", "ttl": None}, "reject_expired_for"),
        ({"on_interrupted": "ignore"}, "on_interrupted"),
        ({"on_interrupted": "release", "guarantee": "at_most_once"}, "at_most_once cannot run an interrupted attempt"),
        ({"remember_errors": ValueError("x")}, "remember"),
        ({"remember_errors": (KeyError, "x")}, "remember"),
        ({"remember_errors": BaseException}, "remember"),
        ({"remember_errors": [KeyError]}, "remember"),
    ],
    ids=str,
)
def test_a_wrong_word_is_refused_and_the_right_ones_are_named(settings: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        Policy(**settings)


def test_unhashable_words_are_refused_too() -> None:
    for name in ("guarantee", "on_abandoned", "on_interrupted", "on_store_error", "on_duplicate"):
        with pytest.raises(PolicyError, match=name):
            Policy(**{name: ["raise"]})


def test_a_policy_may_be_changed_into_another_and_stays_what_it_was() -> None:
    policy = Policy(lease="10s", ttl="1h")
    other = policy.replace(ttl="2h", guarantee="at_most_once")
    assert (policy.ttl_seconds, other.ttl_seconds, other.lease_seconds) == (3600.0, 7200.0, 10.0)
    assert other.takeover is Takeover.REJECT
    assert policy.takeover is Takeover.RETRY
    assert policy.replace() is policy
    with pytest.raises(
        PolicyError,
        match=r"unknown policy leese; there are: completion_timeout, guarantee, lease, max_run_time, on_abandoned",
    ):
        policy.replace(leese=1)
    with pytest.raises(AttributeError):
        policy.lease = 5  # type: ignore[misc]


def test_a_record_is_kept_for_its_ttl_and_for_as_long_as_its_key_is_refused() -> None:
    assert Policy(ttl="1h").retention_seconds == 3600.0
    assert Policy(ttl="1h", reject_expired_for="30m").retention_seconds == 5400.0
    assert Policy(ttl=None).retention_seconds == FOREVER
    assert Policy(ttl=FOREVER - 1, reject_expired_for=FOREVER).retention_seconds == FOREVER


def test_policies_are_values() -> None:
    assert Policy(ttl="1h") == Policy(ttl="1h")
    assert hash(Policy(ttl="1h")) == hash(Policy(ttl="1h"))
    assert Policy(ttl="1h") != Policy(ttl="2h")
    assert "lease_seconds" not in repr(Policy())
