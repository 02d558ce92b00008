"""PostgreSQL, with logical decoding switched on.

It is really durable (fsync is on), except for the session's server, which nobody restarts.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from tests.servers.base import LOOPBACK, Server


class PostgresServer(Server):
    name = "postgres"
    binaries = ("postgres", "initdb")
    search: ClassVar[tuple[str, ...]] = (
        "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
        "/usr/pgsql-*/bin",  # Red Hat
        "/opt/homebrew/opt/postgresql@*/bin",
        "/usr/local/opt/postgresql@*/bin",
    )
    packages = ("postgresql",)
    users = ("postgres", "nobody")
    stop_signal = signal.SIGINT  # fast: sessions are ended, everything is written

    _how: ClassVar[dict[str, signal.Signals]] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return self._url("postgres")

    def prepare(self) -> None:
        initdb = self.binary("initdb")
        self.run([initdb, "-D", self.data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--no-locale"])

    def command(self) -> Sequence[str | Path]:
        settings = {
            "port": self.port,
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "wal_level": "logical",
            "max_connections": 200,
            "log_line_prefix": "%m [%p] %d ",
            "fsync": "on" if self.durable else "off",
        }
        return [
            self.binary("postgres"),
            *("-D", self.data),
            *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
        ]

    def ready(self) -> bool:
        # The last line of this file is the server's own word; its first line says that the file is not an older one's.
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Restart on the same port with the same data; "immediate" is a crash, the log is replayed."""
        self.restart_with(self._how[mode])

    def create_database(self) -> str:
        """A fresh, empty database on this server; returns its URL."""
        name = f"semel_{next(self._numbers)}"
        self._execute(f'CREATE DATABASE "{name}"')
        return self._url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database made by `create_database`, with whoever is still connected to it."""
        self._execute(f'DROP DATABASE IF EXISTS "{urlsplit(url).path[1:]}" WITH (FORCE)')

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@{LOOPBACK}:{self.port}/{database}"

    def _execute(self, statement: str) -> None:
        import psycopg  # not needed to find or install the server

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())
