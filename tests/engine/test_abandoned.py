"""Abandoned attempts: run again, refuse, or find out; for every guarantee and every word a recover hook can say."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from semel import (
    CANNOT_TELL,
    NOT_DONE,
    InProgress,
    OutcomeUnknown,
    PolicyError,
    Recovered,
    RememberedFailure,
    ResultNotStored,
    State,
)
from semel.core.keys import identity
from semel.core.ops import Complete, Release, Renew
from semel.core.states import Takeover
from tests.engine.driving import EVERY_ENGINE, Engine, engine_of

ID = identity("", "op", "k")


class Boom(Exception):
    pass


def forbidden() -> None:
    raise AssertionError("it ran")


@pytest.fixture(params=EVERY_ENGINE)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Both engines on both stores: who wins a key is the store's word."""
    yield from engine_of(request.param, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        ({}, True),
        ({"guarantee": "at_least_once"}, True),
        ({"on_abandoned": "retry"}, True),
        ({"on_abandoned": "reject"}, False),
        ({"guarantee": "at_most_once"}, False),
        ({"guarantee": "at_least_once", "on_abandoned": "reject"}, False),
    ],
    ids=str,
)
def test_an_abandoned_attempt_is_run_again_only_where_the_policy_allows(
    engine: Engine, settings: dict[str, Any], runs: bool
) -> None:
    engine.abandon(takeover=Takeover.RETRY if runs else Takeover.REJECT)
    if runs:
        outcome = engine.run_outcome(lambda: "again", **settings)
        assert (outcome.value, outcome.attempt) == ("again", 2)
        assert engine.names()[0] == "taken_over"
        return
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="resolve"):
            engine.run(forbidden, **settings)
    record = engine.record()
    assert record is not None
    assert record.state is State.UNKNOWN
    assert engine.names() == ["went_unknown", "went_unknown"]


def test_what_the_first_owner_forbade_a_later_policy_cannot_allow(engine: Engine) -> None:
    engine.abandon(takeover=Takeover.REJECT)
    with pytest.raises(OutcomeUnknown):
        engine.run(forbidden, on_abandoned="retry")


def test_at_most_once_never_runs_twice_whatever_happens(engine: Engine) -> None:
    ran: list[int] = []

    def body() -> None:
        ran.append(1)
        raise Boom("half way")

    def interrupted() -> None:
        ran.append(1)
        raise SystemExit if not engine.is_async else asyncio.CancelledError

    settings: dict[str, Any] = {"guarantee": "at_most_once"}
    for expected in (Boom, RememberedFailure, RememberedFailure):
        with pytest.raises(expected, match="half way"):
            engine.run(body, **settings)
    with pytest.raises(Boom, match="half way"):
        engine.run(body, remember_errors=(Exception, Boom), **settings)
    assert ran == [1]
    with pytest.raises(BaseException) as first:
        engine.run(interrupted, key="interrupted", **settings)
    assert not isinstance(first.value, Exception) or engine.is_async
    with pytest.raises(OutcomeUnknown):
        engine.run(interrupted, key="interrupted", **settings)
    assert ran == [1, 1]
    engine.abandon("crashed", takeover=Takeover.REJECT)
    with pytest.raises(OutcomeUnknown):
        engine.run(forbidden, key="crashed", **settings)


def test_an_owner_that_was_only_slow_turns_unknown_into_done(engine: Engine) -> None:
    claimed = engine.abandon(takeover=Takeover.REJECT)
    with pytest.raises(OutcomeUnknown):
        engine.run(forbidden, guarantee="at_most_once")
    donor = engine.run(lambda: "late but true", key="donor")
    assert donor == "late but true"
    call = engine.guard._plain_call("op", "k", None, None, None, {})
    assert engine.execute(Complete(ID, claimed.token, call.seal_value("late but true"), 60.0)) is True
    assert engine.run(forbidden, guarantee="at_most_once") == "late but true"


# -- the recover hook


def hooked(engine: Engine, verdict: Any, kind: str) -> Any:
    """A hook that gives the verdict: as a function, or for the async engine also as a coroutine function."""
    if kind == "async" and engine.is_async:

        async def find_out() -> Any:
            await asyncio.sleep(0)
            return verdict

        async def fail() -> Any:
            raise verdict

        return fail if isinstance(verdict, Exception) else find_out

    def find_out_now() -> Any:
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    return find_out_now


HOOKS = ["sync", "async"]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_found_the_result_completes_with_it(engine: Engine, kind: str) -> None:
    engine.abandon()
    outcome = engine.run_outcome(forbidden, recover=hooked(engine, Recovered("found"), kind))
    assert (outcome.value, outcome.attempt) == ("found", 2)
    assert engine.run(forbidden) == "found"
    assert engine.names() == ["taken_over", "recovered", "completed", "replayed"]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_says_not_done_lets_the_handler_run(engine: Engine, kind: str) -> None:
    engine.abandon()
    outcome = engine.run_outcome(lambda: "again", recover=hooked(engine, NOT_DONE, kind))
    assert (outcome.value, outcome.attempt) == ("again", 2)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_cannot_tell_makes_it_unknown(engine: Engine, kind: str) -> None:
    engine.abandon()
    with pytest.raises(OutcomeUnknown):
        engine.run(forbidden, recover=hooked(engine, CANNOT_TELL, kind))
    record = engine.record()
    assert record is not None
    assert record.state is State.UNKNOWN
    with pytest.raises(OutcomeUnknown):
        engine.run(forbidden, recover=hooked(engine, NOT_DONE, kind))


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_fails_leaves_it_abandoned_for_the_next_call_to_ask(engine: Engine, kind: str) -> None:
    engine.abandon()
    with pytest.raises(Boom):
        engine.run(forbidden, recover=hooked(engine, Boom("the provider is down"), kind))
    record = engine.record()
    assert record is not None
    assert record.state is State.ABANDONED
    assert engine.run(forbidden, recover=hooked(engine, Recovered("found later"), kind)) == "found later"


@pytest.mark.parametrize("verdict", [None, True, "done", 1], ids=repr)
def test_a_hook_with_another_word_is_a_mistake_that_changes_nothing(engine: Engine, verdict: Any) -> None:
    engine.abandon()
    with pytest.raises(PolicyError, match=r"Recovered\(value\), NOT_DONE or CANNOT_TELL"):
        engine.run(forbidden, recover=lambda: verdict)
    record = engine.record()
    assert record is not None
    assert record.state is State.ABANDONED


def test_an_async_hook_under_a_sync_guard_is_a_mistake_that_changes_nothing(engine: Engine) -> None:
    if engine.is_async:
        return

    async def hook() -> Any:
        return NOT_DONE

    engine.abandon()
    with pytest.raises(PolicyError, match="async"):
        engine.run(forbidden, recover=hook)
    record = engine.record()
    assert record is not None
    assert record.state is State.ABANDONED


def test_the_hook_is_not_asked_for_a_first_attempt(engine: Engine) -> None:
    assert engine.run(lambda: "first", recover=forbidden) == "first"
    assert engine.run(forbidden, recover=forbidden) == "first"


def test_the_hook_of_a_decorated_function_gets_its_arguments(engine: Engine) -> None:
    asked: list[Any] = []

    def recover(key: str, amount: int) -> Any:
        asked.append((key, amount))
        return Recovered(amount)

    def body(key: str, carrier: str = "x", amount: int = 3) -> int:
        raise AssertionError("it ran")

    engine.abandon()
    assert engine.do(engine.once(body, recover=recover), "k", amount=7) == 7
    assert asked == [("k", 7)]


def test_a_recovered_result_that_cannot_be_kept_is_done(engine: Engine) -> None:
    engine.abandon()
    with pytest.raises(ResultNotStored):
        engine.run(forbidden, recover=lambda: Recovered(object()))
    with pytest.raises(ResultNotStored):
        engine.run(forbidden, recover=lambda: NOT_DONE)


def test_at_most_once_with_a_hook_may_find_out_and_may_run_what_was_not_done(engine: Engine) -> None:
    engine.abandon(takeover=Takeover.RECOVER)
    assert engine.run(lambda: "now", guarantee="at_most_once", recover=lambda: NOT_DONE) == "now"


def test_a_failure_after_not_done_is_handled_like_any_other(engine: Engine) -> None:
    def body() -> None:
        raise Boom

    engine.abandon()
    with pytest.raises(Boom):
        engine.run(body, recover=lambda: NOT_DONE)
    assert engine.record() is None
    assert [type(op) for op in engine.script.ops][-1] is Release


def test_the_lease_is_kept_while_the_hook_looks(engine: Engine) -> None:
    from semel.errors import StoreUnavailable

    first = engine.script.on(Renew)
    second = engine.script.on(Renew, before=StoreUnavailable("hiccup"))
    third = engine.script.on(Renew)
    engine.abandon()

    def look() -> Iterator[Any]:
        yield first.took_effect
        return NOT_DONE

    def body() -> Iterator[Any]:
        yield second.seen
        yield third.took_effect
        return "again"

    engine.renew_early()
    assert engine.run(body, recover=engine.function(look)) == "again"


@pytest.mark.parametrize(
    ("remember", "expected"),
    [
        (Boom, Boom),
        ((Boom, KeyError), Boom),
        ((Exception, Boom), Boom),
        ("all", RememberedFailure),
        (Exception, RememberedFailure),
        (KeyError, None),
        (None, None),
    ],
    ids=str,
)
def test_which_failures_are_remembered(engine: Engine, remember: Any, expected: Any) -> None:
    def body() -> None:
        raise Boom("no")

    with pytest.raises(Boom):
        engine.run(body, remember_errors=remember)
    if expected is None:
        assert engine.run(lambda: "free again", remember_errors=remember) == "free again"
    else:
        with pytest.raises(expected, match="no"):
            engine.run(forbidden, remember_errors=remember)


class Loaded(Exception):
    """A class that the program has loaded, and that no operation declares."""

    built: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Loaded.built.append(args)


@pytest.mark.parametrize("remember", ["all", Exception, (Exception, KeyError)], ids=str)
def test_what_is_stored_builds_no_class_that_the_operation_does_not_declare(engine: Engine, remember: Any) -> None:
    def body() -> None:
        raise Loaded("no")

    with pytest.raises(Loaded):
        engine.run(body, remember_errors=remember)
    Loaded.built.clear()
    with pytest.raises(RememberedFailure, match=r"Loaded: no") as caught:
        engine.run(forbidden, remember_errors=remember)
    assert caught.value.type_name.endswith(".Loaded")
    assert Loaded.built == []


@pytest.mark.parametrize("error", [ValueError("no"), OSError(2, "gone", "a.txt"), ZeroDivisionError()], ids=repr)
def test_pythons_own_exceptions_come_back_as_they_were(engine: Engine, error: Exception) -> None:
    def body() -> None:
        raise error

    with pytest.raises(type(error)):
        engine.run(body, guarantee="at_most_once")
    with pytest.raises(type(error)) as caught:
        engine.run(forbidden, guarantee="at_most_once")
    assert (type(caught.value), str(caught.value)) == (type(error), str(error))


def test_a_remembered_failure_of_a_subclass_comes_back_as_the_subclass(engine: Engine) -> None:
    class Sub(Boom):
        pass

    def body() -> None:
        raise Sub("local")

    with pytest.raises(Sub):
        engine.run(body, remember_errors=Boom)
    with pytest.raises((Sub, RememberedFailure), match="local"):
        engine.run(forbidden, remember_errors=Boom)


def test_a_running_record_is_not_abandoned_before_its_lease_ends(engine: Engine) -> None:
    engine.claim_elsewhere(lease=30)
    engine.clock.advance(29)
    with pytest.raises(InProgress) as refused:
        engine.run(forbidden, guarantee="at_most_once")
    assert refused.value.retry_after is not None
    assert 0 < refused.value.retry_after <= 5
    record = engine.record()
    assert record is not None
    assert record.state is State.RUNNING
