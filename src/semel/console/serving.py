"""Serve an ASGI application on a socket, for ``semel console`` and for the demo. Signals are left to the caller."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Final

from semel.errors import ConfigurationError, MissingDependency

BACKLOG: Final = 512
"""How many connections may wait until the server accepts them."""
GRACE: Final = 3
"""Seconds for running requests to end when the server stops."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections. Raises ConfigurationError if this address cannot be used.

    :param port: 0 takes a free one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} of {host} cannot be used: {error.strerror}; choose another with --port, or 0 for a free one"
        ) from error


def make_server(app: Any, **settings: Any) -> Any:
    """Return a server of uvicorn. It runs until its ``should_exit`` is set.

    :param settings: further ones of ``uvicorn.Config``.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependency("uvicorn", "console") from error

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return contextlib.nullcontext()

    return Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=GRACE, **settings
        )
    )
