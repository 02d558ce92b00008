"""Real servers for tests and benchmarks: ephemeral, on free loopback ports, in temporary folders, never shared.

    with PostgresServer() as server:
        connect(server.url)

One file per kind, one row per kind in `kinds.KINDS`. Nothing here knows pytest but `plugin`.
"""

from tests.servers.base import Server, ServerError, ServerMissing
from tests.servers.kinds import KINDS
from tests.servers.pool import ServerPool
from tests.servers.postgres import PostgresServer

__all__ = ["KINDS", "PostgresServer", "Server", "ServerError", "ServerMissing", "ServerPool"]
