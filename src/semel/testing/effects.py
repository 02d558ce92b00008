"""The effect log: a plain file in which worker processes record what they did, and checks of that file.

Semel never reads the file. Every line is one ``write`` to a file opened for appending, so a process that is killed
leaves only whole lines. Times are those of the monotonic clock, which all processes of a machine share. Each check
returns a list of violations, which is empty if all is well.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["EffectLog", "Line", "answered_twice", "effects", "overlapping", "unexcused", "verdicts"]


@dataclass(frozen=True)
class Line:
    """One event.

    ``what`` is ``begin`` (a handler began), ``recover`` (a recover hook began), ``effect``, ``end`` (the handler is
    about to return), ``answer``, ``lost`` (LeaseLost), ``unknown`` (OutcomeUnknown), ``refused`` (InProgress) or
    ``store`` (StoreError).
    """

    what: str
    key: str
    pid: int
    at: float
    token: int = 0
    """The token of the attempt; 0 if the line is not about an attempt of this process."""
    attempt: int = 0
    lease_end: float = 0.0
    """The end of the attempt's lease, as far as the attempt knew when it wrote the line."""
    note: str = ""
    """The answer as JSON, or the text of an error."""

    @property
    def alive(self) -> bool:
        """Whether the attempt certainly held its lease at that moment."""
        return self.at < self.lease_end


class EffectLog:
    """A file of lines that many processes write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: Line) -> None:
        os.write(self._file, json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n")

    def read(self) -> list[Line]:
        """Return all whole lines so far."""
        text = self.path.read_bytes()
        return [Line(**json.loads(line)) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def write_effect(self, line: Line) -> bool:
        """Write an effect, unless an owner with a newer token has called ``look``. Returns whether it was written."""
        with self._alone():
            if any(seen.what == "recover" and seen.token > line.token for seen in self._of(line.key)):
                return False
            self.write(line)
            return True

    def look(self, line: Line) -> Line | None:
        """Return the effect of this key, or None. From now on, refuse owners with an older token. For recover hooks."""
        with self._alone():
            self.write(line)
            return next((seen for seen in self._of(line.key) if seen.what == "effect"), None)

    def close(self) -> None:
        os.close(self._file)

    def _of(self, key: str) -> Iterator[Line]:
        wanted = f'"key":{json.dumps(key)},'.encode()
        for line in self.path.read_bytes().splitlines():
            if wanted in line:
                yield Line(**json.loads(line))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # flock belongs to the open file, so open it again: otherwise two threads of one process would share the lock.
        file = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def effects(lines: Iterable[Line]) -> Mapping[str, list[Line]]:
    """Return the effects of each key."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == "effect":
            found[line.key].append(line)
    return found


def answered_twice(lines: Iterable[Line]) -> list[str]:
    """Return the keys whose callers got different answers, which means that a finished record has changed."""
    answers: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line.what == "answer":
            answers[line.key].add(line.note)
    return [f"{key}: {sorted(notes)}" for key, notes in answers.items() if len(notes) > 1]


def overlapping(lines: Iterable[Line]) -> list[str]:
    """Return the attempts that ran at the same time while both held a lease, or with the same token."""
    wrong = []
    for key, attempts in _attempts(lines).items():
        tokens = sorted(attempts)
        for token in tokens:
            if len({line.pid for line in attempts[token]}) > 1:
                wrong.append(f"{key}: two processes got token {token}")
        for older, newer in pairwise(tokens):
            last_held = max((line.at for line in attempts[older] if line.alive), default=0.0)
            start = min(line.at for line in attempts[newer])
            if start < last_held:
                wrong.append(f"{key}: {newer} began {last_held - start:.3f} s before the lease of {older} had ended")
    return wrong


def unexcused(lines: Iterable[Line], hurt: Collection[int]) -> list[str]:
    """Return the keys with several effects although an earlier attempt was neither killed, paused nor late.

    :param hurt: the processes that were killed or paused.
    """
    lines = list(lines)
    attempts = _attempts(lines)
    wrong = []
    for key, done in effects(lines).items():
        for effect in sorted(done, key=lambda line: line.token)[:-1]:
            of_it = attempts[key][effect.token]
            late = max(line.at for line in of_it) >= max(line.lease_end for line in of_it)
            if effect.pid not in hurt and not late:
                wrong.append(
                    f"{key}: done again after attempt {effect.token}, which was neither killed, paused nor late"
                )
    return wrong


def verdicts(lines: Iterable[Line]) -> list[str]:
    """Return what must never happen, under any policy and any fault: overlapping attempts and differing answers."""
    lines = list(lines)
    return overlapping(lines) + answered_twice(lines)


def _attempts(lines: Iterable[Line]) -> dict[str, dict[int, list[Line]]]:
    found: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.token:
            found[line.key][line.token].append(line)
    return found
