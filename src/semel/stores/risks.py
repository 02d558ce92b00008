"""How the settings of a server can lose records that were confirmed. ``semel doctor`` asks for them.

The questions to databases are programs, for every connection. Those to Redis are in ``stores/redis/risks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from semel.sql.program import Program, Query

AT_RISK: Final = "what is stored in Redis is at risk: %s"
"""The warning that a store, broker or source in Redis logs once."""
ACCEPTED_SKEW: Final = 5.0
"""Seconds by which two clocks may differ."""
_POSTGRES: Final = Query(
    "risks",
    "SELECT current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes'), "
    "current_setting('transaction_read_only')::bool, extract(epoch FROM clock_timestamp())::float8",
    True,
)
_MYSQL: Final = Query(
    "risks",
    "SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog, @@read_only, unix_timestamp(sysdate(6))",
    True,
)


@dataclass(frozen=True)
class Risk:
    """A way in which the settings of a server can lose records, or mislead people."""

    name: str
    """Such as ``eviction``: [the doctor's page](../how-to/doctor.md) lists them all."""
    what: str
    """What can happen."""
    remedy: str
    """What to change to avoid it."""


def clock_skew(server: float, before: float, after: float) -> Iterable[Risk]:
    """Yield a risk if the server's clock is not this machine's.

    :param server: the time that the server told, in seconds since 1970.
    :param before: this machine's time when it asked.
    :param after: this machine's time when it had the answer.
    """
    ahead = server - after if server > after else min(server - before, 0.0)
    if abs(ahead) > ACCEPTED_SKEW:
        direction = "ahead of" if ahead > 0 else "behind"
        yield Risk(
            "clock-skew",
            f"the server's clock is {abs(ahead):.0f} s {direction} this machine's. Leases do not depend on it, but "
            "times in logs, tokens and certificates do",
            "synchronise both by NTP",
        )


def postgres_risks(clock: Callable[[], float]) -> Program[list[Risk]]:
    """:param clock: returns the time in seconds since 1970."""
    before = clock()
    fsync, commit, pages, read_only, now = (yield _POSTGRES())[0]
    return [*_postgres(fsync, commit, pages, read_only), *clock_skew(now, before, clock())]


def _postgres(fsync: str, commit: str, pages: str, read_only: bool) -> Iterator[Risk]:
    if read_only:
        yield _read_only("this server is a standby, or read-only for this user")
    if fsync == "off":
        yield Risk("fsync-off", "fsync is off: a power cut may destroy the whole database", "set fsync = on")
    if commit == "off":
        yield Risk(
            "late-commits",
            "synchronous_commit is off: a crash of the server forgets operations that it has confirmed, and they run "
            "again",
            "set synchronous_commit = on for the role that Semel uses: ALTER ROLE … SET synchronous_commit = on",
        )
    if pages == "off":
        yield Risk(
            "torn-pages",
            "full_page_writes is off: a power cut may leave half-written pages",
            "set full_page_writes = on, unless the file system writes pages as a whole",
        )


def mysql_risks(clock: Callable[[], float]) -> Program[list[Risk]]:
    """:param clock: returns the time in seconds since 1970."""
    before = clock()
    flush, binlog, synced, read_only, now = (yield _MYSQL())[0]
    return [*_mysql(flush, binlog, synced, read_only), *clock_skew(float(now), before, clock())]


def _mysql(flush: Any, binlog: Any, synced: Any, read_only: Any) -> Iterator[Risk]:
    if int(read_only):
        yield _read_only("this server is read-only")
    if int(flush) != 1:
        yield Risk(
            "late-commits",
            f"innodb_flush_log_at_trx_commit is {flush}: a crash of the server forgets operations of the last second "
            "that it has confirmed, and they run again",
            "set innodb_flush_log_at_trx_commit = 1",
        )
    if int(binlog) and int(synced) != 1:
        yield Risk(
            "late-binlog",
            f"sync_binlog is {synced}: a crash of the server can leave replicas without the last operations",
            "set sync_binlog = 1",
        )


def _read_only(what: str) -> Risk:
    return Risk("read-only", f"{what}: every claim is refused", "use the URL of the primary")
