# Twin: sync.py is generated from this file by make twins.
"""Drives the flow of a call in an event loop, and sends again what the journal holds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from semel.client.flow import (
    TOO_OLD,
    Intent,
    Lost,
    Receipt,
    Reply,
    Settings,
    Sleep,
    deliver,
    failure,
    log,
    resuming,
    tell,
)
from semel.client.journal import Entry, FindEntries, Journal, JournalReport
from semel.errors import ConfigurationError, NoAnswer, SemelError
from semel.observe import events


class AsyncClientCore:
    """What every client of one event loop is made of: its settings, its journal, and the driver of its calls."""

    def __init__(self, settings: Settings, journal: Journal | str | os.PathLike[str] | None) -> None:
        self.settings = settings
        self.journal = journal if journal is None or isinstance(journal, Journal) else Journal(journal)
        self._owns_journal = self.journal is not None and self.journal is not journal

    async def call(
        self, intent: Intent, send: Callable[[], Awaitable[Reply]], error: type[NoAnswer]
    ) -> tuple[Receipt, Any]:
        """Do what the flow asks for, until it is over. Returns the receipt and the response, or raises ``error``."""
        journal = self.journal
        flow = deliver(intent, self.settings.retry, journal is not None, self.settings.hook)
        reply: Any = None
        entry, sent = 0, False
        try:
            while True:
                try:
                    step = flow.send(reply)
                except StopIteration as stop:
                    receipt, last = stop.value
                    break
                reply = None
                if step == "send":
                    sent = True
                    reply = await send()
                elif type(step) is Sleep:
                    await asyncio.sleep(step.seconds)
                else:
                    assert journal is not None
                    if step == "write":
                        writing = journal.write(intent, self.settings.retry.lifetime)
                        entry = writing.id  # a call that is cancelled now may still be written
                        try:
                            reply = await journal.execute_async(writing)
                        except SemelError:
                            entry = 0
                            raise
                    else:
                        journal.settle_async(entry, remove=step == "clear", key=intent.key)
                        entry = 0
        except BaseException:
            if entry and journal is not None:
                journal.abandon_async(entry)
            elif sent and intent.adds and intent.resumed is None:  # nobody else knows the key
                log.warning("%s %s was interrupted. It may have been executed with the key %r", intent.method,
                            intent.url.partition("?")[0], intent.key)  # fmt: skip
            if intent.outgoing is not None:
                intent.outgoing.end(known=False)
            raise
        if isinstance(last, Lost):
            raise failure(error, receipt, last)
        return receipt, last.response

    async def resume(
        self,
        send: Callable[[Entry, dict[str, str]], Awaitable[Receipt | None]],
        progress: Callable[[JournalReport], object] | None = None,
    ) -> JournalReport:
        """Send every entry again that no living process waits for, the oldest first.

        :param send: sends an entry with these headers, the key among them. Returns None if the request did not come
            back here, where the key is known.
        """
        journal = self.journal
        if journal is None:
            raise ConfigurationError("this client has no journal: make it with journal='calls.db'")
        report = JournalReport()
        for id in await journal.execute_async(FindEntries()):
            entry = await journal.take_async(id)
            if entry is not None:  # another process may resume at the same time
                outcome = "unknown"
                try:
                    outcome = await self._finish(entry, send)
                    report.add(entry, outcome)
                    if progress is not None:
                        progress(report)
                except Exception:  # what the caller could not take note of stays
                    outcome = "unknown"
                    raise
                finally:
                    journal.settle_async(entry.id, remove=outcome != "unknown", key=entry.key)
        return report

    async def _finish(self, entry: Entry, send: Callable[[Entry, dict[str, str]], Awaitable[Receipt | None]]) -> str:
        if entry.expires <= time.time():
            log.warning("%s %s with the key %r is unknown and too old to be sent again: ask the server what happened",
                        entry.method, entry.url, entry.key)  # fmt: skip
            if self.settings.hook is not None:
                intent = Intent(entry.method, entry.url, entry.value, {})
                tell(self.settings.hook, intent, events.CallUnknown, 0, TOO_OLD, 0.0)
            return "expired"
        marked = resuming.set(entry.first_use(self.settings.retry.lifetime))
        try:
            receipt = await send(entry, {**entry.headers, self.settings.header: entry.value})
            if receipt is None:
                raise ConfigurationError(
                    f"what you passed to resume() sends {entry.url} in another way: pass the client or session that "
                    "sends it through this transport, adapter or middleware"
                )
            return receipt.outcome
        except ConfigurationError:
            raise
        except Exception as error:  # one that cannot be sent must not hinder the others
            log.warning("%s %s with the key %r is still unknown: %r", entry.method, entry.url, entry.key, error)
            return "unknown"
        finally:
            resuming.reset(marked)

    async def close(self) -> None:
        if self._owns_journal and self.journal is not None:
            self.journal.close()
