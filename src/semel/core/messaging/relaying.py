"""How a relay sends the messages of the outbox, written once for sync and async.

::

    join ──▶ start a batch ──▶ publish, and read the next ──▶ settle, and start the next ──▶ publish …
     ▲            │ nothing is due: rest until a wake-up, or for a while that grows
     └────────────┴── the lease has ended, or it is time to balance the lanes

The flow is a generator that knows no store, broker or thread. It yields the Ops of ``messages.py``, ``Publish``,
``Rest`` and ``Pause``. The answer to an Op is that of the store, or Raised with its StoreError.

What keeps the order of a stream: only the owner of a lane sends its messages; a message that was not sent ends its
stream for this batch; a batch that reads on from the last one takes a stream up only where it left it; a batch that was
read ahead is dropped if not all of the one before it was sent, or if some of it was moved behind redriven messages.

If the outbox is a log, the relay that owns its cursor sends a batch of the queue and batches of the log in turn. What
it cannot send moves from the log to the queue, with all that follow in its stream, until the queue has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from semel.core.call import Pause, Raised, describe_error
from semel.core.messaging.messages import (
    BrokerDown,
    DeadLetter,
    DestinationDown,
    Failure,
    JoinRelays,
    LeaveRelays,
    LogOwned,
    Message,
    OutboxMode,
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
    light,
    oversize,
    storable_reason,
)
from semel.core.ops import Op
from semel.core.values import value
from semel.observe import events

POLL_FIRST: Final = 0.005
POLL_LONGEST: Final = 1.0
"""Seconds between two looks into an empty outbox. They double, until a message or a wake-up comes."""
BALANCE_EVERY: Final = 2.0
"""A relay joins again after this many seconds, or after a third of its lease, to take lanes that other relays left."""
RESCAN_EVERY: Final = 0.25
"""A relay reads on from its last batch, but starts from the beginning after this many seconds: a transaction with a
lower position may have committed late."""
LARGE: Final = 4
"""How many times larger a batch is if it is read from a log, or from a queue with a backlog. Fewer batches need fewer
round trips to the broker and to the database."""
QUICK: Final = 1 / 48
"""A batch may be large if an earlier one was sent within this part of the lease. Then it ends long before its
deadline."""
MOST_RETAINED: Final = 1 << 30
"""A relay warns when the database keeps more bytes of its own log for the outbox."""
SUSPECT: Final = 2
"""A message that has been started so often is sent alone: it may be what kills the relay."""
SUSPECTS_FOR: Final = 1.0
"""Seconds for messages that are sent alone, before the next batch."""
BROKER_PAUSE_FIRST: Final = 0.5
BROKER_PAUSE_LONGEST: Final = 30.0
"""Seconds until a broker or a destination that was down is tried again. They double."""
STORE_PAUSE_FIRST: Final = 0.05
STORE_PAUSE_LONGEST: Final = 1.0
SHORTEST_PAUSE: Final = 0.1
"""The least time until a message is tried again, also if the broker asks for less."""
REMEMBERED: Final = 100_000
"""How many streams a relay remembers."""

Poison: TypeAlias = Literal["block", "park", "skip"]
"""What happens to a stream whose next message cannot be sent: it waits until that message is sent (``block``); the
message and all that follow go to the dead letters (``park``); only the message does, and the stream goes on (``skip``).
"""
POISON: Final = ("block", "park", "skip")
_POSITION: Final = attrgetter("position")
_NONE: Final[tuple[Outgoing, ...]] = ()


@value
class Publish:
    """Send these messages. The answer is a Result for each."""

    messages: tuple[Message, ...]
    deadline: float
    """By the relay's clock."""
    meanwhile: StartMessages | ReadLog | None = None
    """Read these at the same time. Then the answer is a pair: the results, and what was read, or None."""


@value
class Rest:
    """Wait until there may be messages, or until the relay is to stop, for at most ``seconds``. The answer is
    whether something ended the rest early."""

    seconds: float


RelayFlow: TypeAlias = Generator["Op[Any] | Publish | Rest | Pause", Any, None]
_Steps: TypeAlias = Generator["Op[Any] | Publish | Rest | Pause", Any, bool]


@dataclass
class RelayReport:
    """What a relay has done so far."""

    sent: int = 0
    failed: int = 0
    """Attempts that failed. Their messages are tried again."""
    dead: int = 0
    """Messages that were moved to the dead letters."""
    blocked: int = 0
    """Attempts to send a message that blocks its stream."""
    lanes: int = 0
    """How many lanes the relay owns now."""
    broker_down: str = ""
    """Why the broker cannot be reached; empty while it can."""
    destinations_down: int = 0
    """How many destinations cannot be reached, while the broker can."""


@value
class RelayPlan:
    """The settings of a relay, and what it is handed of the world."""

    batch: int
    lease: float
    tries: int
    pause: float
    """Seconds before the second attempt; the pauses then double."""
    longest_pause: float
    policy: Callable[[str], Poison]
    """What to do with a message that cannot be sent, by its stream."""
    pipelines: bool
    largest: int
    clock: Callable[[], float]
    jitter: Callable[[], float]
    """A random number from 0 to 1."""
    new_id: Callable[[], bytes]
    hook: events.EventHook

    def run(self, stopping: Callable[[], bool], report: RelayReport, *, until_idle: bool = False) -> RelayFlow:
        """Send messages until ``stopping``; with ``until_idle``, until none is due or the broker is down.

        With ``until_idle`` errors of the store are raised.

        :param report: what is done is added to it, as it happens.
        """
        return _Run(self, stopping, report, until_idle).flow()


@dataclass
class _CircuitBreaker:
    """Open: the broker or a destination is down. Its messages wait, and one of them is sent at times, to see."""

    reason: str
    pause: float = 0.0
    probe_at: float = 0.0

    def lasts(self, now: float) -> None:
        """Try again after a longer pause."""
        self.pause = min(2 * self.pause or BROKER_PAUSE_FIRST, BROKER_PAUSE_LONGEST)
        self.probe_at = now + self.pause


class _StoreFailed(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Run:
    """One life of a relay, from its first join until it leaves."""

    def __init__(self, plan: RelayPlan, stopping: Callable[[], bool], report: RelayReport, until_idle: bool) -> None:
        self._plan = plan
        self._stopping = stopping
        self._until_idle = until_idle
        self._report = report
        self._relay: bytes | None = None
        self._former: bytes | None = None
        """The name that was given up because a batch could not be settled. It may still own lanes."""
        self._lanes: tuple[int, ...] = ()
        self._mode: OutboxMode | None = None
        """What this relay reads besides the queue, if it is something else; None: it must ask."""
        self._join_at = 0.0
        self._poll = POLL_FIRST
        self._read_on = 0
        """The last position of a full batch; 0: start from the beginning."""
        self._scanned_at = 0.0
        self._ahead = _NONE
        """The next batch, if it is read already."""
        self._renewed = 0.0
        """When the lease was renewed by the Op that settled the last batch."""
        self._sequences: dict[str, int] = {}
        """The last sequence of each stream that is done, as far as remembered."""
        self._outage: _CircuitBreaker | None = None
        """That of the broker."""
        self._outages: dict[str, _CircuitBreaker] = {}
        """Those of single destinations."""
        self._blocked: dict[int, str] = {}
        """The positions that were reported, and why they cannot be sent."""

    def flow(self) -> RelayFlow:
        pause = STORE_PAUSE_FIRST
        while not self._stopping():
            try:
                more = yield from self._round()
            except _StoreFailed as failed:
                if self._until_idle:
                    yield from self._leave()
                    raise failed.error from None
                yield Pause(pause)
                pause = min(2 * pause, STORE_PAUSE_LONGEST)
                continue
            pause = STORE_PAUSE_FIRST
            if self._until_idle and not more:
                break
        yield from self._leave()

    def _round(self) -> _Steps:
        """Join if it is time, and send one batch. Returns whether there may be more to do now."""
        plan = self._plan
        if self._relay is None or plan.clock() >= self._join_at:
            yield from self._join()
        assert self._relay is not None
        if self._mode is None:
            owned: LogOwned = yield from self._execute(TakeLog(self._relay))
            self._mode = owned.mode
            if owned.retained > MOST_RETAINED:
                plan.hook(events.SlotLag("", "", "", owned.retained))
        if self._outage and self._outage.probe_at > plan.clock():
            yield Rest(min(self._outage.probe_at, self._join_at) - plan.clock())
            return False
        if not self._lanes and self._mode == "queue":
            yield from self._rest(BALANCE_EVERY)
            return False
        more = (yield from self._send_from_queue()) if self._lanes else False
        if self._mode != "queue":
            more = (yield from self._send_from_log(self._mode)) or more
        if not more:
            yield from self._rest(self._poll)
        return more and not (self._until_idle and self._outage)

    def _send_from_queue(self) -> _Steps:
        """Send one batch, and those that are read while the one before is sent. Returns whether there may be more."""
        plan = self._plan
        assert self._relay is not None
        self._ahead = _NONE  # what is left from before an error is read again
        now = plan.clock()
        after = self._read_on if now - self._scanned_at < RESCAN_EVERY else 0
        if not after:
            self._scanned_at = now
        limit = 1 if self._outage else plan.batch
        found = yield from self._execute(StartMessages(self._relay, limit, plan.lease, after))
        if found is None:
            self._relay = None
            return True
        if not found:
            self._read_on = 0
            return bool(after)
        self._poll = POLL_FIRST
        read_on, size, quick = bool(after), plan.batch, False
        end = min(self._scanned_at + RESCAN_EVERY, self._join_at)
        suspects: list[Outgoing] = []
        while found:
            ahead = None
            self._read_on = found[-1].position if len(found) == size else 0
            if self._read_on and plan.pipelines and now < end and not (self._outage or self._stopping()):
                size = plan.batch * LARGE if quick else plan.batch
                ahead = StartMessages(self._relay, size, plan.lease, self._read_on, ahead=True)
            suspects = yield from self._send(found, now, read_on=read_on, ahead=ahead)
            found, self._ahead = self._ahead, _NONE
            quick = self._renewed - now < plan.lease * QUICK
            now, read_on = self._renewed, True
        yield from self._send_alone(suspects)
        return True

    def _send_from_log(self, mode: OutboxMode) -> _Steps:
        """Send batches until it is time to look into the queue. Returns whether there may be more."""
        plan = self._plan
        end = plan.clock() + RESCAN_EVERY
        any_sent = False
        found: tuple[Outgoing, ...] | None
        self._ahead = _NONE  # what is left from before an error is read again
        while self._relay is not None and self._mode is not None:
            now = plan.clock()
            limit = 1 if self._outage else plan.batch * LARGE
            if self._ahead:
                found, self._ahead = self._ahead, _NONE
                now = self._renewed
            elif (any_sent and now >= end) or (self._outage and self._outage.probe_at > now) or self._stopping():
                break
            else:
                found = yield from self._execute(ReadLog(self._relay, limit, plan.lease, mode))
            if found is None:
                self._mode = None  # ask again; if the lease has ended as well, the queue says so
            elif not found:
                return any_sent
            else:
                self._poll = POLL_FIRST
                any_sent = True
                op = None
                if mode == "log" and len(found) == limit > 1 and now < end and plan.pipelines:
                    op = ReadLog(self._relay, limit, plan.lease, mode, ahead=True)
                if (yield from self._send(found, now, log=mode, ahead=op)):
                    break  # some have moved to the queue
        return True

    def _join(self) -> Generator[Any, Any, None]:
        plan = self._plan
        if self._former is not None:
            # The last settle may have been done, and have renewed the lease, although its answer was lost. Nothing is
            # under way, so no lane has to rest for that lease, and no message that was read ahead counts a start.
            yield from self._execute(LeaveRelays(self._former))
            self._former = None
        if self._relay is None:
            # A join whose answer is lost is repeated under the same name, so that it finds the lanes it has taken.
            self._relay, self._join_at = plan.new_id(), 0.0
        self._lanes = yield from self._execute(JoinRelays(self._relay, plan.lease))
        self._report.lanes = len(self._lanes)
        self._mode = None
        self._join_at = plan.clock() + min(plan.lease / 3, BALANCE_EVERY)

    def _leave(self) -> RelayFlow:
        if (name := self._relay or self._former) is not None:
            yield LeaveRelays(name)  # if that fails, the lease ends by itself
        self._report.lanes = 0

    def _rest(self, seconds: float) -> Generator[Any, Any, None]:
        if self._until_idle:
            return
        woken = yield Rest(max(0.0, min(seconds, self._join_at - self._plan.clock())))
        self._poll = POLL_FIRST if woken else min(2 * self._poll, POLL_LONGEST)

    def _execute(self, op: Op[Any]) -> Generator[Any, Any, Any]:
        answer = yield op
        if isinstance(answer, Raised):
            self._tell_store_failed(op, answer.error)
            raise _StoreFailed(answer.error)
        return answer

    # One batch

    def _send(
        self,
        found: tuple[Outgoing, ...],
        began: float,
        *,
        read_on: bool = False,
        log: OutboxMode | None = None,
        ahead: StartMessages | ReadLog | None = None,
    ) -> Generator[Any, Any, list[Outgoing]]:
        """Publish and settle what was started. Returns the messages that are to be sent alone, or, if it was read from
        a log, those that were not sent.

        :param began: when the Op that renewed the lease was sent.
        """
        plan = self._plan
        ready, suspects, unsent = self._sort(found, read_on, log is not None)
        # What is published after the lease has ended could overtake the relay that owns the lane by then. A third of
        # the lease is left to settle.
        deadline = began + plan.lease * 2 / 3
        results = yield from self._publish(ready, deadline, ahead)
        op: SettleMessages
        reports: list[events.Event] = []
        if len(results) == len(found) and not (self._outage or self._outages) and _all_sent(results):
            assert self._relay is not None
            op = SettleMessages(self._relay, tuple(map(_POSITION, found)))  # the usual case, in a hurry
            if not log:
                self._remember(found)
        else:
            self._judge_broker(results.values())
            # A relay that was frozen for longer than its lease is late by itself.
            self._judge_destinations(ready, results, deadline <= plan.clock() < began + plan.lease)
            op, reports = self._judge(found, {**unsent, **results})
        # If not all were sent, the next batch was read too early: what follows in these streams has to wait.
        if len(op.sent) < len(found) or self._stopping():
            self._ahead = _NONE
        self._renewed = plan.clock()
        if log:
            suspects = [] if len(op.sent) == len(found) else _others(found, op.sent)
            stays = self._outage is not None and bool(results) and not (op.sent or op.failed or op.dead)
            moved = () if stays else tuple(suspects)
            then = self._ahead[-1].position if self._ahead else None
            passing = PassLog(op.relay, plan.lease, log, found[-1].position, moved, op.failed, op.dead, stays, then)
            settled = yield from self._settle(passing, began + plan.lease)
        else:
            if self._ahead:
                op = replace(op, then=tuple(map(_POSITION, self._ahead)), lease=plan.lease)
            settled = yield from self._settle(op, began + plan.lease)
        if settled is None:
            self._ahead, self._read_on = _NONE, 0
        elif not settled:
            self._ahead = _NONE
            if log and plan.clock() < began + plan.lease:
                # Somebody has changed the mode of the outbox, and what was under way is in the queue. The lanes still
                # belong to this relay: under another name it would wait for the end of its own lease.
                self._mode = None
                return []
            self._relay = None
            plan.hook(events.RelayLate("", "", "", len(op.sent)))
            return []
        self._report.sent += len(op.sent)
        self._report.dead += len(op.dead)
        if op.sent:
            plan.hook(events.Published("", "", "", len(op.sent)))
        for event in reports:
            plan.hook(event)
        return suspects

    def _sort(
        self, found: tuple[Outgoing, ...], read_on: bool, log: bool
    ) -> tuple[list[Outgoing], list[Outgoing], dict[int, Result]]:
        """Return what to publish now, what to publish alone, and what not to publish at all."""
        plan, outages = self._plan, self._outages
        certain = light(plan.largest)
        if not read_on and not outages:  # the usual case, in a hurry
            for each in found:
                if each.starts or each.queued or len(each.data) > certain:
                    break
            else:
                return list(found), [], {}
        ready: list[Outgoing] = []
        suspects: list[Outgoing] = []
        unsent: dict[int, Result] = {}
        probed: set[str] = set()
        ended: set[str] = set()
        last: dict[str, int] = {}
        # Those who were in the batch of a killer are innocent until they have been sent alone.
        most = max(plan.tries, SUSPECT + 1)
        for each in found:
            stream = each.stream
            if stream:
                if stream in ended:
                    continue
                if read_on and each.sequence != last.get(stream, self._sequences.get(stream, 0)) + 1:
                    # A message of this stream may stand below: one that was put off, or whose commit came late.
                    ended.add(stream)
                    self._read_on = 0
                    continue
                last[stream] = each.sequence
            outage = outages.get(each.destination) if outages else None
            if log and (each.queued or each.starts):
                pass  # it moves to the queue, and is judged there
            elif outage and (outage.probe_at > plan.clock() or each.destination in probed):
                unsent[each.position] = DestinationDown(outage.reason)
            elif each.starts >= most and (plan.policy(stream) != "block" or (each.starts - most) % 2 == 0):
                # It has killed relays. If it blocks its stream, it rests at every other start, so that they live.
                known = self._blocked.get(each.position)  # while it rests, an operator still has to see why
                unsent[each.position] = Refused(
                    known or f"{each.starts} attempts have failed, or have killed the relay"
                )
            elif len(each.data) > certain and oversize(each, plan.largest):
                unsent[each.position] = Refused(f"it is larger than the {plan.largest} bytes that the broker takes")
            elif each.starts >= SUSPECT and len(found) > 1:
                suspects.append(each)
            else:
                ready.append(each)
                probed.add(each.destination)
                continue
            if stream:
                ended.add(stream)
        return ready, suspects, unsent

    def _publish(
        self, ready: list[Outgoing], deadline: float, ahead: StartMessages | ReadLog | None = None
    ) -> Generator[Any, Any, dict[int, Result]]:
        """Publish in one go, or in waves: the first message of every stream, then the next of those that were sent.

        Returns the results by position.
        """
        if not ready or self._plan.clock() >= deadline:
            return {}
        if self._plan.pipelines:
            return dict(zip(map(_POSITION, ready), (yield from self._hand_over(ready, deadline, ahead)), strict=True))
        results: dict[int, Result] = {}
        streams: dict[str | int, list[Outgoing]] = {}
        for each in ready:
            streams.setdefault(each.stream or each.position, []).append(each)
        lines = list(streams.values())
        depth = 0
        while lines and self._plan.clock() < deadline:
            wave = [line[depth] for line in lines]
            answers = yield from self._hand_over(wave, deadline)
            results.update(zip(map(_POSITION, wave), answers, strict=True))
            depth += 1
            if any(isinstance(answer, BrokerDown) for answer in answers):
                break
            lines = [
                line
                for line, answer in zip(lines, answers, strict=True)
                if isinstance(answer, Sent) and len(line) > depth
            ]
        return results

    def _hand_over(
        self, wave: list[Outgoing], deadline: float, ahead: StartMessages | ReadLog | None = None
    ) -> Generator[Any, Any, list[Result]]:
        messages = tuple(wave)
        answers: list[Result]
        if ahead is None:
            answers = yield Publish(messages, deadline)
        else:
            answers, read = yield Publish(messages, deadline, ahead)
            self._ahead = read or _NONE
        return answers

    def _remember(self, sent: tuple[Outgoing, ...]) -> None:
        """Remember how far each stream is."""
        if len(self._sequences) > REMEMBERED:
            self._sequences.clear()
        self._sequences.update([(each.stream, each.sequence) for each in sent])

    def _judge(
        self, found: tuple[Outgoing, ...], results: dict[int, Result]
    ) -> tuple[SettleMessages, list[events.Event]]:
        """Decide what becomes of each message. Those without a result stay as they are."""
        sent: list[int] = []
        failed: list[Failure] = []
        dead: list[DeadLetter] = []
        reports: list[events.Event] = []
        ended: set[str] = set()
        sequences = self._sequences
        if len(sequences) > REMEMBERED:
            sequences.clear()
        for each in found:
            stream = each.stream
            result = results.get(each.position)
            if isinstance(result, Sent):
                sent.append(each.position)
                if stream and stream not in ended:
                    sequences[stream] = each.sequence
                continue
            if stream:
                if stream in ended:
                    continue  # it failed because of the one before, or may have: that is no attempt of its own
                ended.add(stream)
                sequences.pop(stream, None)
            if result is None or isinstance(result, BrokerDown):
                continue
            if isinstance(result, DestinationDown):
                if outage := self._outages.get(each.destination):  # else it is up again
                    after = max(outage.probe_at - self._plan.clock(), SHORTEST_PAUSE)
                    failed.append(Failure(each.position, storable_reason(result.reason), after, counts=False))
                continue
            judged, event = self._judge_failure(each, result)
            reports.append(event)
            if isinstance(judged, Failure):
                failed.append(judged)
            else:
                dead.append(judged)
        assert self._relay is not None
        return SettleMessages(self._relay, tuple(sent), tuple(failed), tuple(dead)), reports

    def _judge_failure(self, each: Outgoing, result: TryAgain | Refused) -> tuple[Failure | DeadLetter, events.Event]:
        plan, reason = self._plan, storable_reason(result.reason)
        starts = each.starts + 1
        about = (each.type, "", each.id, each.stream, reason)
        policy = plan.policy(each.stream)
        after = min(plan.longest_pause, plan.pause * (1 << min(each.starts, 32))) * plan.jitter()
        if isinstance(result, TryAgain) and starts < plan.tries:
            if result.after is not None:
                after = result.after
            self._report.failed += 1
            return Failure(each.position, reason, max(after, SHORTEST_PAUSE)), events.PublishFailed(*about, starts)
        if policy != "block":
            park = policy == "park" and bool(each.stream)
            return DeadLetter(each.position, reason, park), events.PublishGivenUp(*about, starts)
        self._report.blocked += 1
        event: events.Event = events.PublishFailed(*about, starts)
        if each.position not in self._blocked:
            if len(self._blocked) >= REMEMBERED:
                self._blocked.clear()
            event = events.StreamBlocked(*about, starts)
        self._blocked[each.position] = reason
        if starts >= max(plan.tries, SUSPECT + 1):
            after = plan.longest_pause / 2  # from now on it rests twice before each attempt: see _sort
        elif starts >= plan.tries:
            after = plan.longest_pause
        # Otherwise it was refused, perhaps by a queue that is about to be created.
        return Failure(each.position, reason, max(after, SHORTEST_PAUSE)), event

    def _settle(self, op: SettleMessages | PassLog, lease_end: float) -> Generator[Any, Any, bool | None]:
        """Settle, and try again while the lease lasts: what was sent and is not settled is sent twice."""
        pause = STORE_PAUSE_FIRST
        while True:
            answer: bool | Raised | None = yield op
            if not isinstance(answer, Raised):
                return answer
            self._tell_store_failed(op, answer.error)
            if self._plan.clock() + pause >= lease_end:
                self._relay, self._former = None, self._relay
                raise _StoreFailed(answer.error)
            yield Pause(pause)
            pause = min(2 * pause, STORE_PAUSE_LONGEST)

    def _send_alone(self, suspects: list[Outgoing]) -> Generator[Any, Any, None]:
        """Send messages that may kill the relay, each in a batch of its own, so that its death counts for no other.

        Those that were started least often come first: they are probably innocent.
        """
        plan = self._plan
        end = plan.clock() + SUSPECTS_FOR
        for each in sorted(suspects, key=lambda each: (each.starts, each.position)):
            if self._relay is None or self._outage or self._stopping():
                return
            now = plan.clock()
            alone = yield from self._execute(StartMessages(self._relay, 1, plan.lease, each.position - 1))
            if alone is None:
                self._relay = None
                return
            if [one.position for one in alone] == [each.position]:
                yield from self._send(alone, now)
            else:  # somebody has taken it away
                yield from self._settle(SettleMessages(self._relay, ()), now + plan.lease)
            if plan.clock() >= end:
                return

    def _judge_broker(self, results: Collection[Result]) -> None:
        """Open or close the circuit breaker."""
        plan = self._plan
        down = next((result for result in results if isinstance(result, BrokerDown)), None)
        if down is not None:
            if self._outage is None:
                self._outage = _CircuitBreaker(down.reason)
                plan.hook(events.BrokerLost("", "", "", down.reason))
            self._outage.lasts(plan.clock())
            self._report.broker_down = down.reason
        elif self._outage and results:
            self._outage = None
            self._report.broker_down = ""
            plan.hook(events.BrokerBack("", "", ""))

    def _judge_destinations(self, ready: list[Outgoing], results: dict[int, Result], late: bool) -> None:
        """Open or close the circuit breakers of the destinations.

        :param late: publishing took until the deadline. Those that have confirmed nothing have held the others up.
        """
        if not (late or self._outages or any(isinstance(result, DestinationDown) for result in results.values())):
            return
        plan, outages = self._plan, self._outages
        found: dict[str, list[Result]] = {}
        for each in ready:
            if (result := results.get(each.position)) and not isinstance(result, BrokerDown):
                found.setdefault(each.destination, []).append(result)
        for destination, answers in found.items():
            kinds = DestinationDown | TryAgain if late else DestinationDown
            reasons = [answer.reason for answer in answers if isinstance(answer, kinds)]
            if len(reasons) == len(answers):
                if destination not in outages:
                    outages[destination] = _CircuitBreaker(reasons[0])
                    plan.hook(events.BrokerLost("", "", "", reasons[0], destination))
                outages[destination].lasts(plan.clock())
            elif outages.pop(destination, None):
                plan.hook(events.BrokerBack("", "", "", destination))
        if len(outages) > REMEMBERED:
            outages.clear()
        self._report.destinations_down = len(outages)

    def _tell_store_failed(self, op: Op[Any], error: BaseException) -> None:
        self._plan.hook(events.StoreFailed("", "", "", type(op).__name__, describe_error(error)))


def _all_sent(results: dict[int, Result]) -> bool:
    return set(map(type, results.values())) <= {Sent}


def _others(found: tuple[Outgoing, ...], sent: Collection[int]) -> list[Outgoing]:
    done = set(sent)
    return [each for each in found if each.position not in done]
