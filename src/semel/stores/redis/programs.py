"""Each Op as a generator that yields commands and is sent the replies: written once for the sync and the async store.

A first claim, and a claim that finds the answer, is one plain command. Everything else is one call of a small script.
Nothing here does I/O. Of error replies only NoMemory gets here, thrown in at the yield.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import monotonic_ns
from typing import Any, Final, TypeAlias

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    Lookup,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
)
from semel.core.states import State
from semel.core.values import value
from semel.errors import StoreUncertain
from semel.stores.redis.clock import ServerClock
from semel.stores.redis.replies import NoMemory
from semel.stores.redis.scripts import Command, scripts
from semel.stores.redis.values import eight_bytes, finished, fresh, milliseconds, shown, state_in, steps_in, token_in

__all__ = ["BARRIER", "Program", "Programs", "Watch"]

Program: TypeAlias = Generator[Command, Any, Any]

BARRIER: Final = Command(())
"""Asks for WAIT or WAITAOF on the connection of the program's writes; answered with how many replicas have them."""


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
            if reply is None or state_in(reply[0]) is State.RUNNING:
                raise
            return Existing(self._shown(op.id, reply, clock))
        answer: Claimed | Existing
        if found is None:
            answer = Claimed(token, 1)
        elif state_in(found) is not State.RUNNING:
            return Existing(finished(op, found, clock.now()))
        else:
            reply = yield self._scripts["claim"].call(key, value, life, self._flag, self.channel)
            if reply[0] == 0:
                return Existing(self._shown(op.id, reply[1:], clock))
            token = token_in(reply[1])
            clock.saw(token)
            answer = Claimed(token, reply[2], steps_in(reply[3]))
        if self.durable:
            yield from self._kept()
        return answer

    def _renew(self, op: Renew, key: bytes, clock: ServerClock) -> Program:
        # Not waited for: a renewal that a failover loses is an earlier end of the lease, and no answer hangs on it.
        return (yield self._scripts["renew"].call(key, eight_bytes(op.token), milliseconds(op.lease))) == 1

    def _complete(self, op: Complete, key: bytes, clock: ServerClock) -> Program:
        ttl = max(1, milliseconds(op.ttl))
        ends = eight_bytes(clock.now() + ttl * 1000)
        done = yield self._scripts["complete"].call(
            key, eight_bytes(op.token), op.snapshot, ttl, ends, self._flag, self.channel
        )
        if done and self.durable:
            yield from self._kept()
        return done == 1

    def _release(self, op: Release, key: bytes, clock: ServerClock) -> Program:
        # Not waited for either: a release that is lost is a lease that ends by itself.
        return (yield self._scripts["release"].call(key, eight_bytes(op.token), int(op.to), self.channel)) == 1

    def _save_step(self, op: SaveStep, key: bytes, clock: ServerClock) -> Program:
        name = op.name.encode("utf-8", "surrogatepass")
        done = yield self._scripts["save_step"].call(key, eight_bytes(op.token), name, op.value, self._flag)
        if done and self.durable:
            yield from self._kept()
        return done == 1

    def _lookup(self, op: Lookup, key: bytes, clock: ServerClock) -> Program:
        found = yield self._scripts["lookup"].call(key)
        return None if found is None else self._shown(op.id, found, clock)

    def _resolve(self, op: Resolve, key: bytes, clock: ServerClock) -> Program:
        ttl = max(1, milliseconds(op.ttl))
        found = yield self._scripts["resolve"].call(
            key, 0 if op.snapshot is None else 1, op.snapshot or b"", ttl, 1 if op.force else 0, self.channel
        )
        state = State(found)
        changed = state in (State.UNKNOWN, State.ABANDONED) or (op.force and state is State.RUNNING)
        if changed and self.durable:
            yield from self._kept()
        return state

    def _watch(self, op: Watch, key: bytes, clock: ServerClock) -> Program:
        left = yield self._scripts["watch"].call(key)
        return None if left < 0 else left / 1000

    def _shown(self, id: bytes, reply: Any, clock: ServerClock) -> Record:
        value, left, lease_left = reply
        return shown(id, value, clock.now(), left / 1000, lease_left / 1000)

    def _kept(self) -> Program:
        """Wait until what was written has got as far as the store promises."""
        reply = yield BARRIER
        written, replicas = reply if self._aof else (1, reply)
        if replicas < self._replicas or not written:
            raise StoreUncertain(
                f"Redis has it, but only {replicas} of {self._replicas} replicas confirmed it in time"
                if written
                else "Redis has it, but has not confirmed in time that it is on disk"
            )
