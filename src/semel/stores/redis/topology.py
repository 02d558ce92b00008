"""Which server has a key: the only one, the master that the sentinels name, or the node of the cluster for its slot.

A search is a generator that yields questions (a server, a command, and how many servers are left to ask) and is sent
the replies, or the error of a server that did not reply. The sync and the async store do the asking. All questions
share the time that one connection may take, so that a node that is down does not use it up.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any, Final, TypeAlias

from semel.errors import SemelError
from semel.stores.redis.failures import CommandRefused, Moved, NotMaster, ServerUnreachable, with_cause
from semel.stores.redis.settings import Address, RedisSettings

Question: TypeAlias = tuple[Address, tuple[bytes, ...], int]
Search: TypeAlias = Generator[Question, Any, None]
SHORTEST: Final = 0.05
"""Seconds that each node gets to reply, however many there are."""


class SearchTime:
    """The time that one search may take in total."""

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds

    def share(self, left: int) -> float:
        """Return the seconds for the next question, if ``left`` are still to ask."""
        return max(SHORTEST, (self._until - monotonic()) / left)


class Topology:
    """A single server."""

    sentinels = False
    """Whether ``search`` asks sentinels, which have a password of their own."""

    def __init__(self, settings: RedisSettings) -> None:
        self._seeds = list(settings.addresses)
        self.only: Address | None = self._seeds[0]
        """The server that has all keys, where that never changes."""

    def address_of(self, key: bytes) -> Address | None:
        """Return the server that has the key, or None if a search must find out."""
        return self._seeds[0]

    def require_address(self, key: bytes) -> Address:
        """Return the server that has the key. Raises NotMaster if it is not known, even after a search."""
        address = self.address_of(key)
        if address is None:
            self.forget()
            raise NotMaster("no node of the Redis Cluster has the slot")
        return address

    def masters(self) -> list[Address]:
        """Return all servers that take writes; empty if a search must find out."""
        return [self._seeds[0]]

    def search(self) -> Search:
        """Find the servers; raises if none can be found."""
        yield from ()

    def forget(self, address: Address | None = None) -> None:
        """Search before the next try: this server did not reply, or is no longer a master. It is asked last."""

    def moved(self, error: Moved, sent_by: Address) -> Address:
        """Return the address that a redirection names. Without a host it means the host of the node that sent it."""
        return Address(error.host or sent_by.host, error.port)


class SentinelTopology(Topology):
    """The master of a service that sentinels watch."""

    sentinels = True

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self.only = None
        self._service = settings.service
        self._master: Address | None = None

    def address_of(self, key: bytes) -> Address | None:
        return self._master

    def masters(self) -> list[Address]:
        return [self._master] if self._master else []

    def search(self) -> Search:
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        unknown = False
        failures: list[SemelError] = []
        for asked, sentinel in enumerate(list(self._seeds)):
            answer = yield sentinel, command, len(self._seeds) - asked
            if isinstance(answer, SemelError):
                failures.append(answer)
            elif answer:
                others = [each for each in self._seeds if each != sentinel]
                self._seeds = [sentinel, *others]  # it replied, so ask it first next time
                self._master = Address(answer[0].decode(), int(answer[1]))
                return
            else:
                unknown = True
        if unknown:
            raise ServerUnreachable(f"the sentinels know no service {self._service!r}")
        raise _failure(f"none of {len(self._seeds)} sentinels answers", failures)

    def forget(self, address: Address | None = None) -> None:
        master, self._master = self._master, None
        if address is not None and address == master:
            # The sentinel that named it may be the last to learn of the new one. A new list: threads read the old.
            self._seeds = [*self._seeds[1:], *self._seeds[:1]]


class ClusterTopology(Topology):
    """The masters of a cluster by slot."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self.only = None
        from redis.crc import key_slot

        self._slot = key_slot
        self._slots: dict[int, Address] = {}
        self._stale = True
        self._suspect: Address | None = None

    def address_of(self, key: bytes) -> Address | None:
        return None if self._stale else self._slots.get(self._slot(key))

    def masters(self) -> list[Address]:
        return [] if self._stale else sorted(set(self._slots.values()))

    def search(self) -> Search:
        known = list(dict.fromkeys([*self._slots.values(), *self._seeds]))
        failures: list[SemelError] = []
        for asked, node in enumerate(sorted(known, key=lambda node: node == self._suspect)):
            answer = yield node, (b"CLUSTER", b"SLOTS"), len(known) - asked
            if isinstance(answer, SemelError):
                failures.append(answer)
            elif answer:
                self._learn(answer, node)
                return
        raise _failure(f"none of {len(known)} nodes of the Redis Cluster answers", failures)

    def forget(self, address: Address | None = None) -> None:
        self._stale, self._suspect = True, address

    def moved(self, error: Moved, sent_by: Address) -> Address:
        address = super().moved(error, sent_by)
        if not error.asking:
            self._slots[error.slot] = address
        return address

    def _learn(self, ranges: Any, asked: Address) -> None:
        slots: dict[int, Address] = {}
        for first, last, master, *_ in ranges:
            host = master[0].decode() if master[0] else ""
            # Empty or "?": the node does not know its own name. It is the one that we asked.
            address = Address(host if host not in ("", "?") else asked.host, master[1])
            slots.update(dict.fromkeys(range(first, last + 1), address))
        self._slots, self._stale = slots, False


def _failure(what: str, failures: list[SemelError]) -> SemelError:
    """Return the error of a failed search. It quotes a refusal if there is one; if all refused, a retry is useless."""
    refusals = [error for error in failures if isinstance(error, CommandRefused)]
    quoted = (refusals or failures)[-1:]
    kind = CommandRefused if refusals and len(refusals) == len(failures) else ServerUnreachable
    return with_cause(kind(": ".join([what, *map(str, quoted)])), quoted[0].__cause__ if quoted else None)


def topology_of(settings: RedisSettings) -> Topology:
    kinds: dict[str, type[Topology]] = {"redis": Topology, "sentinel": SentinelTopology, "cluster": ClusterTopology}
    return kinds[settings.kind](settings)
