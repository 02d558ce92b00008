"""Servers of the test services: one process for each, started once, and asked over a socket."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
_numbers = itertools.count(1)


class Served:
    """A service in a process of its own. The socket is ours, so that a killed server comes back on the same port."""

    def __init__(self, kind: str, folder: Path, **environment: str) -> None:
        self.kind = kind
        self.ledger = Path(environment.setdefault("LEDGER", str(folder / f"{kind}-{next(_numbers)}.ledger")))
        self.log = folder / f"{self.ledger.stem}.log"
        self.ledger.touch()
        self._environment = {**os.environ, **environment}
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(256)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": "Bearer alice"},
            timeout=30,
            # Uvicorn closes a connection when its application raises, unannounced: none is used twice.
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        descriptor = self._socket.fileno()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.http.apps_asgi", self.kind, str(descriptor)],
                cwd=ROOT, env=self._environment, pass_fds=[descriptor], stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self.client.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._socket.close()

    def post(self, path: str, key: str | None, do: Any = None, method: str = "POST", **headers: str) -> httpx.Response:
        if key is not None:
            headers["Idempotency-Key"] = key
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, path, json={} if do is None else do, headers=lines)

    def admin(self, what: str, **do: Any) -> Any:
        answer = self.client.post(f"/admin/{what}", json=do)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def runs(self, word: str) -> int:
        """How often a handler has run that was told to write this word."""
        return sum(word == line.split(" ", 1)[1] for line in self.lines() if line.startswith("/"))

    def lines(self) -> list[str]:
        return self.ledger.read_text().splitlines()

    def raw(self, data: bytes) -> socket.socket:
        """A connection of one's own, with these bytes sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

    def exchange(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes and read until the server closes: the status, and all that came."""
        with self.raw(data) as connection:
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return int(answer.split(b" ", 2)[1]), answer


def request_bytes(path: str, body: bytes = b"{}", *lines: str, key: str | None = None) -> bytes:
    """A request as it goes over the wire, with lines that httpx would not send."""
    head = [f"POST {path} HTTP/1.1", "Host: test", "Authorization: Bearer alice", "Connection: close"]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    if not any(line.lower().startswith("content-type") for line in lines):
        head.append("Content-Type: application/json")
    if key is not None:
        head.append(f"Idempotency-Key: {key}")
    return "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + body


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Iterator[Callable[..., Served]]:
    """Start a service, or give the one that runs already; all are stopped at the end."""
    folder = tmp_path_factory.mktemp("http")
    running: dict[str, Served] = {}

    def start(kind: str) -> Served:
        if kind not in running:
            running[kind] = Served(kind, folder)
        return running[kind]

    yield start
    for served in running.values():
        served.stop()


@pytest.fixture
def own(tmp_path: Path, starts_process: None) -> Iterator[Callable[..., Served]]:
    """Start a service for this test alone, with its own store."""
    started: list[Served] = []

    def start(kind: str, **environment: str) -> Served:
        served = Served(kind, tmp_path, **environment)
        started.append(served)
        return served

    yield start
    for served in started:
        served.stop()


@pytest.fixture(params=["asgi", "starlette", "fastapi", "fastapi_sync", "litestar", "litestar_sync"])
def service(request: pytest.FixtureRequest, serving: Callable[..., Served]) -> Served:
    """Each framework in turn."""
    return serving(request.param)


@pytest.fixture
def key() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def word() -> str:
    """What the handlers of this test write into the ledger."""
    return uuid.uuid4().hex


def shown(response: httpx.Response) -> dict[str, Any]:
    """A problem's members."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    found: dict[str, Any] = json.loads(response.content)
    return found
