"""The servers of one session: each kind at most once, started when it is wanted, stopped together."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from tests.servers.base import Server
from tests.servers.kinds import KINDS


class ServerPool:
    def __init__(self, kinds: dict[str, type[Server]] | None = None) -> None:
        self._kinds = KINDS if kinds is None else kinds
        self._lock = threading.Lock()
        self._started: dict[str, Future[Server]] = {}
        self._resting: set[str] = set()
        self._workers = ThreadPoolExecutor(max_workers=len(self._kinds) or 1, thread_name_prefix="servers")

    def get(self, name: str) -> Server:
        """The session's server of this kind, started if need be; ServerMissing, ServerError."""
        with self._lock:
            if name not in self._started:
                self._started[name] = self._workers.submit(self._start, name, durable=False)
        return self._started[name].result()

    def private(self, name: str) -> Server:
        """One more server of this kind, which the caller stops."""
        return self._start(name, durable=True)

    def _start(self, name: str, *, durable: bool) -> Server:
        server = self._kinds[name]()
        server.durable = durable  # nobody restarts the session's servers: waiting for the disk would prove nothing
        server.start()
        return server

    def running(self, name: str) -> Server | None:
        """The session's server of this kind if it has started; never waits."""
        future = self._started.get(name)
        return future.result() if future and future.done() and future.exception() is None else None

    def rest(self, name: str) -> None:
        """Stop the session's server of this kind, if it runs, until it is resumed."""
        if server := self.running(name):
            server.stop()
            self._resting.add(name)

    def resume(self, name: str) -> None:
        """Start the session's server of this kind again if it rests: empty, and on another port."""
        if name in self._resting and (server := self.running(name)):
            self._resting.remove(name)
            server.start()

    def stop(self) -> None:
        self._workers.shutdown(wait=True)
        with self._lock:
            servers = [server for name in self._started if (server := self.running(name))]
            self._started.clear()
        with ThreadPoolExecutor(max_workers=len(servers) or 1) as stoppers:
            list(stoppers.map(lambda server: server.stop(), servers))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
