"""What an attempt leaves to the next one.

Steps: the next attempt gets the steps that a running one has saved, in order. No other record gets them.
Resume: the store lists abandoned operations that have stored their input, page by page, and nothing else. For stores
that declare ``resumes``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from semel.core.ops import INPUT, Abandoned, Claimed, Complete, Lookup, Release, Resolve, Resumable, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Batch,
    Elsewhere,
    Family,
    Request,
    Script,
    Together,
    charged,
    claim,
    new_id,
    next_attempt,
    replaced,
    running,
    won,
)

STEPS = Family("steps")


def save(id: bytes, owner: Claimed, *steps: tuple[str, bytes], first: int = 0) -> Script:
    """Save steps as this owner.

    :param first: the position of the first of them.
    """
    for position, (name, value) in enumerate(steps, first):
        assert (yield SaveStep(id, owner.token, name, value, position)) is True


def assert_starts_without_steps(id: bytes) -> Script:
    """Check that the next claim is a first one that gets no steps, and that its own steps are saved."""
    claimed = yield from won(claim(id))
    assert (claimed.attempt, claimed.steps) == (1, ())
    yield from save(id, claimed, ("charge", b"2"))
    assert (yield from next_attempt(id, claimed)).steps == (("charge", b"2"),)


@STEPS()
def steps_come_back_in_order_on_a_takeover() -> Script:
    id, first = yield from running()
    steps = tuple((name, name.encode()) for name in ("reserve", "charge", "a", "Z", "10", "9", "ship"))
    yield from save(id, first, *steps)
    assert (yield from next_attempt(id, first)).steps == steps


@STEPS()
def steps_survive_a_silent_owner() -> Script:
    id, _ = yield from charged(lease=SHORT)
    yield PAST_SHORT
    assert (yield from won(claim(id))).steps == (("charge", b"1"),)


@STEPS()
def the_first_value_of_a_name_stays() -> Script:
    id, first = yield from running()
    yield from save(id, first, ("charge", b"first"), ("ship", b"second"), ("charge", b"other"))
    second = yield from next_attempt(id, first)
    assert second.steps == (("charge", b"first"), ("ship", b"second"))
    yield from save(id, second, ("charge", b"later"), first=2)
    assert (yield from next_attempt(id, second)).steps == (("charge", b"first"), ("ship", b"second"))


@STEPS()
def names_are_told_apart_to_the_letter() -> Script:
    id, first = yield from running()
    names = ["charge", "Charge", "CHARGE", "charge ", " charge", "chargé", "charge\u0301", "", "%", "_", "'", '"', "\\"]
    steps = tuple((name, b"%d" % position) for position, name in enumerate(names))
    yield from save(id, first, *steps)
    assert (yield from next_attempt(id, first)).steps == steps


@STEPS()
def steps_of_several_attempts_come_back_together() -> Script:
    id, first = yield from running()
    yield from save(id, first, ("reserve", b"1"))
    second = yield from next_attempt(id, first)
    yield from save(id, second, ("charge", b"2"), first=1)
    third = yield from next_attempt(id, second)
    assert (third.attempt, third.steps) == (3, (("reserve", b"1"), ("charge", b"2")))


@STEPS()
def any_value_comes_back() -> Script:
    id, first = yield from running()
    values = [b"", b"\x00", bytes(range(256)), b"x" * 100_000]
    yield from save(id, first, *((f"step {position}", value) for position, value in enumerate(values)))
    second = yield from next_attempt(id, first)
    assert [value for _, value in second.steps] == values
    assert {type(value) for _, value in second.steps} == {bytes}


@STEPS()
def a_hundred_steps_come_back() -> Script:
    id, first = yield from running()
    steps = tuple((f"step {position}", b"%d" % position) for position in range(100))
    yield from save(id, first, *steps)
    assert (yield from next_attempt(id, first)).steps == steps


@STEPS()
def a_step_of_a_replaced_owner_is_not_kept() -> Script:
    id, first, second = yield from replaced()
    assert (yield SaveStep(id, first.token, "stale", b"1", 0)) is False
    assert (yield from next_attempt(id, second)).steps == ()


@STEPS()
def a_step_of_an_absent_record_is_refused() -> Script:
    id = new_id()
    assert (yield SaveStep(id, 1, "early", b"1", 0)) is False
    assert (yield Lookup(id)) is None
    assert (yield from won(claim(id))).steps == ()


@STEPS()
def steps_are_gone_when_nothing_happened() -> Script:
    id, first = yield from charged()
    assert (yield Release(id, first.token)) is True
    yield from assert_starts_without_steps(id)


@STEPS()
def steps_are_gone_when_someone_resolved_that_it_did_not_happen() -> Script:
    id, first = yield from charged()
    assert (yield Release(id, first.token, State.UNKNOWN)) is True
    assert (yield Resolve(id, None, TTL)) is State.UNKNOWN
    yield from assert_starts_without_steps(id)


@STEPS()
def steps_are_gone_when_the_record_has_expired() -> Script:
    for finished in (True, False):
        for swept in (True, False):
            # The lease holds until the owner ends it.
            id, first = yield from charged(lease=LIVE, ttl=SHORT)
            done, left = Complete(id, first.token, b"answer", SHORT), Release(id, first.token, State.ABANDONED)
            assert (yield done if finished else left) is True
            yield PAST_SHORT
            if swept:
                yield Sweep(1000)
            yield from assert_starts_without_steps(id)


@STEPS()
def steps_come_back_to_a_claimer_that_recovers() -> Script:
    id, first = yield from charged(takeover=Takeover.REJECT)
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    assert (yield from won(claim(id, takeover=Takeover.RECOVER))).steps == (("charge", b"1"),)


@STEPS()
def steps_of_one_record_are_no_others() -> Script:
    one, first = yield from running()
    two, second = yield from running()
    yield from save(one, first, ("charge", b"one"))
    yield from save(two, second, ("charge", b"two"))
    for id, owner, value in ((one, first, b"one"), (two, second, b"two")):
        assert (yield from next_attempt(id, owner)).steps == (("charge", value),)


@STEPS(second=True)
def steps_come_back_to_another_instance() -> Script:
    id, first = yield from charged()
    assert (yield Release(id, first.token, State.ABANDONED)) is True
    assert (yield from won(Elsewhere(claim(id)))).steps == (("charge", b"1"),)


RESUME = Family("resume")
MOST_PAGES = 1000


def new_operation() -> str:
    return f"operation {new_id().hex()}"


def began(
    operation: str, *, lease: float = SHORT, input: bytes | None = b"input", **settings: Any
) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Start an attempt, and store its input if there is one. Returns its id and the answer to the claim."""
    id, claimed = yield from running(operation=operation, lease=lease, **settings)
    if input is not None:
        yield from save(id, claimed, (INPUT, input))
    return id, claimed


def began_many(operation: str, count: int) -> Generator[Request, Any, set[bytes]]:
    """Start attempts that store their input and are then abandoned. Returns their ids."""
    ids = set()
    for _ in range(count):
        id, _ = yield from began(operation)
        ids.add(id)
    yield PAST_SHORT
    return ids


def all_pages(
    *operations: str, limit: int = 100, elsewhere: bool = False
) -> Generator[Request, Any, dict[bytes, Abandoned]]:
    found: dict[bytes, Abandoned] = {}
    after = b""
    for _ in range(MOST_PAGES):
        op = Resumable(operations, after, limit)
        page = yield Elsewhere(op) if elsewhere else op
        for each in page.found:
            assert each.record.id not in found, "found twice"
            found[each.record.id] = each
        if page.last is None:
            return found
        assert page.last > after, "the pages do not advance"
        after = page.last
    raise AssertionError("the pages never end")


@RESUME(resumes=True)
def nothing_is_found_where_nothing_was_begun() -> Script:
    assert (yield from all_pages(new_operation())) == {}


@RESUME(resumes=True)
def an_abandoned_attempt_is_found_with_its_input() -> Script:
    operation = new_operation()
    id, claimed = yield from began(operation, input=b"\x00what it was called with\xff")
    yield PAST_SHORT
    found = yield from all_pages(operation)
    assert list(found) == [id]
    record = found[id].record
    assert found[id].input == b"\x00what it was called with\xff"
    assert (record.state, record.token, record.attempt) == (State.ABANDONED, claimed.token, 1)
    assert (record.tenant, record.operation, record.key) == ("acme", operation, "key")
    assert record.lease_left <= 0
    assert record.age >= 0
    assert record.expires_in > 0
    assert (yield from all_pages(operation, elsewhere=True)).keys() == {id}


@RESUME(resumes=True)
def what_runs_is_left_alone() -> Script:
    operation = new_operation()
    yield from began(operation, lease=LIVE)
    assert (yield from all_pages(operation)) == {}


@RESUME(resumes=True)
def what_keeps_no_input_is_not_found() -> Script:
    operation = new_operation()
    id, claimed = yield from began(operation, input=None)
    yield from save(id, claimed, ("another step", b"input"))
    yield PAST_SHORT
    assert (yield from all_pages(operation)) == {}


@RESUME(resumes=True)
def what_was_let_go_with_its_steps_is_found() -> Script:
    operation = new_operation()
    id, claimed = yield from began(operation, lease=LIVE)
    assert (yield Release(id, claimed.token, State.ABANDONED)) is True
    assert (yield from all_pages(operation)).keys() == {id}


@RESUME(resumes=True)
def what_ended_is_not_found_again() -> Script:
    operation = new_operation()
    done, claimed = yield from began(operation)
    assert (yield Complete(done, claimed.token, b"answer", TTL)) is True
    free, claimed = yield from began(operation)
    assert (yield Release(free, claimed.token)) is True
    lost, claimed = yield from began(operation)
    assert (yield Release(lost, claimed.token, State.UNKNOWN)) is True
    resolved, claimed = yield from began(operation)
    yield PAST_SHORT
    assert (yield Resolve(resolved, b"answer", TTL)) is State.ABANDONED
    assert (yield from all_pages(operation)) == {}
    assert (yield from all_pages(operation)) == {}


@RESUME(resumes=True)
def what_may_not_be_run_again_is_not_found() -> Script:
    operation = new_operation()
    yield from began(operation, takeover=Takeover.REJECT)
    id, _ = yield from began(operation, takeover=Takeover.RECOVER)
    yield PAST_SHORT
    assert (yield from all_pages(operation)).keys() == {id}


@RESUME(resumes=True)
def what_has_expired_is_not_found() -> Script:
    operation = new_operation()
    yield from began(operation, ttl=SHORT)
    yield PAST_SHORT
    assert (yield from all_pages(operation)) == {}


@RESUME(resumes=True)
def only_the_operations_asked_for_are_found() -> Script:
    first, second, third = (new_operation() for _ in range(3))
    ids = []
    for operation in (first, second, third):
        id, _ = yield from began(operation)
        ids.append(id)
    yield PAST_SHORT
    assert (yield from all_pages(first, third)).keys() == {ids[0], ids[2]}
    assert (yield from all_pages(second)).keys() == {ids[1]}
    assert (yield from all_pages()) == {}


@RESUME(resumes=True)
def small_pages_find_each_of_them_once() -> Script:
    operation = new_operation()
    ids = yield from began_many(operation, 7)
    for limit in (1, 3, 7, 8):
        assert (yield from all_pages(operation, limit=limit)).keys() == ids


@RESUME(resumes=True)
def one_that_was_taken_over_is_found_again_when_that_attempt_is_silent_too() -> Script:
    operation = new_operation()
    id, _ = yield from began(operation)
    yield PAST_SHORT
    second = yield from won(claim(id, operation=operation, lease=LIVE))
    assert second.attempt == 2
    assert second.steps == ((INPUT, b"input"),)
    assert (yield from all_pages(operation)) == {}
    assert (yield Release(id, second.token, State.ABANDONED)) is True
    found = yield from all_pages(operation)
    assert list(found) == [id]
    assert found[id].record.attempt == 2
    assert found[id].input == b"input"


@RESUME(resumes=True)
def looking_forgets_nothing_that_is_still_needed() -> Script:
    """Listing deletes the input of finished operations. The others keep their input and their steps."""
    operation = new_operation()
    first, claimed = yield from began(operation)
    yield from save(first, claimed, ("~step:a", b"a"), first=1)
    for _ in range(5):
        id, other = yield from began(operation)
        assert (yield Complete(id, other.token, b"answer", TTL)) is True
    running, token = yield from began(operation, lease=LIVE)
    yield PAST_SHORT
    for _ in range(2):
        assert (yield from all_pages(operation)).keys() == {first}
    assert (yield Release(running, token.token, State.ABANDONED)) is True
    assert (yield from all_pages(operation)).keys() == {first, running}
    again = yield from won(claim(first, operation=operation))
    assert again.steps == ((INPUT, b"input"), ("~step:a", b"a"))


@RESUME(resumes=True)
def looking_is_one_of_a_batch() -> Script:
    operation = new_operation()
    id, _ = yield from began(operation)
    yield PAST_SHORT
    other = claim(new_id(), operation=operation)
    answers = yield Batch([other, Resumable((operation,), b"", 1000)])
    assert isinstance(answers[0], Claimed)
    assert id in {each.record.id for each in answers[1].found} or answers[1].last is not None


@RESUME(resumes=True)
def of_many_that_look_and_claim_at_once_one_wins_each() -> Script:
    operation = new_operation()
    ids = yield from began_many(operation, 4)

    def resumer() -> Script:
        mine = set()
        for id in (yield from all_pages(operation)):
            if isinstance((yield claim(id, operation=operation)), Claimed):
                mine.add(id)
        return mine

    shares = yield Together([resumer() for _ in range(3)])
    assert set().union(*shares) == ids
    assert sum(map(len, shares)) == len(ids)
