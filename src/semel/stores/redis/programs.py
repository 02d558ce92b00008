"""The programs of the Ops: generators that yield commands and receive replies, for the sync and the async store.

A first claim is one plain command, and so is a claim that finds a result. Everything else is one call of a script.
Nothing here does I/O. The stores handle error replies, with two exceptions: NoMemory is thrown into the program, and
the reply to a ``DurableCommand`` may be an error.

A store that waits for replicas or the disk returns only results that they have. So an owner notes in its record that
the result is confirmed. A replay that finds no such note writes to the record, and waits for the confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Set
from dataclasses import replace
from time import monotonic_ns
from typing import Any, Final, TypeAlias

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    Listing,
    ListRecords,
    Lookup,
    Measure,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
    Size,
    Sweep,
    Swept,
    WatchRecord,
    make_claimed,
    make_existing,
)
from semel.core.semantics import is_filtered, is_listed, not_a_place, pack_place, resolves, unpack_place
from semel.core.states import State
from semel.core.trail.moments import TRAIL_OPS
from semel.errors import SemelError, StoreError, StoreUncertain
from semel.stores.redis.commands import ASK_AGAIN, RedisCommand, ServerClock, make_command, scripts, template
from semel.stores.redis.failures import NoMemory, NotMaster, unconfirmed, with_answer
from semel.stores.redis.layout import (
    HEAD,
    RUNNING,
    confirmation,
    eight_bytes,
    is_confirmed,
    may_need_sweep,
    milliseconds,
    needs_sweep,
    new_value,
    record_of,
    replay_record,
    state_of_value,
    steps_of,
    token_of,
)
from semel.stores.redis.settings import Address, RedisSettings
from semel.stores.redis.topology import Topology
from semel.stores.redis.trail import trail_program

OpProgram: TypeAlias = Generator[RedisCommand, Any, Any]
WalkProgram: TypeAlias = Generator[tuple[Address, list[RedisCommand]], list[Any], Any]
"""The program of an Op that is not about one record. It yields commands with the server they are for."""

SCAN_COUNT: Final = 50
_CLAIM: Final = template(b"SET", None, None, b"NX", b"GET", b"PX", None)
MAX_SCANS: Final = 400
"""The most calls of SCAN in one sweep of one server. They cover about 20,000 keys, including keys of other programs."""
LIST_COUNT: Final = 100
"""How many keys a list reads at a time."""
SAMPLE: Final = 1000
"""Keys of each server that Measure reads, to estimate how many of all its keys are records."""
WEIGHED: Final = 20
"""Records whose size Measure asks for, to estimate the size of all."""
_SEEN: Final = 8
"""Bytes of an id in the cursor of a list."""


WALKS: Final = frozenset({Sweep, ListRecords, Measure, *TRAIL_OPS})
"""The Ops that are not about one record."""


class RedisPrograms:
    """The programs of one store, which know its prefix, its channel, and whether writes must be confirmed."""

    def __init__(self, settings: RedisSettings) -> None:
        replicas, aof = settings.wait_replicas, settings.wait_aof
        self.prefix = settings.prefix.encode("utf-8")
        self.channel = self.prefix + b"wake"
        self.durable = aof or replicas > 0
        self._replicas, self._aof = replicas, aof
        self._flag = b"1" if self.durable else b"0"
        self._by = confirmation(replicas, aof)
        self._scripts = scripts()
        self._complete_script = self._scripts["complete"]
        self._complete_template = template(
            b"EVALSHA", self._complete_script.sha, b"1", None, None, None, None, None, self._flag, self.channel
        )
        self.by_op: dict[type[Op[Any]], Callable[[Any, bytes, ServerClock], OpProgram]] = {
            Claim: self._claim,
            Renew: self._renew,
            Complete: self._complete,
            Release: self._release,
            SaveStep: self._save_step,
            Lookup: self._lookup,
            Resolve: self._resolve,
            WatchRecord: self._watch,
        }
        """For each kind of Op on one record, its program: a function of the Op, its key, and the clock of the server
        that holds the key."""

    def key(self, id: bytes) -> bytes:
        return self.prefix + id.hex().encode()

    def _claim(self, op: Claim, key: bytes, clock: ServerClock) -> OpProgram:
        ours = monotonic_ns()
        while ours >= clock.ask_at:
            clock.ask_at = ours + ASK_AGAIN  # only this caller asks: the others go on with the old estimate meanwhile
            clock.learn(ours, (yield RedisCommand((b"TIME",))), restart=True)
            ours = monotonic_ns()
        now = ours // 1000 + clock.ahead
        clock.last_token = token = max(clock.last_token + 1, now)
        value, life = new_value(op, token, now)
        try:
            digits = b"%d" % life
            found = yield make_command((_CLAIM % (len(key), key, len(value), value, len(digits), digits), None))
        except NoMemory:
            # A full server refuses even a SET that would write nothing. A stored result can still be replayed.
            reply = yield self._scripts["lookup"].call(key)
            if reply is None or not _claim_changes_nothing(op, *reply):
                raise
            return Existing((yield from self._confirmed_record(op.id, key, reply, clock)))
        answer: Claimed | Existing
        if found is None:
            answer = make_claimed((token, 1, ()))
        elif found[1:2] != RUNNING:
            record = replay_record(op, found, now)
            if self.durable and not is_confirmed(found, self._by):
                yield from self._confirm_result(key, found)
            return make_existing((record,))
        else:
            state_of_value(found)
            reply = yield self._scripts["claim"].call(key, value, life, self.channel)
            if reply[0] == 0:
                return Existing((yield from self._confirmed_record(op.id, key, reply[1:], clock)))
            token = token_of(reply[1])
            clock.note_token(token)
            answer = Claimed(token, reply[2], steps_of(reply[3]))
        if self.durable and not (yield from self._touch(key, eight_bytes(token))):
            # A failover lost it, and the first connection may still lead to the old master. The claim starts again.
            raise NotMaster("Redis has lost the claim before it was confirmed")
        return answer

    def _renew(self, op: Renew, key: bytes, clock: ServerClock) -> OpProgram:
        # Not confirmed: if a failover loses a renewal, the lease ends earlier, and no result depends on it.
        return (yield self._scripts["renew"].call(key, eight_bytes(op.token), milliseconds(op.lease))) == 1

    def _complete(self, op: Complete, key: bytes, clock: ServerClock) -> OpProgram:
        ttl = int(op.ttl * 1000) or 1
        ends = eight_bytes(monotonic_ns() // 1000 + clock.ahead + ttl * 1000)
        token, snapshot, digits = eight_bytes(op.token), op.snapshot, b"%d" % ttl
        packed = self._complete_template % (
            len(key), key, 8, token, len(snapshot), snapshot, len(digits), digits, 8, ends,
        )  # fmt: skip
        complete = make_command((packed, self._complete_script))
        if not self.durable:
            return (yield complete) == 1
        done = yield from self._write(complete)
        if done:
            yield self._scripts["confirm"].call(key, token, self._by.to_bytes()).unanswered()
        return done == 1

    def _release(self, op: Release, key: bytes, clock: ServerClock) -> OpProgram:
        # Not confirmed either: if a release is lost, the lease ends by itself.
        return (yield self._scripts["release"].call(key, eight_bytes(op.token), int(op.to), self.channel)) == 1

    def _save_step(self, op: SaveStep, key: bytes, clock: ServerClock) -> OpProgram:
        name = op.name.encode("utf-8", "surrogatepass")
        step = self._scripts["save_step"].call(key, eight_bytes(op.token), name, op.value, self._flag)
        return (yield from self._write(step)) == 1

    def _lookup(self, op: Lookup, key: bytes, clock: ServerClock) -> OpProgram:
        found = yield self._scripts["lookup"].call(key)
        return None if found is None else (yield from self._confirmed_record(op.id, key, found, clock))

    def _resolve(self, op: Resolve, key: bytes, clock: ServerClock) -> OpProgram:
        ttl = max(1, milliseconds(op.ttl))
        resolve = self._scripts["resolve"].call(
            key, 0 if op.snapshot is None else 1, op.snapshot or b"", ttl, 1 if op.force else 0, self.channel,
            b"" if op.token is None else eight_bytes(op.token), b"".join(b"%d" % state for state in op.states),
        )  # fmt: skip
        changes = {state for state in State if resolves(op, state)}
        return State((yield from self._write(resolve, changes)))

    def _watch(self, op: WatchRecord, key: bytes, clock: ServerClock) -> OpProgram:
        left = yield self._scripts["watch"].call(key)
        return None if left < 0 else left / 1000

    def _confirmed_record(self, id: bytes, key: bytes, reply: Any, clock: ServerClock) -> OpProgram:
        """Return the record that a script has read, once its result is confirmed."""
        value, left, lease_left = reply
        if self.durable and not is_confirmed(value, self._by):
            yield from self._confirm_result(key, value)
        return record_of(id, value, clock.now(), left / 1000, lease_left / 1000)

    def _confirm_result(self, key: bytes, value: bytes) -> OpProgram:
        """Wait for a result whose owner has not noted that it is confirmed.

        If it is gone by now, it has expired, or a failover lost it. Then it is not returned, and the Op starts again.
        """
        token = value[4:12]
        try:
            if not (yield from self._touch(key, token)):
                raise NotMaster("Redis has lost the answer before it was confirmed")
        except StoreError as error:
            raise with_answer(error) from error.__cause__
        yield self._scripts["confirm"].call(key, token, self._by.to_bytes()).unanswered()

    def _touch(self, key: bytes, token: bytes) -> OpProgram:
        """Wait for a record that any connection may have written. Returns whether it is still there."""
        done, reply = yield self._scripts["confirm"].call(key, token, b"").durable()
        if isinstance(done, SemelError):
            raise unconfirmed(done)
        if done:
            self._check_confirmed(reply)
        return done

    def _write(self, command: RedisCommand, changes: Set[int] = frozenset({1})) -> OpProgram:
        """Write, and wait for the confirmation that the store promises, unless the reply says that nothing changed."""
        if not self.durable:
            return (yield command)
        done, reply = yield command.durable()
        if isinstance(done, SemelError):
            raise done
        if done in changes:
            self._check_confirmed(reply)
        return done

    def _check_confirmed(self, reply: Any) -> None:
        if isinstance(reply, SemelError):
            raise unconfirmed(reply)
        written, replicas = reply if self._aof else (1, reply)
        if replicas < self._replicas or not written:
            raise StoreUncertain(
                f"Redis has it, but only {replicas} of {self._replicas} replicas confirmed it in time"
                if written
                else "Redis has it, but has not confirmed in time that it is on disk"
            )

    def walk(
        self, op: Op[Any], masters: list[Address], topology: Topology, cursors: dict[Address, bytes]
    ) -> WalkProgram:
        """Run an Op of ``WALKS``.

        :param cursors: where the last sweep of each server has stopped.
        """
        if type(op) in TRAIL_OPS:
            return self._trail(op, topology)
        if isinstance(op, ListRecords):
            return self._list(op, masters)
        if isinstance(op, Measure):
            return self._measure(masters)
        assert isinstance(op, Sweep)
        return self._sweep(op, masters, cursors)

    def _trail(self, op: Op[Any], topology: Topology) -> WalkProgram:
        """Run an Op of a trail. Its keys may be on many servers."""
        program = trail_program(op, self.prefix)
        try:
            commands = next(program)
            while True:
                places: dict[Address, list[int]] = {}
                for at, (key, _) in enumerate(commands):
                    places.setdefault(topology.require_address(key), []).append(at)
                replies: list[Any] = [None] * len(commands)
                for address, chosen in places.items():
                    found = _raise_error((yield address, [commands[at][1] for at in chosen]))
                    for at, reply in zip(chosen, found, strict=True):
                        replies[at] = reply
                commands = program.send(replies)
        except StopIteration as stop:
            return stop.value

    def _sweep(self, op: Sweep, masters: Iterable[Address], cursors: dict[Address, bytes]) -> WalkProgram:
        """Mark abandoned records as unknown, on one server after the other; yields commands with their server.

        Records that are done, or may be run again, expire by themselves, so ``Swept.removed`` is always 0. A record
        that was abandoned past its ttl and must not be run again stays, and a sweep marks it as unknown. Claims and
        lookups treat such a record the same way before and after the sweep.

        To find them, the keys are walked with SCAN: a bounded part in each sweep, and ``cursors`` holds where the next
        one continues. The pages are small, because calls share the connection and must not wait long for a page. Only
        the header of each key is read, and most keys need nothing more.
        """
        unknown = 0
        for address in masters:
            cursor = cursors.get(address, b"0")
            cursors[address], marked = yield from self._sweep_server(address, op.limit - unknown, cursor)
            unknown += marked
        return Swept(0, unknown)

    def _sweep_server(self, address: Address, limit: int, cursor: bytes) -> WalkProgram:
        """Walk the keys of one server from ``cursor`` on. Returns where it stopped and how many records it marked.

        The cursor is ``b"0"`` after the last page.
        """
        sweep = self._scripts["sweep"]
        unknown = 0
        for _ in range(MAX_SCANS):
            if unknown >= limit:
                break
            ((following, keys),) = _raise_error((yield address, [self._scan(cursor, SCAN_COUNT)]))
            if keys:
                heads = yield address, [RedisCommand((b"GETRANGE", key, 0, HEAD.size - 1)) for key in keys]
                candidates = [
                    (key, head)
                    for key, head in zip(keys, heads, strict=True)
                    if isinstance(head, bytes) and may_need_sweep(head)
                ]
                lives: list[Any] = []
                if candidates:
                    lives = yield address, [RedisCommand((b"PTTL", key)) for key, _ in candidates]
                doubtful = [
                    key
                    for (key, head), pttl in zip(candidates, lives, strict=True)
                    if isinstance(pttl, int) and needs_sweep(head, pttl)
                ]
                chosen = doubtful[: limit - unknown]
                if chosen:
                    unknown += sum(_raise_error((yield address, [sweep.call(key) for key in chosen])))
                if len(chosen) < len(doubtful):
                    break  # the next sweep reads this page again
            cursor = following
            if cursor == b"0":
                break
        return cursor, unknown

    def _list(self, op: ListRecords, masters: list[Address]) -> WalkProgram:
        """A page of records, by SCAN on one server after the other.

        SCAN returns every key that is there from the first call to the last. A page ends after a call of SCAN, or among
        the keys that one call has returned. Then its cursor names those that are dealt with, and the next page makes
        the same call again. Keys that SCAN returns twice in a page are shown once. (It repeats keys only while the
        server makes its table of keys smaller.)
        """
        first, server, seen = ("0", "", b"") if op.after is None else _scan_place(op.after)
        if server and len(masters) > 1:  # a single master may have another address since a failover
            masters = [address for address in masters if str(address) >= server]
            if masters and str(masters[0]) != server:
                first, seen = "0", b""
        done = {seen[at : at + _SEEN] for at in range(0, len(seen), _SEEN)}
        cursor = first.encode()
        found: list[Record] = []
        looked_at, left = 0, op.look
        for address, following in zip(masters, [*masters[1:], None], strict=True):
            while True:
                count = min(left, LIST_COUNT if is_filtered(op) else op.limit - len(found))
                scan = self._scan(cursor, count, b"TYPE", b"string")
                time, (next_cursor, keys) = _raise_error((yield address, [RedisCommand((b"TIME",)), scan]))
                ids = sorted({id for key in keys if (id := self._id(key)) is not None and id[:_SEEN] not in done})
                now = int(time[0]) * 1_000_000 + int(time[1])
                records = yield from self._show(address, ids[:left], now)
                dealt: list[bytes] = []
                for id, record in records:
                    if record is not None and is_listed(op, record):
                        if len(found) == op.limit:
                            break
                        found.append(record)
                    dealt.append(id[:_SEEN])
                looked_at += len(dealt)
                left -= max(len(dealt), count)
                if len(dealt) < len(ids):
                    return Listing(tuple(found), _pack_scan(cursor, address, [seen, *dealt]), looked_at)
                done.update(dealt)
                seen, cursor = b"", next_cursor
                if cursor == b"0" and following is None:
                    return Listing(tuple(found), None, looked_at)
                if left <= 0 or len(found) == op.limit:
                    where = following if cursor == b"0" and following is not None else address
                    return Listing(tuple(found), _pack_scan(cursor, where), looked_at)
                if cursor == b"0":
                    break
        return Listing(tuple(found), None, looked_at)

    def _show(self, address: Address, ids: list[bytes], now: int) -> WalkProgram:
        """Return the ids with their records, or with None where there is none any more."""
        if not ids:
            return []
        show = self._scripts["show"]
        replies = _raise_error((yield address, [show.call(self.key(id)) for id in ids]))
        records = [
            reply and replace(record_of(id, reply[0], now, reply[1] / 1000, reply[2] / 1000), snapshot=None)
            for id, reply in zip(ids, replies, strict=True)
        ]
        return list(zip(ids, records, strict=True))

    def _measure(self, masters: Iterable[Address]) -> WalkProgram:
        """Estimate the number of records from a part of the keys of each server, which may have keys of others too."""
        records, exact, weights = 0, True, []
        for address in masters:
            commands = [RedisCommand((b"DBSIZE",)), RedisCommand((b"SCAN", 0, b"COUNT", SAMPLE))]
            size, (cursor, keys) = _raise_error((yield address, commands))
            ours = [key for key in set(keys) if self._id(key) is not None]
            if cursor == b"0":
                records += len(ours)
            else:
                exact = False
                records += round(size * len(ours) / max(1, len(keys)))
            if ours:
                replies = yield address, [RedisCommand((b"MEMORY", b"USAGE", key)) for key in ours[:WEIGHED]]
                weights += [reply for reply in replies if isinstance(reply, int)]
        room = round(sum(weights) / len(weights) * records) if weights else None
        return Size(records, exact, room, 0.0)

    def _scan(self, cursor: bytes, count: int, *more: bytes) -> RedisCommand:
        return RedisCommand((b"SCAN", cursor, b"MATCH", _escaped(self.prefix) + b"*", b"COUNT", count, *more))

    def _id(self, key: bytes) -> bytes | None:
        """Return the id of the record under this key, or None if it is the key of something else."""
        digits = key[len(self.prefix) :]
        if len(digits) != 32 or not key.startswith(self.prefix):
            return None
        try:
            return bytes.fromhex(digits.decode())
        except ValueError:
            return None


def _scan_place(after: str) -> tuple[str, str, bytes]:
    """Return where a page has ended: the cursor of SCAN, the server, and the keys of that call that are dealt with."""
    place, seen = unpack_place(after)
    cursor, _, server = place.partition("@")
    if not cursor.isdecimal():
        raise not_a_place(after)
    return cursor, server, seen


def _pack_scan(cursor: bytes, server: Address, seen: Iterable[bytes] = ()) -> str:
    return pack_place(f"{cursor.decode()}@{server}", b"".join(seen))


def _claim_changes_nothing(op: Claim, value: bytes, left: int, lease_left: int) -> bool:
    """Whether a claim that cannot be written would only have read this record.

    It would have written if the attempt is the claim's own, or could be taken over.
    """
    return state_of_value(value) is not State.RUNNING or (lease_left > 0 and value[12:20] != eight_bytes(op.nonce))


def _escaped(prefix: bytes) -> bytes:
    """Return the prefix as a pattern of SCAN that matches only itself."""
    return b"".join(b"\\" + bytes((char,)) if char in b"\\*?[]^-" else bytes((char,)) for char in prefix)


def _raise_error(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, SemelError):
            raise reply
    return replies
