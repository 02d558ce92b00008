"""The same service behind a server of its own, asked by wrk over a socket: uvicorn for ASGI, gunicorn for WSGI.

Requests are counted twice: in a second by the clock, which is what a client sees, and in a second of the server's CPU
time, which is the same on a machine that has nothing else to do, and steadier on one that has.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final
from urllib.parse import urlsplit

from bench import http_services, job
from bench.contest import Contestant, Match
from bench.http_cost import BODY
from bench.processes import cpu_seconds
from bench.turns import Turn

__all__ = ["BY_THE_CLOCK", "BY_THE_CPU", "WireMatch", "WrkMissing", "matches"]

CONNECTIONS: Final = 32
START: Final = 30.0
BY_THE_CLOCK: Final = "requests a second"
BY_THE_CPU: Final = "requests in a second of the server's CPU"
ROOT: Final = Path(__file__).parents[1]
SCRIPT: Final = Path(__file__).with_name("http_load.lua")


class WrkMissing(Exception):
    """Nothing can be measured over a socket without it."""


@contextmanager
def matches(frameworks: Sequence[str], redis: str | None = None) -> Iterator[list[WireMatch]]:
    """Two matches for each framework, one by the clock and one by the CPU, both from the same turns; a server for each
    contestant, all of them on until the end."""
    if shutil.which("wrk") is None:
        raise WrkMissing("wrk is not installed; install: wrk")
    with ExitStack() as stack:
        found = []
        for framework in frameworks:
            names, missing = http_services.contestants(framework, redis)
            served = {who: stack.enter_context(Served(framework, who, redis)) for who in names}
            notes = [f"{name} is not installed: `pip install --group bench`" for name in missing]
            if framework != "WSGI":
                notes.append(_server_of_choice())
            store = "memory" if redis is None else "Redis"
            for measure in (BY_THE_CPU, BY_THE_CLOCK):
                contestants = [
                    Contestant(
                        who,
                        kind,
                        CONNECTIONS,
                        served[who].turn(kind) if measure == BY_THE_CPU else served[who].clocked(kind),
                        yardstick=who == http_services.UNPROTECTED,
                        peer=who in http_services.PEERS,
                    )
                    for kind in ("first", "replay")
                    for who in names
                ]
                found.append(WireMatch(framework, store, measure, contestants, notes))
        yield found


class WireMatch(Match):
    """The contestants of one framework, on one kind of store, by one measure."""

    def __init__(
        self, framework: str, store: str, measure: str, contestants: Sequence[Contestant], notes: Sequence[str] = ()
    ) -> None:
        super().__init__("http", f"HTTP over a socket, {framework}, {store}: {measure}", contestants, notes)
        self.framework = framework
        self.judged = store == "Redis" and measure == BY_THE_CLOCK
        """Whether there are aims for it."""


def _server_of_choice() -> str:
    """What uvicorn takes by itself, where it is there."""
    from importlib.util import find_spec

    parts = [name if find_spec(name) else instead for name, instead in (("uvloop", "asyncio"), ("httptools", "h11"))]
    return f"uvicorn, 1 worker, {' and '.join(parts)}; wrk with {CONNECTIONS} connections"


class Served:
    """One contestant in a process of its own."""

    def __init__(self, framework: str, who: str, redis: str | None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}{http_services.PATH}"
        self._primed = False
        self._by_the_clock: dict[str, deque[float]] = {"first": deque(), "replay": deque()}
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

    def clocked(self, kind: str) -> Turn:
        """What the turns of that kind came to by the clock, one after the other: they are over when this is asked."""
        return lambda seconds: self._by_the_clock[kind].popleft()

    def _ask(self, kind: str, seconds: float) -> float:
        """wrk counts whole seconds, so a turn is one at least."""
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(SCRIPT), self.url, "--"]
        command += [kind, job.fresh_key() if kind == "first" else "k", str(job.KNOWN), BODY.decode()]
        if kind == "replay" and not self._primed:
            self._prime()
        before = cpu_seconds(self._process.pid)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        used = cpu_seconds(self._process.pid) - before
        sums: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        if sums["refused"] or sums["failed"] or not sums["requests"]:
            raise RuntimeError(f"{self._command[-4:]}: a contestant that refuses is no contestant: {sums}")
        requests: int = sums["requests"]
        self._by_the_clock[kind].append(requests / sums["seconds"])
        return requests / (used or sums["seconds"])

    def _prime(self) -> None:
        """Each known key once, one after the other: a replay that finds its first call still running is refused. With
        the very lines that wrk sends: a peer takes all of them for a part of the request."""
        self._primed = True
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.netloc, timeout=START)
        for number in range(job.KNOWN):
            connection.putrequest("POST", where.path, skip_accept_encoding=True)
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Idempotency-Key", f"k-known-{number}")
            connection.putheader("Content-Length", str(len(BODY)))
            connection.endheaders(BODY)
            connection.getresponse().read()
        connection.close()

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
