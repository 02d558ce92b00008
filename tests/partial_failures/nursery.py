"""Processes that may be killed: each forked, quickly, from one that has imported everything and opened nothing."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATIENCE = 60.0


class Nursery:
    """``run`` answers how the process ended, as subprocess does: 0, or minus the signal."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, theirs), daemon=True)
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


def _serve(work: Callable[[Any], None], pipe: Any) -> None:
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
