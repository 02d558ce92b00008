"""What all connections of a sync store share: where the servers are, which are down, and which risks were logged.

``aio_servers.py`` is the same for event loops. Both are written by hand: here threads take a lock and one of them
searches while the others wait, there one task searches for all; and the async store also keeps its connections there,
because its tasks share them. What a search asks, and what the replies mean, is in ``topology.py``.
"""

from __future__ import annotations

import threading
from typing import Any

from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError
from semel.stores.redis.connection import RedisConnection, connect, reply_text
from semel.stores.redis.failures import NotMaster, error_of_reply, server_unreachable
from semel.stores.redis.risks import QUESTIONS, Risk, RiskLog
from semel.stores.redis.settings import Address, RedisSettings
from semel.stores.redis.topology import SearchTime, Topology, topology_of


class Servers:
    """Finds out which server has which key, with one search at a time for all threads."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self.topology: Topology = topology_of(settings)
        self.cursors: dict[Address, bytes] = {}
        """Where the next sweep of each server continues."""
        self.down: set[Address | None] = set()
        """Servers that a caller has retried in vain: later callers try them once, and do not wait."""
        self._risks = RiskLog(settings)
        self._assessed: set[Address] = set()
        self._searches = 0
        self._failure: StoreError | None = None
        """The error of the last search, for those who waited for it: they need not search in vain again."""
        self._renew_lock()
        survive_forks(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def address_of(self, key: bytes) -> Address:
        """Return the server that has the key, after a search if need be."""
        address = self.topology.address_of(key)
        if address is None:
            self.search()
            address = self.topology.address_of(key)
            if address is None:
                self.topology.forget()
                raise NotMaster("no node of the Redis Cluster has the slot")
        return address

    def masters(self) -> list[Address]:
        """Return all servers that take writes, after a search if need be."""
        if not self.topology.masters():
            self.search()
        return self.topology.masters()

    def search(self) -> None:
        """Find the servers. Threads that call this while another searches wait for its result, or share its error."""
        searches = self._searches
        with self._lock:
            if self.topology.masters():
                return  # another thread has found them meanwhile
            if self._searches != searches and self._failure is not None:
                raise type(self._failure)(str(self._failure)) from self._failure.__cause__
            self._failure = None
            search, time = self.topology.search(), SearchTime(self.settings.connect_timeout)
            try:
                address, command, left = next(search)
                while True:
                    address, command, left = search.send(self._ask(address, command, time.share(left)))
            except StopIteration:
                self.down.discard(None)
            except StoreError as error:
                self._failure = error
                raise
            finally:
                self._searches += 1

    def _ask(self, address: Address, command: tuple[bytes, ...], timeout: float) -> Any:
        """Send one command over a connection of its own. Returns the reply, or the error as a value."""
        from redis.exceptions import AuthenticationError, RedisError, ResponseError

        try:
            raw: Any = connect(self.settings, address, sentinel=self.topology.sentinels, timeout=timeout)
        except StoreError as error:
            return error
        try:
            raw.send_command(*command)
            return raw.read_response(disable_decoding=True) or ()
        except (ResponseError, AuthenticationError) as error:
            return _with_cause(error_of_reply(reply_text(error)), error)
        except (RedisError, OSError) as error:
            return _with_cause(server_unreachable(str(address), error), error)
        finally:
            raw.disconnect()

    def assess_once(self, connection: RedisConnection) -> None:
        """Log the risks of a server if this store has not been connected to it before."""
        if connection.address not in self._assessed:
            self._assessed.add(connection.address)
            self.assess(connection)

    def assess(self, connection: RedisConnection) -> list[Risk]:
        """Return the risks of a server; new ones are logged."""
        return self._risks.report(connection.exchange(QUESTIONS))


def _with_cause(error: SemelError, cause: BaseException) -> SemelError:
    error.__cause__ = cause
    return error
