"""The payments service as several processes on one socket, which belongs to the parent: the port outlives them."""

from __future__ import annotations

import http.client
import importlib
import time
from pathlib import Path
from typing import Any, Final, Self

from semel.demo.payments.data import Books, has_books, stats
from semel.demo.processes import WorkerPool
from semel.errors import ConfigurationError, MissingDependency
from semel.stores.urls import migrate_store

HOST: Final = "127.0.0.1"
START: Final = 30.0
"""Seconds that the service has to answer for the first time."""
STOP: Final = 1.5
"""Seconds that the processes have to end what they are doing."""
TICK: Final = 0.05


def require_packages() -> None:
    """Raise MissingDependency before anything is started, if a package of the ``demo`` extra is missing."""
    for package in ("fastapi", "uvicorn", "httpx", "jinja2", "prometheus_client"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependency(package, "demo") from error


class Service:
    """Processes that serve, with a store and business rows. ``tend`` replaces a process that has died."""

    def __init__(
        self, folder: Path, store: str | None, *, workers: int, port: int, mistake: str = "", beside: str = ""
    ) -> None:
        """
        :param store: by default SQLite in the folder.
        :param port: 0 takes a free one.
        :param mistake: what is wrong with the service on purpose.
        :param beside: the store of another service, which the console shows as well.
        """
        from semel.console.serving import listen  # needs Starlette, which a storm straight on the store does not

        self.store = store or f"sqlite:///{folder}/semel.db"
        migrate_store(self.store)
        # In the store's own database where it has SQL tables, otherwise in a file.
        where = self.store if has_books(self.store) else f"sqlite:///{folder}/books.db"
        self.books = Books(where)
        self.books.prepare()
        self._socket = listen(HOST, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self._count = workers
        self.workers = WorkerPool("semel.demo.payments.app", folder / "service.log", [self._socket.fileno()])
        self.settings: dict[str, Any] = {
            "descriptor": self._socket.fileno(), "store": self.store, "books": where, "mistake": mistake,
            "beside": beside, "metrics": str(folder / "metrics"),
        }  # fmt: skip
        (folder / "metrics").mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        """Start the processes; done when one of them answers."""
        self.tend()
        end = time.monotonic() + START
        while not self._answers():
            self.workers.reap()
            if self.workers.crashes or time.monotonic() > end:
                self.__exit__()
                raise ConfigurationError("the demo's service does not start:\n" + self.workers.last_lines())
            time.sleep(TICK)
        return self

    def tend(self) -> None:
        """Replace what has died."""
        self.workers.reap()
        while len(self.workers) < self._count:
            self.workers.start(self.settings)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Stop all processes, in order if there is time, and give the port back."""
        self.books.close()
        self.workers.ask_to_finish()
        self.workers.wait(0.0 if kind is KeyboardInterrupt else STOP)
        self._socket.close()

    def counted(self) -> dict[str, int]:
        """What ``GET /stats`` says."""
        return self.books.run(stats())._asdict()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=1.0)
        try:
            connection.request("GET", "/stats")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
