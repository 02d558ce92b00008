"""Processes that may be killed: each forked, quickly, from one that has imported everything and opened nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATIENCE = 60.0


def nothing() -> None:
    pass


class Nursery:
    """``run`` answers how the process ended, as subprocess does: 0, or minus the signal.

    ``prepare`` runs once, in the process that the others are forked from: it imports what they would import.
    """

    def __init__(self, work: Callable[[Any], None], prepare: Callable[[], None] = nothing) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, prepare, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, argument: Any) -> int:
        self._pipe.send(argument)
        assert self._pipe.poll(PATIENCE), "the process neither ended nor died"
        return int(self._pipe.recv())

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(work: Callable[[Any], None], prepare: Callable[[], None], pipe: Any) -> None:
    prepare()
    gc.freeze()  # else each child would look through all that was imported, and copy it
    with suppress(EOFError):
        while True:
            argument = pipe.recv()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    work(argument)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
