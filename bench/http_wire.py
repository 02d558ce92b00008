"""The same service behind a server of its own, asked by wrk over a socket: uvicorn for ASGI, gunicorn for WSGI.

What is counted are requests in a second of the server's CPU time: on a machine that has other work to do, that is what
a second of a machine for itself would be.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from bench import http_services, job
from bench.contest import Contestant, Match
from bench.http_cost import BODY
from bench.turns import Turn

__all__ = ["WrkMissing", "matches"]

CONNECTIONS: Final = 32
START: Final = 30.0
ROOT: Final = Path(__file__).parents[1]
SCRIPT: Final = Path(__file__).with_name("http_load.lua")


class WrkMissing(Exception):
    """Nothing can be measured over a socket without it."""


@contextmanager
def matches(frameworks: Sequence[str], redis: str | None = None) -> Iterator[list[Match]]:
    """A match for each framework, with a server for each contestant, all of them on until the end."""
    if shutil.which("wrk") is None:
        raise WrkMissing("wrk is not installed; install: wrk")
    with ExitStack() as stack:
        found = []
        for framework in frameworks:
            names, missing = http_services.contestants(framework)
            served = {who: stack.enter_context(Served(framework, who, redis)) for who in names}
            contestants = [
                Contestant(
                    who,
                    kind,
                    CONNECTIONS,
                    served[who].turn(kind),
                    yardstick=who == http_services.UNPROTECTED,
                    peer=who in http_services.PEERS,
                )
                for kind in ("first", "replay")
                for who in names
            ]
            notes = [f"{name} is not installed: `pip install --no-deps {name}`" for name in missing]
            store = "memory" if redis is None else "Redis"
            title = f"HTTP over a socket, {framework}, {store}: requests in a second of the server's CPU"
            found.append(Match("http", title, contestants, notes))
        yield found


class Served:
    """One contestant in a process of its own."""

    def __init__(self, framework: str, who: str, redis: str | None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}{http_services.PATH}"
        self._primed = False
        descriptor = self._socket.fileno()
        self._command = [sys.executable, "-m", "bench.http_wire", framework, who, str(descriptor), redis or ""]
        if framework == "WSGI":
            self._command = [
                *(sys.executable, "-m", "gunicorn", "--bind", f"fd://{descriptor}", "--worker-class", "gthread"),
                *("--threads", str(CONNECTIONS), "--keep-alive", "60", "--log-level", "error"),
                f"bench.http_services:make('WSGI', {who!r}, {redis!r})",
            ]

    def __enter__(self) -> Served:
        self._process = subprocess.Popen(self._command, cwd=ROOT, pass_fds=[self._socket.fileno()])
        self._await()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def turn(self, kind: str) -> Turn:
        return lambda seconds: self._ask(kind, seconds)

    def _ask(self, kind: str, seconds: float) -> float:
        """wrk counts whole seconds, so a turn is one at least."""
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(SCRIPT), self.url, "--"]
        command += [kind, job.fresh_key() if kind == "first" else "k", str(job.KNOWN), BODY.decode()]
        if kind == "replay" and not self._primed:
            self._prime()
        before = self._cpu()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        used = self._cpu() - before
        sums: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        if sums["refused"] or sums["failed"] or not sums["requests"]:
            raise RuntimeError(f"{self._command[-4:]}: a contestant that refuses is no contestant: {sums}")
        rate: float = sums["requests"] / (used or sums["seconds"])
        return rate

    def _prime(self) -> None:
        """Each known key once, one after the other: a replay that finds its first call still running is refused."""
        self._primed = True
        for number in range(job.KNOWN):
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"k-known-{number}"}
            urllib.request.urlopen(urllib.request.Request(self.url, BODY, headers)).close()

    def _cpu(self) -> float:
        """Seconds of CPU that the server has used, and its workers; 0 where /proc does not say."""
        found = 0.0
        for pid in (self._process.pid, *_children(self._process.pid)):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def _await(self) -> None:
        end = monotonic() + START
        request = urllib.request.Request(self.url, BODY, {"Idempotency-Key": "up", "Content-Type": "application/json"})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=START):
                    return
            except OSError:
                if self._process.poll() is not None or monotonic() > end:
                    raise
                sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def serve(framework: str, who: str, descriptor: str, redis: str) -> None:
    """An ASGI contestant on the socket that the measurement has opened."""
    import asyncio

    import uvicorn

    app = http_services.make(framework, who, redis or None)
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off")
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as loop:
        loop.run(uvicorn.Server(config).serve(sockets=[socket.socket(fileno=int(descriptor))]))


if __name__ == "__main__":
    serve(*sys.argv[1:])
