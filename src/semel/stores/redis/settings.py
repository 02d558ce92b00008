"""The settings of a Redis store: its limits, and what its URL says about servers, credentials and TLS."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError, StoreURLError

CONNECTIONS: Final = 2
"""Connections of a sync store to each server. An async store has one, which all its tasks share."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
RETRY_FOR: Final = 1.0
WAIT_TIMEOUT: Final = 1.0
WAIT_TIMEOUT_OF_DISK: Final = 3.0
"""With ``appendfsync everysec`` the server confirms once a second, and two seconds late if the disk is busy."""
MAX_IN_FLIGHT: Final = 100_000
"""Commands of an async store that may wait for their replies; more are refused."""
CLOSE_TIMEOUT: Final = 1.0
"""Seconds that closing a store waits for replies that are still to come."""
PREFIX: Final = "semel:"
_PORTS: Final = {"redis": 6379, "sentinel": 26379, "cluster": 6379}
_EXAMPLES: Final = (
    "redis://[user:password@]host:port/db, rediss:// with TLS, redis+sentinel://host:port,host:port/service/db, "
    "redis+cluster://host:port,host:port, or unix:///path"
)


class Address(NamedTuple):
    """Where a server listens. Port 0 means a Unix socket, and then the host is its path."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a number")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError("yes or no")
    return text.lower() in ("true", "yes", "1")


def _cert_reqs(text: str) -> str:
    if text not in ("none", "optional", "required"):
        raise ValueError("none, optional or required")
    return text


URL_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "db": _number, "username": str, "password": str, "sentinel_username": str, "sentinel_password": str,
    "ssl_cert_reqs": _cert_reqs, "ssl_ca_certs": str, "ssl_ca_path": str, "ssl_certfile": str, "ssl_keyfile": str,
    "ssl_password": str, "ssl_check_hostname": _flag, "prefix": str, "wait_replicas": _number, "wait_aof": _flag,
}  # fmt: skip
"""The options that a URL may have after its ``?``. A reader raises ValueError with what the value should be."""


class RedisSettings:
    """The settings of one store. They hold the password, so they are never shown."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None,
        connections: int,
        timeout: Duration,
        connect_timeout: Duration,
        retry_for: Duration,
        wait_replicas: int | None,
        wait_aof: bool | None,
        wait_timeout: Duration | None,
    ) -> None:
        self.kind, self.tls, self.addresses, self.service, options = _read(url)
        self._options = options
        self.db: int = options.get("db", 0)
        self.ssl = {name.removeprefix("ssl_"): value for name, value in options.items() if name.startswith("ssl_")}
        self.prefix: str = options.get("prefix", PREFIX) if prefix is None else prefix
        self.wait_replicas: int = options.get("wait_replicas", 0) if wait_replicas is None else wait_replicas
        self.wait_aof: bool = options.get("wait_aof", False) if wait_aof is None else wait_aof
        self.connections = connections
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")
        if wait_timeout is None:
            wait_timeout = min(WAIT_TIMEOUT_OF_DISK if self.wait_aof else WAIT_TIMEOUT, self.timeout * 0.8)
        self.wait_ms = max(1, int(seconds(wait_timeout, "wait_timeout") * 1000))
        self.wait_command: tuple[Any, ...] = (
            (b"WAITAOF", 1, self.wait_replicas, self.wait_ms)
            if self.wait_aof
            else (b"WAIT", self.wait_replicas, self.wait_ms)
        )
        """Confirms all writes before it on its connection."""
        if type(connections) is not int or not 1 <= connections <= 64:
            raise ConfigurationError(f"connections is a number from 1 to 64, not {connections!r}")
        if type(self.wait_replicas) is not int or self.wait_replicas < 0:
            raise ConfigurationError(
                f"wait_replicas is the number of replicas that must confirm a write, not {self.wait_replicas!r}"
            )
        if type(self.wait_aof) is not bool:
            raise ConfigurationError(f"wait_aof is True or False, not {self.wait_aof!r}")
        if not isinstance(self.prefix, str):
            raise ConfigurationError(f"prefix is the text that the store's keys begin with, not {self.prefix!r}")
        if (self.wait_replicas or self.wait_aof) and self.wait_ms / 1000 >= self.timeout:
            raise ConfigurationError("wait_timeout must be shorter than timeout: Redis answers only after it")
        for name in ("ca_certs", "ca_path", "certfile", "keyfile"):
            if name in self.ssl and not os.path.exists(self.ssl[name]):
                raise ConfigurationError(f"ssl_{name} does not exist: {self.ssl[name]!r}")
        if self.kind == "cluster" and self.db:
            raise StoreURLError("a Redis Cluster has one database, 0")

    def credentials(self, sentinel: bool = False) -> tuple[str | None, str | None]:
        """Return the user and the password of the servers, or of the sentinels."""
        prefix = "sentinel_" if sentinel else ""
        return self._options.get(f"{prefix}username"), self._options.get(f"{prefix}password")


def _read(url: str) -> tuple[str, bool, list[Address], str, dict[str, Any]]:
    """Return the parts of a URL. Errors never quote it whole, because it may hold the password."""
    if not isinstance(url, str):
        raise StoreURLError(f"the store's URL is text, not {type(url).__name__}: write {_EXAMPLES}")
    try:
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise StoreURLError(f"the options of the Redis URL cannot be read; write {_EXAMPLES}") from None
    options: dict[str, Any] = {}
    for name, text in pairs:
        if name not in URL_OPTIONS:
            # Not quoted: behind a ? in a password its rest looks like an option.
            raise StoreURLError(f"the Redis URL has an unknown option; the options are: {', '.join(URL_OPTIONS)}")
        try:
            options[name] = URL_OPTIONS[name](text)
        except ValueError as expected:
            raise StoreURLError(f"{name} of a Redis URL is {expected}") from None
    scheme, _, kind = parts.scheme.partition("+")
    kind = kind or "redis"
    if scheme not in ("redis", "rediss", "unix") or kind not in _PORTS or (scheme == "unix" and kind != "redis"):
        raise StoreURLError(f"this is no Redis URL: write {_EXAMPLES}")
    if parts.fragment:
        raise StoreURLError("a Redis URL has no fragment; write a # in a password as %23")
    if scheme != "rediss" and (tls := [name for name in options if name.startswith("ssl_")]):
        raise StoreURLError(f"{tls[0]} is an option for TLS, which this URL does not use: write rediss://")
    if credentials:
        name, colon, password = credentials.partition(":")
        options.setdefault("username", unquote(name) or None)
        if colon:
            options.setdefault("password", unquote(password))
    if scheme == "unix":
        if hosts or len(parts.path) < 2 or "\0" in unquote(parts.path):
            raise StoreURLError("a Unix socket is named by its whole path: write unix:///run/redis.sock?db=0")
        return kind, False, [Address(unquote(parts.path), 0)], "", options
    path = [unquote(step) for step in parts.path.split("/") if step]
    service = path.pop(0) if kind == "sentinel" and path else ""
    try:
        if path:
            options.setdefault("db", _number(path.pop(0)))
    except ValueError:
        raise StoreURLError(f"in a Redis URL a database is a number from 0 on; write {_EXAMPLES}") from None
    addresses = [_address(host, _PORTS[kind]) for host in (hosts or "localhost").split(",")]
    if path or (kind == "sentinel") != bool(service) or (kind == "redis" and len(addresses) > 1):
        raise StoreURLError(f"the Redis URL cannot be read; write {_EXAMPLES}")
    return kind, scheme == "rediss", addresses, service, options


def _address(text: str, port: int) -> Address:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        if rest[:1] not in ("", ":"):
            raise StoreURLError(f"after the ] of a Redis URL comes a colon and a port, or nothing; write {_EXAMPLES}")
        colon, digits = rest[:1], rest[1:]
    else:
        host, colon, digits = text.partition(":")
    if colon:
        port = int(digits) if digits.isdecimal() and len(digits) < 6 else 0
        if not 1 <= port <= 65535:
            raise StoreURLError(f"in a Redis URL a port is a number from 1 to 65535; write {_EXAMPLES}")
    name = unquote(host) if text else "."
    try:
        name.encode("idna")
        if not name.isprintable():
            raise UnicodeError("a control character")
    except UnicodeError:
        raise StoreURLError(f"the Redis URL has no valid host name; write {_EXAMPLES}") from None
    return Address(name or "localhost", port)
