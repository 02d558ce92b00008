"""``log_events()``: a hook that writes events to the standard library's logging."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Final

from semel.observe.events import Event, EventHook, LoggingHook, RenewalFailed, StoreFailed

MOST_FAILURES: Final = 1000
_UNSAID: Final = ("route", "id")
"""Fields that are only in the log record."""


def log_events(logger: logging.Logger | None = None, *, show_keys: bool = True) -> EventHook:
    """Return a hook that logs each event at its own level: ``Semel(store, on_event=log_events())``.

    A failure of the store that repeats itself is logged at its level once, and then for debugging. The guard does not
    log problems itself then. For structured handlers, the log record carries the event's name as ``semel_event`` and
    its fields as ``semel``.

    :param logger: defaults to the logger ``semel``.
    :param show_keys: False leaves the keys out, for services whose keys are secrets.
    """
    target = logger or logging.getLogger("semel")
    failures: dict[tuple[str, str, str], Event] = {}
    """The last failure of the store that each operation has met, by the name of the event and by the key."""

    def log(event: Event) -> None:
        level = event.level
        if isinstance(event, (StoreFailed, RenewalFailed)):
            operation = (event.name, event.operation, event.key)
            if failures.get(operation) == event:
                level = logging.DEBUG  # it only repeats itself, try after try
            else:
                if len(failures) >= MOST_FAILURES:
                    failures.clear()
                failures[operation] = event
        if not target.isEnabledFor(level):
            return
        details = {f.name: getattr(event, f.name) for f in fields(event)}
        if not show_keys:
            del details["key"]
        details["id"] = event.id.hex()
        words = " ".join(f"{name}={value!r}" for name, value in details.items() if value != "" and name not in _UNSAID)
        target.log(level, "%s %s", event.name, words, extra={"semel_event": event.name, "semel": details})

    return LoggingHook(log)
