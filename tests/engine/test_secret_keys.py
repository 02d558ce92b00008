"""Keys that must not be readable in the store: with a secret they cannot be guessed either."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import pytest

from semel import current_operation
from semel.core.keys import identity
from semel.core.ops import Claim
from tests.engine.driving import Engine

SECRET = b"not in the database"


def claimed_ids(engine: Engine, **settings: Any) -> list[bytes]:
    engine.run(lambda: "done", key="1234", guard=engine.new_guard(**settings))
    return [op.id for op in engine.script.ops if isinstance(op, Claim)]


@pytest.mark.parametrize("secret", [SECRET, b"s" * 200], ids=["short", "long"])
def test_a_key_that_is_not_readable_cannot_be_found_without_the_secret(quick_engine: Engine, secret: bytes) -> None:
    guard = quick_engine.new_guard(readable_keys=False, secret=secret)
    ran: list[int] = []
    for _ in range(2):
        quick_engine.run(lambda: ran.append(1), key="1234", guard=guard)
    assert ran == [1]
    assert quick_engine.record("1234") is None, "the id is the plain hash of the key: all short keys can be tried"
    assert quick_engine.do(guard.lookup, "op", "1234") is not None
    other = quick_engine.new_guard(readable_keys=False, secret=b"another")
    assert quick_engine.do(other.lookup, "op", "1234") is None


def test_the_keyed_identity_is_never_changed(quick_engine: Engine) -> None:
    plain = b"0:2:op4:1234"
    keyed = blake2b(plain, digest_size=16, key=SECRET, person=b"semel.identity.1").digest()
    assert claimed_ids(quick_engine, readable_keys=False, secret=SECRET) == [keyed]


@pytest.mark.parametrize("settings", [{}, {"readable_keys": False}, {"secret": SECRET}], ids=str)
def test_other_identities_are_as_before(quick_engine: Engine, settings: dict[str, Any]) -> None:
    assert claimed_ids(quick_engine, **settings) == [identity("", "op", "1234")]


def test_an_abandoned_operation_is_resolved_by_a_guard_with_the_secret(quick_engine: Engine) -> None:
    settings: dict[str, Any] = {"readable_keys": False, "secret": SECRET}
    guard = quick_engine.new_guard(**settings)

    def fails() -> Iterator[Any]:
        operation: Any = current_operation()
        yield operation.capture("charge", lambda: "c-1")
        raise KeyError

    with pytest.raises(KeyError):
        quick_engine.run(fails, guard=guard)
    quick_engine.do(quick_engine.new_guard(**settings).resolve, "op", "k", "it happened")
    assert quick_engine.run(lambda: "ran again", guard=guard) == "it happened"
