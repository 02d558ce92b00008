"""PgBouncer in transaction mode, before a PostgreSQL server of its own: a client has a session for one transaction."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tests.servers.base import LOOPBACK, Server
from tests.servers.postgres import PostgresServer

IGNORED = (
    "options,default_transaction_isolation,statement_timeout,jit,plan_cache_mode,"
    "enable_seqscan,enable_hashjoin,enable_mergejoin"
)
"""What our page tells users to write: PgBouncer refuses settings of a session that it does not know."""


class PgBouncerServer(Server):
    name = "pgbouncer"
    binaries = ("pgbouncer",)
    search: ClassVar[tuple[str, ...]] = ("/usr/sbin", "/opt/homebrew/bin")
    packages = ("pgbouncer", *PostgresServer.packages)
    users = ("postgres", "nobody")

    def __init__(self) -> None:
        super().__init__()
        self.postgres = PostgresServer()
        self.pool_mode = "transaction"

    def start(self) -> None:
        self.binary("pgbouncer")
        if self.postgres.pid is None:
            self.postgres.start()
        try:
            super().start()
        except BaseException:
            self.postgres.stop()
            raise

    def stop(self) -> None:
        super().stop()
        self.postgres.stop()

    def command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addr": LOOPBACK,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": self.pool_mode,
            "default_pool_size": 2,  # fewer than the clients of a test: they share sessions all the time
            "ignore_startup_parameters": IGNORED,
        }
        lines = ["[databases]", f"* = host={LOOPBACK} port={self.postgres.port} user=postgres", "[pgbouncer]"]
        ini = self.folder / "pgbouncer.ini"
        ini.write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in settings.items()), ""]))
        return [self.binary("pgbouncer"), ini]

    def ready(self) -> bool:
        # Its own word in its own log that it listens; and then that it answers.
        if f"listening on {LOOPBACK}:{self.port}" not in self.log_tail(400):
            return False
        try:
            socket.create_connection((LOOPBACK, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def create_database(self) -> tuple[str, str]:
        """A fresh database: its URL through the pooler, and the one that leads straight to the server."""
        direct = self.postgres.create_database()
        return direct.replace(f":{self.postgres.port}/", f":{self.port}/"), direct
