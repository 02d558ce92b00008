"""The example of three services: one command, one retry at the edge, one charge at the end, and the lineage of each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

FOLDER = Path(__file__).parents[2] / "examples" / "lineage"


def test_a_killed_gateway_charges_once_and_each_record_says_where_it_comes_from() -> None:
    command = [sys.executable, FOLDER / "run.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    died, checkout, charges, *records = ran.stdout.splitlines()
    assert died == "gateway died, and is started again"
    assert checkout == "checkout order-1001: 201, succeeded; retried: True"
    assert charges == "charges: 1"
    line = re.compile(r"(\w+) +(\S+)  root: (\S+)  parent: (\S+)  attempt (\d)")
    gateway, orders, payments = (line.fullmatch(record) for record in records)
    assert gateway is not None
    assert orders is not None
    assert payments is not None
    assert gateway.groups() == ("gateway", "order-1001", "None", "None", "2")
    assert orders.groups() == ("orders", orders[2], "order-1001", "order-1001", "1")
    assert payments.groups() == ("payments", payments[2], "order-1001", orders[2], "1")
    assert len({"order-1001", orders[2], payments[2]}) == 3
