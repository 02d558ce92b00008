"""One worker process of the service: ``python -m semel.demo.payments.process '{…}'``, on a socket of the parent's.

The socket stays with the parent, so that the port does when this process is killed. It ends when it is told to on
standard input, and with its parent, however that ends.
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

from semel.demo.payments.app import Settings, make_app

__all__ = ["main"]

GRACE: Final = 3
"""Seconds that requests have to end after the process was told to stop."""


async def serve(settings: Settings, descriptor: int) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:  # the parent decides when it is over, and says so on standard input
            return contextlib.nullcontext()

    config = uvicorn.Config(
        make_app(settings), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE, lifespan="on"
    )
    server = Server(config)
    threading.Thread(target=_listen, args=(server,), daemon=True).start()
    await server.serve(sockets=[socket.socket(fileno=descriptor)])


def _listen(server: Any) -> None:
    """A word ends the service in order; the end of the words means that the parent is dead, and so are we."""
    for _ in sys.stdin:
        server.should_exit = True
    os._exit(1)


def main(argv: list[str]) -> int:
    config = json.loads(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor: int = config.pop("descriptor")
    asyncio.run(serve(Settings(**config), descriptor))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
