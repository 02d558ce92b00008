"""A process of an example that can be killed, paused and started again."""

import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import IO


@dataclass
class Worker:
    """A process that is restarted whenever it ends, until its work is finished or the run is over."""

    name: str
    command: list[str]
    stdout: IO[str] | None = None
    """Where it prints to; None: where this process does."""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=self.stdout)

    @property
    def finished(self) -> bool:
        return self.process.poll() == 0

    def revive(self) -> None:
        if self.process.poll() not in (None, 0):
            self.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()

    def pause(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
