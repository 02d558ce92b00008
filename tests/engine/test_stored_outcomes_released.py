"""A stored outcome is released, a failure above all, and the next call runs again."""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from semel import Codec, KeyRing, NotResolvable, PolicyError, State
from semel.core.keys import identity
from semel.core.ops import Complete, Lookup, Release, Renew, Resolve
from tests.engine.driving import Engine
from tests.engine.scripted import Gate

ID = identity("", "op", "k")


class ProviderDown(Exception):
    pass


def fail() -> None:
    raise ProviderDown("the provider is down")


def store_failure(engine: Engine, **settings: Any) -> Any:
    with pytest.raises(ProviderDown):
        engine.run(fail, remember_errors=ProviderDown, **settings)
    record = engine.record()
    assert record is not None
    engine.events.clear()
    engine.script.forget()
    return record


def release(engine: Engine, guard: Any = None, **settings: Any) -> None:
    engine.do((guard or engine.guard).release, "op", "k", **settings)


def test_a_stored_failure_is_released_and_the_next_call_runs(engine: Engine) -> None:
    old = store_failure(engine)
    release(engine, stored="failure")
    assert engine.names() == ["outcome_released"]
    (event,) = engine.events
    assert (event.outcome, event.token) == ("failure", old.token)  # type: ignore[attr-defined]
    assert engine.record() is None
    outcome = engine.run_outcome(lambda: "paid")
    assert (outcome.value, outcome.attempt, outcome.replayed) == ("paid", 1, False)
    record = engine.record()
    assert record is not None
    assert record.token > old.token
    assert engine.run(lambda: "never") == "paid"


def test_without_the_word_it_stays_and_the_error_says_what_to_write(engine: Engine) -> None:
    store_failure(engine)
    before = engine.record()
    for force in (False, True):
        with pytest.raises(NotResolvable, match=r'release\(…, stored="failure"\).*--stored failure'):
            release(engine, force=force)
    assert engine.record() == before
    assert engine.names() == []


def test_a_stored_result_needs_the_other_word(engine: Engine) -> None:
    engine.run(lambda: "paid")
    before = engine.record()
    engine.events.clear()
    with pytest.raises(NotResolvable, match=r'what is stored is a result.*stored="any".*--stored any'):
        release(engine, stored="failure", force=True)
    assert engine.record() == before
    assert engine.names() == []
    release(engine, stored="any")
    assert engine.names() == ["outcome_released"]
    assert engine.events[0].outcome == "result"  # type: ignore[attr-defined]
    assert engine.run(lambda: "paid again") == "paid again"


def test_what_cannot_be_read_needs_the_other_word(engine: Engine) -> None:
    codec = Codec(cipher=KeyRing({"one": KeyRing.generate_key()}))
    store_failure(engine, guard=engine.new_guard(codec=codec))
    with pytest.raises(NotResolvable, match=r'its stored outcome cannot be read.*stored="any"'):
        release(engine, stored="failure")
    release(engine, engine.new_guard(codec=codec), stored="failure")
    store_failure(engine, guard=engine.new_guard(codec=codec))
    release(engine, stored="any")
    assert engine.events[0].outcome == "unreadable"  # type: ignore[attr-defined]


def test_what_a_missing_package_would_read_is_released_like_what_cannot_be_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    engine.run(lambda: "paid" * 1000, guard=engine.new_guard(codec=Codec(compression="zstd")))
    engine.events.clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as on the machine of an operator
    with pytest.raises(NotResolvable, match="its stored outcome cannot be read"):
        release(engine, stored="failure")
    release(engine, stored="any")
    assert engine.events[0].outcome == "unreadable"  # type: ignore[attr-defined]


@pytest.mark.parametrize("stored", ["failure", "any"])
@pytest.mark.parametrize("at", [State.ABSENT, State.RUNNING, State.ABANDONED, State.UNKNOWN], ids=lambda s: s.name)
def test_what_is_not_done_is_released_as_without_the_word(engine: Engine, at: State, stored: str) -> None:
    if at is not State.ABSENT:
        claimed = engine.claim_elsewhere()
        if at is State.ABANDONED:
            engine.clock.advance(31)
        elif at is State.UNKNOWN:
            assert engine.execute(Release(ID, claimed.token, State.UNKNOWN))
    if at in (State.ABANDONED, State.UNKNOWN):
        release(engine, stored=stored)
        assert engine.names() == ["resolved"]
    else:
        words = "is running" if at is State.RUNNING else "no such record"
        with pytest.raises(NotResolvable, match=words):
            release(engine, stored=stored)
        assert engine.names() == []


@pytest.mark.parametrize("stored", ["success", "", "FAILURE", True, 0])
def test_any_other_word_is_refused_before_anything_is_asked(engine: Engine, stored: Any) -> None:
    store_failure(engine)
    with pytest.raises(PolicyError, match=r'stored= is "failure" or "any"'):
        release(engine, stored=stored)
    assert engine.record() is not None


def test_late_reports_of_the_released_attempt_are_refused(engine: Engine) -> None:
    """Also while the clock stands still."""
    old = store_failure(engine)
    release(engine, stored="failure")
    for _ in range(2):
        assert engine.execute(Complete(ID, old.token, b"late", 60.0)) is False
        assert engine.execute(Renew(ID, old.token, 60.0)) is False
        if engine.record() is None:
            engine.claim_elsewhere()
    record = engine.record()
    assert record is not None
    assert record.state is State.RUNNING


def test_an_outcome_that_came_meanwhile_stays(engine: Engine) -> None:
    """The caller has seen a failure. Somebody releases it, the retry succeeds, and only then the release arrives."""
    store_failure(engine)
    arrives = Gate()
    resolving = engine.script.on(Resolve, hold_before=arrives)
    late = engine.start(engine.guard.release, "op", "k", stored="failure")
    resolving.seen.wait()
    release(engine, engine.new_guard(), stored="failure")
    assert engine.run(lambda: "paid") == "paid"
    arrives.open()
    with pytest.raises(NotResolvable, match="somebody else has just released it"):
        late.result(20)
    assert engine.run(lambda: "never") == "paid"
    assert engine.names().count("outcome_released") == 1


def test_each_release_is_a_line_in_the_log(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    guard = engine.new_guard(on_event=None)
    tokens = []
    for _ in range(3):
        tokens.append(store_failure(engine, guard=guard).token)
        release(engine, guard, stored="failure")
    lines = [record for record in caplog.records if record.name == "semel.guard"]
    assert [line.levelno for line in lines] == [logging.WARNING] * 3
    for line, token in zip(lines, tokens, strict=True):
        assert ID.hex() in line.getMessage()
        assert f"released the stored outcome (failure, token {token}): the next call runs it again" in line.getMessage()


def test_calls_of_this_process_that_wait_for_the_key_share_no_old_outcome(engine: Engine) -> None:
    """A replay that is on its way when the outcome is released returns it; the next call does not."""
    store_failure(engine)
    release(engine, stored="failure")
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "paid"

    first = engine.start_run(body)
    inside.wait()
    finish.open()
    assert first.result(20) == "paid"
    assert engine.run(lambda: "never") == "paid"


def test_it_costs_a_look_and_one_op(engine: Engine) -> None:
    store_failure(engine)
    release(engine, stored="failure")
    assert engine.script.kinds == [Lookup.__name__, Resolve.__name__]
