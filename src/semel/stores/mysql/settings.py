"""The settings of the MySQL store: its URL, its bounds, and the settings of a session."""

from __future__ import annotations

import ssl
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration
from semel.errors import StoreURLError
from semel.stores.batching.retries import CONTENTION_TRIES
from semel.stores.bounds import CONNECT_TIMEOUT, CONNECTIONS, RETRY_FOR, TIMEOUT, ServerSettings

PORT: Final = 3306
_OPTIONS: Final = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket", "charset")


class MySQLSettings(ServerSettings):
    """The settings of one store."""

    def __init__(
        self,
        url: str,
        connections: int = CONNECTIONS,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
    ) -> None:
        super().__init__(url, connections, timeout, connect_timeout, retry_for)
        self.where = _parsed(self.url)
        """Arguments of the drivers' ``connect()``, by the names that both of them know."""

    def session(self, mariadb: bool) -> list[str]:
        """The statements that set up a session. The last one returns the largest packet that the server accepts."""
        # An Op that waited for a lock in vain is retried. All tries together stay within the timeout.
        lock_wait = max(1, int(self.timeout / CONTENTION_TRIES))
        slowest = (
            f"max_statement_time = {self.timeout:f}" if mariadb else f"max_execution_time = {int(self.timeout * 1000)}"
        )
        return [
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            f"SET SESSION innodb_lock_wait_timeout = {lock_wait}, {slowest}",
            # Strict, so that nothing is ever cut to fit. Assignments run from left to right, as our statements expect.
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0",
            "SELECT @@max_allowed_packet",
        ]


def _parsed(url: str) -> dict[str, Any]:
    """The parts of ``mysql://user:password@host:3306/database``. No error quotes it: it may contain the password."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise StoreURLError(
            "the MySQL URL cannot be read: percent-encode what is special in its user and password"
        ) from None
    database = unquote(parts.path[1:])
    if parts.scheme not in ("mysql", "mariadb") or not database or "/" in database or parts.fragment:
        raise StoreURLError("a MySQL URL is mysql://user:password@host:3306/database")
    if set(options) - set(_OPTIONS):  # not quoted: behind a ? in a password its rest looks like an option
        raise StoreURLError(f"a MySQL URL may have the options {', '.join(_OPTIONS)}, and this one has another")
    if options.get("charset", "utf8mb4") != "utf8mb4":
        raise StoreURLError("Semel always uses utf8mb4 on its own connections: leave charset out of the MySQL URL")
    where: dict[str, Any] = {
        "host": unquote(parts.hostname or "localhost"),
        "port": port,
        "user": unquote(parts.username or "") or None,
        # As bytes: the drivers encode text as Latin-1.
        "password": unquote(parts.password or "").encode(),
        "database": database,
    }
    if "unix_socket" in options:
        where["unix_socket"] = options["unix_socket"]
    if any(name.startswith("ssl") for name in options) and options.get("ssl", "true") != "false":
        where["ssl"] = _trusted(options)
    return where


def _trusted(options: dict[str, str]) -> ssl.SSLContext:
    """TLS that checks the server's certificate and name."""
    if options.get("ssl", "true") != "true":
        raise StoreURLError("ssl in a MySQL URL is true or false")
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca"))
        if "ssl_cert" in options:
            context.load_cert_chain(options["ssl_cert"], options.get("ssl_key"))
    except OSError as error:
        raise StoreURLError(f"a certificate or key that the MySQL URL names cannot be read: {error}") from error
    return context
