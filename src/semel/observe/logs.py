"""``log_events()``: a hook that writes events to the standard library's logging."""

from __future__ import annotations

import logging
from dataclasses import fields
from hashlib import blake2b
from typing import Any, Final

from semel.observe.events import Event, EventHook, LoggingHook, RenewalFailed, StoreFailed

MOST_FAILURES: Final = 1000
_NOT_IN_TEXT: Final = ("route", "id")
"""Fields that are only in the log record."""


def log_events(logger: logging.Logger | None = None, *, show_keys: bool = False, secret: bytes = b"") -> EventHook:
    """Return a hook that logs each event at its own level: ``Semel(store, on_event=log_events())``.

    A failure of the store that repeats itself is logged at its level once, and then for debugging. The guard does not
    log problems itself then. For structured handlers, the log record carries the event's name as ``semel_event`` and
    its fields as ``semel``.

    :param logger: defaults to the logger ``semel``.
    :param show_keys: log the keys themselves. By default they are hashed, as ``key_hash``: whoever reads the log cannot
        replay an answer with them.
    :param secret: makes the hashes useless for guessing keys that are short or follow a pattern.
    """
    target = logger or logging.getLogger("semel")
    repeats, hidden = Repeats(), HiddenKeys(show_keys, secret)

    def log(event: Event) -> None:
        level = repeats.level(event)
        if not target.isEnabledFor(level):
            return
        details = hidden.details(event)
        words = " ".join(
            f"{name}={value!r}" for name, value in details.items() if value != "" and name not in _NOT_IN_TEXT
        )
        target.log(level, "%s %s", event.name, words, extra={"semel_event": event.name, "semel": details})

    return LoggingHook(log)


class HiddenKeys:
    """The fields of events as they may be logged: with hashes in place of the keys."""

    def __init__(self, show: bool, secret: bytes) -> None:
        self._show = show
        self._secret = blake2b(secret, digest_size=32).digest() if secret else b""

    def details(self, event: Event) -> dict[str, Any]:
        """Return the fields of the event. Bytes are in hexadecimal."""
        found: dict[str, Any] = {}
        for each in fields(event):
            value = getattr(event, each.name)
            if each.name == "id":
                value = value.hex()
            if self._show or each.name not in ("key", "root", "parent"):
                found[each.name] = value
            else:
                found[f"{each.name}_hash"] = self._hash(value)
        return found

    def _hash(self, key: str) -> str:
        text = key.encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=8, key=self._secret, person=b"semel.log.1").hexdigest() if key else ""


class Repeats:
    """Tells failures of the store that are new from those that only repeat themselves, try after try."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str, str], Event] = {}
        """The last failure of the store that each operation has met, by the name of the event and by the key."""

    def level(self, event: Event) -> int:
        """Return the level at which the event is logged."""
        if isinstance(event, (StoreFailed, RenewalFailed)):
            operation = (event.name, event.operation, event.key)
            if self._failures.get(operation) == event:
                return logging.DEBUG
            if len(self._failures) >= MOST_FAILURES:
                self._failures.clear()
            self._failures[operation] = event
        return event.level
