"""Which server has a key: the one there is, the master that the sentinels name, or the cluster's node for its slot.

Looking for it is a generator that yields questions (a server, a command) and is sent the answers, or the error where
there was none; the sync and the async store ask them. With each goes how many are left to ask, itself among them: all
share the time that one connection may take, so that a node which is gone does not use it up.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any, Final, TypeAlias

from semel.errors import SemelError
from semel.stores.redis.replies import Moved, Refused, Unreachable
from semel.stores.redis.settings import Address, Settings

__all__ = ["Ask", "SearchTime", "Topology"]

Ask: TypeAlias = tuple[Address, tuple[bytes, ...], int]
Search: TypeAlias = Generator[Ask, Any, None]
SHORTEST: Final = 0.05
"""Seconds that a node is given to answer, however many there are."""


class SearchTime:
    """What one search may take altogether."""

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds

    def share(self, left: int) -> float:
        """For the next of so many."""
        return max(SHORTEST, (self._until - monotonic()) / left)


class Topology:
    """A single server."""

    sentinels = False
    """Whether ``search`` asks sentinels, which have a password of their own."""

    def __init__(self, settings: Settings) -> None:
        self._seeds = list(settings.addresses)

    def address_of(self, key: bytes) -> Address | None:
        """Who has the key; None: nobody knows, search."""
        return self._seeds[0]

    def masters(self) -> list[Address]:
        """Everyone who takes writes; empty: search."""
        return [self._seeds[0]]

    def search(self) -> Search:
        """Find out."""
        yield from ()

    def forget(self, address: Address | None = None) -> None:
        """This one did not answer, or is no master any more: search before the next try, and ask it last."""

    def moved(self, error: Moved, said_by: Address) -> Address:
        """A node named another one; without a host it means its own."""
        return Address(error.host or said_by.host, error.port)


class SentinelTopology(Topology):
    """The master of a service that sentinels watch."""

    sentinels = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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
                self._seeds = [sentinel, *others]  # it answered: it is asked first the next time
                self._master = Address(answer[0].decode(), int(answer[1]))
                return
            else:
                unknown = True
        if unknown:
            raise Unreachable(f"the sentinels know no service {self._service!r}")
        raise _failure(f"none of {len(self._seeds)} sentinels answers", failures)

    def forget(self, address: Address | None = None) -> None:
        master, self._master = self._master, None
        if address is not None and address == master:
            # Whoever named it may be the last to learn of the new one. A new list, for lanes look at it meanwhile.
            self._seeds = [*self._seeds[1:], *self._seeds[:1]]


class ClusterTopology(Topology):
    """The masters of a cluster by slot."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

    def moved(self, error: Moved, said_by: Address) -> Address:
        address = super().moved(error, said_by)
        if not error.asking:
            self._slots[error.slot] = address
        return address

    def _learn(self, ranges: Any, asked: Address) -> None:
        slots: dict[int, Address] = {}
        for first, last, master, *_ in ranges:
            host = master[0].decode() if master[0] else ""
            # Empty or "?": the node does not know its own name; it is the one we asked.
            address = Address(host if host not in ("", "?") else asked.host, master[1])
            slots.update(dict.fromkeys(range(first, last + 1), address))
        self._slots, self._stale = slots, False


def _failure(what: str, failures: list[SemelError]) -> SemelError:
    """Whoever has refused us is quoted; where all have, they will again."""
    refusals = [error for error in failures if isinstance(error, Refused)]
    quoted = (refusals or failures)[-1:]
    told = Refused if refusals and len(refusals) == len(failures) else Unreachable
    error = told(": ".join([what, *map(str, quoted)]))
    error.__cause__ = quoted[0].__cause__ if quoted else None
    return error


def topology_of(settings: Settings) -> Topology:
    kinds: dict[str, type[Topology]] = {"redis": Topology, "sentinel": SentinelTopology, "cluster": ClusterTopology}
    return kinds[settings.kind](settings)
