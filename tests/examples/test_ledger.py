"""The ledger run in short, on every broker: processes are killed and paused, broker and database restarted, and every
entry is applied once, in the order of its account.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import KINDS
from tests.servers.install import missing_is_an_error

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
@pytest.mark.process
@pytest.mark.postgres
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "broker", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("kafka", "rabbitmq", "nats", "redis")]
)
def test_every_entry_is_applied_once_and_in_order(broker: str) -> None:
    for kind in ("postgres", broker):
        if KINDS[kind].find() is None and not missing_is_an_error():
            pytest.skip(f"{kind} is not installed")
    command = [sys.executable, "-m", "examples.ledger", "--broker", broker, "--events", "300", "--streams", "20"]
    command += ["--seconds", "8", "--faults", "7", "--json"]
    if broker == "redis":
        command.append("--in-batches")
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert len(ran.stdout.splitlines()) == 1, ran.stderr
    verdict = json.loads(ran.stdout)
    wanted = {"events": 300, "applied": 300, "lost": 0, "duplicates": 0, "disordered": 0}
    assert {name: verdict[name] for name in wanted} == wanted, ran.stderr
    assert verdict["kills"] >= 2  # a producer may be finished before it is killed
    assert verdict["restarts"] == 2
    assert ran.returncode == 0
