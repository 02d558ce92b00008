"""The effect log: what worker processes did and saw, in a plain file that Semel never reads, and verdicts over it.

Every line is one ``write`` to a file opened for appending, so a process that is killed leaves whole lines. Times are
those of the machine's monotonic clock, which all its processes share. A verdict is a list of what is wrong; empty is
good.
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
    """One thing that happened.

    ``what`` is ``begin`` (a handler began), ``recover`` (a recover hook began), ``effect``, ``end`` (the handler is
    about to return), ``answer``, ``lost`` (LeaseLost), ``unknown`` (OutcomeUnknown), ``refused`` (InProgress) or
    ``store`` (StoreError).
    """

    what: str
    key: str
    pid: int
    at: float
    token: int = 0
    """Of the attempt; 0 where the line is about no attempt of this process."""
    attempt: int = 0
    lease_end: float = 0.0
    """Until when this attempt knew its lease to be held, when the line was written."""
    note: str = ""
    """The answer, as JSON; or an error's text."""

    @property
    def alive(self) -> bool:
        """Whether the attempt's lease was certainly held at that moment."""
        return self.at < self.lease_end


class EffectLog:
    """A file of lines, written by many processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: Line) -> None:
        os.write(self._file, json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n")

    def read(self) -> list[Line]:
        """All whole lines so far."""
        text = self.path.read_bytes()
        return [Line(**json.loads(line)) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def write_effect(self, line: Line) -> bool:
        """Write, unless an owner with a newer token has looked already (``look``): an effect behind a fence."""
        with self._alone():
            if any(seen.what == "recover" and seen.token > line.token for seen in self._of(line.key)):
                return False
            self.write(line)
            return True

    def look(self, line: Line) -> Line | None:
        """For a recover hook: the effect of this key, if any; from here on, owners with an older token are refused."""
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
        # A lock of its own open file: flock belongs to it, and two threads of a process must exclude each other too.
        file = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def effects(lines: Iterable[Line]) -> Mapping[str, list[Line]]:
    """The effects of each key."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == "effect":
            found[line.key].append(line)
    return found


def answered_twice(lines: Iterable[Line]) -> list[str]:
    """Keys whose callers were given different answers: a finished record has changed."""
    answers: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line.what == "answer":
            answers[line.key].add(line.note)
    return [f"{key}: {sorted(given)}" for key, given in answers.items() if len(given) > 1]


def overlapping(lines: Iterable[Line]) -> list[str]:
    """Attempts that ran at once under leases that were both held, or under one token."""
    wrong = []
    for key, attempts in _attempts(lines).items():
        tokens = sorted(attempts)
        for token in tokens:
            if len({line.pid for line in attempts[token]}) > 1:
                wrong.append(f"{key}: token {token} was given to two processes")
        for older, newer in pairwise(tokens):
            held = max((line.at for line in attempts[older] if line.alive), default=0.0)
            taken = min(line.at for line in attempts[newer])
            if taken < held:
                wrong.append(f"{key}: {newer} began {held - taken:.3f} s before the lease of {older} had ended")
    return wrong


def unexcused(lines: Iterable[Line], hurt: Collection[int]) -> list[str]:
    """Keys with several effects although every attempt before the last was neither hurt nor late.

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
                wrong.append(f"{key}: done again after {effect.token}, which nothing had happened to")
    return wrong


def verdicts(lines: Iterable[Line]) -> list[str]:
    """What must never be, under any policy and any fault."""
    lines = list(lines)
    return overlapping(lines) + answered_twice(lines)


def _attempts(lines: Iterable[Line]) -> dict[str, dict[int, list[Line]]]:
    found: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.token:
            found[line.key][line.token].append(line)
    return found
