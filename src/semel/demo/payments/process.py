"""One worker process of the service: ``python -m semel.demo.payments.process '{…}'``, on the parent's socket.

The parent owns the socket, so the port survives when this process is killed. The process ends when a line arrives on
standard input, or when its parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any, Final

from semel.demo.payments.app import ServiceSettings, make_app

__all__ = ["main"]

GRACE: Final = 3
"""Seconds for running requests to end when the process stops."""


async def serve(settings: ServiceSettings, descriptor: int) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:  # the parent decides when to stop, and writes to standard input
            return contextlib.nullcontext()

    config = uvicorn.Config(
        make_app(settings), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE, lifespan="on"
    )
    server = Server(config)
    threading.Thread(target=_listen, args=(server,), daemon=True).start()
    await server.serve(sockets=[socket.socket(fileno=descriptor)])


def _listen(server: Any) -> None:
    """Stop in order on a line from standard input. End of file means that the parent died: exit at once."""
    for _ in sys.stdin:
        server.should_exit = True
    os._exit(1)


def main(argv: list[str]) -> int:
    config = json.loads(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor: int = config.pop("descriptor")
    asyncio.run(serve(ServiceSettings(**config), descriptor))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
