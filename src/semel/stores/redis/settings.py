"""A store's bounds, and what its URL says: where the servers are, who we are, how the line is encrypted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError, StoreURLError

__all__ = ["Address", "Settings"]

LANES: Final = 2
"""Connections of a sync store to each server. An async store has one, which all tasks share."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
PATIENCE: Final = 1.0
WAIT_TIMEOUT: Final = 1.0
WAIT_TIMEOUT_OF_DISK: Final = 3.0
"""With ``appendfsync everysec`` the server confirms once a second, and two late where the disk is busy."""
LISTEN_AGAIN: Final = 1.0
"""A waiter looks again after so many seconds although nobody woke it: a listener may be deaf without knowing."""
MOST_IN_FLIGHT: Final = 100_000
"""Commands of an async store that wait for their answers; more are refused."""
CLOSE_PATIENCE: Final = 1.0
"""How long a store that is closed waits for answers that are still to come."""
PREFIX: Final = "semel:"
_PORTS: Final = {"redis": 6379, "sentinel": 26379, "cluster": 6379}
_EXAMPLES: Final = (
    "redis://[user:password@]host:port/db, rediss:// with TLS, redis+sentinel://host:port,host:port/service/db, "
    "redis+cluster://host:port,host:port, or unix:///path"
)


class Address(NamedTuple):
    """Where a server listens; port 0 is a Unix socket, whose path is the host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "yes", "1")


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "db": int, "username": str, "password": str, "sentinel_username": str, "sentinel_password": str,
    "ssl_cert_reqs": str, "ssl_ca_certs": str, "ssl_ca_path": str, "ssl_certfile": str, "ssl_keyfile": str,
    "ssl_password": str, "ssl_check_hostname": _flag, "prefix": str, "wait_replicas": int, "wait_aof": _flag,
}  # fmt: skip
"""What may stand behind the ``?`` of a URL."""


class Settings:
    """One store's settings. Nothing of them is ever shown: they hold the password."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None,
        lanes: int,
        timeout: Duration,
        connect_timeout: Duration,
        patience: Duration,
        wait_replicas: int | None,
        wait_aof: bool | None,
        wait_timeout: Duration | None,
    ) -> None:
        self.kind, self.tls, self.addresses, self.service, options = _read(url)
        self.username: str | None = options.get("username")
        self.password: str | None = options.get("password")
        self.sentinel_username: str | None = options.get("sentinel_username")
        self.sentinel_password: str | None = options.get("sentinel_password")
        self.db: int = options.get("db", 0)
        self.ssl = {name.removeprefix("ssl_"): given for name, given in options.items() if name.startswith("ssl_")}
        self.prefix: str = options.get("prefix", PREFIX) if prefix is None else prefix
        self.wait_replicas: int = options.get("wait_replicas", 0) if wait_replicas is None else wait_replicas
        self.wait_aof: bool = options.get("wait_aof", False) if wait_aof is None else wait_aof
        self.lanes = lanes
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.patience = seconds(patience, "patience")
        if wait_timeout is None:
            wait_timeout = min(WAIT_TIMEOUT_OF_DISK if self.wait_aof else WAIT_TIMEOUT, self.timeout * 0.8)
        self.wait_ms = max(1, int(seconds(wait_timeout, "wait_timeout") * 1000))
        if not 1 <= lanes <= 64:
            raise ConfigurationError(f"lanes are connections, 1 to 64, not {lanes!r}")
        if self.wait_replicas < 0:
            raise ConfigurationError(f"wait_replicas is how many must confirm a write, not {self.wait_replicas!r}")
        if (self.wait_replicas or self.wait_aof) and self.wait_ms / 1000 >= self.timeout:
            raise ConfigurationError("wait_timeout must be shorter than timeout: Redis answers only after it")
        for name in ("ca_certs", "ca_path", "certfile", "keyfile"):
            if name in self.ssl and not os.path.exists(self.ssl[name]):
                raise ConfigurationError(f"ssl_{name} names nothing that is there: {self.ssl[name]!r}")
        if self.kind == "cluster" and self.db:
            raise StoreURLError("a Redis Cluster has one database, 0")


def _read(url: str) -> tuple[str, bool, list[Address], str, dict[str, Any]]:
    """The parts of a URL. What is wrong is never quoted whole: it may hold the password."""
    try:
        parts = urlsplit(url)
        who, _, hosts = parts.netloc.rpartition("@")
        options = {
            name: _OPTIONS[name](given)
            for name, given in parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        }
    except KeyError as unknown:
        raise StoreURLError(f"no option of a Redis URL is called {unknown}; there are: {', '.join(_OPTIONS)}") from None
    except ValueError:
        raise StoreURLError(f"the options of the Redis URL cannot be read; write {_EXAMPLES}") from None
    scheme, _, kind = parts.scheme.partition("+")
    kind = kind or "redis"
    if scheme not in ("redis", "rediss", "unix") or kind not in _PORTS or (scheme == "unix" and kind != "redis"):
        raise StoreURLError(f"{parts.scheme[:40]!r} is no Redis URL: write {_EXAMPLES}")
    if who:
        name, colon, password = who.partition(":")
        options.setdefault("username", unquote(name) or None)
        if colon:
            options.setdefault("password", unquote(password))
    if scheme == "unix":
        return kind, False, [Address(unquote(parts.path), 0)], "", options
    path = [unquote(step) for step in parts.path.split("/") if step]
    service = path.pop(0) if kind == "sentinel" and path else ""
    try:
        if path:
            options.setdefault("db", int(path.pop(0)))
        addresses = [_address(host, _PORTS[kind]) for host in hosts.split(",")]
    except ValueError:
        raise StoreURLError(f"hosts or database of the Redis URL cannot be read; write {_EXAMPLES}") from None
    if path or (kind == "sentinel") != bool(service) or (kind == "redis" and len(addresses) > 1):
        raise StoreURLError(f"the Redis URL cannot be read; write {_EXAMPLES}")
    return kind, scheme == "rediss", addresses, service, options


def _address(text: str, port: int) -> Address:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return Address(host, int(rest[1:]) if rest else port)
    host, colon, given = text.partition(":")
    return Address(unquote(host) or "localhost", int(given) if colon else port)
