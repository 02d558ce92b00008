"""The payments service as processes: several on one socket, which is ours, so that the port outlives them all.

A process that dies is replaced. All of them die with this one, however it ends: each reads its standard input.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from semel.errors import ConfigurationError, MissingDependency

__all__ = ["HOST", "Service", "require_packages"]

HOST: Final = "127.0.0.1"
BACKLOG: Final = 512
"""Connections that wait while no process is there to take them."""
START: Final = 30.0
"""Seconds that the service has to answer for the first time."""
STOP: Final = 8.0
"""Seconds that the processes have to end what they are doing."""
TICK: Final = 0.05


def require_packages() -> None:
    """The service and its clients need what the extra brings; better said before anything is started."""
    for package in ("fastapi", "uvicorn", "httpx"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependency(package, "demo") from error


class Service:
    """Processes that serve; ``tend`` replaces the dead."""

    def __init__(self, folder: Path, store: str, books: str, *, workers: int, port: int, mistake: str = "") -> None:
        """
        :param port: 0 takes a free one.
        :param mistake: what is wrong with the service on purpose.
        """
        self._socket = _listening(port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.log = folder / "service.log"
        self.kills = 0
        """Processes that were killed, from here or by their own hand."""
        self.crashes = 0
        """Processes that ended of an error."""
        self._workers = workers
        self._running: list[subprocess.Popen[bytes]] = []
        self._config: dict[str, Any] = {
            "descriptor": self._socket.fileno(), "store": store, "books": books, "mistake": mistake,
        }  # fmt: skip

    def start(self) -> None:
        """Start the processes; done when one of them answers."""
        self.tend()
        end = time.monotonic() + START
        while not self._answers():
            self._reap()
            if self.crashes or time.monotonic() > end:
                self.stop()
                raise ConfigurationError("the demo's service does not start:\n" + self.last_words())
            time.sleep(TICK)

    def tend(self) -> None:
        """Replace what has died."""
        self._reap()
        while len(self._running) < self._workers:
            self._spawn()

    def kill_one(self, dice: random.Random) -> None:
        """As a crash or the kernel would: without a warning."""
        if self._running:
            dice.choice(self._running).kill()

    def stop(self) -> None:
        """End all processes, in order if they can, and give the port back."""
        for process in self._running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died a moment ago
                process.stdin.write(b"stop\n")
        end = time.monotonic() + STOP
        while self._running and time.monotonic() < end:
            self._reap()
            time.sleep(TICK)
        for process in self._running:
            process.kill()
            process.wait()
        self._reap()
        self._socket.close()

    def last_words(self, lines: int = 20) -> str:
        """The end of what the processes wrote, for whoever looks for a reason."""
        said = self.log.read_text(errors="replace").splitlines()[-lines:] if self.log.exists() else []
        return "\n".join(said) or "it said nothing"

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "semel.cli.demo.payments.process", json.dumps(self._config)]
        with self.log.open("ab") as log:
            # Out of our process group: Ctrl-C is for us, and we end the processes when their work is in order.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, bufsize=0, process_group=0,
                pass_fds=[self._socket.fileno()],
            )  # fmt: skip
        self._running.append(process)

    def _reap(self) -> None:
        for process in self._running[:]:
            code = process.poll()
            if code is not None:
                self._running.remove(process)
                assert process.stdin is not None
                process.stdin.close()
                self.kills += code < 0
                self.crashes += code > 0

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=1.0)
        try:
            connection.request("GET", "/stats")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _listening(port: int) -> socket.socket:
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        ours.bind((HOST, port))
        ours.listen(BACKLOG)
    except OSError as error:
        ours.close()
        raise ConfigurationError(
            f"port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port, or 0 for a free one"
        ) from error
    return ours
