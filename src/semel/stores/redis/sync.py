"""The Redis store for threads: a few connections serve all of them, and Ops that wait for one are sent in one batch.

::

    execute(op) ──▶ Combiner ──▶ RedisBatchConnection ──▶ RedisConnection to server 1
                                                     └──▶ RedisConnection to server 2 (of a cluster)

``aio.py`` is the store for event loops. The two are written by hand: there each Op is sent by its own task over a
shared connection, here one thread sends the Ops of many. What they send, and how they judge errors, is in
``programs.py`` and ``failures.py``.

A batch is answered when its last Op is. So in a store that waits for replicas or the disk there are two combiners:
durable Ops go to one whose connections wait, and all others to one that never waits, so that no replay queues behind
a WAIT. An Op that turns out to need a confirmation half-way is moved from the second to the first (``ResumedOp``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from semel.core.ops import Complete, Op, Release, Renew, Resolve, SaveStep, WatchRecord
from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.errors import SemelError, StoreError, StoreUncertain
from semel.stores.batching.combiner import Combiner
from semel.stores.listening import LISTEN_AGAIN, Listener
from semel.stores.redis.commands import DurableCommand, RedisCommand, UnansweredCommand
from semel.stores.redis.connection import RedisConnection, Servers, connect, require_redis
from semel.stores.redis.failures import (
    ConnectionLost,
    Moved,
    NoMemory,
    NotMaster,
    OpRetry,
    ServerUnreachable,
    unconfirmed,
)
from semel.stores.redis.programs import WALKS, OpProgram, RedisPrograms
from semel.stores.redis.settings import (
    CONNECT_TIMEOUT,
    CONNECTIONS,
    RETRY_FOR,
    TIMEOUT,
    Address,
    RedisSettings,
)
from semel.stores.risks import Risk

R = TypeVar("R")
_ALWAYS_DURABLE: Final = frozenset({Complete, SaveStep, Resolve})
"""Ops whose first command must be confirmed, if the store waits at all."""
_NEVER_DURABLE: Final = frozenset({Renew, Release})
_PENDING: Final = object()
_Outcome: TypeAlias = tuple[int, "Address | None", Any]
"""The result of one try: the Op's position, the server, and the answer or an error."""


def risks(url: str) -> list[Risk]:
    """Return the ways in which the servers' settings can lose records."""
    with closing(RedisStore(url, listen=False)) as store:
        return store.risks()


class RedisStore:
    """A store in Redis 7 or newer, or Valkey, for threads. Connections are opened when first needed."""

    counts = False
    resumes = False
    lists = True
    trails = True
    adopt = None
    accept = None

    def __init__(
        self,
        url: str,
        *,
        prefix: str | None = None,
        connections: int = CONNECTIONS,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
        listen: bool = True,
        wait_replicas: int | None = None,
        wait_aof: bool | None = None,
        wait_timeout: Duration | None = None,
    ) -> None:
        """
        :param url: ``redis://[user:password@]host:port/db``, ``rediss://…``, ``redis+sentinel://host,host/service/db``,
            ``redis+cluster://host,host`` or ``unix:///path``.
        :param prefix: what the store's keys begin with; ``semel:`` by default.
        :param connections: connections to each server; while all are busy, Ops wait and are then sent together.
        :param timeout: how long the server may take to reply.
        :param connect_timeout: how long it may take to connect.
        :param retry_for: how long an Op is retried while a server, or its successor, cannot be reached.
        :param listen: be woken by publish/subscribe when waiting (one more connection); False polls.
        :param wait_replicas: how many replicas must confirm a claim, a result, a step; fewer raise StoreUncertain.
        :param wait_aof: whether the server must have it on disk as well (``WAITAOF``, Redis 7.2).
        :param wait_timeout: how long they may take to confirm; 1 s by default, 3 s with ``wait_aof``.
        """
        require_redis()
        settings = RedisSettings(
            url, prefix=prefix, connections=connections, timeout=timeout, connect_timeout=connect_timeout,
            retry_for=retry_for, wait_replicas=wait_replicas, wait_aof=wait_aof, wait_timeout=wait_timeout,
        )  # fmt: skip
        self.wakes = listen
        self._programs = programs = RedisPrograms(settings)
        self._servers = servers = Servers(settings)
        self._listener = Listener(self._receive)
        self._subscriptions = 0
        self._durable = self._combiner = Combiner([RedisBatchConnection(servers, programs) for _ in range(connections)])
        if programs.durable:
            self._combiner = Combiner(
                [RedisBatchConnection(servers, programs, waits=False) for _ in range(connections)]
            )

    def execute(self, op: Op[R]) -> R:
        if type(op) in _ALWAYS_DURABLE:
            return self._durable.execute(op)
        answer: R | ResumedOp = self._combiner.execute(op)
        if not isinstance(answer, ResumedOp):
            return answer
        try:
            return self._durable.execute(answer)  # type: ignore[no-any-return]
        except StoreError as error:
            uncertain = StoreUncertain(str(error))  # a claim has been written by now
            uncertain.answered = error.answered or answer.fail(error).answered
            raise uncertain from error.__cause__

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        durable = any(type(op) not in _NEVER_DURABLE for op in ops)
        return (self._durable if durable else self._combiner).execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        self._listener.wait(self._programs.key(id), seconds, lambda: self.execute(WatchRecord(id)))

    def risks(self) -> list[Risk]:
        """Return the ways in which the servers' settings can lose records: eviction, a restart, a failover."""
        servers = self._servers
        found: dict[Risk, None] = {}
        for address in servers.masters():
            with closing(RedisConnection(servers.settings, address)) as connection:
                found.update(dict.fromkeys(servers.assess(connection)))
        return list(found)

    def open(self) -> None:
        self._listener.resume()
        self._combiner.open()
        self._durable.open()

    def close(self) -> None:
        self._listener.stop()
        self._combiner.close()
        self._durable.close()

    def _receive(self, stop: threading.Event, ready: Callable[[], None], wake: Callable[[Any], None]) -> None:
        """Subscribe to the store's channel. One server is enough: each receives what another publishes."""
        masters = self._servers.masters()
        self._subscriptions += 1  # each time at another one
        raw: Any = connect(self._servers.settings, masters[self._subscriptions % len(masters)])
        try:
            raw.send_command("SUBSCRIBE", self._programs.channel)
            raw.read_response(disable_decoding=True)
            ready()
            while not stop.is_set():
                if raw.can_read(LISTEN_AGAIN):
                    message = raw.read_response(disable_decoding=True)
                    if message[0] == b"message":
                        wake(message[2])
        finally:
            raw.disconnect()


@dataclass(slots=True, eq=False)
class _RunningOp:
    """One Op of a batch that is under way: its program, the connection, and the command that is next."""

    at: int
    connection: RedisConnection
    program: OpProgram
    asking: bool
    command: RedisCommand


class ResumedOp(Op[Any]):
    """An Op whose program has reached a durable command, and that continues on a connection that waits.

    If that connection has to retry it, the Op starts from the beginning.
    """

    __slots__ = ("asking", "command", "connection", "id", "op", "program")

    def __init__(self, op: Op[Any], running: _RunningOp) -> None:
        self.id = op.id
        self.op = op
        self.connection = running.connection
        self.program: OpProgram | None = running.program
        self.command = running.command
        self.asking = running.asking

    def resume(self, at: int, connection: RedisConnection) -> _RunningOp | None:
        """Continue where it stopped, once and only on the same server. Returns None if it must start again."""
        program, self.program = self.program, None
        if program is None or connection.address != self.connection.address:
            return None
        return _RunningOp(at, connection, program, self.asking, self.command)

    def fail(self, error: SemelError) -> StoreError:
        """Return the error of an Op that cannot continue. Its program knows whether it has written or found one."""
        program, self.program = self.program, None
        if program is None:
            return unconfirmed(error)
        try:
            program.send((error, None))
        except StoreError as raised:
            return raised
        raise AssertionError("a program must not continue after an error in reply to a durable command")


class RedisBatchConnection:
    """Runs batches of Ops over one connection to each server.

    Connections are opened when first needed, opened again when lost, and opened anew by a forked child.
    """

    gathers = True

    def __init__(self, servers: Servers, programs: RedisPrograms, *, waits: bool = True) -> None:
        """
        :param waits: wait for confirmations. Otherwise an Op that needs one is answered with a ResumedOp.
        """
        self._servers = servers
        self._programs = programs
        self._waits = waits
        self._connections: dict[Address, RedisConnection] = {}
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._connections = {}

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run a batch. Ops on different records are sent together, those on one record one after the other."""
        answers: list[Any] = [_PENDING] * len(ops)
        retries: dict[int, OpRetry] = {}
        redirections: dict[int, Address] = {}
        down = self._servers.down
        while True:
            first: dict[bytes, int] = {}
            for at, op in enumerate(ops):
                if answers[at] is _PENDING:
                    first.setdefault(op.id, at)
            if not first:
                return answers
            pause = 0.0
            for at, where, outcome in self._try_once(ops, list(first.values()), redirections):
                if not isinstance(outcome, SemelError):
                    answers[at] = outcome
                    down.discard(where)
                    continue
                if at not in retries:
                    retries[at] = OpRetry(ops[at], 0.0 if where in down else self._servers.settings.retry_for)
                op = ops[at]
                if isinstance(outcome, NotMaster) and isinstance(op, ResumedOp):
                    op.connection.stale = True  # it leads to the old master, which still has the lost claim
                wait = retries[at].pause_after(outcome)
                if wait is None:
                    answers[at] = retries[at].failure(outcome)
                    if isinstance(outcome, (ServerUnreachable, ConnectionLost)):
                        down.add(where)
                else:
                    pause = max(pause, wait)
            if pause:
                time.sleep(pause)

    def _try_once(self, ops: Sequence[Op[Any]], chosen: list[int], redirections: dict[int, Address]) -> list[_Outcome]:
        """Try each of the chosen Ops once."""
        outcomes: list[_Outcome] = []
        running: list[_RunningOp] = []
        failed: dict[Address | None, SemelError] = {}
        for at in chosen:
            op = ops[at]
            if type(op) in WALKS:
                outcomes.append((at, None, self._walk(op)))
                continue
            key = self._programs.key(op.id)
            address = where = redirections.pop(at, None)
            try:
                where = address or self._servers.address_of(key)
                if where in failed:
                    raise failed[where]
                try:
                    connection = self._connection(where)
                except SemelError as error:
                    failed[where] = error
                    raise
            except SemelError as error:
                outcomes.append((at, where, op.fail(error) if isinstance(op, ResumedOp) else error))
                continue
            started = op.resume(at, connection) if isinstance(op, ResumedOp) else None
            if started is None:
                plain = op.op if isinstance(op, ResumedOp) else op
                program = self._programs.by_op[type(plain)](plain, key, connection.clock)
                started = _RunningOp(at, connection, program, address is not None, next(program))
            running.append(started)
        while running:
            if not self._waits:
                moved = [each for each in running if isinstance(each.command, DurableCommand)]
                outcomes += [(each.at, each.connection.address, ResumedOp(ops[each.at], each)) for each in moved]
                running = [each for each in running if each not in moved] if moved else running
            running = self._send_next(running, outcomes, redirections)
        return outcomes

    def _send_next(
        self, running: list[_RunningOp], outcomes: list[_Outcome], redirections: dict[int, Address]
    ) -> list[_RunningOp]:
        """Send the next command of every Op, in one round trip to each server. Returns those that are not finished."""
        unfinished: list[_RunningOp] = []
        groups: dict[tuple[int, bool], list[_RunningOp]] = {}
        for each in running:
            groups.setdefault((id(each.connection), each.asking), []).append(each)
        for group in groups.values():
            connection = group[0].connection
            for each, reply in zip(group, self._exchange(connection, group), strict=True):
                if isinstance(reply, tuple) and isinstance(reply[0], NotMaster):
                    self._drop(connection)  # the program reports it as unconfirmed, whatever the reason
                try:
                    if isinstance(reply, NoMemory):
                        each.command = each.program.throw(reply)
                    elif isinstance(reply, SemelError):
                        raise reply
                    else:
                        each.command = each.program.send(reply)
                    unfinished.append(each)
                except StopIteration as stop:
                    outcomes.append((each.at, connection.address, stop.value))
                except SemelError as error:
                    if isinstance(error, (NotMaster, ConnectionLost)):
                        self._drop(connection)
                    elif isinstance(error, Moved):
                        redirections[each.at] = self._servers.topology.moved(error, connection.address)
                    outcomes.append((each.at, connection.address, error))
        return unfinished

    def _exchange(self, connection: RedisConnection, group: list[_RunningOp]) -> list[Any]:
        """Send the commands that nobody waits for, then the others in one round trip."""
        unanswered = [each.command for each in group if isinstance(each.command, UnansweredCommand)]
        if unanswered:
            connection.send_unanswered(unanswered)
        commands = [each.command for each in group if not isinstance(each.command, UnansweredCommand)]
        replies = iter(connection.exchange(commands, asking=group[0].asking) if commands else ())
        return [None if isinstance(each.command, UnansweredCommand) else next(replies) for each in group]

    def _walk(self, op: Op[Any]) -> Any:
        """Run an Op that is not about one record. Returns the answer or the error. A retry starts it again."""
        servers = self._servers
        try:
            walk = self._programs.walk(op, servers.masters(), servers.topology, servers.cursors)
            address, commands = next(walk)
            while True:
                connection = self._connection(address)
                replies = connection.exchange(commands)
                for reply in replies:
                    if isinstance(reply, (NotMaster, ConnectionLost)):
                        self._drop(connection)
                    elif isinstance(reply, Moved):
                        servers.topology.moved(reply, address)
                address, commands = walk.send(replies)
        except StopIteration as stop:
            return stop.value
        except SemelError as error:
            return error

    def _connection(self, address: Address) -> RedisConnection:
        connection = self._connections.get(address)
        if connection is None or connection.closed or connection.stale:
            if connection is not None:
                connection.close()
            try:
                connection = RedisConnection(self._servers.settings, address)
            except SemelError:
                self._servers.topology.forget(address)
                raise
            self._connections[address] = connection
            self._servers.assess_once(connection)
        return connection

    def _drop(self, connection: RedisConnection) -> None:
        connection.close()
        self._connections.pop(connection.address, None)
        self._servers.topology.forget(connection.address)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
