"""Each Op as a generator that yields commands and is sent the replies: written once for the sync and the async store.

A first claim, and a claim that finds the answer, is one plain command. Everything else is one call of a small script.
Nothing here does I/O. Of error replies only NoMemory gets here, thrown in at the yield, and those to what is kept.

A store that waits for replicas or the disk hands out no answer that they do not have. So an owner writes into its
record that they have it, and a replay that finds nothing of the kind makes sure itself: it touches the record, and
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Set
from time import monotonic_ns
from typing import Any, TypeAlias

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    Lookup,
    Op,
    Release,
    Renew,
    Resolve,
    SaveStep,
)
from semel.core.states import State
from semel.core.values import value
from semel.errors import SemelError, StoreError, StoreUncertain
from semel.stores.redis.clock import ServerClock
from semel.stores.redis.replies import NoMemory, NotMaster, answered, unconfirmed
from semel.stores.redis.scripts import Command, scripts
from semel.stores.redis.values import (
    confirmation,
    eight_bytes,
    finished,
    fresh,
    is_confirmed,
    milliseconds,
    shown,
    state_in,
    steps_in,
    token_in,
)

__all__ = ["Program", "Programs", "Watch"]

Program: TypeAlias = Generator[Command, Any, Any]


@value
class Watch(Op["float | None"]):
    """Before waiting: ask to be told when the attempt ends. Answers the seconds of its lease; None: nobody runs it."""

    id: bytes


class Programs:
    """The programs of one store: its prefix, its channel, and whether writes are waited for."""

    def __init__(self, prefix: str, *, replicas: int, aof: bool, wait_ms: int) -> None:
        self.prefix = prefix.encode("utf-8")
        self.channel = self.prefix + b"wake"
        self.durable = aof or replicas > 0
        self.barrier = Command((b"WAITAOF", 1, replicas, wait_ms) if aof else (b"WAIT", replicas, wait_ms))
        self._replicas, self._aof = replicas, aof
        self._flag = b"1" if self.durable else b"0"
        self._by = confirmation(replicas, aof)
        self._scripts = scripts()
        self._start: dict[type[Op[Any]], Callable[[Any, bytes, ServerClock], Program]] = {
            Claim: self._claim,
            Renew: self._renew,
            Complete: self._complete,
            Release: self._release,
            SaveStep: self._save_step,
            Lookup: self._lookup,
            Resolve: self._resolve,
            Watch: self._watch,
        }

    def key(self, id: bytes) -> bytes:
        return self.prefix + id.hex().encode()

    def start(self, op: Op[Any], key: bytes, clock: ServerClock) -> Program:
        return self._start[type(op)](op, key, clock)

    def _claim(self, op: Claim, key: bytes, clock: ServerClock) -> Program:
        if clock.is_old():
            asked_at = monotonic_ns()
            clock.learn(asked_at, (yield Command((b"TIME",))), anew=True)
        now = clock.now()
        token = clock.next_token(now)
        value, life = fresh(op, token, now)
        try:
            found = yield Command((b"SET", key, value, b"NX", b"GET", b"PX", life))
        except NoMemory:
            # A full server refuses even a SET that would write nothing. What is there can still be replayed.
            reply = yield self._scripts["lookup"].call(key)
            if reply is None or not _stands(op, *reply):
                raise
            return Existing((yield from self._handed_out(op.id, key, reply, clock)))
        answer: Claimed | Existing
        if found is None:
            answer = Claimed(token, 1)
        elif state_in(found) is not State.RUNNING:
            if self.durable and not is_confirmed(found, self._by):
                yield from self._made_sure(key, found)
            return Existing(finished(op, found, clock.now()))
        else:
            reply = yield self._scripts["claim"].call(key, value, life, self.channel)
            if reply[0] == 0:
                return Existing((yield from self._handed_out(op.id, key, reply[1:], clock)))
            token = token_in(reply[1])
            clock.saw(token)
            answer = Claimed(token, reply[2], steps_in(reply[3]))
        if self.durable and not (yield from self._touched(key, eight_bytes(token))):
            # To a failover, and the first connection may still lead to the old master. It is made anew.
            raise NotMaster("Redis has lost the claim before it was confirmed")
        return answer

    def _renew(self, op: Renew, key: bytes, clock: ServerClock) -> Program:
        # Not waited for: a renewal that a failover loses is an earlier end of the lease, and no answer hangs on it.
        return (yield self._scripts["renew"].call(key, eight_bytes(op.token), milliseconds(op.lease))) == 1

    def _complete(self, op: Complete, key: bytes, clock: ServerClock) -> Program:
        ttl = max(1, milliseconds(op.ttl))
        ends = eight_bytes(clock.now() + ttl * 1000)
        token = eight_bytes(op.token)
        complete = self._scripts["complete"].call(key, token, op.snapshot, ttl, ends, self._flag, self.channel)
        if not self.durable:
            return (yield complete) == 1
        done = yield from self._kept(complete)
        if done:
            yield self._scripts["confirm"].call(key, token, self._by.to_bytes()).told()
        return done == 1

    def _release(self, op: Release, key: bytes, clock: ServerClock) -> Program:
        # Not waited for either: a release that is lost is a lease that ends by itself.
        return (yield self._scripts["release"].call(key, eight_bytes(op.token), int(op.to), self.channel)) == 1

    def _save_step(self, op: SaveStep, key: bytes, clock: ServerClock) -> Program:
        name = op.name.encode("utf-8", "surrogatepass")
        step = self._scripts["save_step"].call(key, eight_bytes(op.token), name, op.value, self._flag)
        return (yield from self._kept(step)) == 1

    def _lookup(self, op: Lookup, key: bytes, clock: ServerClock) -> Program:
        found = yield self._scripts["lookup"].call(key)
        return None if found is None else (yield from self._handed_out(op.id, key, found, clock))

    def _resolve(self, op: Resolve, key: bytes, clock: ServerClock) -> Program:
        ttl = max(1, milliseconds(op.ttl))
        resolve = self._scripts["resolve"].call(
            key, 0 if op.snapshot is None else 1, op.snapshot or b"", ttl, 1 if op.force else 0, self.channel
        )
        changes = {State.UNKNOWN, State.ABANDONED, *([State.RUNNING] if op.force else [])}
        return State((yield from self._kept(resolve, changes)))

    def _watch(self, op: Watch, key: bytes, clock: ServerClock) -> Program:
        left = yield self._scripts["watch"].call(key)
        return None if left < 0 else left / 1000

    def _handed_out(self, id: bytes, key: bytes, reply: Any, clock: ServerClock) -> Program:
        """The record that a script has read."""
        value, left, lease_left = reply
        if self.durable and not is_confirmed(value, self._by):
            yield from self._made_sure(key, value)
        return shown(id, value, clock.now(), left / 1000, lease_left / 1000)

    def _made_sure(self, key: bytes, value: bytes) -> Program:
        """Of an answer whose owner has not said that it was confirmed. One that is gone meanwhile has expired, or was
        lost to a failover: it is not handed out, and the Op starts from the top."""
        token = value[4:12]
        try:
            if not (yield from self._touched(key, token)):
                raise NotMaster("Redis has lost the answer before it was confirmed")
        except StoreError as error:
            raise answered(error) from error.__cause__
        yield self._scripts["confirm"].call(key, token, self._by.to_bytes()).told()

    def _touched(self, key: bytes, token: bytes) -> Program:
        """Wait for a record that was written on whatever connection; whether it is there still."""
        done, reply = yield self._scripts["confirm"].call(key, token, b"").kept()
        if isinstance(done, SemelError):
            raise unconfirmed(done)
        if done:
            self._check(reply)
        return done

    def _kept(self, command: Command, changes: Set[int] = frozenset({1})) -> Program:
        """Write, and wait until it has got as far as the store promises, unless the answer is that nothing changed."""
        if not self.durable:
            return (yield command)
        done, reply = yield command.kept()
        if isinstance(done, SemelError):
            raise done
        if done in changes:
            self._check(reply)
        return done

    def _check(self, reply: Any) -> None:
        if isinstance(reply, SemelError):
            raise unconfirmed(reply)
        written, replicas = reply if self._aof else (1, reply)
        if replicas < self._replicas or not written:
            raise StoreUncertain(
                f"Redis has it, but only {replicas} of {self._replicas} replicas confirmed it in time"
                if written
                else "Redis has it, but has not confirmed in time that it is on disk"
            )


def _stands(op: Claim, value: bytes, left: int, lease_left: int) -> bool:
    """Whether a claim that cannot be written would have met this record and changed nothing: not where the attempt is
    the claim's own, nor where it could be taken over."""
    return state_in(value) is not State.RUNNING or (lease_left > 0 and value[12:20] != eight_bytes(op.nonce))
