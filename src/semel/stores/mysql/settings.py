"""What the sync and the async MySQL store have in common: the URL, bounds, and the settings of a session."""

from __future__ import annotations

import ssl
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError, StoreURLError
from semel.stores.batching.retries import CONTENTION_TRIES

__all__ = ["CONNECTIONS", "CONNECT_TIMEOUT", "RETRY_FOR", "TIMEOUT", "Settings"]

CONNECTIONS: Final = 2
"""Connections of a store. Under load one is quickest, as more share each trip; the other is for when it is slow."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
RETRY_FOR: Final = 1.0
MIGRATION_TIMEOUT: Final = 600.0
PORT: Final = 3306
_KNOWN: Final = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket")


class Settings:
    """One store's address and bounds."""

    __slots__ = ("connect_timeout", "connections", "retry_for", "timeout", "where")

    def __init__(
        self, url: str, connections: int, timeout: Duration, connect_timeout: Duration, retry_for: Duration
    ) -> None:
        if not 1 <= connections <= 64:
            raise ConfigurationError(f"connections is a number from 1 to 64, not {connections!r}")
        self.connections = connections
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")
        self.where = _parsed(url)
        """What the drivers are told, in the words that both of them know."""

    @classmethod
    def for_migration(cls, url: str) -> Settings:
        return cls(url, 1, MIGRATION_TIMEOUT, CONNECT_TIMEOUT, 0.0)

    def session(self, mariadb: bool) -> list[str]:
        """Statements that make a connection ours; the last one is answered by the size of packet that it takes."""
        # Waiting for a lock is tried again: all tries together stay within the time-out.
        lock_wait = max(1, int(self.timeout / CONTENTION_TRIES))
        slowest = (
            f"max_statement_time = {self.timeout:f}" if mariadb else f"max_execution_time = {int(self.timeout * 1000)}"
        )
        return [
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            f"SET SESSION innodb_lock_wait_timeout = {lock_wait}, {slowest}",
            # Strict, so that nothing is ever cut to fit; and assigning from left to right, as our statements mean it.
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0",
            "SELECT @@max_allowed_packet",
        ]


def _parsed(url: str) -> dict[str, Any]:
    """``mysql://user:password@host:3306/database``; no error quotes it, for it may hold the password."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
        asked = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise StoreURLError(
            "the MySQL URL cannot be read: percent-encode what is special in its user and password"
        ) from None
    database = unquote(parts.path[1:])
    if parts.scheme not in ("mysql", "mariadb") or not database or "/" in database or parts.fragment:
        raise StoreURLError("a MySQL URL is mysql://user:password@host:3306/database")
    unknown = [name for name in asked if name not in _KNOWN]
    if unknown:
        raise StoreURLError(f"a MySQL URL may have {', '.join(_KNOWN)}, not {', '.join(unknown)[:80]}")
    where: dict[str, Any] = {
        "host": unquote(parts.hostname or "localhost"),
        "port": port,
        "user": unquote(parts.username or "") or None,
        # As bytes: the drivers would encode text as Latin-1.
        "password": unquote(parts.password or "").encode(),
        "database": database,
    }
    if "unix_socket" in asked:
        where["unix_socket"] = asked["unix_socket"]
    if any(name.startswith("ssl") for name in asked) and asked.get("ssl", "true") != "false":
        where["ssl"] = _trusted(asked)
    return where


def _trusted(asked: dict[str, str]) -> ssl.SSLContext:
    """TLS that checks the server's certificate and name."""
    if asked.get("ssl", "true") != "true":
        raise StoreURLError("ssl in a MySQL URL is true or false")
    try:
        context = ssl.create_default_context(cafile=asked.get("ssl_ca"))
        if "ssl_cert" in asked:
            context.load_cert_chain(asked["ssl_cert"], asked.get("ssl_key"))
    except OSError as error:
        raise StoreURLError(f"a certificate or key that the MySQL URL names cannot be read: {error}") from error
    return context
