"""gunicorn, or uvicorn, in processes of its own, on a free loopback port, with a store in a temporary folder; and its
client.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from gunicorn.config import KNOWN_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
QUIET = ["--no-control-socket"] if any(s.name.startswith("control_socket") for s in KNOWN_SETTINGS) else []


class Service:
    """A running service, and the folder it works in."""

    def __init__(self, app: str, folder: Path, *options: str) -> None:
        """:param app: of ``apps_wsgi`` by its name, any other one as ``module:name``; ``module kind`` serves itself."""
        self.app = app
        self.folder = folder
        # Bound and listening before the server is there: clients may connect at once, and no port is guessed.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self._listener.getsockname()
        self.stderr = (folder / "stderr").open("w+b")
        fd = self._listener.fileno()
        if " " in app:
            command = [*app.split(), str(fd)]
        else:
            module = "" if ":" in app else "tests.http.apps_wsgi:"
            command = ["gunicorn", module + app, "--bind", f"fd://{fd}", *QUIET, "--worker-tmp-dir", str(folder),
                       "--graceful-timeout", "5"]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, *options],
            cwd=ROOT, env={**os.environ, "SEMEL_TEST_FOLDER": str(folder)}, pass_fds=(fd,),
            stdin=subprocess.DEVNULL, stdout=self.stderr, stderr=self.stderr,
        )  # fmt: skip
        # No connection is kept: one to a worker that was killed would fail a later request.
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.address[1]}",
            timeout=PATIENCE,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self.stderr.close()

    def ask(
        self,
        path: str = "/pay",
        *,
        key: str | None,
        tag: str,
        method: str = "POST",
        body: bytes | Iterator[bytes] = b'{"amount": 1}',
        user: str | None = "alice",
        **headers: str,
    ) -> httpx.Response:
        lines = {"X-Tag": tag, "Content-Type": "application/json"}
        if key is not None:
            lines["Idempotency-Key"] = key
        if user is not None:
            lines["Authorization"] = user
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, path, content=body, headers=lines)

    def raw(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.sendall(data)
        return connection

    def runs(self, tag: str) -> list[int]:
        """The processes in which handlers ran for this tag, one for each run."""
        try:
            lines = (self.folder / "runs.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [int(line.split()[1]) for line in lines if line.split()[0] == tag]

    def renewed(self, key: str) -> None:
        """Wait until a lease of this key was renewed."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / f"renewed-{key}").exists():
            assert time.monotonic() < deadline, "the lease is not renewed"
            time.sleep(0.02)

    @contextmanager
    def gate(self) -> Iterator[Gate]:
        gate = Gate(self.folder / uuid.uuid4().hex)
        try:
            yield gate
        finally:
            gate.open()

    @contextmanager
    def store_down(self) -> Iterator[None]:
        down = self.folder / "down"
        down.touch()
        try:
            yield
        finally:
            down.unlink()


class Gate:
    """A pipe that handlers read from: they wait there until it is opened."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.name = path.name
        self._end: int | None = None

    def reached(self) -> None:
        """Wait until a handler stands at the gate."""
        deadline = time.monotonic() + PATIENCE
        while self._end is None:
            try:
                self._end = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads so far
                assert time.monotonic() < deadline, "no handler came to the gate"
                time.sleep(0.005)

    def open(self) -> None:
        """Let the handlers go, and later ones pass."""
        if not self.path.exists():
            return
        both = os.open(self.path, os.O_RDWR)  # whoever is about to open it finds a writer, and then the end
        self.path.unlink()
        os.close(both)
        if self._end is not None:
            os.close(self._end)


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))
