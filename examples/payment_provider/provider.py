"""A payment provider for the example: it supports keys, and keeps its charges in memory. `python provider.py [PORT]`.

`POST /charges` with an `Idempotency-Key` charges once per key: the same key again gets the same response, and is
refused with another body. Without a key, every request is a new charge. `GET /charges` lists the charges.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Provider(BaseHTTPRequestHandler):
    charges: ClassVar[list[dict[str, object]]] = []
    by_key: ClassVar[dict[str, dict[str, object]]] = {}
    lock = threading.Lock()

    def do_GET(self) -> None:
        with self.lock:
            self.answer(200, self.charges)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Idempotency-Key"]
        with self.lock:
            charge = self.by_key.get(key or "")
            if charge is None:
                charge = {"id": f"ch_{len(self.charges) + 1}", **body}
                self.charges.append(charge)
                if key:
                    self.by_key[key] = charge
        self.answer(200 if charge == {"id": charge["id"], **body} else 422, charge)

    def answer(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the output of the example stays readable."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Provider)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
