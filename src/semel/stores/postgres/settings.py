"""What the sync and the async PostgreSQL store have in common: bounds and session settings."""

from __future__ import annotations

from typing import Any, Final

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError, StoreUnavailable, StoreURLError
from semel.sql.connections.refusals import Unreachable

__all__ = ["Settings", "unreachable", "unreadable"]

CONNECTIONS: Final = 2
"""Connections of a store. Under load one is quickest, as more share each trip; the other is for when it is slow."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
MIGRATION_TIMEOUT: Final = 600.0
RETRY_FOR: Final = 1.0
LISTEN_AGAIN: Final = 1.0
"""A waiter looks again after so many seconds although nobody woke it: a listener may be deaf without knowing."""


class Settings:
    """One store's bounds."""

    __slots__ = ("connect_timeout", "connections", "retry_for", "timeout", "url")

    def __init__(
        self, url: str, connections: int, timeout: Duration, connect_timeout: Duration, retry_for: Duration
    ) -> None:
        if not 1 <= connections <= 64:
            raise ConfigurationError(f"connections is a number from 1 to 64, not {connections!r}")
        self.url = url
        self.connections = connections
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")

    @classmethod
    def for_migration(cls, url: str) -> Settings:
        """One connection, on which a statement may take long: an index is made on a full table."""
        return cls(url, 1, MIGRATION_TIMEOUT, CONNECT_TIMEOUT, 0.0)

    def session(self) -> dict[str, str]:
        """Server settings of our own connections, sent when they are opened."""
        return {
            "application_name": "semel",
            "default_transaction_isolation": "read committed",
            "statement_timeout": str(int(self.timeout * 1000)),
            "jit": "off",
            # Our few statements are prepared once; planning each anew would cost more than running it.
            "plan_cache_mode": "force_generic_plan",
            # A plan made while the table is new would read all of it for every Op, and be kept while it grows.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    def options(self, given: object = "") -> str:
        """The same as libpq's ``options``, before those the user gave."""
        own = " ".join(
            f"-c {name}={value}".replace("read committed", r"read\ committed") for name, value in self.session().items()
        )
        return f"{own} {given}".strip()

    def for_psycopg(self) -> dict[str, Any]:
        """What psycopg's connect() is called with, sync and async."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(self.url).get("options") or ""
        except psycopg.Error:
            raise unreadable() from None
        return {
            "conninfo": self.url,
            "autocommit": True,
            "prepare_threshold": 1,
            "connect_timeout": max(2, int(self.connect_timeout)),
            "options": self.options(given),
        }


def unreachable(error: Exception) -> StoreUnavailable:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return Unreachable(f"PostgreSQL cannot be reached: {text}")


def unreadable() -> StoreURLError:
    """The drivers show the part they stumble over, which may be the password: so they are not quoted."""
    return StoreURLError("the PostgreSQL URL cannot be read: percent-encode what is special in its user and password")
