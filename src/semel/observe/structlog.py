"""``structlog_events()``: a hook that writes events to structlog."""

from __future__ import annotations

from typing import Any

from semel.observe.events import Event, EventHook, LoggingHook
from semel.observe.logs import HiddenKeys, Repeats
from semel.stores.settings import require


def structlog_events(logger: Any = None, *, show_keys: bool = False, secret: bytes = b"") -> EventHook:
    """Return a hook that logs each event by structlog: its name as the event, and its fields as values.

    The other parameters, and what is logged at which level, are those of ``log_events``.

    :param logger: a logger of structlog; defaults to ``structlog.get_logger("semel")``.
    """
    structlog = require("structlog", "structlog")
    target = structlog.get_logger("semel") if logger is None else logger
    repeats, hidden = Repeats(), HiddenKeys(show_keys, secret)

    def log(event: Event) -> None:
        target.log(repeats.level(event), event.name, **hidden.details(event))

    return LoggingHook(log)
