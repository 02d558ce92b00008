"""A sink that writes events to stdlib logging: ``Semel(store, on_event=log_events())``."""

from __future__ import annotations

import logging
from dataclasses import fields

from semel.observe.events import Event, EventHook

__all__ = ["log_events"]


def log_events(logger: logging.Logger | None = None, *, show_keys: bool = True) -> EventHook:
    """A hook that logs each event at its own level under the logger ``semel``.

    The event's fields are on the log record as ``semel_event`` (name) and ``semel`` (a dict), for structured handlers.
    ``show_keys=False`` leaves the keys out, where they are secrets.
    """
    target = logger or logging.getLogger("semel")

    def log(event: Event) -> None:
        if not target.isEnabledFor(event.level):
            return
        details = {f.name: getattr(event, f.name) for f in fields(event)}
        if not show_keys:
            del details["key"]
        words = " ".join(f"{name}={value!r}" for name, value in details.items() if value != "")
        target.log(event.level, "%s %s", event.name, words, extra={"semel_event": event.name, "semel": details})

    return log
