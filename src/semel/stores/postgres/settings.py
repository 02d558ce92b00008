"""The settings of the PostgreSQL store: its URL, its bounds, and the settings of a session."""

from __future__ import annotations

from typing import Any

from semel.errors import StoreURLError
from semel.stores.bounds import ServerSettings


class PostgresSettings(ServerSettings):
    """The settings of one store. Its URL may also be a libpq connection string."""

    def session(self) -> dict[str, str]:
        """Server settings of our own connections. They are sent when a connection is opened."""
        return {
            "application_name": "semel",
            "default_transaction_isolation": "read committed",
            "statement_timeout": str(int(self.timeout * 1000)),
            "jit": "off",
            # Our few statements are prepared once. Planning one again would cost more than running it.
            "plan_cache_mode": "force_generic_plan",
            # A plan made while the table is small would read all of it for every Op, and stay while the table grows.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    def for_psycopg(self) -> dict[str, Any]:
        """The arguments of psycopg's ``connect()``, sync and async."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            users = conninfo_to_dict(self.url).get("options") or ""
        except psycopg.Error:
            raise unreadable_url() from None
        ours = " ".join(
            f"-c {name}={value}".replace("read committed", r"read\ committed") for name, value in self.session().items()
        )
        return {
            "conninfo": self.url,
            "autocommit": True,
            "prepare_threshold": 1,
            "connect_timeout": max(2, int(self.connect_timeout)),
            "options": f"{ours} {users}".strip(),  # the user's come last, and win
        }


def unreadable_url() -> StoreURLError:
    """The drivers' own errors show the part that they cannot read. That may be the password, so it is not quoted."""
    return StoreURLError(
        "the PostgreSQL URL cannot be read: write postgresql://user:password@host:5432/database, percent-encode what "
        "is special in its user and password, and leave out options that PostgreSQL does not have"
    )
