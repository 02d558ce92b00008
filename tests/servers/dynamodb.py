"""DynamoDB Local: the vendor's own implementation of the API, in memory, on Java 17.

Its parts come from Maven Central: see `maven.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

from tests.servers.base import LOOPBACK, Server
from tests.servers.maven import JAVA, MavenParts

PARTS = MavenParts("dynamodb_local.xml", "DynamoDBLocal")
MAIN = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"


class DynamoDBServer(Server):
    name = "dynamodb"
    binaries = ("java",)
    packages = MavenParts.packages
    costly = True

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @classmethod
    def find(cls) -> Path | None:
        return super().find() if PARTS.home.is_dir() else None

    @classmethod
    def fetch(cls) -> None:
        if super().find() is not None:
            PARTS.fetch()

    def start(self) -> None:
        self.fetch()
        super().start()

    def command(self) -> Sequence[str | Path]:
        return [
            self.binary("java"), *JAVA, "-Xmx512m", f"-Djava.library.path={PARTS.home}", *PARTS.classes, MAIN,
            "-inMemory", "-disableTelemetry", "-port", str(self.port),
        ]  # fmt: skip

    def ready(self) -> bool:
        if not self._listens():
            return False
        try:  # the first request loads most of it
            urlopen(self.url, b"{}", timeout=5).close()
        except HTTPError as answer:  # what it has against it does not matter
            answer.close()
        except OSError:
            return False
        return True

    def _listens(self) -> bool:
        """Whether the port is this process's own, where the system can tell."""
        wanted, found = f":{self.port:04X}", set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError):
                for line in Path(table).read_text().splitlines()[1:]:
                    words = line.split()
                    if words[1].endswith(wanted) and words[3] == "0A":
                        found.add(f"socket:[{words[9]}]")
        if not Path("/proc/net/tcp").exists():
            return "Initializing DynamoDB Local" in self.log_tail()
        with suppress(OSError):
            return any(os.readlink(each) in found for each in Path(f"/proc/{self.pid}/fd").iterdir())
        return False

    def table(self) -> str:
        """The URL of a table that is not there yet."""
        return f"dynamodb://eu-central-1/semel_{next(self._numbers)}?endpoint={quote(self.url, safe='')}"
