"""What a guard and its decorator are given by mistake is refused at once, in words that say what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import (
    INJECTED,
    AsyncMemoryStore,
    AsyncSemel,
    Codec,
    ConfigurationError,
    MemoryStore,
    Operation,
    PolicyError,
    Semel,
)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"policy": {"ttl": "7d"}}, r'policy= is Policy\(ttl="7d"\) or the like, not dict'),
        ({"codec": b"k" * 32}, r"codec= is Codec\(cipher=KeyRing\(…\)\) or the like, not bytes"),
        ({"secret": "s3cret"}, r"secret= is bytes, .* or the like, not str$"),
        ({"on_event": "print"}, r"on_event= is a function of an event, .* or a list of them, not 'print'"),
        ({"on_event": ["print"]}, r"on_event= is a function of an event, .* or a list of them, not \['print'\]"),
        ({"quota": 5}, r"quota= is Quota\(live_keys=10_000\) or the like, not int"),
    ],
)
def test_a_setting_of_another_type_is_refused(settings: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Semel(MemoryStore(), **settings)
    with pytest.raises(ConfigurationError, match=complaint):
        AsyncSemel(AsyncMemoryStore(), **settings)


def test_a_key_is_no_ring_of_keys() -> None:
    with pytest.raises(PolicyError, match=r"cipher= is a ring of keys, KeyRing"):
        Codec(cipher=b"k" * 32)  # type: ignore[arg-type]


def test_a_call_that_does_not_fit_names_the_function() -> None:
    guard = Semel(MemoryStore())

    @guard.once(key="order")
    def ship(order: str, op) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(TypeError, match=r"ship\(\) missing required argument: 'op'"):
        ship("o-1")


async def awaits() -> int:
    return 1


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (awaits, "the function of 'part' is async and is not awaited here"),
        (
            object,
            "'part' cannot be stored: a builtins.object would not come back as it is: return plain data, or a dat",
        ),
    ],
)
def test_a_step_and_a_captured_value_say_what_they_may_be(make: Callable[[], Any], complaint: str) -> None:
    guard = Semel(MemoryStore())

    @guard.once(key="order")
    def ship(order: str, how: str, op: Operation = INJECTED) -> None:
        getattr(op, how)("part", make)

    for how in ("step", "capture"):
        with pytest.raises(PolicyError, match=complaint):
            ship(how, how)
