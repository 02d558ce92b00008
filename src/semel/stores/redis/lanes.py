"""A lane of a sync store: a connection to each server, over which batches of Ops travel.

A batch is answered when the last of it is. So where some wait for replicas or the disk, there are two kinds of lanes:
those on which is waited, and those that hand such an Op on to them, for no replay should stand behind it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from semel.core.ops import Op, Sweep, Swept
from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError
from semel.stores.redis.link import Link
from semel.stores.redis.programs import Program
from semel.stores.redis.replies import Lost, Moved, NoMemory, NotMaster, Unreachable, unconfirmed
from semel.stores.redis.risks import Risk
from semel.stores.redis.scripts import Command, Kept, Told
from semel.stores.redis.servers import Servers
from semel.stores.redis.settings import Address
from semel.stores.redis.sweeping import walk
from semel.stores.redis.trips import Trip

__all__ = ["HandedOn", "Lane"]

_PENDING: Final = object()
_Found: TypeAlias = tuple[int, "Address | None", Any]
"""What came of one try: the Op's position, the server, and the answer or an error."""


class _Turn:
    """One Op under way: its program on a link, and the command that is next."""

    __slots__ = ("asking", "at", "command", "link", "program")

    def __init__(self, at: int, link: Link, program: Program, asking: bool, command: Command | None = None) -> None:
        self.at = at
        self.link = link
        self.program = program
        self.asking = asking
        self.command = command or next(program)


class HandedOn(Op[Any]):
    """An Op whose program has come to what is kept: it goes on where is waited. Tried again, it starts from the top."""

    __slots__ = ("asking", "command", "id", "link", "op", "program")

    def __init__(self, op: Op[Any], turn: _Turn) -> None:
        self.id = op.id
        self.op = op
        self.link = turn.link
        self.program: Program | None = turn.program
        self.command = turn.command
        self.asking = turn.asking

    def turn(self, at: int, link: Link) -> _Turn | None:
        """Where it stopped, once, and on the same server."""
        program, self.program = self.program, None
        if program is None or link.address != self.link.address:
            return None
        return _Turn(at, link, program, self.asking, self.command)

    def failed(self, error: SemelError) -> StoreError:
        """It cannot go on: the error in the words of its program, which has written, or found an answer, already."""
        program, self.program = self.program, None
        if program is None:
            return unconfirmed(error)
        try:
            program.send((error, None))
        except StoreError as told:
            return told
        raise AssertionError("an error is an answer of what is kept, and no program goes on after it")


class Lane:
    """A connection to each server, opened when first needed, opened again when lost, and by a forked child."""

    gathers = True

    def __init__(self, servers: Servers, *, waits: bool = True) -> None:
        self._servers = servers
        self._waits = waits
        self._links: dict[Address, Link] = {}
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._links = {}

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Ops on different records go out together, those on one record one after the other, as they came."""
        answers: list[Any] = [_PENDING] * len(ops)
        trips: dict[int, Trip] = {}
        redirected: dict[int, Address] = {}
        down = self._servers.down
        while True:
            first: dict[bytes, int] = {}
            for at, op in enumerate(ops):
                if answers[at] is _PENDING:
                    first.setdefault(op.id, at)
            if not first:
                return answers
            pause = 0.0
            for at, where, found in self._wave(ops, list(first.values()), redirected):
                if not isinstance(found, SemelError):
                    answers[at] = found
                    down.discard(where)
                    continue
                if at not in trips:
                    trips[at] = Trip(ops[at], 0.0 if where in down else self._servers.settings.retry_for)
                op = ops[at]
                if isinstance(found, NotMaster) and isinstance(op, HandedOn):
                    op.link.stale = True  # it leads where the claim was not lost: to the old master
                wait = trips[at].pause_after(found)
                if wait is None:
                    answers[at] = trips[at].failure(found)
                    if isinstance(found, (Unreachable, Lost)):
                        down.add(where)
                else:
                    pause = max(pause, wait)
            if pause:
                time.sleep(pause)

    def _wave(self, ops: Sequence[Op[Any]], chosen: list[int], redirected: dict[int, Address]) -> list[_Found]:
        """One try for each of the chosen Ops."""
        found: list[_Found] = []
        turns: list[_Turn] = []
        failed: dict[Address | None, SemelError] = {}
        for at in chosen:
            op = ops[at]
            if type(op) is Sweep:
                found.append((at, None, self._sweep(op)))
                continue
            key = self._servers.programs.key(op.id)
            address = where = redirected.pop(at, None)
            try:
                where = address or self._servers.address_of(key)
                if where in failed:
                    raise failed[where]
                try:
                    link = self._link(where)
                except SemelError as error:
                    failed[where] = error
                    raise
            except SemelError as error:
                found.append((at, where, op.failed(error) if isinstance(op, HandedOn) else error))
                continue
            turn = op.turn(at, link) if isinstance(op, HandedOn) else None
            if turn is None:
                start = self._servers.programs.start
                program = start(op.op if isinstance(op, HandedOn) else op, key, link.clock)
                turn = _Turn(at, link, program, address is not None)
            turns.append(turn)
        while turns:
            if not self._waits:
                on = [turn for turn in turns if isinstance(turn.command, Kept)]
                found += [(turn.at, turn.link.address, HandedOn(ops[turn.at], turn)) for turn in on]
                turns = [turn for turn in turns if turn not in on] if on else turns
            turns = self._step(turns, found, redirected)
        return found

    def _step(self, turns: list[_Turn], found: list[_Found], redirected: dict[int, Address]) -> list[_Turn]:
        """Send the next command of every turn, one trip a link; those that have an answer are done."""
        going: list[_Turn] = []
        groups: dict[tuple[int, bool], list[_Turn]] = {}
        for turn in turns:
            groups.setdefault((id(turn.link), turn.asking), []).append(turn)
        for group in groups.values():
            link = group[0].link
            replies = self._exchange(link, group)
            for turn, reply in zip(group, replies, strict=True):
                if isinstance(reply, tuple) and isinstance(reply[0], NotMaster):
                    self._drop(link)  # what is confirmed there is told as unconfirmed, whatever the reason
                try:
                    if isinstance(reply, NoMemory):
                        turn.command = turn.program.throw(reply)
                    elif isinstance(reply, SemelError):
                        raise reply
                    else:
                        turn.command = turn.program.send(reply)
                    going.append(turn)
                except StopIteration as stop:
                    found.append((turn.at, link.address, stop.value))
                except SemelError as error:
                    if isinstance(error, (NotMaster, Lost)):
                        self._drop(link)
                    elif isinstance(error, Moved):
                        redirected[turn.at] = self._servers.topology.moved(error, link.address)
                    found.append((turn.at, link.address, error))
        return going

    def _exchange(self, link: Link, group: list[_Turn]) -> list[Any]:
        """One trip, and before it what nobody waits for."""
        told = [turn.command for turn in group if isinstance(turn.command, Told)]
        if told:
            link.tell(told)
        asked = [turn.command for turn in group if not isinstance(turn.command, Told)]
        replies = iter(link.exchange(asked, asking=group[0].asking) if asked else ())
        return [None if isinstance(turn.command, Told) else next(replies) for turn in group]

    def _sweep(self, op: Sweep) -> Swept | SemelError:
        unknown = 0
        cursors = self._servers.cursors
        try:
            for address in self._servers.masters():
                steps = walk(self._servers.programs.prefix, op.limit - unknown, cursors.get(address, b"0"))
                try:
                    commands = next(steps)
                    while True:
                        commands = steps.send(self._link(address).exchange(commands))
                except StopIteration as stop:
                    cursors[address] = stop.value[0]
                    unknown += stop.value[1]
        except SemelError as error:
            return error
        return Swept(0, unknown)

    def risks(self) -> list[Risk]:
        """Of all servers that take writes, each named once."""
        found = {
            risk: None for address in self._servers.masters() for risk in self._servers.look_at(self._link(address))
        }
        return list(found)

    def _link(self, address: Address) -> Link:
        link = self._links.get(address)
        if link is None or link.closed or link.stale:
            if link is not None:
                link.close()
            try:
                link = self._links[address] = Link(self._servers.settings, address, self._servers.programs.barrier)
            except SemelError:
                self._servers.topology.forget(address)
                raise
            self._servers.look_once(link)
        return link

    def _drop(self, link: Link) -> None:
        link.close()
        self._links.pop(link.address, None)
        self._servers.topology.forget(link.address)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links = {}
