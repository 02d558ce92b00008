"""Operation names: the same function is the same operation in every process that knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel import MemoryStore, PolicyError, Semel

PROGRAM = """
import multiprocessing, sys
from semel import Semel, SQLiteStore

guard = Semel(SQLiteStore("app.db"))

@guard.once(key="number")
def work(number: int) -> str:
    with open("effects", "a") as log:
        log.write(f"{__name__}\\n")
    return "done"

if __name__ == "__main__":
    work(1)
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            pool.map(work, [1])
"""


@pytest.mark.slow
def test_a_function_is_one_operation_in_the_script_its_children_and_its_importers(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM)
    # Unmeasured: what coverage does on SIGTERM, with which a pool ends its children, can wait for ever.
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    for script in (["shop.py"], ["-m", "shop"], ["-c", "import shop; shop.work(1)"]):
        subprocess.run([sys.executable, *script], cwd=tmp_path, env=unmeasured, check=True, timeout=100)
    assert (tmp_path / "effects").read_text() == "__main__\n", "one effect, in the first process"


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(PolicyError, match="operation="):
        Semel(MemoryStore()).once(key="n")(lambda n: n)


class Basket:
    def __init__(self, total: int) -> None:
        self.total = total


def test_an_argument_that_is_not_compared_is_warned_of_once() -> None:
    guard = Semel(MemoryStore())

    @guard.once(key="number", operation="pay")
    def pay(number: int, basket: Basket) -> int:
        return basket.total

    with pytest.warns(UserWarning, match=r'basket \(Basket\).*fingerprint=\("basket.id"'):
        assert pay(1, Basket(10)) == 10
    assert pay(1, Basket(20)) == 10, "and no second warning, which would be an error here"


def test_what_is_said_not_to_count_is_not_warned_of() -> None:
    guard = Semel(MemoryStore())

    @guard.once(key="number", operation="pay", exclude=("basket",))
    def pay(number: int, basket: Basket) -> int:
        return basket.total

    assert pay(1, Basket(10)) == 10
