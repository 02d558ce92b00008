"""The Redis store for threads: a few connections serve all of them, and Ops that wait meanwhile travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

from semel.core.ops import Complete, Op, Release, Renew, Resolve, SaveStep
from semel.core.policy import Duration
from semel.errors import StoreError, StoreUncertain
from semel.stores.batching.combiner import Combiner
from semel.stores.redis.lanes import HandedOn, Lane
from semel.stores.redis.link import require_redis
from semel.stores.redis.programs import Programs, Watch
from semel.stores.redis.risks import Risk
from semel.stores.redis.servers import Servers
from semel.stores.redis.settings import (
    CONNECT_TIMEOUT,
    CONNECTIONS,
    LISTEN_AGAIN,
    RETRY_FOR,
    TIMEOUT,
    Settings,
)
from semel.stores.redis.threads import Listener

__all__ = ["RedisStore"]

R = TypeVar("R")
_WRITE: Final = frozenset({Complete, SaveStep, Resolve})
"""What replicas and the disk are waited for, where they are, from the first command on."""
_NEVER_WAIT: Final = frozenset({Renew, Release})


class RedisStore:
    """A store in Redis 7 or newer, or Valkey, for threads. Connections are opened when first needed."""

    counts = False
    resumes = False
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
        :param connections: connections to each server; Ops beyond them travel together.
        :param timeout: how long the server may take to answer.
        :param retry_for: how long a lost server, or its successor, is sought before an Op fails.
        :param listen: be woken by publish/subscribe when waiting (one more connection); False polls.
        :param wait_replicas: how many replicas must confirm a claim, an answer, a step; fewer is StoreUncertain.
        :param wait_aof: whether the server must have it on disk as well (``WAITAOF``, Redis 7.2).
        :param wait_timeout: how long they may take to confirm; 1 s by default, 3 s with ``wait_aof``.
        """
        require_redis()
        settings = Settings(
            url, prefix=prefix, connections=connections, timeout=timeout, connect_timeout=connect_timeout,
            retry_for=retry_for, wait_replicas=wait_replicas, wait_aof=wait_aof, wait_timeout=wait_timeout,
        )  # fmt: skip
        programs = Programs(
            settings.prefix, replicas=settings.wait_replicas, aof=settings.wait_aof, wait_ms=settings.wait_ms
        )
        self.wakes = listen
        self._servers = Servers(settings, programs)
        self._listener = Listener(settings, programs.channel, self._servers.masters)
        self._waiting = self._combiner = Combiner([Lane(self._servers) for _ in range(connections)])
        if programs.durable:
            self._combiner = Combiner([Lane(self._servers, waits=False) for _ in range(connections)])

    def execute(self, op: Op[R]) -> R:
        if type(op) in _WRITE:
            return cast(R, self._waiting.execute(op))
        answer = self._combiner.execute(op)
        if not isinstance(answer, HandedOn):
            return cast(R, answer)
        try:
            return cast(R, self._waiting.execute(answer))
        except StoreError as error:
            told = StoreUncertain(str(error))  # a claim is written by then
            told.answered = error.answered or answer.failed(error).answered
            raise told from error.__cause__

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        waits = any(type(op) not in _NEVER_WAIT for op in ops)
        return (self._waiting if waits else self._combiner).execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        if not self._listener.listen(min(seconds, LISTEN_AGAIN)):
            return  # nothing is heard: that was a wait, and the caller looks for itself
        key = self._servers.programs.key(id)
        gate = self._listener.enter(key)  # before we ask to be told, so that no answer can slip in between
        try:
            lease_left = self.execute(Watch(id))
            if lease_left is not None:
                gate.acquire(timeout=max(0.0, min(seconds, lease_left, LISTEN_AGAIN)))
        finally:
            self._listener.leave(key, gate)

    def risks(self) -> list[Risk]:
        """What the settings of the servers may cost, asked now: eviction, lost writes at a restart or a failover."""
        lane = Lane(self._servers)
        try:
            return lane.risks()
        finally:
            lane.close()

    def close(self) -> None:
        self._listener.stop()
        self._combiner.close()
        self._waiting.close()
