"""DynamoDB Local: the vendor's own implementation of the API, in memory, on Java 17.

Its parts come from Maven Central once, into a folder of the user's cache: `python -m tests.servers dynamodb`, or the
first test that needs them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

from tests.servers.base import LOOPBACK, Server, ServerMissing

PARTS = Path(__file__).with_name("dynamodb_local.xml")
MAIN = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
FETCH_TIMEOUT = 600.0


class DynamoDBServer(Server):
    name = "dynamodb"
    binaries = ("java",)
    packages = ("default-jre-headless", "maven")
    start_timeout = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @classmethod
    def home(cls) -> Path:
        """Where its parts are kept."""
        found = re.search(r"<artifactId>DynamoDBLocal</artifactId>\s*<version>([\d.]+)<", PARTS.read_text("utf-8"))
        assert found is not None
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "semel-tests" / f"dynamodb-local-{found[1]}"

    @classmethod
    def find(cls) -> Path | None:
        return super().find() if cls.home().is_dir() else None

    @classmethod
    def fetch(cls) -> None:
        """Have Maven copy the parts, all or none; of several processes one does it."""
        home, maven = cls.home(), shutil.which("mvn")
        if home.is_dir() or maven is None or super().find() is None:
            return
        home.parent.mkdir(parents=True, exist_ok=True)
        with Path(home.parent, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if home.is_dir():
                return
            with tempfile.TemporaryDirectory(dir=home.parent) as folder:
                command = [maven, "-q", "-B", "-f", str(PARTS), COPY, f"-DoutputDirectory={folder}/parts"]
                try:
                    done = subprocess.run(
                        command,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        timeout=FETCH_TIMEOUT,
                        check=False,
                    )
                except subprocess.TimeoutExpired as error:
                    raise ServerMissing(f"{cls.name}: mvn took more than {FETCH_TIMEOUT:g} s to fetch it") from error
                if done.returncode != 0:
                    lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
                    said = next((line for line in lines if "ERROR" in line), f"mvn ended with {done.returncode}")
                    raise ServerMissing(f"{cls.name} cannot be fetched from Maven Central: {said[:300]}")
                Path(folder, "parts").rename(home)

    def start(self) -> None:
        self.fetch()
        super().start()

    def command(self) -> Sequence[str | Path]:
        home = self.home()
        quick = ("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m")
        return [
            self.binary("java"), *quick, f"-Djava.library.path={home}", "-cp", f"{home}/*", MAIN,
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
