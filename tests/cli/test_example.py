"""The example runs, and does what its first line says."""

import subprocess
import sys
from pathlib import Path

import pytest

SHIP = Path(__file__).parents[2] / "examples" / "ship.py"


@pytest.mark.slow
def test_the_example_ships_each_order_once(tmp_path: Path) -> None:
    runs = [
        subprocess.run([sys.executable, SHIP, tmp_path / "orders.db"], capture_output=True, text=True) for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs
    first, second = (run.stdout.splitlines() for run in runs)
    assert first[:2] == ["shipping A-1 to Rome", "shipping A-2 to Ostia"]
    assert second == first[2:], "the second run shipped again, or answered otherwise"
