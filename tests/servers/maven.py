"""Servers that are written in Java: their parts come from Maven Central once, into a folder of the user's cache.

`python -m tests.servers <kind>` fetches them, or the first test that needs them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

from tests.servers.base import ServerMissing

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
FETCH_TIMEOUT = 600.0
JAVA = ("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options that make a Java program start soon."""


class MavenParts:
    """The dependencies that a Maven project in this folder names, above all one of them, whose version counts."""

    packages: ClassVar[tuple[str, ...]] = ("default-jre-headless", "maven")

    def __init__(self, project: str, artifact: str) -> None:
        self._project = Path(__file__).with_name(project)
        self._artifact = artifact

    @property
    def home(self) -> Path:
        """Where the parts are kept."""
        text = self._project.read_text("utf-8")
        found = re.search(rf"<artifactId>({self._artifact}[^<]*)</artifactId>\s*<version>([\d.]+)<", text)
        assert found is not None
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "semel-tests" / f"{self._project.stem.replace('_', '-')}-{found[2]}"

    @property
    def classes(self) -> tuple[str, str]:
        return "-cp", f"{self.home}/*"

    def fetch(self) -> None:
        """Have Maven copy the parts, all or none; of several processes one does it."""
        home, maven, name = self.home, shutil.which("mvn"), self._artifact
        if home.is_dir() or maven is None:
            return
        home.parent.mkdir(parents=True, exist_ok=True)
        with Path(home.parent, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if home.is_dir():
                return
            with tempfile.TemporaryDirectory(dir=home.parent) as folder:
                command = [maven, "-q", "-B", "-f", str(self._project), COPY, f"-DoutputDirectory={folder}/parts"]
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
                    raise ServerMissing(f"{name}: mvn took more than {FETCH_TIMEOUT:g} s to fetch it") from error
                if done.returncode != 0:
                    lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
                    said = next((line for line in lines if "ERROR" in line), f"mvn ended with {done.returncode}")
                    raise ServerMissing(f"{name} cannot be fetched from Maven Central: {said[:300]}")
                Path(folder, "parts").rename(home)
