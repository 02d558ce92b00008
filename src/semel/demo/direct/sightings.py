"""What the clients saw, as JSON lines in one file per worker, and running totals.

Each line is one ``write`` to a file opened for appending, so a killed worker leaves whole lines. Nothing comes from
Semel's tables or events: a replay is an answer for which neither the handler nor the recover hook ran in this client.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["Sightings", "Totals"]


class Sightings:
    """The file of one worker."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def see(self, what: str, payment: int, **details: Any) -> None:
        line = json.dumps({"saw": what, "payment": payment, **details}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Totals:
    """Totals over the files of all workers, read while they grow.

    The keys of ``counts``: asked (calls), attempt (handler started), taken_over, recovered, failed (handler raised),
    refused (running elsewhere), fenced (this owner was replaced), store_error, replay and first (answers), died (killed
    itself); for steps: ran (the step's function started), marked (the step returned, so it is stored).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.counts: Counter[str] = Counter()
        self.begun: set[int] = set()
        """Payments that a client has asked for."""
        self.answers: dict[int, str] = {}
        """The first answer for each payment."""
        self.mismatched: set[int] = set()
        """Payments with two different answers."""
        self._ran: dict[tuple[int, str], int] = {}
        self._marked: dict[tuple[int, str], int] = {}
        """By payment and step: the last token under which it ran, and the first under which it was stored."""

    def update(self) -> None:
        """Read what was written since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1  # an unfinished line is read next time
            self._read[path] = self._read.get(path, 0) + whole
            for line in text[:whole].splitlines():
                self._take(json.loads(line))

    def answer(self, payment: int) -> Any:
        """The first answer for a payment."""
        return json.loads(self.answers[payment])

    def repeated(self) -> int:
        """How many steps ran again in a later attempt although they were stored."""
        return sum(self._ran.get(step, 0) > token for step, token in self._marked.items())

    def _take(self, line: dict[str, Any]) -> None:
        what, payment = line["saw"], line["payment"]
        self.counts[what] += 1
        if what == "asked":
            self.begun.add(payment)
        elif what == "ran":
            step = payment, line["step"]
            self._ran[step] = max(self._ran.get(step, 0), line["token"])
        elif what == "marked":
            self._marked.setdefault((payment, line["step"]), line["token"])
        elif what in ("first", "replay"):
            answer = json.dumps(line["answer"], sort_keys=True)
            if self.answers.setdefault(payment, answer) != answer:
                self.mismatched.add(payment)
