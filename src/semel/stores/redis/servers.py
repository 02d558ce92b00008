"""What the lanes of a sync store share: where the servers are, whether they are down, which risks were told already."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from semel.engine.forking import survive_forks
from semel.errors import StoreError
from semel.stores.redis.link import Link, connect, reply_text
from semel.stores.redis.programs import Programs
from semel.stores.redis.replies import NotMaster
from semel.stores.redis.risks import QUESTIONS, Risk, assess, described
from semel.stores.redis.settings import Address, Settings
from semel.stores.redis.topology import Topology, topology_of

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
        with self._lock:
            if self.topology.masters():
                return  # another lane has found out meanwhile
            search = self.topology.search()
            try:
                address, command = next(search)
                while True:
                    address, command = search.send(self._ask(address, command))
            except StopIteration:
                self.down.discard(None)

    def _ask(self, address: Address, command: tuple[bytes, ...]) -> Any:
        from redis.exceptions import RedisError

        try:
            raw: Any = connect(self.settings, address, sentinel=self.topology.sentinels)
        except StoreError:
            return None
        try:
            raw.send_command(*command)
            return raw.read_response(disable_decoding=True) or ()
        except (RedisError, OSError) as error:
            _log.debug("Redis at %s does not answer: %s", address, reply_text(error))
            return None
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
