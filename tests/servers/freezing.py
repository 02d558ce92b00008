"""Stop a process in its tracks, as a paused machine would."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["freeze"]

PATIENCE = 20.0


def freeze(pid: int | None) -> None:
    """SIGSTOP, and wait until all threads have stopped: the signal takes a moment, in which one could still answer."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():  # not Linux: nobody can tell
        return
    end = time.monotonic() + PATIENCE
    while any(_state(task) not in "Tt" for task in tasks.iterdir()):
        assert time.monotonic() < end, "the process does not stop"
        time.sleep(0.002)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # a thread that has ended since
        return "T"
