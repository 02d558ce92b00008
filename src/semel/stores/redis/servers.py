"""What the lanes of a sync store share: where the servers are, whether they are down, which risks were told already."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError
from semel.stores.redis.link import Link, connect, reply_text
from semel.stores.redis.programs import Programs
from semel.stores.redis.replies import NotMaster, from_reply, unreachable
from semel.stores.redis.risks import QUESTIONS, Risk, assess, described
from semel.stores.redis.settings import Address, Settings
from semel.stores.redis.topology import SearchTime, Topology, topology_of

__all__ = ["Servers"]

_log: Final = logging.getLogger("semel.redis")


class Servers:
    """One search at a time finds out who has what, for all lanes."""

    def __init__(self, settings: Settings, programs: Programs) -> None:
        self.settings = settings
        self.programs = programs
        self.topology: Topology = topology_of(settings)
        self.cursors: dict[Address, bytes] = {}
        self.down: set[Address | None] = set()
        """Servers that stayed away for a whole patience: no other caller waits for them as long."""
        self._seen: set[Address] = set()
        self._told: set[str] = set()
        self._searches = 0
        self._failure: StoreError | None = None
        """Of the last search: those who waited for it meanwhile need not search in vain again."""
        self._renew()
        survive_forks(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def address_of(self, key: bytes) -> Address:
        address = self.topology.address_of(key)
        if address is None:
            self.search()
            address = self.topology.address_of(key)
            if address is None:
                self.topology.forget()
                raise NotMaster("no node of the Redis Cluster has the slot")
        return address

    def masters(self) -> list[Address]:
        if not self.topology.masters():
            self.search()
        return self.topology.masters()

    def search(self) -> None:
        searches = self._searches
        with self._lock:
            if self.topology.masters():
                return  # another lane has found out meanwhile
            if self._searches != searches and self._failure is not None:
                raise type(self._failure)(str(self._failure)) from self._failure.__cause__  # or that there is none
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
        from redis.exceptions import AuthenticationError, RedisError, ResponseError

        try:
            raw: Any = connect(self.settings, address, sentinel=self.topology.sentinels, timeout=timeout)
        except StoreError as error:
            return error
        try:
            raw.send_command(*command)
            return raw.read_response(disable_decoding=True) or ()
        except (ResponseError, AuthenticationError) as error:
            return _caused(from_reply(reply_text(error)), error)
        except (RedisError, OSError) as error:
            return _caused(unreachable(str(address), error), error)
        finally:
            raw.disconnect()

    def look_once(self, link: Link) -> None:
        """Look at a server that this store has not been connected to before."""
        if link.address not in self._seen:
            self._seen.add(link.address)
            self.look_at(link)

    def look_at(self, link: Link) -> list[Risk]:
        """The risks of a server; those that are new are logged."""
        settings = self.settings
        risks = assess(link.exchange(QUESTIONS), wait_replicas=settings.wait_replicas, wait_aof=settings.wait_aof)
        news = [risk for risk in risks if risk.name not in self._told]
        if news:
            self._told.update(risk.name for risk in news)
            _log.warning("records in Redis are at risk: %s", described(news))
        return risks


def _caused(error: SemelError, cause: BaseException) -> SemelError:
    error.__cause__ = cause
    return error
