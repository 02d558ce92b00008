"""The log sinks: each event at its own level, its fields for machines, its keys only where they may be shown."""

import dataclasses
import logging
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from semel import MemoryStore, Semel, log_events
from semel.observe.events import EVENTS, Event, Mismatched, Replayed, Started, SweptEvent
from semel.observe.structlog import structlog_events


@pytest.fixture(autouse=True)
def default_structlog() -> None:
    """What a page of the documentation configures stays, and would filter events out here."""
    structlog.reset_defaults()


def example(event: type[Event]) -> Event:
    values: dict[str, Any] = {"str": "words", "int": 3, "float": 1.5, "bool": True}
    fields = [values[str(getattr(f.type, "__name__", f.type))] for f in dataclasses.fields(event)[5:]]
    return event("op", "acme", "secret-key", *fields, route="route", id=b"i" * 16)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_each_event_is_logged_at_its_own_level(event: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    made = example(event)
    log_events(show_keys=True)(made)
    (record,) = caplog.records
    assert record.levelno == event.level
    assert record.name == "semel"
    assert record.getMessage().startswith(f"{event.name} operation='op' tenant='acme' key='secret-key'")
    assert record.semel_event == event.name  # type: ignore[attr-defined]
    assert record.semel == {**dataclasses.asdict(made), "id": "69" * 16}  # type: ignore[attr-defined]


@pytest.mark.parametrize("sink", ["logging", "structlog"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_keys_are_hashed(event: type[Event], sink: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    made = example(event)
    with capture_logs() as captured:
        (log_events() if sink == "logging" else structlog_events())(made)
    if sink == "logging":
        (record,) = caplog.records
        details, text = record.semel, record.getMessage()  # type: ignore[attr-defined]
    else:
        (details,) = captured
        assert details.pop("event") == event.name
        assert details.pop("log_level") == logging.getLevelName(event.level).lower()
        text = repr(details)
    assert "secret-key" not in text
    assert "secret-key" not in repr(details)
    assert details["key_hash"] == "2cbdbd66d0924f85"
    hashed = {"key", "root", "parent"}
    shown = {name: value for name, value in dataclasses.asdict(made).items() if name not in hashed}
    assert {name: value for name, value in details.items() if not name.endswith("_hash")} == {**shown, "id": "69" * 16}


def test_a_secret_changes_the_hashes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    for secret in (b"", b"a", b"a", b"b" * 100):
        log_events(secret=secret)(Mismatched("op", "", "k"))
    hashes = [record.semel["key_hash"] for record in caplog.records]  # type: ignore[attr-defined]
    assert hashes[1] == hashes[2]
    assert len(set(hashes)) == 3


def test_structlog_takes_the_place_of_the_guards_own_log(caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as captured, Semel(MemoryStore(), on_event=structlog_events(), sweep_every=None) as guard:
        for _ in range(2):
            guard.run("op", key="k", call=lambda: 1)
        guard.release("op", "k", stored="any")
    assert [line["event"] for line in captured] == ["started", "completed", "replayed", "outcome_released"]
    assert caplog.records == []


def test_what_is_not_enabled_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("test-semel-quiet")
    logger.setLevel(logging.ERROR)
    monkeypatch.setattr("semel.observe.logs.fields", lambda event: pytest.fail("it looked at the fields"))
    log_events(logger)(Started("op", "", "k", 1, 2))


def test_a_logger_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mine")
    log_events(logging.getLogger("mine"))(Replayed("op", "", "k", 1.0, 1))
    assert [(record.name, record.levelname) for record in caplog.records] == [("mine", "INFO")]


def test_what_is_empty_is_left_out_of_the_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    log_events()(SweptEvent("", "", "", 0, 0))
    assert caplog.records[0].getMessage() == "swept removed=0 unknown=0"


def test_a_value_cannot_forge_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    log_events()(Started("op", "a\nERROR forged", "k", 1, 2))
    assert "\n" not in caplog.records[0].getMessage()


def test_it_works_as_the_hook_of_a_guard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel")
    guard = Semel(MemoryStore(), on_event=log_events(), sweep_every=None)
    for _ in range(2):
        guard.run("op", key="k", call=lambda: 1)
    assert [record.semel_event for record in caplog.records] == ["replayed"]  # type: ignore[attr-defined]
