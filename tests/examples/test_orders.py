"""The example of orders, payments and a ledger: each order is sent twice, the payments consumer is killed, and each
order is charged once and booked once, with the browser's key in the ledger.
"""

from __future__ import annotations

import re
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
@pytest.mark.timeout(200)
# Over RabbitMQ it is the same with another URL. The ledger, which shares the code of the brokers, runs on each of them.
@pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.kafka)])
def test_each_order_is_charged_once_and_booked_once(broker: str) -> None:
    for kind in ("postgres", broker):
        if KINDS[kind].find() is None and not missing_is_an_error():
            pytest.skip(f"{kind} is not installed")
    command = [sys.executable, "-m", "examples.orders", "--broker", broker, "--orders", "2"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert lines[-1] == "each order was charged once and booked once"
    assert sum(line.endswith("(replayed)") for line in lines) == 2
    assert "payments  is dead; it is started again" in lines
    for key in ("checkout-1", "checkout-2"):
        [order] = re.findall(rf"(o-\w+) placed with the key {key};", ran.stdout)
        assert re.findall(rf"ledger    {order} booked for .* began with the key (.*)", ran.stdout) == [key]
