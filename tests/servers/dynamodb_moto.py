"""DynamoDB's HTTP API, as moto answers it: a second implementation, beside DynamoDB Local.

One request at a time: moto's own server takes several at once, and between its test of a condition and the write
another write may come in, which DynamoDB rules out.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from tests.servers.base import LOOPBACK, Server

SERVES = f"""
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("{LOOPBACK}", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""


class MotoServer(Server):
    name = "moto"
    binaries = ("moto_server", "python")
    search: ClassVar[tuple[str, ...]] = (sysconfig.get_path("scripts"),)
    packages = ("python3-moto",)

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def command(self) -> Sequence[str | Path]:
        return [self.binary("python"), "-c", SERVES, str(self.port)]

    def ready(self) -> bool:
        return f"Running on {self.url}" in self.log_tail(10)  # said once it listens

    def table(self) -> str:
        """The URL of a table that is not there yet."""
        return f"dynamodb://eu-central-1/semel_{next(self._numbers)}?endpoint={quote(self.url, safe='')}"
