"""Prometheus, which scrapes what it is told to, and promtool."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.servers.base import LOOPBACK, Server

# A scrape that times out makes every series of its target stale: the timeout is long, for a busy machine.
_CONFIG = """
global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: tests
    file_sd_configs: [{{files: ["{targets}"], refresh_interval: 1s}}]
"""
_RULES = Path(__file__).parents[2] / "src/semel/observe/alerts/semel.yml"


class PrometheusServer(Server):
    name = "prometheus"
    binaries = ("prometheus", "promtool")
    packages = ("prometheus",)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        self.scrape()
        config = _CONFIG.format(rules=_RULES, targets=self._targets)
        (self.folder / "prometheus.yml").write_text(config)

    def command(self) -> Sequence[str | Path]:
        return [
            self.binary("prometheus"),
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={LOOPBACK}:{self.port}",
            "--log.level=warn",
        ]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def scrape(self, *addresses: str) -> None:
        """Scrape ``/metrics`` of these addresses, such as ``127.0.0.1:8000``, from now on."""
        written = self._targets.with_suffix(".new")
        written.write_text(json.dumps([{"targets": list(addresses)}]))
        written.rename(self._targets)  # in one step, because it is watched

    def ask(self, path: str, **parameters: str) -> Any:
        """What the API answers: ``ask("query", query="up")``. Raises AssertionError if it refuses."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        return found["data"]

    @classmethod
    def promtool(cls, *words: str | Path) -> str:
        """What promtool prints. Raises AssertionError if it fails."""
        done = subprocess.run(
            [cls.binary("promtool"), *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def _targets(self) -> Path:
        return self.folder / "targets.json"
