"""NATS with JetStream, whose streams are files in the temporary folder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tests.servers.base import LOOPBACK, Server


class NATSServer(Server):
    name = "nats"
    binaries = ("nats-server",)
    search: ClassVar[tuple[str, ...]] = ("/usr/sbin",)
    packages = ("nats-server",)
    port_taken: ClassVar[str] = "address already in use"

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self.port}"

    def command(self) -> Sequence[str | Path]:
        listen = ("--addr", LOOPBACK, "--port", str(self.port))
        return [self.binary("nats-server"), *listen, "--jetstream", "--store_dir", self.folder / "streams"]

    def ready(self) -> bool:
        found = [line for line in self.log_tail(20).splitlines() if line.startswith(f"[{self.pid}] ")]
        return any("Server is ready" in line for line in found)

    def subject(self) -> str:
        """A subject that no test has used. It has no stream yet."""
        return f"subject-{next(self._numbers)}"
