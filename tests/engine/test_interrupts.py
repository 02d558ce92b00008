"""Ctrl-C: whoever is interrupted while waiting for the store must not take the others with it."""

import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from semel.core.ops import Lookup
from semel.stores.batching.combiner import Combiner
from tests.engine.scripted import Gate

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals for threads")


class SlowLane:
    """The first trip waits for the gate."""

    gathers = False

    def __init__(self) -> None:
        self.began, self.gate = Gate(), Gate()

    def run(self, ops: Sequence[Any]) -> list[Any]:
        self.began.open()
        self.gate.wait()
        return [op.id for op in ops]

    def close(self) -> None: ...


def test_a_caller_interrupted_in_the_queue_does_not_keep_the_lane_for_ever() -> None:
    """The lane is handed to the first that waits; if that one has gone, nobody would ever run again."""
    lane = SlowLane()
    combiner = Combiner([lane])
    first = threading.Thread(target=combiner.execute, args=(Lookup(b"first"),), daemon=True)
    first.start()
    lane.began.wait()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was set, or ignored, before
    main = threading.main_thread().ident
    assert main is not None
    assert threading.current_thread() is threading.main_thread()

    def interrupt() -> None:
        pause = threading.Event()
        while not combiner._queue:
            pause.wait(0.002)
        signal.pthread_kill(main, signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            combiner.execute(Lookup(b"interrupted"))
    finally:
        signal.signal(signal.SIGINT, before)
    watcher.join()
    answers: list[Any] = []
    last = threading.Thread(target=lambda: answers.append(combiner.execute(Lookup(b"last"))), daemon=True)
    last.start()
    lane.gate.open()
    first.join(3)
    last.join(3)
    assert answers == [b"last"]
