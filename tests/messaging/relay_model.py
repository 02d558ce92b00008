"""An outbox, a broker and relays as a model: one clock, no I/O, every step by hand. For tests of the relay's rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from semel.core.call import Pause, Raised
from semel.core.messaging.messages import (
    LANES,
    JoinRelays,
    LeaveRelays,
    LogOwned,
    Message,
    Outgoing,
    Result,
    Sent,
    SettleMessages,
    StartMessages,
    TakeLog,
    lane_of,
)
from semel.core.messaging.relaying import Poison, Publish, RelayFlow, RelayPlan, RelayReport, Rest
from semel.core.ops import Op
from semel.observe import events


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Relay:
    lease_end: float
    started: tuple[int, ...] = ()


@dataclass
class Row:
    message: Message
    due: float = 0.0
    starts: int = 0
    visible: bool = True


@dataclass
class OutboxModel:
    """What the Ops of a relay mean."""

    clock: Clock = field(default_factory=Clock)
    rows: dict[int, Row] = field(default_factory=dict)
    holds: dict[str, float] = field(default_factory=dict)
    relays: dict[bytes, _Relay] = field(default_factory=dict)
    lanes: dict[int, bytes | None] = field(default_factory=lambda: dict.fromkeys(range(LANES)))
    dead: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Reason and starts of the dead letters, by id."""
    ops: list[Op[Any]] = field(default_factory=list)
    _sequences: dict[str, int] = field(default_factory=dict)
    _positions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(
        self, stream: str = "", *, data: bytes = b"{}", visible: bool = True, starts: int = 0, destination: str = ""
    ) -> Message:
        sequence = 0
        if stream:
            sequence = self._sequences[stream] = self._sequences.get(stream, 0) + 1
        position = next(self._positions)
        message = Message(f"m{position}", "tested", data, stream=stream, sequence=sequence, destination=destination)
        self.rows[position] = Row(message, visible=visible, starts=starts)
        return message

    def commit(self) -> None:
        for row in self.rows.values():
            row.visible = True

    def waiting(self) -> list[str]:
        """The ids of the messages that a relay can still send."""
        return [row.message.id for row in self.rows.values() if self.holds.get(row.message.stream) != math.inf]

    def starts(self) -> dict[str, int]:
        return {row.message.id: row.starts for row in self.rows.values()}

    def execute(self, op: Op[Any]) -> Any:
        self.ops.append(op)
        match op:
            case JoinRelays():
                return self._join(op)
            case StartMessages():
                return self._start(op)
            case SettleMessages():
                return self._settle(op)
            case TakeLog():
                return LogOwned("queue")
            case LeaveRelays():
                self._free(op.relay)
                self.relays.pop(op.relay, None)
        return None

    def _free(self, relay: bytes) -> None:
        for lane, owner in self.lanes.items():
            if owner == relay:
                self.lanes[lane] = None

    def _lives(self, relay: bytes) -> bool:
        return relay in self.relays and self.relays[relay].lease_end > self.clock()

    def _join(self, op: JoinRelays) -> tuple[int, ...]:
        for relay in [relay for relay in self.relays if not self._lives(relay)]:
            for position in self.relays.pop(relay).started:
                if position in self.rows:
                    self.rows[position].starts += 1
            self._free(relay)
        self.relays[op.relay] = _Relay(self.clock() + op.lease)
        share = math.ceil(LANES / len(self.relays))
        mine = [lane for lane, owner in self.lanes.items() if owner == op.relay]
        for lane in mine[share:]:
            self.lanes[lane] = None
        free = [lane for lane, owner in self.lanes.items() if owner is None and lane not in mine]
        for lane in free[: max(0, share - len(mine))]:
            self.lanes[lane] = op.relay
        return tuple(lane for lane, owner in self.lanes.items() if owner == op.relay)

    def _start(self, op: StartMessages) -> tuple[Outgoing, ...] | None:
        if not self._lives(op.relay):
            return () if op.ahead else None
        found = []
        for position, row in sorted(self.rows.items()):
            message = row.message
            if (
                position > op.after
                and row.visible
                and row.due <= self.clock()
                and self.lanes[lane_of(message.stream, message.id)] == op.relay
                and self.holds.get(message.stream, 0.0) <= self.clock()
            ):
                found.append(Outgoing(**asdict(message), position=position, starts=row.starts))
        found = found[: op.limit]
        if not op.ahead:
            self.relays[op.relay] = _Relay(self.clock() + op.lease, tuple(each.position for each in found))
        return tuple(found)

    def _settle(self, op: SettleMessages) -> bool | None:
        if not self._lives(op.relay):
            return False
        relay = self.relays[op.relay]
        for position in op.sent:
            if position in relay.started:
                self.rows.pop(position)
        for failure in op.failed:
            if failure.position in relay.started:
                row = self.rows[failure.position]
                row.starts += failure.counts
                if row.message.stream:
                    self.holds[row.message.stream] = self.clock() + failure.after
                else:
                    row.due = self.clock() + failure.after
        for letter in op.dead:
            if letter.position in relay.started:
                row = self.rows.pop(letter.position)
                self.dead[row.message.id] = (letter.reason, row.starts)
                if letter.park:
                    self.holds[row.message.stream] = math.inf
                    for position, later in list(self.rows.items()):
                        if later.visible and later.message.stream == row.message.stream:
                            self.dead[later.message.id] = ("parked", later.starts)
                            del self.rows[position]
        whole = all(position in self.rows for position in op.then)
        relay.started = op.then if whole else ()
        relay.lease_end = max(relay.lease_end, self.clock() + op.lease)
        return True if whole else None


_ids = itertools.count(1)
Answer = Callable[[Message], Result]


class BrokerModel:
    """Takes messages. ``answers`` says what it answers, message by message; a pipelining one fails what follows."""

    def __init__(self, clock: Clock, pipelines: bool = True) -> None:
        self.clock = clock
        self.pipelines = pipelines
        self.answer: Answer = lambda message: Sent()
        self.batches: list[list[str]] = []
        self.taken: list[Message] = []

    def publish(self, publish: Publish) -> list[Result]:
        assert self.clock() < publish.deadline
        self.batches.append([message.id for message in publish.messages])
        ended: dict[str, Result] = {}
        results: list[Result] = []
        for message in publish.messages:
            result = ended.get(message.stream) or self.answer(message)
            if isinstance(result, Sent):
                self.taken.append(message)
            elif message.stream and self.pipelines:
                ended[message.stream] = result
            results.append(result)
        return results

    def ids(self) -> list[str]:
        return [message.id for message in self.taken]

    def first_deliveries(self) -> dict[str, list[int]]:
        """The sequences of each stream, without repeats: what a consumer sees that applies each message once."""
        seen: set[str] = set()
        streams: dict[str, list[int]] = {}
        for message in self.taken:
            if message.stream and message.id not in seen:
                seen.add(message.id)
                streams.setdefault(message.stream, []).append(message.sequence)
        return streams


class RelayModel:
    """One relay, driven request by request."""

    def __init__(self, outbox: OutboxModel, broker: BrokerModel, **settings: Any) -> None:
        self.outbox = outbox
        self.broker = broker
        self.stopping = False
        self.events: list[events.Event] = []
        self.report = RelayReport()
        self.ended = False
        self.requests: list[Any] = []
        self.fail: Callable[[Op[Any]], BaseException | None] = lambda op: None
        """The error of an Op that was not done."""
        self.lose: Callable[[Op[Any]], BaseException | None] = lambda op: None
        """The error of an Op that was done, and whose answer was lost."""
        until_idle = settings.pop("until_idle", False)
        policy: Poison | Callable[[str], Poison] = settings.pop("policy", "block")
        plan = RelayPlan(
            batch=10, lease=30.0, tries=4, pause=1.0, longest_pause=60.0,
            policy=policy if callable(policy) else lambda stream: policy,
            pipelines=broker.pipelines, largest=1 << 20, clock=outbox.clock, jitter=lambda: 1.0,
            new_id=lambda: next(_ids).to_bytes(16), hook=self.events.append,
        )  # fmt: skip
        self.plan = replace(plan, **settings)
        self.flow: RelayFlow = self.plan.run(lambda: self.stopping, self.report, until_idle=until_idle)
        self.request: Any = next(self.flow)

    def step(self) -> bool:
        """Answer the next request. Returns False at the end."""
        if self.ended:
            return False
        request = self.request
        self.requests.append(request)
        answer: Any = None
        if isinstance(request, Publish):
            return self.send_results(self.broker.publish(request))
        elif isinstance(request, Rest | Pause):
            self.outbox.clock.now += max(request.seconds, 0.0)
            answer = False
        else:
            answer = self.execute(request)
        return self.send(answer)

    def send_results(self, results: list[Result]) -> bool:
        """Answer a Publish, and read what is to be read at the same time."""
        op: Op[Any] | None = self.request.meanwhile
        if op is None:
            return self.send(results)
        read = self.execute(op)
        return self.send((results, None if isinstance(read, Raised) else read))

    def execute(self, op: Op[Any]) -> Any:
        error = self.fail(op)
        answer = self.outbox.execute(op) if error is None else Raised(error)
        if (lost := self.lose(op)) is not None:
            answer = Raised(lost)
        return answer

    def send(self, answer: Any) -> bool:
        try:
            self.request = self.flow.send(answer)
        except StopIteration:
            self.ended = True
        return not self.ended

    def run_until(self, condition: Callable[[], bool], steps: int = 2000) -> None:
        for _ in range(steps):
            if condition():
                return
            assert self.step(), "the relay has ended"
        raise AssertionError("it did not come to that")

    def drain(self) -> RelayReport:
        while self.step():
            pass
        return self.report

    def named(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def ordered(sequences: Iterable[int]) -> bool:
    found: Sequence[int] = list(sequences)
    return list(found) == sorted(found)
