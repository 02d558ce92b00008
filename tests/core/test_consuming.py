"""The flow of a consumer, without databases and brokers: what it asks for, also when its process dies on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from semel.core.call import Pause, Raised
from semel.core.messaging.consuming import (
    Acknowledge,
    AppliedMessage,
    ApplyMessages,
    ConsumerPlan,
    ConsumerReport,
    MisplacedMessage,
    Postpone,
    Receive,
    RepeatedMessage,
    identify,
    place_in_streams,
    storable,
)
from semel.core.messaging.messages import (
    BuryMessage,
    CountStart,
    ForgetStarts,
    Message,
    SeeMessages,
    check_message,
    read_message,
)
from semel.errors import BrokerUnavailable, StoreUnavailable, TransactionConflict
from semel.messaging.ports import Delivery
from semel.observe import events
from semel.observe.events import Event

BUSY = BrokerUnavailable("busy")


class Killed(BaseException):
    """The process of the consumer was killed."""


class World:
    """A broker, a database and a clock that the flow of a consumer runs in. They survive the consumer."""

    def __init__(self, ids: list[str], *, counts: bool = True, **settings: Any) -> None:
        self.plan_settings = {
            "consumer": "ledger", "batch": 100, "tries": 3, "pause": 1.0, "longest_pause": 8.0, "ordered": False,
            "policy": "park", "counts_starts": counts, "clock": lambda: self.now, "jitter": lambda: 1.0,
            "hook": self.hook, **settings,
        }  # fmt: skip
        self.queue = [Message(id, "paid", b"", stream=id[:1], sequence=int(id[1:] or 0)) for id in ids]
        self.sent, self.place = list(ids), "log/0"
        self.offsets: dict[str, int] = {}
        self.delivered: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.applied: list[str] = []
        self.batches: list[int] = []
        """How many messages each call of the handler was for."""
        self.dead: dict[str, str] = {}
        self.parked: list[str] = []
        self.postponed: list[tuple[str, float]] = []
        self.pauses: list[float] = []
        self.asked: list[str] = []
        self.events: list[Event] = []
        self.now = 0.0
        self.apply: Callable[[Message], Any] = lambda message: None
        """What the handler does: it returns an answer, or None for AppliedMessage; or it raises Killed."""
        self.broken: Callable[[Any], BaseException | None] = lambda request: None
        """An error of the broker or the database, for a request."""
        self.report = ConsumerReport()

    def hook(self, event: Event) -> None:
        self.events.append(event)

    def live(self, until_idle: float | None = 0.0, rounds: int = 1000) -> None:
        """One life of a consumer, until nothing is left, or until it is killed."""
        plan = ConsumerPlan(**self.plan_settings)  # type: ignore[arg-type]
        flow = plan.run(lambda: False, self.report, until_idle)
        in_hand: list[Message] = []
        answer: Any = None
        try:
            for _ in range(rounds):
                request = flow.send(answer)
                self.asked.append(type(request).__name__)
                error = self.broken(request)
                answer = Raised(error) if error is not None else self.answer(request, in_hand)
        except StopIteration:
            pass
        except Killed:
            pass
        self.queue = [*in_hand, *self.queue]  # what was not acknowledged is delivered again

    def answer(self, request: Any, in_hand: list[Message]) -> Any:
        if isinstance(request, Receive):
            found, self.queue = self.queue[: request.limit], self.queue[request.limit :]
            in_hand += found
            for message in found:
                self.delivered[message.id] = self.delivered.get(message.id, 0) + 1
            counts = self.plan_settings["counts_starts"]
            return [
                Delivery(each, self.delivered[each.id] if counts else 0, each, self.place, self.sent.index(each.id))
                for each in found
            ]
        if isinstance(request, ApplyMessages):
            self.batches.append(len(request.messages))
            answers: list[Any] = []
            new: list[str] = []
            for message in request.messages:  # all of them, or none
                answer = self.apply(message)
                if isinstance(answer, (MisplacedMessage, Raised)):
                    return answer
                known = message.id in self.applied or message.id in new
                answers.append(RepeatedMessage() if known else answer or AppliedMessage())
                new += [] if known else [message.id]
            self.applied += new
            self.offsets.update(request.offsets)
            return answers
        if isinstance(request, Acknowledge):
            for delivery in request.deliveries:
                in_hand.remove(delivery.handle)
        elif isinstance(request, Postpone):
            in_hand.remove(request.delivery.handle)
            self.queue.append(request.delivery.handle)
            self.postponed.append((request.delivery.message.id, request.seconds))
        elif isinstance(request, Pause):
            self.pauses.append(request.seconds)
        elif isinstance(request, SeeMessages):
            seen = frozenset(id for id in request.ids if id in self.starts)
            for id in request.ids:
                self.starts.setdefault(id, 0)
            return seen
        elif isinstance(request, CountStart):
            self.starts[request.message] = self.starts.get(request.message, 0) + 1
            return self.starts[request.message]
        elif isinstance(request, ForgetStarts):
            for id in request.ids:
                if request.only_last:
                    self.starts[id] -= 1
                else:
                    self.starts.pop(id, None)
        elif isinstance(request, BuryMessage):
            self.dead[request.message.id] = request.reason
            self.parked += [request.message.stream] * request.park
        else:
            raise AssertionError(request)
        return None


@pytest.mark.parametrize("counts", [True, False])
def test_a_message_that_kills_its_consumer_reaches_the_dead_letters_alone(counts: bool) -> None:
    ids = [f"a{number}" for number in range(1, 10)]
    world = World(ids, counts=counts)

    def apply(message: Message) -> None:
        if message.id == "a5":
            raise Killed

    world.apply = apply
    lives = 0
    while len(world.applied) + len(world.dead) < len(ids):
        world.live()
        lives += 1
        assert lives < 10
    assert sorted(world.applied) == [id for id in ids if id != "a5"]
    assert list(world.dead) == ["a5"]
    assert "each time that it was applied (3 starts)" in world.dead["a5"]
    # The first start is not counted, so that a message that kills nobody costs no write.
    assert lives == world.plan_settings["tries"] + 2
    assert world.starts == {}
    assert world.queue == []


def test_nothing_is_written_for_messages_that_are_delivered_once() -> None:
    world = World([f"a{number}" for number in range(1, 4)])
    world.live()
    assert world.asked == ["Receive", "ApplyMessages", "ApplyMessages", "ApplyMessages", "Acknowledge", "Receive"]
    unaware = World([f"a{number}" for number in range(1, 4)], counts=False)
    unaware.live()
    assert [name for name in unaware.asked if name not in ("Receive", "ApplyMessages")] == [
        "SeeMessages", "Acknowledge", "ForgetStarts",
    ]  # fmt: skip


def test_a_consumer_that_dies_between_the_commit_and_the_acknowledgement_applies_nothing_twice() -> None:
    world = World(["a1", "a2"])

    def die(request: Any) -> BaseException | None:
        if isinstance(request, Acknowledge):
            raise Killed
        return None

    world.broken = die
    world.live()
    world.broken = lambda request: None
    world.live()
    assert world.applied == ["a1", "a2"]
    assert world.report.repeated == 2
    assert world.queue == []


@pytest.mark.parametrize("counts", [True, False])
def test_a_message_that_is_applied_is_never_given_up_however_often_it_comes_again(counts: bool) -> None:
    world = World(["a1"], counts=counts, tries=1)
    world.broken = lambda request: BUSY if isinstance(request, Acknowledge) else None
    for _ in range(5):
        world.live()
    assert world.applied == ["a1"]
    assert world.dead == {}
    world.broken = lambda request: None
    world.live()
    assert world.queue == []
    assert world.starts == {}


def test_pauses_grow_up_to_the_longest_and_the_last_try_gives_up() -> None:
    world = World(["a1"], tries=6, longest_pause=5.0)
    world.apply = lambda message: Raised(ValueError("no"))
    world.live()
    assert world.postponed == [("a1", 1.0), ("a1", 2.0), ("a1", 4.0), ("a1", 5.0), ("a1", 5.0)]
    assert world.dead == {"a1": "ValueError('no')"}
    assert [event.name for event in world.events] == ["apply_failed"] * 5 + ["apply_given_up"]
    assert world.parked == []  # it has no order to keep


def test_an_outage_of_the_database_burns_no_attempts() -> None:
    world = World(["a1", "a2"], ordered=True)
    down = iter(range(20))
    world.apply = lambda message: Raised(StoreUnavailable("down")) if next(down, None) is not None else None
    for _ in range(30):
        world.live()
    assert world.applied == ["a1", "a2"]
    assert world.dead == world.starts == {}


def test_a_broker_that_is_down_is_asked_again_after_growing_pauses() -> None:
    world = World(["a1"])
    down = iter(range(4))
    world.broken = lambda request: BUSY if isinstance(request, Receive) and next(down, None) is not None else None
    world.live(until_idle=None, rounds=20)
    assert world.pauses == [0.1, 0.2, 0.4, 0.8]
    assert [event.name for event in world.events] == ["consumer_interrupted"] * 4
    assert world.applied == ["a1"]


@pytest.mark.parametrize("counts", [True, False])
def test_in_an_outage_everything_in_hand_goes_back_in_its_order(counts: bool) -> None:
    """A message that stayed in hand would not be delivered again before the consumer ends."""
    world = World(["a1", "a2", "a3"], counts=counts)
    world.apply = lambda message: Raised(StoreUnavailable("down"))
    world.broken = lambda request: StoreUnavailable("down") if isinstance(request, SeeMessages) else None
    world.live()
    assert [id for id, _ in world.postponed] == ["a1", "a2", "a3"]
    assert world.asked.count("ApplyMessages") == int(counts)


def test_a_conflict_counts_no_attempt_and_is_no_repeat() -> None:
    world = World(["a1"], tries=1)
    answers = iter([Raised(TransactionConflict("busy"))] * 5)
    world.apply = lambda message: next(answers, None)
    world.live()
    assert world.applied == ["a1"]
    assert world.starts == world.dead == {}
    assert world.report.repeated == 0
    told = [event for event in world.events if isinstance(event, events.Conflicted)]
    assert [(event.key, "busy" in event.error) for event in told] == [("a1", True)] * 5


@pytest.mark.parametrize("counts", [True, False])
def test_a_message_that_kills_and_is_in_the_way_of_itself_reaches_the_dead_letters(counts: bool) -> None:
    """Its operation belongs to the dead process until the lease ends. Others find it in progress meanwhile."""
    world = World(["a1"], counts=counts)
    lives = 0
    in_the_way = 0

    def apply(message: Message) -> Raised:
        nonlocal in_the_way
        if not in_the_way:
            in_the_way = 2
            raise Killed
        in_the_way -= 1
        return Raised(TransactionConflict("busy"))

    world.apply = apply
    while not world.dead:
        world.live()
        lives += 1
        assert lives < 10
    assert lives == world.plan_settings["tries"] + 2
    assert world.starts == {}
    assert world.queue == []


def test_what_cannot_be_buried_stays_with_the_broker() -> None:
    world = World(["a1"], tries=1)
    world.apply = lambda message: Raised(ValueError("no"))
    world.broken = lambda request: StoreUnavailable("down") if isinstance(request, BuryMessage) else None
    world.live()
    assert world.dead == {}
    assert [message.id for message in world.queue] == ["a1"]
    world.broken = lambda request: None
    world.live()
    assert list(world.dead) == ["a1"]


def test_slow_batches_are_acknowledged_on_the_way() -> None:
    world = World([f"a{number}" for number in range(1, 6)])

    def apply(message: Message) -> None:
        world.now += 0.6

    world.apply = apply
    world.live()
    assert world.asked.count("Acknowledge") == 3


def test_the_place_in_a_stream() -> None:
    def place(last: int, sequence: int) -> AppliedMessage | MisplacedMessage:
        found = place_in_streams({"s": last}, [Message("m", "t", b"", stream="s", sequence=sequence)])
        return found if isinstance(found, MisplacedMessage) else found[0]

    assert place(0, 57) == AppliedMessage()  # a consumer may begin anywhere
    assert place(4, 5) == AppliedMessage()
    assert place(4, 7) == AppliedMessage(missing=2)
    assert isinstance(place(4, 4), MisplacedMessage)
    assert isinstance(place(-4, 5), MisplacedMessage)
    assert place(-4, 4) == place(-4, 3) == AppliedMessage()


def test_a_message_without_an_id_gets_one_of_its_content() -> None:
    first, problem = identify(Message("", "t", b"1"))
    assert first == identify(Message("", "t", b"1"))[0]
    assert first.id != identify(Message("", "t", b"2"))[0].id
    assert "has no id" in problem
    assert identify(Message("m", "t", b"")) == (Message("m", "t", b""), "")
    strange = Message("m", "t\x00" * 300, b"", headers={"UP": "x"}, stream=" s ", subject="\ud800")
    check_message(storable(strange))
    fine = Message("m", "", b"", headers={"a": "b"})
    assert storable(fine) is fine


@pytest.mark.parametrize(
    ("packed", "unpacked"),
    [('{"traceparent": "00-1"}', {"traceparent": "00-1"}), ('{"own": "2", "n": 3}', {}), ("[1", {}), ("[" * 9_999, {})],
)
def test_headers_that_debezium_packs_are_unpacked(packed: str, unpacked: dict[str, str]) -> None:
    message = read_message({"ce-id": "1", "own": "1", "semel-headers": packed}, b"")
    assert message.headers == {"own": "1"} | unpacked


def test_each_message_is_told_if_somebody_wants_to_know() -> None:
    def live(watched: bool) -> list[Event]:
        world = World(["a1", "a1"], watched=watched)
        world.queue[0] = replace(world.queue[0], headers={"idempotency-root": "r", "idempotency-parent": "p"})

        def apply(message: Message) -> None:
            world.now += 2.0

        world.apply = apply
        world.live()
        return world.events

    assert live(False) == []
    assert live(True) == [
        events.AppliedEvent("paid", "", "a1", "ledger", 2.0, "r", "p"),
        events.Skipped("paid", "", "a1", "ledger", 2.0),
    ]


def test_a_batch_is_applied_at_once_and_acknowledged_then() -> None:
    world = World(["a1", "a2", "b1"], in_batches=True)
    world.live()
    assert world.asked == ["Receive", "ApplyMessages", "Acknowledge", "Receive"]
    assert (world.batches, world.applied) == ([3], ["a1", "a2", "b1"])


@pytest.mark.parametrize("counts", [True, False])
def test_a_poison_message_takes_no_other_of_its_batch_with_it(counts: bool) -> None:
    world = World(["a1", "a2", "", "b1", "b2"], in_batches=True, counts=counts)
    world.apply = lambda message: Raised(ValueError("no")) if message.id == "a2" else None
    world.live()
    assert sorted(world.applied) == ["a1", "b1", "b2"]
    assert set(world.dead) == {"a2", identify(Message("", "paid", b""))[0].id}
    # The message without an id divides the batch. After the first failure, each message comes alone.
    assert world.batches[:4] == [2, 1, 1, 2]
    assert world.starts == {}


@pytest.mark.parametrize("counts", [True, False])
def test_a_message_that_kills_the_consumer_of_its_batch_is_found(counts: bool) -> None:
    ids = [f"a{number}" for number in range(1, 10)]
    world = World(ids, counts=counts, in_batches=True)

    def apply(message: Message) -> None:
        if message.id == "a5":
            raise Killed

    world.apply = apply
    for _ in range(10):
        world.live()
    assert sorted(world.applied) == [id for id in ids if id != "a5"]
    assert "each time that it was applied (3 starts)" in world.dead["a5"]
    assert (world.queue, world.starts) == ([], {})


def test_after_a_failure_a_batch_leaves_out_the_streams_that_wait() -> None:
    world = World(["a1", "b1", "a2", "b2", "b3"], in_batches=True, ordered=True)
    world.apply = lambda message: Raised(ValueError("no")) if message.id == "a1" and len(world.asked) < 9 else None
    world.live()
    assert world.applied == ["b1", "b2", "b3", "a1", "a2"]
    assert [id for id, _ in world.postponed][:2] == ["a1", "a2"]


def test_a_batch_waits_for_a_database_that_is_down() -> None:
    world = World(["a1", "a2"], in_batches=True)
    down = [StoreUnavailable("down")] * 2
    world.broken = lambda request: down.pop() if down and isinstance(request, ApplyMessages) else None
    world.live(until_idle=None, rounds=30)
    assert world.applied == ["a1", "a2"]
    assert (world.report.failed, world.dead) == (0, {})


def test_messages_of_a_batch_are_placed_one_after_the_other() -> None:
    def found(last: dict[str, int], *ids: str) -> Any:
        return place_in_streams(last, [Message(id, "", b"", stream=id[0], sequence=int(id[1:])) for id in ids])

    assert found({"a": 0, "b": 4}, "a3", "b5", "a4", "b8", "c9", "a0") == [
        AppliedMessage(), AppliedMessage(), AppliedMessage(), AppliedMessage(2), AppliedMessage(), AppliedMessage(),
    ]  # fmt: skip
    assert isinstance(found({"a": 0}, "a4", "a3"), MisplacedMessage)
    assert found({"a": -3}, "a3") == [AppliedMessage()]
    assert isinstance(found({"a": -3}, "a3", "b1"), MisplacedMessage)  # one by one


@pytest.mark.parametrize("in_batches", [False, True])
def test_no_offset_is_stored_beyond_a_message_that_waits(in_batches: bool) -> None:
    """If the process died then, nobody would apply that message."""
    world = World(["a1", "b1", "c1", "d1"], stores_offsets=True, in_batches=in_batches)
    fails = iter([True, in_batches])  # in the batch, then alone
    stored: list[tuple[list[str], dict[str, int]]] = []

    def apply(message: Message) -> Any:
        stored.append((list(world.applied), dict(world.offsets)))
        return Raised(ValueError("no")) if message.id == "b1" and next(fails, False) else None

    world.apply = apply
    world.live()
    assert world.applied == ["a1", "b1", "c1", "d1"]
    assert [id for id, _ in world.postponed] == ["b1", "c1", "d1"]
    assert world.offsets == {"log/0": 4}
    for applied, offsets in stored:
        assert offsets.get("log/0", 0) <= len(applied)
    plain = World(["a1"])
    plain.live()
    assert plain.offsets == {}
