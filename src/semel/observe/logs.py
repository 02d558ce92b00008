"""``log_events()``: a hook that writes events to the standard library's logging."""

from __future__ import annotations

import logging
from dataclasses import fields

from semel.observe.events import Event, EventHook

__all__ = ["log_events"]


def log_events(logger: logging.Logger | None = None, *, show_keys: bool = True) -> EventHook:
    """Return a hook that logs each event at its own level: ``Semel(store, on_event=log_events())``.

    For structured handlers, the log record carries the event's name as ``semel_event`` and its fields as ``semel``.

    :param logger: defaults to the logger ``semel``.
    :param show_keys: False leaves the keys out, for services whose keys are secrets.
    """
    target = logger or logging.getLogger("semel")

    def log(event: Event) -> None:
        if not target.isEnabledFor(event.level):
            return
        details = {f.name: getattr(event, f.name) for f in fields(event)}
        if not show_keys:
            del details["key"]
        words = " ".join(f"{name}={value!r}" for name, value in details.items() if value != "" and name != "route")
        target.log(event.level, "%s %s", event.name, words, extra={"semel_event": event.name, "semel": details})

    return log
