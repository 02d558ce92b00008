"""Sample records and what they take: finished records, written through the store, measured, and always removed.

A signal handler that raises may do so between creating something and recording that it was created, or in the middle of
removing it. So while there is something to remove, the handler only sets a flag. The code that writes checks it between
two steps. When there is nothing to remove, a signal ends the command at once.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

from semel.codec import Codec
from semel.core.encoding.snapshot import Kind
from semel.core.ops import Claim, Complete
from semel.core.states import Takeover
from semel.engine.ports import Store
from semel.errors import SemelError, StoreUnavailable
from semel.stores.batching.batches import result_of

BATCH: Final = 100
LIFE: Final = 3600.0
"""The ttl of samples: if removing them fails, they expire."""
ENOUGH: Final = 20_000_000
"""Bytes after which the pages of a database are small beside what was written, however few the records."""
_OPERATION: Final = "POST /payments/{id}/captures"
_TENANT: Final = "tenant-00000"


@dataclass(frozen=True)
class Work:
    """The work that calls cause in a store."""

    unit: str
    """Statements, commands, capacity units."""
    first: float
    """For a new key: claim and completion."""
    again: float
    """For a retry that is answered by replay."""
    sweep: float | None = None
    """For one sweep, at most; None if it does not matter."""
    which: str = "each retry"
    """Which retries ``again`` is about."""


@dataclass(frozen=True)
class Measured:
    """What one record takes in a store, measured with real records."""

    store: str
    """Its kind, as in URLs."""
    what: str
    """``disk`` or ``memory``."""
    records: int
    """How many records were measured; 0 if the store gets none."""
    record: float
    """Bytes of a record without indexes, on average."""
    index: float | None
    """Bytes of its index entries; None if the store cannot tell, and ``record`` includes them."""
    how: str
    """How it was measured, in words; or why there are no records."""
    holds: float | None = None
    """Seconds for which a cache holds records; None if they are held for the whole window."""
    work: tuple[Work, ...] = ()

    @property
    def each(self) -> float:
        return self.record + (self.index or 0.0)


def in_pages(store: str, records: int, data: float, index: float | None, how: str, work: tuple[Work, ...]) -> Measured:
    """The figures of a database that allocates whole pages. Raises StoreUnavailable if no new page was needed."""
    if data <= 0:
        raise StoreUnavailable(
            f"{records} records took no more room in {store} than it had ready; write more --records"
        )
    if index is not None and index <= 0:
        how, index = f"{how}; their indexes fill no page", None
    return Measured(store, "disk", records, data / records, None if index is None else index / records, how, work=work)


def in_one_line(error: Exception) -> str:
    """The text of a driver's error, for a message of ours."""
    return " ".join(str(error).split())[:300]


class Sample:
    """Records like those of a service: a UUID as key, an operation, a tenant, a fingerprint, an answer."""

    def __init__(self, answer: bytes, count: int, interrupts: Interrupts | None = None) -> None:
        self.answer = answer
        self.count = count
        self.interrupts = interrupts or Interrupts()
        self.ids: list[bytes] = []
        """The ids of all samples. An id is added before its record is written, so that it can always be removed."""

    def again(self) -> Sample:
        """The same for another store."""
        return Sample(self.answer, self.count, self.interrupts)

    def stored(self) -> int:
        """Bytes of the answer in the form that a store gets."""
        return len(Codec().seal(Kind.VALUE, "plain", self.answer, b""))

    def write(self, store: Store, count: int | None = None, *, after: Callable[[], None] | None = None) -> None:
        """Claim and complete the records.

        :param count: how many, if other than those of the sample.
        :param after: called after each batch.
        """
        codec = Codec()
        left = self.count if count is None else count
        while left > 0:
            self.interrupts.check()
            some = [secrets.token_bytes(16) for _ in range(min(BATCH, left))]
            left -= len(some)
            self.ids += some
            claimed = store.execute_many([self._claim(id) for id in some])
            completions = [
                Complete(id, result_of(answer).token, codec.seal(Kind.VALUE, "plain", self.answer, id), LIFE)
                for id, answer in zip(some, claimed, strict=True)
            ]
            for answer in store.execute_many(completions):
                result_of(answer)
            if after is not None:
                after()
        self.interrupts.check()

    def fill(self, store: Store, floor: int, grown: Callable[[], float]) -> None:
        """Write the records, and more if they are too few for a database that allocates whole pages.

        :param floor: enough records in any case.
        :param grown: returns the bytes that they take now.
        """
        self.write(store)
        while len(self.ids) < floor and grown() < ENOUGH:
            self.write(store, min(len(self.ids), floor - len(self.ids)))

    def _claim(self, id: bytes) -> Claim:
        key = f"{id[:4].hex()}-{id[4:6].hex()}-{id[6:8].hex()}-{id[8:10].hex()}-{id[10:].hex()}"
        nonce = int.from_bytes(id[:7], "big")
        return Claim(id, nonce, secrets.token_bytes(16), LIFE, LIFE, Takeover.RETRY, _TENANT, _OPERATION, key)


class Interrupts:
    """The signals of one command. None are handled outside of ``handled``."""

    def __init__(self) -> None:
        self._asked = False
        self._careful = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals that end a command. An ignored signal stays ignored (``nohup``, background jobs)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        taken = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = [(number, signal.signal(number, self._handle)) for number in taken]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if not self._careful:
            raise KeyboardInterrupt
        if first:
            _say(b"semel: removing the samples, then ending\n")

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came. Call it between two steps."""
        if self._asked:
            raise KeyboardInterrupt

    @contextmanager
    def place(self, remove: Callable[[], None], what: str) -> Iterator[None]:
        """A place for samples that is created inside the block, and removed at its end whatever happens.

        :param remove: removes all of it. Also called when nothing, or only a part, was created.
        :param what: names it in the error, for the user to remove by hand if ``remove`` fails.
        """
        failed: BaseException | None = None
        self._careful = True
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            try:
                remove()
            except Exception as error:
                why = f"{failed}; " if isinstance(failed, SemelError) else ""
                raise StoreUnavailable(
                    f"{why}{what} could not be removed, do so by hand: {in_one_line(error)}"
                ) from error
            finally:
                self._careful = False
        self.check()


def _say(line: bytes) -> None:
    """Write from a signal handler. It may interrupt ``print`` itself, so it does not print, and it raises nothing.

    The terminal may be gone. In a process started without one (``2>&-``), descriptor 2 may be a socket or a file.
    """
    with suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), line)
