"""The table of server kinds. Its names are also the names of fixtures and markers."""

from tests.servers.base import Server
from tests.servers.postgres import PostgresServer

KINDS: dict[str, type[Server]] = {kind.name: kind for kind in (PostgresServer,)}
