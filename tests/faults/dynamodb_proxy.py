"""A proxy before DynamoDB that throttles, fails and drops connections, for a share of the requests, and counts them."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, unquote, urlsplit

REFUSALS: Final = {
    "ProvisionedThroughputExceededException": 400,
    "ThrottlingException": 400,
    "InternalServerError": 500,
}
"""What the service says and has not done."""
FAULTS: Final = (*REFUSALS, "failed after", "dropped before", "dropped after")
"""``after``: it was done, and nobody is told."""


class Proxy(ThreadingHTTPServer):
    """In front of the server of a table's URL; ``url`` is the table's through it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, table: str, share: float, seed: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        head, _, endpoint = table.partition("?endpoint=")
        self.target = urlsplit(unquote(endpoint))
        self.url = f"{head}?endpoint={quote(f'http://127.0.0.1:{self.server_port}', safe='')}"
        self.share = share
        self.counted: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="proxy", daemon=True)

    def fate(self, action: str) -> str:
        """What becomes of the next request: one of FAULTS, or nothing."""
        with self._lock:
            fault = self._dice.choice(FAULTS) if self._dice.random() < self.share else ""
            self.counted[fault or "passed"] += 1
            self.counted[action] += 1
        return fault

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what this is for."""


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.fate(self.headers["X-Amz-Target"].partition(".")[2])
        if fault in REFUSALS:
            self._refuse(fault, REFUSALS[fault])
        elif fault == "dropped before":
            self.close_connection = True
        else:
            self._forward(body, fault)

    def _forward(self, body: bytes, fault: str) -> None:
        target = self.server.target
        connection = HTTPConnection(str(target.hostname), target.port, timeout=30)
        try:
            connection.request("POST", self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if fault == "dropped after":
            self.close_connection = True
        elif fault == "failed after":
            self._refuse("InternalServerError", 500)
        else:
            self._say(answer.status, said, [line for line in answer.getheaders() if line[0].lower() in _KEPT])

    def _refuse(self, code: str, status: int) -> None:
        said = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "on purpose"}
        self._say(status, json.dumps(said).encode(), [("Content-Type", "application/x-amz-json-1.0")])

    def _say(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what happens is counted."""


_KEPT: Final = frozenset({"content-type", "x-amzn-requestid", "x-amz-crc32"})
