"""One of three services: gateway → orders → payments. `run.py` starts them.

`python service.py NAME DESCRIPTOR FOLDER [NEXT_URL]` serves on a socket that the parent has opened.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from fastapi import FastAPI

from semel import AsyncOperation, AsyncSemel, Policy, migrate_store
from semel.client.httpx import AsyncIdempotencyTransport
from semel.http.fastapi import idempotent, install

PATHS = {"gateway": "/checkout", "orders": "/orders", "payments": "/payments"}


def make_app(name: str, folder: Path, following: str | None) -> FastAPI:
    url = f"sqlite:///{folder}/{name}.db"
    migrate_store(url)
    # The lease is short, so that the operation of a dead process is soon free again.
    guard = AsyncSemel(url, tenant="shop", policy=Policy(lease="1s"))
    app = FastAPI()
    install(app, guard=guard)
    # Only the next service receives keys and lineage. This line is all that forwarding needs.
    hosts = [urlsplit(following).netloc] if following else []
    client = httpx.AsyncClient(transport=AsyncIdempotencyTransport(hosts=hosts), timeout=30)

    @app.post(PATHS[name], status_code=201)
    @idempotent()
    async def handle(order: dict[str, Any], op: AsyncOperation) -> dict[str, Any]:
        answer = {name: op.key}
        if following:
            response = await client.post(following, json=order)
            response.raise_for_status()
            answer |= response.json()
        else:
            with (folder / "charges.txt").open("a") as charges:
                charges.write(f"{order['customer']} {order['cents']}\n")
        if name == "gateway" and op.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # charged, but not recorded
        return answer

    return app


if __name__ == "__main__":
    name, descriptor, folder, *following = sys.argv[1:]
    app = make_app(name, Path(folder), following[0] if following else None)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=int(descriptor))])
