"""How a consumer applies the messages of a broker, written once for sync and async.

::

    receive a batch ──▶ for each message: apply it ──▶ acknowledge ──▶ receive the next …
                            │ the handler raised: postpone it, with a pause that grows
                            └ it has used up its tries: to the dead letters, then acknowledge

The flow is a generator that knows no store, broker or thread. It yields ``Receive``, ``ApplyMessages``,
``Acknowledge``, ``Postpone``, ``Pause`` and Ops. The answer is what was asked for, or Raised.

A handler of batches gets the messages of a batch together, in one transaction. If that fails, or if messages were
delivered before, they are applied one by one, so that a poison message takes no other with it.

A message is acknowledged after its effect is committed, so a crash in between leads to a repeat, and the inbox knows
that one. A message that kills its consumer raises nothing. It is found because starts are counted when they begin. To
count every start would be a commit for every message, so only those are counted that may be starts after a crash: of
messages that were delivered before. The broker knows which these are, or else one write for each batch does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final, TypeAlias

from semel.core.call import Pause, Raised, describe_error
from semel.core.lineage import read_metadata
from semel.core.messaging.messages import (
    MAX_NAME,
    BuryMessage,
    CountStart,
    ForgetStarts,
    Message,
    SeeMessages,
    check_message,
    fits_column,
    storable_reason,
)
from semel.core.messaging.relaying import Poison
from semel.core.ops import Op
from semel.core.values import value
from semel.errors import ConfigurationError, StoreError, TransactionConflict
from semel.observe import events

WAIT: Final = 1.0
"""Seconds to wait for a message, before the consumer looks whether it is to stop."""
ACKNOWLEDGE_EVERY: Final = 1.0
"""Seconds after which messages are acknowledged although their batch is not finished."""
OUTAGE_PAUSE_FIRST: Final = 0.1
OUTAGE_PAUSE_LONGEST: Final = 30.0
"""Seconds until a broker or a database that was down is tried again. They double."""


@value
class Delivery:
    """A message as a broker delivered it."""

    message: Message
    starts: int
    """How many times it was delivered, this time included; 0 if the broker does not count."""
    handle: Any
    """What the adapter needs to acknowledge it."""
    place: str = ""
    """The part of a log that it stands in, such as a partition; empty if the source does not seek."""
    offset: int = 0
    """Where it stands there. Messages of one place are delivered in the order of their offsets."""


@value
class Receive:
    """Receive up to ``limit`` messages, and wait at most ``seconds`` for the first."""

    limit: int
    seconds: float


@value
class Acknowledge:
    """Tell the broker that these are done."""

    deliveries: tuple[Delivery, ...]


@value
class Postpone:
    """Have the message delivered again later."""

    delivery: Delivery
    seconds: float


@value
class ApplyMessages:
    """Run the handler in a transaction with the inbox's rows, and commit. The answer is AppliedMessage or
    RepeatedMessage for each message, or if nothing was applied, MisplacedMessage or Raised."""

    messages: tuple[Message, ...]
    offsets: Mapping[str, int]
    """Where to go on at each place of a log, to be committed with the effect; empty if that is left to the broker."""


@value
class AppliedMessage:
    """The message is applied, and committed."""

    missing: int = 0
    """How many messages of its stream were never applied before it."""


@value
class RepeatedMessage:
    """The message was applied before."""


@value
class MisplacedMessage:
    """The message was not applied, because of its place in its stream."""

    reason: str
    parked: bool = False
    """Whether its stream is parked at an earlier message."""


Request: TypeAlias = "Op[Any] | Receive | Acknowledge | Postpone | ApplyMessages | Pause"
ConsumerFlow: TypeAlias = Generator[Request, Any, None]


@dataclass
class ConsumerReport:
    """What a consumer has done so far."""

    applied: int = 0
    repeated: int = 0
    """Messages that were delivered again after they had been applied."""
    failed: int = 0
    """Attempts that failed. Their messages are delivered again."""
    dead: int = 0
    """Messages that were moved to the dead letters."""


@value
class ConsumerPlan:
    """The settings of a consumer, and what it is handed of the world."""

    consumer: str
    batch: int
    tries: int
    pause: float
    """Seconds before the second attempt, at most; the pauses then double."""
    longest_pause: float
    ordered: bool
    policy: Poison
    counts_starts: bool
    clock: Callable[[], float]
    jitter: Callable[[], float]
    """A random number from 0 to 1."""
    hook: events.EventHook
    watched: bool = False
    """Whether a hook of the user hears of each message. Otherwise only problems are reported."""
    in_batches: bool = False
    """Whether the handler takes many messages at once."""
    stores_offsets: bool = False
    """Whether offsets commit with the effects. Then a message that fails holds up its place: an offset stands for all
    that are before it."""

    def run(
        self, stopping: Callable[[], bool], report: ConsumerReport, until_idle: float | None = None
    ) -> ConsumerFlow:
        """Apply messages until ``stopping``; with ``until_idle``, until none arrives for that many seconds, or the
        broker or the database is down.
        """
        return _Consumption(self, stopping, report).flow(until_idle)


def place_in_streams(last: Mapping[str, int], messages: Sequence[Message]) -> list[AppliedMessage] | MisplacedMessage:
    """Return whether the messages may be applied now, in their order.

    :param last: for each stream, the sequence that was applied last, or 0. If the stream is parked, the sequence of its
        first dead letter, negative. Messages of other streams have no order.
    """
    places, answers = dict(last), []
    for message in messages:
        stream, sequence = message.stream, message.sequence
        if stream not in places or sequence <= 0:
            answers.append(AppliedMessage())
            continue
        before = places[stream]
        if before < 0 and sequence > -before:
            return MisplacedMessage(f"its stream is parked since its message {-before} was given up", parked=True)
        if sequence <= before:
            # It was never applied: the inbox would know it. To drop it would lose it.
            return MisplacedMessage(f"it came too late: the message {before} of its stream was applied before it")
        if before < 0 and len(messages) > 1:  # then each of them may change where it is parked
            return MisplacedMessage("its stream is parked")
        answers.append(AppliedMessage(sequence - before - 1 if before > 0 else 0))
        places[stream] = sequence
    return answers


def identify(message: Message) -> tuple[Message, str]:
    """Return the message with an id and attributes that the tables can hold, and what was wrong with it.

    A message without an id gets one that is made of its content, so that a repeat has the same.
    """
    if message.id and fits_column(message.id):
        return message, ""
    digest = blake2b(digest_size=16, person=b"semel.noid.1")
    for part in (message.id, message.type, message.source, message.stream, str(message.sequence)):
        digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
    digest.update(message.data)
    what = "has no id" if not message.id else "has an id that is too long, or has control characters or spaces"
    return (
        replace(message, id=f"without-id-{digest.hexdigest()}"),
        f"the message {what}, so nobody could tell whether it was applied. It has a new id here",
    )


def storable(message: Message) -> Message:
    """Return the message as the dead letters can hold it. Other producers send what they like."""
    try:
        check_message(replace(message, type=message.type or "-"))
        return message
    except ConfigurationError:
        names = ("type", "source", "destination", "stream", "subject", "content_type")
        fitting: dict[str, Any] = {name: _fitting(getattr(message, name)) for name in names}
        return replace(message, headers={}, **fitting)


def _fitting(text: str) -> str:
    return "".join(c for c in text if c.isprintable())[:MAX_NAME].strip()


class _Outage(Exception):
    """The broker or the database is down. It is not the fault of a message."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Consumption:
    """One run of a consumer."""

    def __init__(self, plan: ConsumerPlan, stopping: Callable[[], bool], report: ConsumerReport) -> None:
        self._plan = plan
        self._stopping = stopping
        self._report = report
        self._done: list[Delivery] = []
        """What is applied, and not yet acknowledged."""
        self._counted: set[str] = set()
        """The messages in hand of which the store has counted something."""
        self._acknowledge_at = 0.0

    def flow(self, until_idle: float | None) -> ConsumerFlow:
        pause = OUTAGE_PAUSE_FIRST
        while not self._stopping():
            try:
                deliveries = yield from self._ask(Receive(self._plan.batch, WAIT if until_idle is None else until_idle))
                if deliveries:
                    yield from self._handle(deliveries)
                elif until_idle is not None:
                    return
            except _Outage as outage:
                self._done.clear()  # they are delivered again, and the inbox knows them
                self._plan.hook(events.ConsumerInterrupted("", "", "", describe_error(outage.error)))
                if until_idle is not None:
                    return
                yield Pause(pause)
                pause = min(2 * pause, OUTAGE_PAUSE_LONGEST)
                continue
            pause = OUTAGE_PAUSE_FIRST

    def _ask(self, request: Request) -> Generator[Request, Any, Any]:
        """Ask for what only fails if the broker or the database is down."""
        answer = yield request
        if type(answer) is Raised:
            raise _Outage(answer.error)
        return answer

    def _handle(self, deliveries: Sequence[Delivery]) -> ConsumerFlow:
        left = deque(deliveries)
        try:
            yield from self._handle_all(left)
        except _Outage:
            # Give back what is in hand, in its order. The next round finds out whether it is over.
            while left:
                yield from self._ask(Postpone(left[0], OUTAGE_PAUSE_FIRST))
                left.popleft()
            yield from self._acknowledge()
            raise

    def _handle_all(self, left: deque[Delivery]) -> ConsumerFlow:
        """Handle the deliveries. Each is removed when it is applied, given up or postponed."""
        plan = self._plan
        self._acknowledge_at = plan.clock() + ACKNOWLEDGE_EVERY
        repeated = yield from self._delivered_before(left)
        waits: dict[str, float] = {}
        """For each stream or place of which a message failed: in how many seconds it is tried again."""
        singly = 0
        """How many of the next messages are not tried together again."""
        while left and not self._stopping():  # if it stops, the others are not acknowledged, so they come again
            if plan.in_batches and not singly:
                batch = tuple(takewhile(lambda each: self._is_fresh(each, repeated, waits), left))
                if len(batch) > 1 and (yield from self._apply(batch)) is None:
                    self._done += [left.popleft() for _ in batch]
                    if plan.clock() >= self._acknowledge_at:
                        yield from self._acknowledge()
                    continue
                singly = len(batch)
            singly = max(0, singly - 1)
            delivery = left[0]
            stream = self._line(delivery)
            seconds = waits.get(stream) if stream else None
            if seconds is None:
                seconds = yield from self._handle_one(delivery, repeated)
            left.popleft()
            if seconds is None:
                self._done.append(delivery)
                if plan.clock() >= self._acknowledge_at:
                    yield from self._acknowledge()
            else:
                waits[stream] = seconds
                yield from self._ask(Postpone(delivery, seconds))
        yield from self._acknowledge()

    def _acknowledge(self) -> ConsumerFlow:
        done = tuple(self._done)
        self._done = []
        self._acknowledge_at = self._plan.clock() + ACKNOWLEDGE_EVERY
        if not done:
            return
        yield from self._ask(Acknowledge(done))
        # After that, so that a message that is delivered again has not got all of its tries back.
        forgotten = self._counted.intersection(identify(each.message)[0].id for each in done)
        if forgotten:
            self._counted -= forgotten
            yield ForgetStarts(self._plan.consumer, tuple(sorted(forgotten)))

    def _delivered_before(self, deliveries: Collection[Delivery]) -> Generator[Request, Any, set[str]]:
        """Return the ids of the messages that may have killed their consumer before."""
        if self._plan.counts_starts:
            return {each.message.id for each in deliveries if each.starts > 1}
        ids = tuple(sorted({identify(each.message)[0].id for each in deliveries}))
        seen = yield from self._ask(SeeMessages(self._plan.consumer, ids))
        self._counted.update(ids)
        return set(seen)

    def _handle_one(self, delivery: Delivery, repeated: set[str]) -> Generator[Request, Any, float | None]:
        """Apply a message, or give it up. Returns None if it is done, or in how many seconds it is to come again."""
        plan, report = self._plan, self._report
        message, problem = identify(delivery.message)
        if problem:
            yield from self._bury(message, problem, delivery.starts)
            return None
        starts = 0
        if message.id in repeated:
            # It may kill the process. What is done must not come again then, and again, until it looks like poison too.
            yield from self._acknowledge()
            starts = yield from self._count_start(message)
            if starts > plan.tries and not self._blocks(message):
                reason = f"its consumer has died, or was stopped, each time that it was applied ({starts - 1} starts)"
                yield from self._bury(message, reason, starts - 1, park=True)
                return None
        answer = yield from self._apply((delivery,))
        if answer is None:
            if starts:
                # It is applied, so it kills nobody any more. If its acknowledgement fails, it comes again, and must not
                # run out of tries then.
                self._counted.discard(message.id)
                yield ForgetStarts(plan.consumer, (message.id,))
            return None
        if isinstance(answer, MisplacedMessage):
            # Somebody may have freed the stream since. Then park it at this message, or those after it would go on.
            yield from self._bury(message, answer.reason, starts or 1, park=answer.parked)
            return None
        if isinstance(answer.error, StoreError):  # it is not the fault of the message, so it does not count
            if starts:
                # Those before it stay. The message may have killed a process, and be in the way of itself until the
                # database or the lease of its operation lets it go.
                yield ForgetStarts(plan.consumer, (message.id,), only_last=True)
            if not isinstance(answer.error, TransactionConflict):
                raise _Outage(answer.error)
            report.failed += 1
            tries = starts or delivery.starts or 1
            plan.hook(events.Conflicted(message.type, "", message.id, tries, describe_error(answer.error)))
            return plan.jitter() * plan.pause
        starts = starts or (yield from self._count_start(message))
        reason = describe_error(answer.error)
        if starts >= plan.tries and not self._blocks(message):
            yield from self._bury(message, reason, starts, park=True)
            return None
        report.failed += 1
        plan.hook(events.ApplyFailed(message.type, "", message.id, message.stream, reason, starts))
        return plan.jitter() * min(plan.longest_pause, plan.pause * 2.0 ** min(starts - 1, 30))

    def _line(self, delivery: Delivery) -> str:
        """The stream or the place in which messages wait for each other."""
        plan = self._plan
        return delivery.place if plan.stores_offsets else delivery.message.stream if plan.ordered else ""

    def _is_fresh(self, delivery: Delivery, repeated: Collection[str], waits: Collection[str]) -> bool:
        """Whether the message may be applied together with others."""
        message, line = delivery.message, self._line(delivery)
        return not (line and line in waits) and message.id not in repeated and not identify(message)[1]

    def _apply(self, deliveries: tuple[Delivery, ...]) -> Generator[Request, Any, MisplacedMessage | Raised | None]:
        """Apply messages together. Returns None if they are applied, or why none of them is."""
        plan, report = self._plan, self._report
        began = plan.clock()
        messages = tuple(each.message for each in deliveries)
        offsets = {each.place: each.offset + 1 for each in deliveries} if plan.stores_offsets else {}
        answers = yield ApplyMessages(messages, offsets)
        if isinstance(answers, (MisplacedMessage, Raised)):
            return answers
        for message, answer in zip(messages, answers, strict=True):
            if isinstance(answer, AppliedMessage):
                report.applied += 1
                self._report_each(events.AppliedEvent, message, began)
                if answer.missing:
                    plan.hook(events.StreamGap(message.type, "", message.id, message.stream, answer.missing))
            else:
                report.repeated += 1
                self._report_each(events.Skipped, message, began)
        return None

    def _report_each(self, event: type[events.AppliedEvent | events.Skipped], message: Message, began: float) -> None:
        plan = self._plan
        if plan.watched:
            seconds, lineage = plan.clock() - began, read_metadata(message.headers)
            plan.hook(event(message.type, "", message.id, plan.consumer, seconds, lineage.root, lineage.parent))

    def _count_start(self, message: Message) -> Generator[Request, Any, int]:
        self._counted.add(message.id)
        starts: int = yield from self._ask(CountStart(self._plan.consumer, message.id))
        return starts

    def _blocks(self, message: Message) -> bool:
        plan = self._plan
        return plan.ordered and bool(message.stream) and plan.policy == "block"

    def _bury(self, message: Message, reason: str, starts: int, park: bool = False) -> ConsumerFlow:
        """Write the message to the dead letters.

        The inbox has no row of it, because its transaction was rolled back, so a redrive can apply it.
        """
        plan, reason = self._plan, storable_reason(reason)
        parks = park and plan.ordered and plan.policy == "park" and bool(message.stream) and message.sequence > 0
        yield from self._ask(BuryMessage(plan.consumer, storable(message), reason, starts, parks))
        self._report.dead += 1
        plan.hook(events.ApplyGivenUp(message.type, "", message.id, message.stream, reason, starts))
