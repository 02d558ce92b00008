"""What a relay asks of a store: lanes, leases, starts, holds and dead letters, the same on every database."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from semel.core.messaging.messages import (
    LANES,
    MAX_STARTED_BYTES,
    DeadLetter,
    Failure,
    JoinRelays,
    LeaveRelays,
    LetterFilter,
    RedriveLetters,
    SettleMessages,
    StartMessages,
    lane_of,
)
from tests.messaging.desks import DIALECTS, KINDS, Desk, marked

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
LEASE = 1000.0


@pytest.fixture(params=marked(*DIALECTS))
def desk(request: pytest.FixtureRequest, open_desk: Callable[[str], Desk]) -> Desk:
    return open_desk(request.param)


def start(desk: Desk, relay: bytes, limit: int = 100, after: int = 0) -> list[str] | None:
    found = desk.execute(StartMessages(relay, limit, LEASE, after))
    return None if found is None else [one.id for one in found]


def positions(desk: Desk) -> dict[str, int]:
    return dict(desk.sql("SELECT id, position FROM semel_outbox"))  # type: ignore[arg-type]


class Model:
    """The Ops of a relay, in memory: what they mean."""

    def __init__(self) -> None:
        self.outbox: dict[int, dict[str, Any]] = {}
        self.hold: dict[str, tuple[str, str]] = {}
        self.relay: dict[bytes, tuple[bool, list[int]]] = {}
        self.lane: dict[int, bytes] = {}
        self.dead: list[tuple[str, str, int]] = []

    def join(self, relay: bytes) -> tuple[int, ...]:
        for other, (alive, started) in list(self.relay.items()):
            if not alive:
                for position in started:
                    if position in self.outbox:
                        self.outbox[position]["starts"] += 1
                del self.relay[other]
                self.lane = {lane: owner for lane, owner in self.lane.items() if owner != other}
        self.relay[relay] = (True, [])
        share = -(-LANES // len(self.relay))
        mine = sorted(lane for lane, owner in self.lane.items() if owner == relay)
        for lane in mine[share:]:
            del self.lane[lane]
        free = [lane for lane in range(LANES) if lane not in self.lane and lane not in mine]
        for lane in free[: max(0, share - len(mine))]:
            self.lane[lane] = relay
        return tuple(sorted(lane for lane, owner in self.lane.items() if owner == relay))

    def start(self, relay: bytes, limit: int, after: int = 0, ahead: bool = False) -> list[str] | None:
        if not self.relay.get(relay, (False, []))[0]:
            return [] if ahead else None
        found = [
            position
            for position, row in sorted(self.outbox.items())
            if position > after
            and row["due"]
            and self.lane.get(lane_of(row["stream"], row["id"])) == relay
            and self.hold.get(row["stream"], ("over", ""))[0] == "over"
        ][:limit]
        if not ahead:
            self.relay[relay] = (True, found)
        return [self.outbox[position]["id"] for position in found]

    def settle(self, op: SettleMessages) -> bool | None:
        alive, started = self.relay.get(op.relay, (False, []))
        if not alive:
            return False
        for position in op.sent:
            row = self.outbox.pop(position, None) if position in started else None
            if row is not None and self.hold.get(row["stream"], ("", ""))[0] == "over":
                del self.hold[row["stream"]]
        held: set[str] = set()
        for failure in sorted(op.failed, key=lambda failure: failure.position):
            row = self.outbox.get(failure.position)
            if row is None or failure.position not in started:
                continue
            row["starts"] += 1
            state = "waits" if failure.after else "over"
            if not row["stream"]:
                row["due"] = state == "over"
            elif row["stream"] not in held and self.hold.get(row["stream"], ("", ""))[0] != "parked":
                self.hold[row["stream"]] = (state, failure.reason)
                held.add(row["stream"])
        letters: dict[int, str] = {}
        for letter in sorted(op.dead, key=lambda letter: letter.position):
            row = self.outbox.get(letter.position)
            if row is None or letter.position not in started:
                continue
            letters[letter.position] = letter.reason
            if letter.park and row["stream"]:
                stream = row["stream"]
                given = {each.position for each in op.dead}
                first = not any(
                    each.park and each.position < letter.position and self.outbox[each.position]["stream"] == stream
                    for each in op.dead
                    if each.position in self.outbox
                )
                if first:
                    self.hold[stream] = ("parked", letter.reason)
                    for position, other in self.outbox.items():
                        if other["stream"] == stream and position > letter.position and position not in given:
                            letters[position] = f"its stream is parked since {row['id']}"
        for position in sorted(letters):
            row = self.outbox.pop(position)
            self.dead.append((row["id"], letters[position], row["starts"]))
        whole = all(position in self.outbox for position in op.then)
        self.relay[op.relay] = (True, list(op.then) if whole else [])
        return True if whole else None

    def state(self) -> dict[str, Any]:
        return {
            "outbox": [(row["id"], row["starts"], row["due"]) for _, row in sorted(self.outbox.items())],
            "hold": self.hold,
            "relay": {relay: (alive, sorted(started)) for relay, (alive, started) in self.relay.items()},
            "lane": self.lane,
            "dead": self.dead,
        }


@pytest.mark.parametrize("kind", marked(*KINDS))
def test_every_history_means_the_same_everywhere(kind: str, open_desk: Callable[[str], Desk]) -> None:
    desk = open_desk(kind)
    for seed in range(8 if kind in DIALECTS else 2):
        desk.clear()
        play(desk, random.Random(seed))


def play(desk: Desk, chance: random.Random) -> None:
    model = Model()
    started: dict[bytes, tuple[int, ...]] = {}
    for number in range(70):
        relay = chance.choice((A, B, C))
        action = chance.choice(
            ("add", "add", "add", "join", "start", "start", "settle", "settle", "die", "wait", "leave")
        )
        if action == "add":
            id, stream = f"m{number}", chance.choice(("", "s1", "s2", "s3"))
            desk.add(id, stream)
            model.outbox[positions(desk)[id]] = {"id": id, "stream": stream, "starts": 0, "due": True}
        elif action == "join":
            assert desk.execute(JoinRelays(relay, LEASE)) == model.join(relay)
        elif action == "start":
            limit = chance.choice((1, 3, 100))
            found = desk.execute(StartMessages(relay, limit, LEASE))
            assert (None if found is None else [one.id for one in found]) == model.start(relay, limit)
            started[relay] = tuple(one.position for one in found or ())
        elif action == "settle":
            op = settlement(relay, started.get(relay, ()), chance)
            if op.sent and chance.random() < 0.5:
                after = max(op.sent)
                found = desk.execute(StartMessages(relay, 3, LEASE, after, ahead=True))
                assert [one.id for one in found] == model.start(relay, 3, after, ahead=True)
                op = replace(op, then=tuple(one.position for one in found), lease=LEASE)
            started[relay] = op.then
            for _ in range(chance.choice((1, 2))):  # its answer was lost
                assert desk.execute(op) == model.settle(op)
        elif action == "die" and relay in model.relay:
            desk.end_lease(relay)
            model.relay[relay] = (False, model.relay[relay][1])
        elif action == "wait":
            desk.end_waiting()
            for row in model.outbox.values():
                row["due"] = True
            model.hold = {
                stream: (state if state == "parked" else "over", reason)
                for stream, (state, reason) in model.hold.items()
            }
        elif action == "leave" and chance.random() < 0.3:
            desk.execute(LeaveRelays(relay))
            model.relay.pop(relay, None)
            model.lane = {lane: owner for lane, owner in model.lane.items() if owner != relay}
        assert desk.state() == model.state(), action


def test_what_was_read_ahead_is_started_with_a_new_lease_when_the_batch_before_it_is_settled(desk: Desk) -> None:
    for number in range(6):
        desk.add(f"m{number}", "s")
    desk.execute(JoinRelays(A, 1.0))
    first = desk.execute(StartMessages(A, 2, 1.0))
    ahead = desk.execute(StartMessages(A, 2, 1.0, first[-1].position, ahead=True))
    assert [one.id for one in ahead] == ["m2", "m3"]
    assert desk.state()["relay"][A] == (True, [one.position for one in first])
    op = SettleMessages(A, tuple(one.position for one in first), then=tuple(one.position for one in ahead), lease=LEASE)
    assert desk.execute(op)
    time.sleep(1.1)
    assert desk.state()["relay"][A] == (True, list(op.then)), "the first lease would be over"
    assert desk.execute(op), "a repeat changes nothing"
    desk.end_lease(A)
    assert desk.execute(StartMessages(A, 2, LEASE, ahead=True)) == ()
    assert not desk.execute(op)
    desk.execute(JoinRelays(B, LEASE))
    assert [(one.id, one.starts) for one in desk.execute(StartMessages(B, 9, LEASE))] == [
        ("m2", 1), ("m3", 1), ("m4", 0), ("m5", 0),
    ]  # fmt: skip


def test_what_was_read_ahead_is_not_started_if_a_redrive_has_put_others_before_it(desk: Desk) -> None:
    desk.execute(JoinRelays(A, LEASE))
    desk.add("dead", "s", sequence=1)
    (dead,) = desk.execute(StartMessages(A, 1, LEASE))
    desk.execute(SettleMessages(A, (), dead=(DeadLetter(dead.position, "no", park=False),)))
    desk.add("other")
    desk.add("later", "s", sequence=2)
    (first,) = desk.execute(StartMessages(A, 1, LEASE))
    (ahead,) = desk.execute(StartMessages(A, 1, LEASE, first.position, ahead=True))
    assert desk.execute(RedriveLetters(LetterFilter(), 2**40, 10)) == 1
    op = SettleMessages(A, (first.position,), then=(ahead.position,), lease=LEASE)
    assert desk.execute(op) is None
    assert desk.state()["relay"][A] == (True, [])
    assert start(desk, A) == ["dead", "later"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", marked("postgres", "mysql"))
def test_the_lease_is_renewed_also_if_it_ends_while_the_batch_before_is_deleted(
    kind: str, open_desk: Callable[[str], Desk]
) -> None:
    """Somebody holds a lock on a message for longer than the lease. The relay sends the next batch after that, so
    it must own its lanes until then."""
    desk = open_desk(kind)
    for number in range(2):
        desk.add(f"m{number}")
    desk.execute(JoinRelays(A, 1.0))
    (first,) = desk.execute(StartMessages(A, 1, 1.0))
    (ahead,) = desk.execute(StartMessages(A, 1, 1.0, first.position, ahead=True))
    settled: list[bool] = []
    op = SettleMessages(A, (first.position,), then=(ahead.position,), lease=LEASE)
    thread = threading.Thread(target=lambda: settled.append(desk.execute(op)))
    other = desk.connect()
    with desk.transaction(other):
        desk.sql("SELECT id FROM semel_outbox WHERE position = %s FOR UPDATE", first.position, conn=other)
        thread.start()
        time.sleep(1.1)
    thread.join()
    other.close()
    assert settled == [True]
    assert desk.state()["relay"][A] == (True, [ahead.position])


def settlement(relay: bytes, started: tuple[int, ...], chance: random.Random) -> SettleMessages:
    sent, failed, dead = [], [], []
    for position in started:
        fate = chance.random()
        if fate < 0.4:
            sent.append(position)
        elif fate < 0.7:
            failed.append(Failure(position, f"failed {position}", chance.choice((0.0, 1000.0))))
        elif fate < 0.85:
            dead.append(DeadLetter(position, f"dead {position}", chance.random() < 0.5))
    return SettleMessages(relay, tuple(sent), tuple(failed), tuple(dead))


def test_a_message_comes_back_as_it_was_added(desk: Desk) -> None:
    desk.execute(JoinRelays(A, LEASE))
    desk.add("m1", "s", sequence=7)
    (message,) = desk.execute(StartMessages(A, 10, LEASE))
    assert (message.id, message.stream, message.sequence, message.data) == ("m1", "s", 7, b"m1")
    assert (message.destination, message.headers, message.redrives, message.starts) == ("orders", {"a": "1"}, 0, 0)
    assert abs(message.time - time.time()) < 60


def test_each_message_has_its_own_headers(desk: Desk) -> None:
    """Neighbours with equal headers are read once."""
    desk.execute(JoinRelays(A, LEASE))
    headers = [{"a": "1"}, {"a": "1"}, {}, {}, {"a": "1"}, {"b": "2"}]
    for number, each in enumerate(headers):
        desk.add(f"m{number}", "s", sequence=number + 1)
        desk.sql("UPDATE semel_outbox SET headers = %s WHERE id = %s", json.dumps(each), f"m{number}")
    assert [one.headers for one in desk.execute(StartMessages(A, 10, LEASE))] == headers


def test_large_messages_are_taken_a_few_at_a_time(desk: Desk) -> None:
    """A relay that is behind must not need the memory for a whole batch of them."""
    for number in range(5):
        desk.add(f"m{number}", "s")
    size = MAX_STARTED_BYTES // 2
    desk.sql("UPDATE semel_outbox SET data = %s", bytes(size))
    desk.execute(JoinRelays(A, LEASE))
    taken = []
    while found := desk.execute(StartMessages(A, 100, LEASE)):
        assert desk.execute(SettleMessages(A, tuple(one.position for one in found)))
        taken.append([one.id for one in found])
    assert taken == [["m0", "m1"], ["m2", "m3"], ["m4"]]


def test_a_paused_relay_wakes_late_and_is_refused(desk: Desk) -> None:
    """It settles after another relay has its lanes: nothing changes, and the other one sends the messages again."""
    desk.execute(JoinRelays(A, LEASE))
    desk.add("m1", "s")
    assert start(desk, A) == ["m1"]
    desk.end_lease(A)
    desk.execute(JoinRelays(B, LEASE))
    (found,) = desk.execute(StartMessages(B, 10, LEASE))
    assert (found.id, found.starts) == ("m1", 1)
    assert desk.execute(SettleMessages(A, (found.position,), (), ())) is False
    assert desk.execute(SettleMessages(A, (), (Failure(found.position, "no", 9.0),))) is False
    assert desk.execute(SettleMessages(A, (), (), (DeadLetter(found.position, "no", True),))) is False
    assert start(desk, A) is None
    assert [row[:2] for row in desk.state()["outbox"]] == [("m1", 1)]
    assert desk.execute(SettleMessages(B, (found.position,))) is True
    assert desk.state()["outbox"] == []


def test_a_relay_that_comes_back_counts_what_it_was_sending(desk: Desk) -> None:
    """A message that makes its relay hang for longer than its lease is found, also if no other relay has noticed."""
    desk.execute(JoinRelays(A, LEASE))
    desk.add("m1")
    start(desk, A)
    desk.end_lease(A)
    assert start(desk, A) is None
    assert len(desk.execute(JoinRelays(A, LEASE))) == LANES
    assert [row[:2] for row in desk.state()["outbox"]] == [("m1", 1)]


def test_a_parked_stream_stays_parked(desk: Desk) -> None:
    desk.execute(JoinRelays(A, LEASE))
    for number in range(3):
        desk.add(f"m{number}", "s")
    desk.add("other", "t")
    start(desk, A, limit=1)
    first = positions(desk)["m0"]
    assert desk.execute(SettleMessages(A, (), (), (DeadLetter(first, "too large", True),)))
    assert [row[0] for row in desk.state()["dead"]] == ["m0", "m1", "m2"]
    desk.add("m3", "s")
    assert start(desk, A) == ["other"]
    desk.end_waiting()
    assert start(desk, A) == ["other"]


def test_relays_that_race_for_lanes_never_share_one(desk: Desk) -> None:
    """Each joins, sends and gives up lanes as fast as it can, while others die. Every message is settled once."""
    total = 150
    for number in range(total):
        desk.add(f"m{number}", f"s{number % 7}")
    settled: list[str] = []
    errors: list[BaseException] = []

    def relay(name: bytes) -> None:
        try:
            mine = Desk(desk.kind, desk.url)
            chance = random.Random(name)
            for turn in range(400):
                if turn % 5 == 0 or chance.random() < 0.1:
                    mine.execute(JoinRelays(name, LEASE))
                found = mine.execute(StartMessages(name, 4, LEASE))
                if found is None:
                    mine.execute(JoinRelays(name, LEASE))
                    continue
                if chance.random() < 0.1:
                    mine.end_lease(name)  # it hangs, and has sent nothing
                    continue
                if mine.execute(SettleMessages(name, tuple(one.position for one in found))):
                    settled.extend(f"{one.stream} {one.id[1:]:0>4}" for one in found)
                if len(settled) >= total:
                    break
            mine.execute(LeaveRelays(name))
            mine.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=relay, args=(name,)) for name in (A, B, C)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(settled) == sorted(f"s{number % 7} {number:0>4}" for number in range(total))
    for stream in range(7):
        sent = [one for one in settled if one.startswith(f"s{stream} ")]
        assert sent == sorted(sent)
