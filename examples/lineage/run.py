"""Three services, one checkout. The gateway is killed after the charge; its client retries; there is one charge.

`python run.py` starts the services, sends the checkout, and shows the records of all three with their lineage.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

from semel import Semel
from semel.client.httpx import IdempotencyTransport

NAMES = ("payments", "orders", "gateway")
PATHS = {"gateway": "/checkout", "orders": "/orders", "payments": "/payments"}
SERVICE = Path(__file__).with_name("service.py")


@contextlib.contextmanager
def running(name: str, folder: Path, following: str | None) -> Iterator[str]:
    """Run a service until the block ends, and restart it if it dies. Yields the URL of its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # ours, so that the port outlives the process
        command = [sys.executable, SERVICE, name, str(server.fileno()), folder, *([following] if following else [])]
        processes = [subprocess.Popen(command, pass_fds=[server.fileno()])]
        stopping = threading.Event()

        def watch() -> None:
            while True:
                processes[-1].wait()
                if stopping.is_set():
                    return
                print(f"{name} died, and is started again", flush=True)
                processes.append(subprocess.Popen(command, pass_fds=[server.fileno()]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}{PATHS[name]}"
        finally:
            stopping.set()
            processes[-1].terminate()
            watcher.join()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder, url = Path(temporary), None
        for name in NAMES:
            url = stack.enter_context(running(name, folder, url))
        assert url is not None
        client = stack.enter_context(httpx.Client(transport=IdempotencyTransport(), timeout=30))
        key = {"Idempotency-Key": "order-1001"}
        response = client.post(url, json={"customer": "ada", "cents": 1250}, headers=key)
        receipt = response.extensions["idempotency"]
        print(f"checkout {receipt.key}: {response.status_code}, {receipt.outcome}; retried: {receipt.attempts > 1}")
        print(f"charges: {len((folder / 'charges.txt').read_text().splitlines())}")
        for name in reversed(NAMES):
            with Semel(f"sqlite:///{folder}/{name}.db", tenant="shop") as guard:
                record = guard.lookup(f"POST {PATHS[name]}", response.json()[name])
            assert record is not None
            print(f"{name:<8} {record.key}  root: {record.root}  parent: {record.parent}  attempt {record.attempt}")


if __name__ == "__main__":
    main()
