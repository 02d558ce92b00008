"""What an operator must know of a relay or a consumer, in its log."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from semel.observe import events

QUIET: Final = 60.0
"""Seconds in which a problem that was logged is only counted."""
MOST_PROBLEMS: Final = 1000
_ONE_BY_ONE: Final = (events.PublishGivenUp, events.StreamBlocked, events.ApplyGivenUp, events.StreamGap)
"""Each of these is a problem of its own."""


def reporter(logger: logging.Logger, on_event: events.EventHooks | None) -> events.EventHook:
    """Return the hook of a flow: it logs problems, unless a hook of the user does, and survives errors of the hooks."""
    hooks = events.hooks_of(on_event)
    if not any(isinstance(hook, events.LoggingHook) for hook in hooks):
        hooks = (_MessagingLog(logger), *hooks)
    report = events.call_hooks(hooks, logger.name)
    assert report is not None
    return report


class _MessagingLog:
    """Logs what an operator must know, once a minute for each cause."""

    _TEXTS: Final[dict[type[events.Event], str]] = {
        events.PublishFailed: "{operation} {key}{within}: attempt {starts} failed, and is repeated: {error}",
        events.PublishGivenUp: "{operation} {key}{within}: moved to the dead letters: {error}",
        events.StreamBlocked: "{operation} {key} cannot be sent, and {waits}: {error}",
        events.BrokerLost: "the broker is down{place}, so messages wait: {error}",
        events.BrokerBack: "the broker is back{place}",
        events.RelayLate: "the relay was slower than its lease; {sent} messages that it has sent are sent again",
        events.SlotLag: "the database keeps {retained} bytes of its log for the outbox: the relay is behind, or a "
        "transaction is open for long; if it cannot catch up, switch the mode before the disk is full",
        events.ApplyFailed: "{operation} {key}{within}: attempt {starts} failed, and is repeated: {error}",
        events.ApplyGivenUp: "{operation} {key}{within}: moved to the dead letters: {error}",
        events.StreamGap: "{operation} {key}, stream {stream!r}: {missing} messages before it were never applied",
        events.ConsumerInterrupted: "the broker or the database is down, so messages wait: {error}",
        events.StoreFailed: "the store failed at {op}; the relay goes on: {error}",
    }

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._problems: dict[tuple[Any, ...], tuple[float, int]] = {}
        """When each was logged last, and how often it has come since."""

    def __call__(self, event: events.Event) -> None:
        text = self._TEXTS.get(type(event))
        if text is None:
            return
        details = {name: getattr(event, name) for name in event.__dataclass_fields__}
        details["place"] = f" for {details['destination']!r}" if details.get("destination") else ""
        stream = details.get("stream")
        details["within"] = f", stream {stream!r}" if stream else ""
        details["waits"] = f"its stream {stream!r} waits" if stream else "is tried again later"
        one_by_one = isinstance(event, _ONE_BY_ONE)
        cause = (type(event), details.get("error"), details["place"], event.key if one_by_one else "")
        now = time.monotonic()
        logged, missed = self._problems.get(cause, (-QUIET, 0))
        if now - logged < QUIET and not isinstance(event, events.BrokerBack):
            self._problems[cause] = (logged, missed + 1)
            return
        if len(self._problems) >= MOST_PROBLEMS:
            self._problems.clear()
        self._problems[cause] = (now, 0)
        more = f" ({missed} more like this in between)" if missed else ""
        self._logger.log(event.level, "%s%s", text.format(**details), more)
