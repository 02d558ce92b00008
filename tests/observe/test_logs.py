"""The log sink: each event at its own level, its fields for machines, its keys only where they may be shown."""

import dataclasses
import logging
from typing import Any

import pytest

from semel import MemoryStore, Semel, log_events
from semel.observe.events import EVENTS, Event, Replayed, Started, SweptEvent


def example(event: type[Event]) -> Event:
    values: dict[str, Any] = {"str": "words", "int": 3, "float": 1.5, "bool": True}
    fields = [values[str(getattr(f.type, "__name__", f.type))] for f in dataclasses.fields(event)[5:]]
    return event("op", "acme", "secret-key", *fields, route="route", id=b"i" * 16)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_each_event_is_logged_at_its_own_level(event: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    made = example(event)
    log_events()(made)
    (record,) = caplog.records
    assert record.levelno == event.level
    assert record.name == "semel"
    assert record.getMessage().startswith(f"{event.name} operation='op' tenant='acme' key='secret-key'")
    assert record.semel_event == event.name  # type: ignore[attr-defined]
    assert record.semel == {**dataclasses.asdict(made), "id": "69" * 16}  # type: ignore[attr-defined]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_keys_can_be_left_out(event: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    log_events(show_keys=False)(example(event))
    (record,) = caplog.records
    assert "secret-key" not in record.getMessage()
    assert "key" not in record.semel  # type: ignore[attr-defined]


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
