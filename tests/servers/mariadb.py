"""MariaDB, with real durability (every commit is flushed) and a general log for tests that count statements.

SEMEL_TEST_MYSQL_SERVER names another program to run in its place: a newer mariadbd, or the mysqld of MySQL.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from tests.servers.base import LOOPBACK, Server


class MariaDBServer(Server):
    name = "mariadb"
    binaries = (os.environ.get("SEMEL_TEST_MYSQL_SERVER") or "mariadbd",)
    search: ClassVar[tuple[str, ...]] = (
        "/usr/sbin",  # Debian, Ubuntu
        "/usr/libexec",  # Red Hat
        "/opt/homebrew/opt/mariadb*/bin",
        "/usr/local/opt/mariadb*/bin",
    )
    packages = ("mariadb-server",)
    users = ("mysql", "nobody")
    stop_timeout = 20.0

    _how: ClassVar[dict[str, signal.Signals]] = {"clean": signal.SIGTERM, "crash": signal.SIGKILL}

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return self._url("mysql")

    @property
    def general_log(self) -> Path:
        """Every statement, once `SET GLOBAL general_log = 1` was said."""
        return self.folder / "general.log"

    @classmethod
    @cache
    def is_mysql(cls) -> bool:
        """Whether it is MySQL itself: the program's own word, for MariaDB's may be called mysqld as well."""
        command = [str(cls.binary(cls.binaries[0])), "--no-defaults", "--version"]
        return "MariaDB" not in subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    def prepare(self) -> None:
        found = self.binary(self.binaries[0])
        if self.is_mysql():
            root = f"'root'@'{LOOPBACK}'"  # MySQL makes that of localhost only
            first = self.folder / "first.sql"
            first.write_text(f"CREATE USER {root};\nGRANT ALL ON *.* TO {root} WITH GRANT OPTION;\n")
            self.run(
                [found, "--no-defaults", "--initialize-insecure", f"--datadir={self.folder / 'data'}",
                 f"--init-file={first}"]
            )  # fmt: skip
            return
        installer = next(
            (folder / "mariadb-install-db" for folder in (found.parent, found.parents[1] / "bin")
             if (folder / "mariadb-install-db").exists()),
            Path("mariadb-install-db"),
        )  # fmt: skip
        self.run(
            [installer, "--no-defaults", f"--datadir={self.folder / 'data'}", "--skip-test-db",
             "--auth-root-authentication-method=normal"]
        )  # fmt: skip

    def command(self) -> Sequence[str | Path]:
        settings: dict[str, object] = {
            "datadir": self.folder / "data",
            "port": self.port,
            "bind-address": LOOPBACK,
            "socket": self.folder / "s",
            "pid-file": self.folder / "pid",
            "general-log-file": self.general_log,
            "innodb-buffer-pool-size": "32M",
            "max-connections": 200,
        }
        if self.is_mysql():
            settings |= {
                "innodb-redo-log-capacity": "16M",
                "innodb-lock-wait-timeout": 1,  # of callers' connections: MySQL cannot be told not to wait
                "mysqlx": "OFF",  # another protocol, on a port that would be the same for all servers
                "secure-file-priv": "",
            }
        else:
            settings |= {"innodb-log-file-size": "16M"}
        return [
            self.binary(self.binaries[0]),
            "--no-defaults",
            "--skip-name-resolve",
            *(f"--{name}={value}" for name, value in settings.items()),
        ]

    def ready(self) -> bool:
        # Written once it listens; the number in it says that the file is not an older one's.
        try:
            return (self.folder / "pid").read_text().strip() == str(self.pid)
        except FileNotFoundError:
            return False

    def restart(self, mode: Literal["clean", "crash"] = "clean") -> None:
        """Restart on the same port with the same data; "crash" kills it, and the log is replayed."""
        self.restart_with(self._how[mode])

    def create_database(self) -> str:
        """A fresh, empty database on this server; returns its URL."""
        name = f"semel_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE `{name}`")
        return self._url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database made by `create_database`; whoever still has a lock in it is ended first."""
        name = urlsplit(url).path[1:]
        for (number,) in self.execute(f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"):
            self.execute(f"KILL {number}", missing_is_fine=True)
        self.execute(f"DROP DATABASE IF EXISTS `{name}`")

    def execute(self, statement: str, *, missing_is_fine: bool = False) -> list[tuple[Any, ...]]:
        """Run one statement as root."""
        import pymysql  # not needed to find or install the server

        with pymysql.connect(host=LOOPBACK, port=self.port, user="root", autocommit=True) as connection:
            cursor = connection.cursor()
            try:
                cursor.execute(statement)
            except pymysql.OperationalError as error:
                if missing_is_fine and error.args[0] == 1094:  # no such connection: it has gone by itself
                    return []
                raise
            return list(cursor.fetchall())

    def _url(self, database: str) -> str:
        return f"mysql://root@{LOOPBACK}:{self.port}/{database}"
