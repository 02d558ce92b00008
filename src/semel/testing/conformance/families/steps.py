"""Steps: the next attempt gets the steps that a running one has saved, in order. No other record gets them."""

from __future__ import annotations

from semel.core.ops import Complete, Lookup, Release, Resolve, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.phrases import abandoned, claim, running, won
from semel.testing.conformance.script import PAST_SHORT, SHORT, TTL, Elsewhere, Family, Script, new_id

FAMILY = Family("steps")


@FAMILY()
def steps_come_back_in_order_on_a_takeover() -> Script:
    id, first = yield from running()
    names = ["reserve", "charge", "a", "Z", "10", "9", "ship"]
    for position, name in enumerate(names):
        assert (yield SaveStep(id, first.token, name, name.encode(), position)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    second = yield from won(claim(id))
    assert second.steps == tuple((name, name.encode()) for name in names)


@FAMILY()
def steps_survive_a_silent_owner() -> Script:
    id = new_id()
    first = yield from won(claim(id, lease=SHORT))
    assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
    yield PAST_SHORT
    assert (yield from won(claim(id))).steps == (("charge", b"1"),)


@FAMILY()
def the_first_value_of_a_name_stays() -> Script:
    id, first = yield from running()
    assert (yield SaveStep(id, first.token, "charge", b"first", 0)) is True
    assert (yield SaveStep(id, first.token, "ship", b"second", 1)) is True
    assert (yield SaveStep(id, first.token, "charge", b"other", 2)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    second = yield from won(claim(id))
    assert second.steps == (("charge", b"first"), ("ship", b"second"))
    assert (yield SaveStep(id, second.token, "charge", b"later", 2)) is True
    assert (yield Release(id, second.token, State.ABANDONED)) is True
    assert (yield from won(claim(id))).steps == (("charge", b"first"), ("ship", b"second"))


@FAMILY()
def names_are_told_apart_to_the_letter() -> Script:
    id, first = yield from running()
    names = ["charge", "Charge", "CHARGE", "charge ", " charge", "chargé", "charge\u0301", "", "%", "_", "'", '"', "\\"]
    for position, name in enumerate(names):
        assert (yield SaveStep(id, first.token, name, str(position).encode(), position)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    second = yield from won(claim(id))
    assert second.steps == tuple((name, str(position).encode()) for position, name in enumerate(names))


@FAMILY()
def steps_of_several_attempts_come_back_together() -> Script:
    id, first = yield from running()
    assert (yield SaveStep(id, first.token, "reserve", b"1", 0)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    second = yield from won(claim(id))
    assert (yield SaveStep(id, second.token, "charge", b"2", 1)) is True
    assert (yield Release(id, second.token, State.ABANDONED)) is True
    third = yield from won(claim(id))
    assert (third.attempt, third.steps) == (3, (("reserve", b"1"), ("charge", b"2")))


@FAMILY()
def any_value_comes_back() -> Script:
    id, first = yield from running()
    values = [b"", b"\x00", bytes(range(256)), b"x" * 100_000]
    for position, value in enumerate(values):
        assert (yield SaveStep(id, first.token, f"step {position}", value, position)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    second = yield from won(claim(id))
    assert [value for _, value in second.steps] == values
    assert {type(value) for _, value in second.steps} == {bytes}


@FAMILY()
def a_hundred_steps_come_back() -> Script:
    id, first = yield from running()
    for position in range(100):
        assert (yield SaveStep(id, first.token, f"step {position}", b"%d" % position, position)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    second = yield from won(claim(id))
    assert second.steps == tuple((f"step {position}", b"%d" % position) for position in range(100))


@FAMILY()
def a_step_of_a_replaced_owner_is_not_kept() -> Script:
    id, first = yield from abandoned()
    second = yield from won(claim(id))
    assert (yield SaveStep(id, first.token, "stale", b"1", 0)) is False
    assert (yield Release(id, second.token, State.ABANDONED)) is True
    assert (yield from won(claim(id))).steps == ()


@FAMILY()
def a_step_of_an_absent_record_is_refused() -> Script:
    id = new_id()
    assert (yield SaveStep(id, 1, "early", b"1", 0)) is False
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).steps == ()


@FAMILY()
def steps_are_gone_when_nothing_happened() -> Script:
    id, first = yield from running()
    assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
    assert (yield Release(id, first.token)) is True
    second = yield from won(claim(id))
    assert second.steps == ()
    assert (yield SaveStep(id, second.token, "charge", b"2", 0)) is True
    assert (yield Release(id, second.token, State.ABANDONED)) is True
    assert (yield from won(claim(id))).steps == (("charge", b"2"),)


@FAMILY()
def steps_are_gone_when_someone_resolved_that_it_did_not_happen() -> Script:
    id, first = yield from running()
    assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
    assert (yield Release(id, first.token, State.UNKNOWN)) is True
    assert (yield Resolve(id, None, TTL)) is State.UNKNOWN
    second = yield from won(claim(id))
    assert second.steps == ()
    assert (yield SaveStep(id, second.token, "charge", b"2", 0)) is True
    assert (yield Release(id, second.token, State.ABANDONED)) is True
    assert (yield from won(claim(id))).steps == (("charge", b"2"),)


@FAMILY()
def steps_are_gone_when_the_record_has_expired() -> Script:
    for finished in (True, False):
        for swept in (True, False):
            id = new_id()
            first = yield from won(claim(id, lease=SHORT, ttl=SHORT))
            assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
            if finished:
                assert (yield Complete(id, first.token, b"answer", SHORT)) is True
            yield PAST_SHORT
            if swept:
                yield Sweep(1000)
            second = yield from won(claim(id))
            assert (second.attempt, second.steps) == (1, ())
            assert (yield SaveStep(id, second.token, "charge", b"2", 0)) is True
            assert (yield Release(id, second.token, State.ABANDONED)) is True
            assert (yield from won(claim(id))).steps == (("charge", b"2"),)


@FAMILY()
def steps_come_back_to_a_claimer_that_recovers() -> Script:
    id, first = yield from running(takeover=Takeover.REJECT)
    assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    assert (yield from won(claim(id, takeover=Takeover.RECOVER))).steps == (("charge", b"1"),)


@FAMILY()
def steps_of_one_record_are_no_others() -> Script:
    one, first = yield from running()
    two, second = yield from running()
    assert (yield SaveStep(one, first.token, "charge", b"one", 0)) is True
    assert (yield SaveStep(two, second.token, "charge", b"two", 0)) is True
    for id, token, value in ((one, first.token, b"one"), (two, second.token, b"two")):
        assert (yield Release(id, token, State.ABANDONED)) is True
        assert (yield from won(claim(id))).steps == (("charge", value),)


@FAMILY(second=True)
def steps_come_back_to_another_instance() -> Script:
    id, first = yield from running()
    assert (yield SaveStep(id, first.token, "charge", b"1", 0)) is True
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    assert (yield from won(Elsewhere(claim(id)))).steps == (("charge", b"1"),)
