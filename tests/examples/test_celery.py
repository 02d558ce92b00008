"""What the page about Celery says of a killed worker, with a real broker and a real worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TASKS = """
import os, sys
from pathlib import Path

from celery import Celery
from semel import INJECTED, InProgress, Operation, Semel

REDIS, FOLDER = os.environ["BROKER"], Path(__file__).parent
guard = Semel(f"sqlite:///{FOLDER}/shop.db")
app = Celery("shop", broker=REDIS, backend=REDIS)
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True


@guard.once(key="order_id", operation="ship", lease="5s")
def ship(order_id: int, op: Operation = INJECTED) -> int:
    with (FOLDER / "attempts").open("a") as log:
        log.write(f"{op.attempt}\\\\n")
    if op.attempt == 1:
        os.kill(os.getpid(), 9)
    return op.attempt


@app.task(name="ship", bind=True, max_retries=20)
def ship_task(self, order_id: int) -> int:
    try:
        return ship(order_id)
    except InProgress as error:
        raise self.retry(exc=error, countdown=error.retry_after) from None


if __name__ == "__main__":
    results = [ship_task.delay(1001), ship_task.delay(1001)]
    print([result.get(timeout=100) for result in results])
""".replace("\\\\n", "\\n")


@pytest.mark.faults
def test_a_task_whose_worker_is_killed_is_finished_by_another_attempt(
    redis_url: str, tmp_path: Path, starts_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("celery")
    monkeypatch.setenv("BROKER", redis_url)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tasks.py").write_text(TASKS)
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-P", "prefork", "-c", "2", "-l", "WARNING"]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [*command, "--without-gossip", "--without-mingle"], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        sent = subprocess.run(
            [sys.executable, "tasks.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
        )
    finally:
        worker.terminate()
        worker.wait(30)
    assert sent.stdout == "[2, 2]\n", sent.stderr + (tmp_path / "log").read_text()
    assert (tmp_path / "attempts").read_text() == "1\n2\n"
