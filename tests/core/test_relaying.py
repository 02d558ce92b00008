"""The rules of a relay, on a model of the outbox: order, retries, poison, the circuit breaker, leases."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.call import Raised
from semel.core.messaging.messages import (
    BrokerDown,
    DestinationDown,
    JoinRelays,
    LeaveRelays,
    LogOwned,
    Message,
    Outgoing,
    PassLog,
    ReadLog,
    Refused,
    Result,
    Sent,
    SettleMessages,
    StartMessages,
    TakeLog,
    TryAgain,
)
from semel.core.messaging.relaying import (
    BROKER_PAUSE_LONGEST,
    POISON,
    STORE_PAUSE_LONGEST,
    Poison,
    Publish,
    Rest,
)
from semel.errors import StoreUnavailable, StoreUncertain
from semel.observe import events
from tests.messaging.relay_model import BrokerModel, OutboxModel, RelayModel, ordered


def made(pipelines: bool = True, **settings: Any) -> RelayModel:
    outbox = OutboxModel()
    return RelayModel(outbox, BrokerModel(outbox.clock, pipelines), **settings)


def drained(relay: RelayModel, **settings: Any) -> RelayModel:
    """A relay on the same outbox and broker that has sent all that is due."""
    again = RelayModel(relay.outbox, relay.broker, until_idle=True, **settings)
    again.drain()
    return again


def failing(*ids: str, result: Result) -> Any:
    return lambda message: result if message.id in ids else Sent()


def test_it_sends_all_in_batches_and_leaves() -> None:
    relay = made(until_idle=True)
    messages = [relay.outbox.add(f"s{number % 3}") for number in range(25)]
    report = relay.drain()
    assert (report.sent, report.failed, report.dead) == (25, 0, 0)
    assert relay.broker.ids() == [message.id for message in messages]
    assert [len(batch) for batch in relay.broker.batches] == [10, 10, 5]
    assert not relay.outbox.rows
    assert not relay.outbox.relays
    assert isinstance(relay.outbox.ops[-1], LeaveRelays)
    assert [event.count for event in relay.named(events.Published)] == [10, 10, 5]


def test_it_polls_ever_more_rarely_until_a_wake_up() -> None:
    relay = made()
    rests: list[float] = []
    while len(rests) < 9:
        relay.step()
        if isinstance(relay.request, Rest):
            rests.append(relay.request.seconds)
    assert rests[:4] == [0.005, 0.01, 0.02, 0.04]
    assert max(rests) <= 1.0
    relay.send(True)
    relay.run_until(lambda: isinstance(relay.request, Rest))
    assert relay.request.seconds == 0.005


def test_it_joins_again_only_with_nothing_under_way() -> None:
    relay = made(lease=3.0)
    under_way = 0
    for _ in range(300):
        relay.outbox.add("s")
        request = relay.request
        if isinstance(request, JoinRelays):
            assert not under_way
        relay.step()
        if isinstance(request, StartMessages):
            under_way = len(relay.outbox.relays[request.relay].started)
        elif isinstance(request, SettleMessages):
            under_way = 0
        elif isinstance(request, Publish):
            relay.outbox.clock.now += 0.3
    joins = sum(isinstance(op, JoinRelays) for op in relay.outbox.ops)
    assert joins >= 10


# Failures


def test_a_failure_is_tried_again_after_growing_pauses() -> None:
    relay = made(tries=5, jitter=lambda: 0.5)
    relay.outbox.add("s")
    relay.outbox.add("s")
    relay.broker.answer = failing("m1", result=TryAgain("busy"))
    relay.run_until(lambda: relay.outbox.starts()["m1"] == 4)
    afters = [op.failed[0].after for op in relay.outbox.ops if isinstance(op, SettleMessages) and op.failed]
    assert afters == [0.5, 1.0, 2.0, 4.0]
    assert relay.outbox.starts()["m2"] == 0, "it failed because of the one before"
    assert relay.broker.ids() == []
    relay.broker.answer = lambda message: Sent()
    relay.run_until(lambda: not relay.outbox.rows)
    assert relay.broker.ids() == ["m1", "m2"]
    assert [event.starts for event in relay.named(events.PublishFailed)] == [1, 2, 3, 4]


def test_the_broker_says_when_to_try_again() -> None:
    relay = made(until_idle=True)
    relay.outbox.add()
    relay.broker.answer = lambda message: TryAgain("slow down", 17.0)
    relay.drain()
    assert relay.outbox.rows[1].due == relay.outbox.clock() + 17.0


@pytest.mark.parametrize("result", [TryAgain("busy"), Refused("no such topic")])
@pytest.mark.parametrize("policy", POISON)
def test_poison_follows_the_policy_of_its_stream(policy: Poison, result: TryAgain | Refused) -> None:
    relay = made(policy=policy, tries=3)
    for _ in range(3):
        relay.outbox.add("s")
    relay.outbox.add("other")
    relay.broker.answer = failing("m1", result=result)
    starts = 3 if isinstance(result, TryAgain) else 1
    relay.run_until(lambda: relay.outbox.starts().get("m1", starts) >= starts)
    relay.run_until(lambda: isinstance(relay.request, Rest))
    relay.step()
    relay.run_until(lambda: isinstance(relay.request, Rest))
    assert "m4" in relay.broker.ids()
    if policy == "block":
        assert set(relay.outbox.rows) == {1, 2, 3}
        assert len(relay.named(events.StreamBlocked)) == 1
        assert not relay.outbox.dead
        relay.broker.answer = lambda message: Sent()
        relay.run_until(lambda: not relay.outbox.rows)
        assert relay.broker.ids() == ["m4", "m1", "m2", "m3"]
    else:
        assert relay.outbox.dead["m1"] == (result.reason, starts - 1)
        assert [event.key for event in relay.named(events.PublishGivenUp)] == ["m1"]
        assert set(relay.outbox.dead) == ({"m1"} if policy == "skip" else {"m1", "m2", "m3"})
        assert ("m2" in relay.broker.ids()) == (policy == "skip")


def test_a_blocked_stream_is_tried_for_ever_with_the_longest_pause() -> None:
    relay = made(policy="block", tries=2)
    relay.outbox.add("s")
    relay.broker.answer = lambda message: TryAgain("busy")
    times: list[float] = []
    for _ in range(5000):
        if isinstance(relay.request, Publish):
            times.append(relay.outbox.clock())
        relay.step()
    pauses = [later - earlier for earlier, later in pairwise(times[3:])]
    assert len(pauses) > 5
    assert all(60 <= pause < 66 for pause in pauses)


def test_a_message_that_is_refused_and_blocks_its_stream_is_soon_tried_again() -> None:
    """A queue that does not exist is often created a moment later, by its consumer."""
    relay = made(policy="block", tries=6)
    relay.outbox.add("s")
    relay.broker.answer = lambda message: Refused("no such queue") if len(times) < 4 else Sent()
    times: list[float] = []
    while relay.outbox.rows:
        if isinstance(relay.request, Publish):
            times.append(relay.outbox.clock())
        relay.step()
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert [1 <= pauses[0] < 2.5, 2 <= pauses[1] < 3.5, 4 <= pauses[2] < 5.5] == [True] * 3  # it polls once a second
    assert len(relay.named(events.StreamBlocked)) == 1


def test_a_message_that_blocks_its_stream_shows_the_reason_while_it_rests() -> None:
    relay = made(policy="block", tries=2)
    relay.outbox.add("s")
    relay.broker.answer = lambda message: Refused("no such queue")
    relay.run_until(lambda: len(relay.named(events.PublishFailed)) > 10)
    assert {event.error for event in relay.named(events.PublishFailed)} == {"no such queue"}


def test_messages_after_a_failure_are_deleted_only_if_the_broker_took_them() -> None:
    """A broker that does not keep its promise: the third message was sent, and must not be sent again."""
    relay = made(until_idle=True)
    relay.broker.pipelines = False
    for _ in range(4):
        relay.outbox.add("s")
    answers: dict[str, Result] = {"m2": TryAgain("busy"), "m4": Refused("bad")}
    relay.broker.answer = lambda message: answers.get(message.id, Sent())
    relay.drain()
    assert relay.broker.ids() == ["m1", "m3"]
    assert relay.outbox.starts() == {"m2": 1, "m4": 0}
    assert not relay.outbox.dead


def test_a_message_that_is_too_large_is_not_sent_and_holds_its_stream() -> None:
    relay = made(until_idle=True, largest=500, policy="park")
    relay.outbox.add("s", data=b"x" * 600)
    relay.outbox.add("s")
    relay.outbox.add("t")
    relay.drain()
    assert relay.broker.ids() == ["m3"]
    assert set(relay.outbox.dead) == {"m1", "m2"}
    assert "larger" in relay.outbox.dead["m1"][0]


def test_waves_for_a_broker_that_does_not_pipeline() -> None:
    relay = made(pipelines=False, until_idle=True)
    for stream in ("a", "a", "b", "", "a", "b", ""):
        relay.outbox.add(stream)
    relay.broker.answer = failing("m3", result=TryAgain("busy"))
    relay.drain()
    assert relay.broker.batches == [["m1", "m3", "m4", "m7"], ["m2"], ["m5"]]
    assert relay.outbox.starts() == {"m3": 1, "m6": 0}


# The broker is down


def test_a_broker_that_is_down_costs_no_attempt() -> None:
    relay = made(tries=2)
    for number in range(5):
        relay.outbox.add(f"s{number}")
    relay.broker.answer = lambda message: BrokerDown("refused")
    times: list[tuple[float, int]] = []
    for _ in range(400):
        if isinstance(relay.request, Publish):
            times.append((relay.outbox.clock(), len(relay.request.messages)))
        relay.step()
    assert set(relay.outbox.starts().values()) == {0}
    assert [size for _, size in times] == [5, *[1] * (len(times) - 1)], "after the first batch, one at a time"
    pauses = [round(later[0] - earlier[0], 3) for earlier, later in pairwise(times)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) == BROKER_PAUSE_LONGEST
    assert len(relay.named(events.BrokerLost)) == 1
    assert all(not row.started for row in relay.outbox.relays.values())
    assert len(relay.outbox.relays) == 1, "it keeps its lease meanwhile"
    relay.broker.answer = lambda message: Sent()
    relay.run_until(lambda: not relay.outbox.rows)
    assert len(relay.named(events.BrokerBack)) == 1
    assert [len(batch) for batch in relay.broker.batches[-2:]] == [1, 4]


def test_a_message_that_is_not_published_does_not_prove_that_the_broker_is_up() -> None:
    relay = made(largest=100, policy="skip")
    relay.outbox.add(data=b"x" * 200, starts=0)
    relay.outbox.add()
    relay.broker.answer = lambda message: BrokerDown("refused")
    relay.run_until(lambda: bool(relay.named(events.BrokerLost)))
    relay.outbox.add(data=b"x" * 200)
    relay.outbox.rows = dict(sorted(relay.outbox.rows.items(), reverse=True))
    for _ in range(50):
        relay.step()
    assert not relay.named(events.BrokerBack)


def test_a_destination_that_is_down_waits_alone_and_costs_no_attempt() -> None:
    relay = made(tries=2)
    down = [relay.outbox.add(f"s{number}", destination="down") for number in (0, 0, 1, 2)]
    down += [relay.outbox.add(destination="down") for _ in range(25)]  # more than a batch
    relay.broker.answer = lambda message: DestinationDown("full") if message.destination == "down" else Sent()
    times: list[float] = []
    for step in range(400):
        if isinstance(relay.request, Publish) and relay.request.messages[0].destination == "down":
            times.append(relay.outbox.clock())
        if step in (50, 100, 150, 200):
            relay.outbox.add("t", destination="up")
        relay.step()
    assert [message.sequence for message in relay.broker.taken] == [1, 2, 3, 4]
    assert set(relay.outbox.starts().values()) == {0}
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert all(pause <= found <= pause + 1.0 for pause, found in zip((0.5, 1.0, 2.0, 4.0), pauses[:4], strict=True))
    assert [event.destination for event in relay.named(events.BrokerLost)] == ["down"]
    assert relay.report.destinations_down == 1
    assert not relay.report.broker_down
    relay.broker.answer = lambda message: Sent()
    relay.run_until(lambda: not relay.outbox.rows)
    assert [event.destination for event in relay.named(events.BrokerBack)] == ["down"]
    assert relay.report.destinations_down == 0
    assert sorted(relay.broker.ids()[4:]) == sorted(message.id for message in down)
    assert all(map(ordered, relay.broker.first_deliveries().values()))


def test_a_destination_that_holds_the_others_up_rests() -> None:
    relay = made(tries=3, batch=2)

    def answer(message: Message) -> Result:
        if message.destination != "stuck":
            return Sent()
        relay.outbox.clock.now += 20.0  # until the deadline
        return TryAgain("not confirmed")

    relay.broker.answer = answer
    for _ in range(6):
        relay.outbox.add(destination="stuck")
        relay.outbox.add(destination="up")
    began = relay.outbox.clock()
    relay.run_until(lambda: len(relay.broker.taken) == 6)
    assert relay.outbox.clock() - began < 45, "not 20 s for each"
    assert [event.destination for event in relay.named(events.BrokerLost)] == ["stuck"]


def test_draining_ends_when_the_broker_is_down() -> None:
    relay = made(until_idle=True)
    relay.outbox.add()
    relay.broker.answer = lambda message: BrokerDown("refused")
    assert relay.drain().broker_down == "refused"
    assert relay.outbox.starts() == {"m1": 0}


# Relays that die, pause and rebalance


def killed(outbox: OutboxModel, broker: BrokerModel, poison: str, **settings: Any) -> int:
    """Run relays that die when they publish this message, until it is gone. Returns how many died."""
    for deaths in range(50):
        relay = RelayModel(outbox, broker, **settings)
        for _ in range(500):
            if isinstance(relay.request, Publish) and poison in [message.id for message in relay.request.messages]:
                break
            if poison not in outbox.starts():
                while not isinstance(relay.request, Rest):
                    relay.step()
                return deaths
            relay.step()
        outbox.clock.now += 31.0
    raise AssertionError("it was never given up")


@pytest.mark.parametrize("policy", ["park", "skip"])
def test_a_message_that_kills_its_relay_reaches_the_dead_letters_alone(policy: Poison) -> None:
    outbox = OutboxModel()
    broker = BrokerModel(outbox.clock)
    for number in range(8):
        outbox.add(f"s{number % 4}")
    assert killed(outbox, broker, "m3", policy=policy, tries=6) == 6
    assert set(outbox.dead) == ({"m3"} if policy == "skip" else {"m3", "m7"})
    assert set(broker.ids()) == {f"m{number}" for number in range(1, 9)} - set(outbox.dead)
    assert outbox.dead["m3"][1] == 6


def test_the_innocent_in_the_batch_of_a_killer_are_not_given_up_with_it() -> None:
    outbox = OutboxModel()
    broker = BrokerModel(outbox.clock)
    for number in range(8):
        outbox.add(f"s{number}")
    assert killed(outbox, broker, "m3", policy="skip", tries=1) == 3
    assert set(outbox.dead) == {"m3"}
    assert len(set(broker.ids())) == 7


def test_a_killer_that_blocks_its_stream_lets_the_others_pass() -> None:
    outbox = OutboxModel()
    broker = BrokerModel(outbox.clock)
    outbox.add("killer")
    for number in range(30):
        outbox.add(f"s{number % 5}")
    deaths = 0
    start = outbox.clock()
    while outbox.clock() < start + 2000:
        relay = RelayModel(outbox, broker, policy="block", tries=3)
        while outbox.clock() < start + 2000:
            if isinstance(relay.request, Publish) and "m1" in [message.id for message in relay.request.messages]:
                deaths += 1
                break
            relay.step()
        outbox.clock.now += 31.0
    assert set(broker.ids()) == {f"m{number}" for number in range(2, 32)}
    assert set(outbox.rows) == {1}
    assert 5 <= deaths <= 2000 / 60 + 3, "it rests between two of its victims"


def test_a_relay_that_was_too_slow_does_not_settle_and_joins_under_a_new_name() -> None:
    relay = made(policy="skip")
    relay.outbox.add("s")
    relay.run_until(lambda: isinstance(relay.request, SettleMessages))
    relay.outbox.clock.now += 31.0
    first = relay.request.relay
    relay.run_until(lambda: not relay.outbox.rows)
    assert relay.broker.ids() == ["m1", "m1"]
    assert [event.sent for event in relay.named(events.RelayLate)] == [1]
    assert first not in relay.outbox.relays
    assert [event.count for event in relay.named(events.Published)] == [1]


def test_a_relay_that_was_paused_before_it_publishes_does_not_publish() -> None:
    relay = made()
    relay.outbox.add("s")
    relay.run_until(lambda: isinstance(relay.request, StartMessages))
    found = relay.outbox.execute(relay.request)
    relay.outbox.clock.now += 25.0  # the lease still lasts, but its margin has begun
    relay.send(found)
    assert isinstance(relay.request, SettleMessages)
    assert relay.request.sent == ()


def test_relays_share_the_lanes_and_rebalance() -> None:
    outbox = OutboxModel()
    broker = BrokerModel(outbox.clock)
    relays = [RelayModel(outbox, broker) for _ in range(3)]

    def run(*some: RelayModel) -> list[int]:
        for _ in range(100):
            for relay in some:
                relay.step()
        return sorted(len([lane for lane, owner in outbox.lanes.items() if owner == name]) for name in outbox.relays)

    assert run(relays[0]) == [64]
    assert run(*relays) == [20, 22, 22]
    relays[0].stopping = True
    while relays[0].step():
        pass
    assert run(*relays[1:]) == [32, 32]
    outbox.clock.now += 31.0  # both are late; one of them is dead
    assert run(relays[2])[-1] == 64


def test_store_errors_pause_the_relay_and_lose_nothing() -> None:
    relay = made()
    for number in range(40):
        relay.outbox.add(f"s{number % 3}")
    chance = random.Random(1)
    relay.fail = lambda op: StoreUnavailable("away") if chance.random() < 0.4 else None
    relay.run_until(lambda: not relay.outbox.rows, 5000)
    assert relay.broker.ids() == [f"m{number}" for number in range(1, 41)], (
        "settled while the lease lasts: none is sent twice"
    )
    assert relay.named(events.StoreFailed)


def test_a_join_whose_answer_was_lost_is_repeated_under_the_same_name() -> None:
    """Under another name the lanes of the first one would wait for the end of its lease."""
    relay = made()
    message = relay.outbox.add("s")
    relay.outbox.execute(relay.request)
    relay.send(Raised(StoreUncertain("no answer")))
    relay.run_until(lambda: message.id in relay.broker.ids())
    assert len(relay.outbox.relays) == 1
    assert relay.outbox.clock() < 1001


def test_a_relay_that_cannot_settle_leaves_under_its_old_name_before_it_joins_again() -> None:
    """The last settle may have renewed the lease, and its answer was lost. The lanes must not rest for that lease, and
    what was read ahead and never sent must not count a start."""
    relay = made()
    for number in range(20):
        relay.outbox.add(f"s{number % 3}")
    end = relay.outbox.clock() + relay.plan.lease
    relay.lose = lambda op: StoreUncertain("no answer") if isinstance(op, SettleMessages) else None
    relay.run_until(lambda: isinstance(relay.request, SettleMessages))
    relay.run_until(lambda: isinstance(relay.request, JoinRelays | LeaveRelays))
    relay.lose = lambda op: None
    relay.run_until(lambda: not relay.outbox.rows)
    assert relay.outbox.clock() < end + STORE_PAUSE_LONGEST
    assert len(relay.outbox.relays) == 1
    assert set(relay.broker.ids()) == {f"m{number}" for number in range(1, 21)}
    published = [each for request in relay.requests if isinstance(request, Publish) for each in request.messages]
    assert {each.starts for each in published if isinstance(each, Outgoing)} == {0}


def test_a_relay_that_stops_in_an_outage_leaves_under_its_old_name() -> None:
    relay = made()
    relay.outbox.add("s")
    end = relay.outbox.clock() + relay.plan.lease
    relay.run_until(lambda: isinstance(relay.request, SettleMessages))
    relay.fail = lambda op: None if isinstance(op, LeaveRelays) else StoreUnavailable("away")
    relay.run_until(lambda: relay.outbox.clock() >= end)
    relay.stopping = True
    relay.drain()
    assert relay.outbox.relays == {}


@pytest.mark.parametrize("kind", [JoinRelays, StartMessages, SettleMessages])
def test_draining_raises_the_error_of_the_store_and_keeps_no_lanes(kind: type) -> None:
    relay = made(until_idle=True)
    relay.outbox.add("s")
    relay.fail = lambda op: StoreUncertain("no answer") if isinstance(op, kind) else None
    with pytest.raises(StoreUncertain):
        relay.drain()
    assert relay.outbox.relays == {}, "the next one must not wait for the end of a lease"


# Reading on


def test_it_reads_on_from_a_full_batch_and_looks_back_for_late_commits() -> None:
    relay = made()
    late = relay.outbox.add("late", visible=False)
    for number in range(100):
        relay.outbox.add(f"s{number % 7}")
    relay.run_until(lambda: len(relay.broker.taken) == 60)
    afters = [op.after for op in relay.outbox.ops if isinstance(op, StartMessages)]
    assert afters[:3] == [0, 11, 21]
    relay.outbox.commit()
    relay.run_until(lambda: not relay.outbox.rows)
    assert late.id in relay.broker.ids()


def test_while_a_batch_is_sent_the_next_one_is_read_and_settling_starts_it() -> None:
    relay = made(until_idle=True)
    for number in range(105):
        relay.outbox.add(f"s{number % 7}")
    relay.drain()
    assert len(relay.broker.taken) == 105
    ops = [op for op in relay.outbox.ops if isinstance(op, StartMessages | SettleMessages)]
    assert [op.ahead for op in ops if isinstance(op, StartMessages)] == [False, True, True, True, True, False]
    assert [len(op.then) for op in ops if isinstance(op, SettleMessages)] == [10, 40, 40, 5, 0]


@pytest.mark.parametrize(("seconds", "sizes"), [(0.06, [10, 10, 40, 40]), (0.07, [10, 10, 10, 10])])
def test_a_batch_is_large_only_if_the_one_before_it_was_sent_in_a_small_part_of_the_lease(
    seconds: float, sizes: list[int]
) -> None:
    """Otherwise a slow broker would not have it by the deadline."""
    relay = made(until_idle=True, lease=3.0)
    for _ in range(100):
        relay.outbox.add()
    clock, count = relay.outbox.clock, 0

    def answer(message: Message) -> Result:
        nonlocal count
        count += 1
        if count % 10 == 1:
            clock.now += seconds
        return Sent()

    relay.broker.answer = answer
    relay.drain()
    assert [len(batch) for batch in relay.broker.batches][: len(sizes)] == sizes


def test_what_was_read_ahead_does_not_overtake_a_failure() -> None:
    relay = made()
    for number in range(30):
        relay.outbox.add("s" if number in (3, 15) else "")
    first, second = (message.id for message in (relay.outbox.rows[4].message, relay.outbox.rows[16].message))
    relay.broker.answer = lambda message: TryAgain("busy") if message.id == first else Sent()
    relay.run_until(lambda: len(relay.broker.taken) == 28)
    assert second not in relay.broker.ids()
    relay.broker.answer = lambda message: Sent()
    relay.run_until(lambda: not relay.outbox.rows)
    assert relay.broker.ids()[-2:] == [first, second]


def test_a_relay_that_stops_does_not_start_what_it_has_read_ahead() -> None:
    relay = made()
    for _ in range(30):
        relay.outbox.add()
    relay.run_until(lambda: isinstance(relay.request, SettleMessages))
    relay.stopping = True
    relay.drain()
    assert len(relay.broker.taken) == 20, "the second batch was started when the first one was settled"
    assert not relay.outbox.relays


def test_what_was_read_ahead_is_left_to_the_others_if_the_lease_has_ended() -> None:
    relay = made()
    for _ in range(30):
        relay.outbox.add()
    relay.run_until(lambda: isinstance(relay.request, SettleMessages))
    relay.outbox.clock.now += 31.0
    relay.step()
    assert isinstance(relay.request, JoinRelays)


def test_what_was_read_ahead_does_not_overtake_what_is_redriven_meanwhile() -> None:
    relay = made()
    relay.outbox.add("s")
    redriven = relay.outbox.rows.pop(1)
    for number in range(20):
        relay.outbox.add("s" if number == 15 else "")
    relay.run_until(lambda: isinstance(relay.request, SettleMessages))
    assert relay.request.then
    relay.outbox.rows |= {100: redriven, 101: relay.outbox.rows.pop(17)}
    relay.run_until(lambda: not relay.outbox.rows)
    assert [message.sequence for message in relay.broker.taken if message.stream] == [1, 2]
    assert len(relay.broker.taken) == 21
    assert not relay.named(events.RelayLate)


def test_reading_on_does_not_overtake_a_late_commit_of_the_same_stream() -> None:
    """The trap of every cursor: position 1 commits when position 11 has been sent. Position 12 must wait for it."""
    relay = made()
    relay.outbox.add("late", visible=False)
    for number in range(10):
        relay.outbox.add(f"s{number}")
    relay.run_until(lambda: len(relay.broker.taken) == 10)
    relay.outbox.commit()
    relay.outbox.add("late")
    for number in range(9):
        relay.outbox.add(f"s{number}")
    relay.run_until(lambda: not relay.outbox.rows)
    assert relay.broker.first_deliveries()["late"] == [1, 2]


# Whatever happens


@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(POISON),
    pipelines=st.booleans(),
    trouble=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_order_and_completeness_whatever_happens(seed: int, policy: Poison, pipelines: bool, trouble: float) -> None:
    """Relays die, sleep and lose the store; the broker refuses, delays and goes down; transactions commit late."""
    chance = random.Random(seed)
    outbox = OutboxModel()
    broker = BrokerModel(outbox.clock, pipelines)
    tries = 3
    failures: dict[str, int] = {}
    refused: set[str] = set()

    def answer(message: Message) -> Result:
        if chance.random() >= trouble:
            return Sent()
        match chance.randrange(5):
            case 4:
                return DestinationDown("away")
            case 0:
                refused.add(message.id)
                return Refused("bad")
            case 1:
                return BrokerDown("away")
            case _:
                failures[message.id] = failures.get(message.id, 0) + 1
                return TryAgain("busy", chance.choice([None, 0.0, 3.0]))

    def relay() -> RelayModel:
        made = RelayModel(
            outbox, broker, policy=policy, tries=tries, batch=chance.choice([1, 4, 50]), jitter=chance.random
        )
        made.fail = lambda op: StoreUnavailable("away") if chance.random() < trouble / 3 else None
        made.lose = lambda op: StoreUncertain("no answer") if chance.random() < trouble / 3 else None
        return made

    broker.answer = answer
    relays = [relay() for _ in range(chance.randint(1, 3))]
    asleep: dict[int, float] = {}
    added: list[Message] = []
    open_transactions: list[list[int]] = []
    deaths = 0
    for _ in range(800):
        if len(added) < 60 and chance.random() < 0.3:
            before = set(outbox.rows)
            # A transaction that has locked a stream keeps others from adding to it until it commits.
            locked = {outbox.rows[p].message.stream for group in open_transactions for p in group if p in outbox.rows}
            streams = [stream for stream in ("", "a", "b", "c") if not stream or stream not in locked]
            late = chance.random() < 0.3
            added.append(outbox.add(chance.choice(streams), visible=not late, destination=chance.choice("xy")))
            if late:
                open_transactions.append(list(set(outbox.rows) - before))
        if open_transactions and chance.random() < 0.2:
            for position in open_transactions.pop(chance.randrange(len(open_transactions))):
                outbox.rows[position].visible = True
        at = chance.randrange(len(relays))
        if asleep.get(at, 0.0) > outbox.clock():
            outbox.clock.now += 0.5
            continue
        if chance.random() < trouble / 30:
            if chance.random() < 0.5:
                deaths += 1
                relays[at] = relay()
            else:
                asleep[at] = outbox.clock() + chance.choice([1.0, 40.0])
            continue
        if isinstance(relays[at].request, Publish) and relays[at].request.deadline <= outbox.clock():
            # An adapter does not send after the deadline.
            for message in relays[at].request.messages:
                failures[message.id] = failures.get(message.id, 0) + 1
            relays[at].send_results([TryAgain("busy") for _ in relays[at].request.messages])
            continue
        relays[at].step()
    # The trouble ends: what is left is sent.
    outbox.commit()
    broker.answer = lambda message: Sent()
    outbox.clock.now += 31.0
    last = RelayModel(outbox, broker, policy=policy, tries=tries)
    last.run_until(lambda: not outbox.waiting(), 20_000)

    parked = set(outbox.starts())
    assert {message.id for message in added} == set(broker.ids()) | set(outbox.dead) | parked, "nothing is lost"
    assert not parked or policy == "park"
    for stream, sequences in broker.first_deliveries().items():
        assert ordered(sequences), (stream, sequences)
    if policy == "block":
        assert not outbox.dead
        for sequences in broker.first_deliveries().values():
            assert sequences == list(range(1, len(sequences) + 1))
    for id, (reason, starts) in outbox.dead.items():
        if reason == "bad":
            assert id in refused
        elif reason == "busy":
            assert starts + 1 >= tries
            assert failures[id] + deaths + len(asleep) >= tries, "nothing is given up too early"
        elif reason != "parked":
            assert starts >= tries


@pytest.mark.parametrize("late", [0.0, 25.0])
def test_a_batch_that_was_read_ahead_is_sent_within_the_lease_that_the_last_one_renewed(late: float) -> None:
    """:param late: how long the relay is frozen between the renewal and the next batch. Then it must not send it."""
    relay = made(until_idle=True, batch=1)
    log = [Outgoing(f"m{at}", "tested", b"{}", stream="s", sequence=at, position=at) for at in range(1, 9)]
    clock = relay.outbox.clock
    published: list[tuple[list[str], float]] = []
    renewed = read = 0.0
    while not relay.ended and len(published) < 2:
        request = relay.request
        if isinstance(request, Publish):
            published.append(([message.id for message in request.messages], request.deadline))
            clock.now += 3.0
            results = [Sent()] * len(request.messages)
            relay.send(results if request.meanwhile is None else (results, tuple(log[4:])))
        elif isinstance(request, ReadLog):
            read = clock()
            relay.send(tuple(log[:4]))
        elif isinstance(request, TakeLog):
            relay.send(LogOwned("log"))
        elif isinstance(request, PassLog):
            assert request.lease == 30.0
            renewed = renewed or clock()
            clock.now += late
            relay.send(True)
        else:
            relay.send(relay.outbox.execute(request))
        if renewed and late:
            break
    assert published[0] == (["m1", "m2", "m3", "m4"], read + 20.0)
    if late:
        assert not isinstance(relay.request, Publish), "its lease may have ended before the broker has it"
    else:
        assert published[1] == (["m5", "m6", "m7", "m8"], renewed + 20.0)
