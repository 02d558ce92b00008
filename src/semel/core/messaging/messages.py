"""Messages, and the Ops of the outbox, the relay, the inbox and the dead letters.

A message is a CloudEvents 1.0 event in binary mode: its attributes travel as headers (``ce-id``, ``ce-type``, …), its
data as the body. ``attributes`` and ``read_message`` are the one place that knows these names.

The outbox is a table in the caller's database, and a message is added to it in the caller's transaction. Messages of
one *stream* are sent in the order of their sequence. Every stream belongs to one of ``LANES`` lanes, by a hash of its
name. A relay owns lanes, and only the owner of a lane sends its messages, so several relays keep the order of every
stream without locking a message. A relay lives as long as its lease. When it dies, the others share its lanes, and
count a start for each message that it was sending: a message that kills its relay is found that way.

On PostgreSQL the outbox can be a log instead, which is only appended to. One relay at a time reads it, with a cursor.
What it cannot send moves to the queue, and is treated there.

The rules of this module are pure. The statements are in ``semel.sql``; what drives them is in ``semel.messaging``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from math import modf
from operator import attrgetter
from typing import Final, Literal, TypeAlias
from zlib import crc32

from semel.core.ops import StoreOp
from semel.core.values import value
from semel.errors import ConfigurationError

LANES: Final = 64
"""The number of lanes, and so the largest number of relays that can share the work of one database."""
OUTBOX: Final = b"semel.outbox"
"""What a relay waits for with ``store.wait``: who adds a message notifies the waiters of this id."""
MAX_NAME: Final = 255
"""The longest id, type, source, subject, destination and stream, in characters. The columns have this size."""
MAX_HEADERS: Final = 32 * 1024
"""The most that all headers of a message take together, in characters."""
_MOST_HEADER_BYTES: Final = 4 * MAX_HEADERS + 16 * 1024
"""No message that was checked has more bytes of headers and attributes."""

MAX_STARTED_BYTES: Final = 8 * 1024 * 1024
"""A relay takes no further message once the data of its batch has this many bytes."""

LONGEST_REASON: Final = 2000
"""The most characters of the text that says why a message failed."""
_MOST_REDRIVES: Final = 1_000_000
"""A column holds it."""
_PREFIX: Final = "ce-"
_CONTENT_TYPE: Final = "content-type"
_PACKED: Final = "semel-headers"
"""Debezium cannot make headers of what is in the column ``headers``. It sends the column as this one."""
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_ODD: Final = re.compile(rf"\s|{_UNFIT.pattern}")
"""A text without these is sure to fit."""
_ATTRIBUTES: Final = ("id", "type", "source", "destination", "stream", "subject", "content_type")
_attributes_of: Final = attrgetter(*_ATTRIBUTES)
_HEADER_NAME: Final = re.compile("[a-z0-9!#$%&'*+.^_`|~-]+")


@value
class Message:
    """One message: a CloudEvent, and where it goes."""

    id: str
    """Identifies the message everywhere and for ever. It is the same in every attempt, and after a redrive."""
    type: str
    data: bytes
    source: str = ""
    """Who sends it, such as ``/orders``. CloudEvents identify an event by source and id together."""
    destination: str = ""
    """The topic, exchange, subject, stream, queue or URL. Empty: the relay's default."""
    stream: str = ""
    """Messages of one stream are sent in order. Empty: this message needs no order."""
    sequence: int = 0
    """The place in the stream, from 1 on, without gaps in the order of the commits. 0 without a stream."""
    subject: str = ""
    content_type: str = "application/json"
    time: float = 0.0
    """When it was added, in seconds since 1970, by the clock of the database."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers, with names in lower case: traceparent, idempotency-key, causation-id, and the caller's own."""
    redrives: int = 0
    """How often it has come back from the dead letters."""

    @property
    def broker_id(self) -> str:
        """The id for the broker's own deduplication. A redrive must not be swallowed by it, so it has another one."""
        return f"{self.id}:{self.redrives}" if self.redrives else self.id


def lane_of(stream: str, id: str) -> int:
    """Return the lane of a stream. A message without a stream has a lane by its id."""
    if not stream:  # any lane will do, so the cheaper hash does
        return crc32(id.encode()) % LANES
    digest = blake2b(stream.encode(), digest_size=4, person=b"semel.lane.1").digest()
    return int.from_bytes(digest, "big") % LANES


def fits_column(text: object) -> bool:
    """Whether this can be an id or another attribute of a message."""
    # MySQL takes texts for equal that differ in the spaces at their ends.
    return isinstance(text, str) and len(text) <= MAX_NAME and not _UNFIT.search(text) and text == text.strip()


def check_message(message: Message) -> None:
    """Raise ConfigurationError if a broker or a column could not hold the message."""
    texts = _attributes_of(message)
    if set(map(type, texts)) != {str} or len(joined := "".join(texts)) > MAX_NAME or _ODD.search(joined):
        for name, text in zip(_ATTRIBUTES, texts, strict=True):  # seldom, because the first look takes less time
            if not isinstance(text, str):
                raise ConfigurationError(f"the {name} of a message is text, not {type(text).__name__}")
            if not fits_column(text):
                raise ConfigurationError(
                    f"the {name} of a message is text of at most {MAX_NAME} characters, without control characters, "
                    "and without spaces at its ends"
                )
    if not message.id or not message.type:
        raise ConfigurationError("a message needs an id and a type")
    if not message.headers:
        return
    headers: Mapping[str, object] = message.headers
    for name, text in headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.startswith(_PREFIX) or name == _CONTENT_TYPE:
            raise ConfigurationError(
                f"{name[:80]!r} cannot be a header: names are in lower case, and ce-… and content-type are attributes"
            )
        if not isinstance(text, str) or _UNFIT.search(text):
            raise ConfigurationError(f"the header {name!r} holds control characters, or is not text")
    if sum(len(name) + len(value) for name, value in message.headers.items()) > MAX_HEADERS:
        raise ConfigurationError(f"the headers of a message take at most {MAX_HEADERS} characters together")


def storable_reason(text: str) -> str:
    """Return why a message failed as a column can hold it. A broker's or handler's error may have any text, and what
    cannot be stored would block the relay or the consumer.
    """
    return text[:LONGEST_REASON].replace("\x00", "").encode(errors="replace").decode()


def attributes(message: Message) -> dict[str, str]:
    """Return the headers of a message in binary mode. Its data is the body."""
    found = {
        "ce-specversion": "1.0",
        "ce-id": message.id,
        "ce-type": message.type,
        "ce-source": message.source or "/",
    }
    if message.time:
        found["ce-time"] = _time_text(message.time)
    if message.subject:
        found["ce-subject"] = message.subject
    if message.stream:
        found["ce-stream"] = message.stream
        found["ce-sequence"] = str(message.sequence)
    if message.redrives:
        found["ce-redrives"] = str(message.redrives)
    if message.content_type:
        found[_CONTENT_TYPE] = message.content_type
    for name, text in message.headers.items():
        if text:
            found[name] = text
    return found


def _time_text(time: float) -> str:
    """As ``datetime.isoformat``, with the whole second from a cache: it is called for every message that is sent."""
    part, whole = modf(time)
    micros = round(part * 1_000_000)
    if micros < 0 or micros == 1_000_000:
        return _isoformat(time) + "Z"
    return f"{_isoformat(whole)}.{micros:06}Z" if micros else f"{_isoformat(whole)}Z"


@lru_cache(maxsize=64)
def _isoformat(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat().removesuffix("+00:00")


def size_of(headers: Mapping[str, str], data: bytes) -> int:
    """Return how many bytes headers and data have together, as ``Capabilities.largest`` counts them."""
    return len(data) + sum(len(name.encode()) + len(text.encode()) for name, text in headers.items())


def light(most: int) -> int:
    """Return how many bytes of data a message may have that is certainly not oversize, whatever its headers are."""
    return most - _MOST_HEADER_BYTES


def oversize(message: Message, most: int) -> int:
    """Return the size of a message with more than ``most`` bytes, else 0. It is for messages that were checked."""
    if len(message.data) <= light(most):  # almost always; to encode the headers takes longer
        return 0
    size = size_of(attributes(message), message.data)
    return size if size > most else 0


def read_message(headers: Mapping[str, str], data: bytes, destination: str = "") -> Message:
    """Return the message that arrived with these headers.

    Other producers leave out what they like: what is missing or malformed is empty. The caller decides what to do with
    a message that has no id.
    """
    lower = {name.lower(): text for name, text in headers.items()}
    if _PACKED in lower:
        lower = _unpacked(lower.pop(_PACKED)) | lower
    return Message(
        id=lower.get("ce-id", ""),
        type=lower.get("ce-type", ""),
        data=data,
        source=lower.get("ce-source", ""),
        destination=destination,
        stream=lower.get("ce-stream", ""),
        sequence=_number(lower.get("ce-sequence", "")),
        subject=lower.get("ce-subject", ""),
        content_type=lower.get(_CONTENT_TYPE, "") or "application/octet-stream",
        time=_timestamp(lower.get("ce-time", "")),
        headers={name: text for name, text in lower.items() if name != _CONTENT_TYPE and not name.startswith(_PREFIX)},
        # A consumer that gives the message up again must know it: the next redrive needs a broker_id that is new.
        redrives=min(_number(lower.get("ce-redrives", "")), _MOST_REDRIVES),
    )


def _unpacked(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {n: t for n, t in found.items() if isinstance(t, str)} if isinstance(found, dict) else {}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _timestamp(text: str) -> float:
    if not text:
        return 0.0
    try:
        time = datetime.fromisoformat(text).timestamp()
        datetime.fromtimestamp(time, UTC)  # a time zone, or rounding, may move it out of the years 1 to 9999
    except (ValueError, OverflowError, OSError):
        return 0.0
    return time


# The outbox


@value
class NewMessage(Message):
    """A message that is to be added to the outbox."""

    delay: float = 0.0
    """Send it only after this many seconds."""
    fresh: bool = False
    """Its id was made at random for it, so the outbox need not look for another message with this id."""


@value
class Outgoing(Message):
    """A message in the outbox that a relay is to send."""

    position: int = 0
    """Where it stands in the outbox. Identifies the row."""
    starts: int = 0
    """How many attempts to send it have begun and failed, or ended with the death of their relay."""
    queued: bool = False
    """It is in a log, and earlier messages of its stream wait in the queue: it must follow them there."""


@value
class JoinRelays(StoreOp["tuple[int, ...]"]):
    """Register a relay, or renew its lease, and balance the lanes. The answer is the lanes that it owns now.

    In one atomic step: relays whose lease has ended are removed, their lanes are freed, and each message that they were
    sending counts one start more; this relay then takes free lanes up to its share (all lanes divided by the living
    relays, rounded up), or gives up what it has beyond that. A relay must have no message under way when it joins.
    """

    relay: bytes
    """16 random bytes that identify the relay."""
    lease: float


@value
class StartMessages(StoreOp["tuple[Outgoing, ...] | None"]):
    """Take the next messages of the relay's lanes, write down that they are being sent, and renew the lease.

    The answer holds at most ``limit`` messages that are due, in the order of their positions, without those of streams
    that are held back. It ends with the message that reaches ``MAX_STARTED_BYTES``. Only a message without a stream has
    a time when it is due; a stream waits as a whole. The answer is None if the relay's lease has ended: it owns no lane
    any more, and must join again. A repeat after a lost answer returns the same messages, or more.
    """

    relay: bytes
    limit: int
    lease: float
    after: int = 0
    """Skip the positions up to this one. A relay that reads on from its last batch does not look at rows that are
    deleted and not yet removed. It checks by the sequence that it skips no message of a stream."""
    ahead: bool = False
    """Only read them: the messages before them remain under way. It does not renew the lease; ``SettleMessages`` does.
    The answer is empty if the lease has ended."""


@value
class Failure:
    """A message that was not sent."""

    position: int
    reason: str
    after: float
    """Seconds until the next try. While it waits, the later messages of its stream wait too."""
    counts: bool = True
    """False if it was not tried, because its destination is down."""


@value
class DeadLetter:
    """A message that is given up."""

    position: int
    reason: str
    park: bool = False
    """Park its stream as well: all later messages of the stream follow it to the dead letters, until a redrive."""


@value
class SettleMessages(StoreOp["bool | None"]):
    """Delete the messages that were sent, put off those that failed, and move those that are given up. The answer is
    False if the relay's lease has ended; then nothing has changed.

    Each failure counts one start, unless the message was not tried. Messages that are in no list (the broker was down)
    stay as they are. Afterwards only those in ``then`` are under way. Only messages under way are settled, so a repeat
    after a lost answer changes nothing.
    """

    relay: bytes
    sent: tuple[int, ...]
    failed: tuple[Failure, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    then: tuple[int, ...] = ()
    """Messages that were read ahead. They are under way from now on, and the lease is renewed. If one of them is gone,
    because a redrive has put others before it, none is under way, and the answer is None."""
    lease: float = 0.0


@value
class LeaveRelays(StoreOp[None]):
    """Remove the relay and free its lanes. It must have no message under way."""

    relay: bytes


# The log: how PostgreSQL can store the outbox for large volumes, instead of in a queue

OutboxMode: TypeAlias = Literal["queue", "log", "wal"]
"""How messages are stored: as rows that are deleted when they are sent, in a table that is only appended to, or in the
database's own log (the write-ahead log, read by logical decoding)."""
OUTBOX_MODES: Final[tuple[OutboxMode, ...]] = ("queue", "log", "wal")


@value
class LogOwned:
    """What a relay reads besides the queue."""

    mode: OutboxMode
    """``queue``: nothing else."""
    retained: int = 0
    """How many bytes of its own log the database keeps for the outbox, in the mode ``wal``."""


@value
class TakeLog(StoreOp[LogOwned]):
    """Take the cursor of the log, if its owner is gone. The answer has the mode of the outbox if this relay owns the
    cursor now, otherwise ``queue``.

    It also removes messages that were read long ago. A relay must have no message under way.
    """

    relay: bytes


@value
class ReadLog(StoreOp["tuple[Outgoing, ...] | None"]):
    """Take the next messages of the log, write down that they are being sent, and renew the lease.

    The answer is as that of ``StartMessages``: in the order of their positions, which is that of the commits within a
    stream. It is None if the lease has ended or another relay owns the cursor. A repeat returns the same messages, or
    more. Messages that a relay was sending when it died have one start.
    """

    relay: bytes
    limit: int
    lease: float
    mode: OutboxMode
    ahead: bool = False
    """In the mode ``log``: return those that follow the messages under way, which remain so. It does not renew the
    lease; ``PassLog`` does. It returns no messages as well if it is not known yet what follows."""


@value
class PassLog(StoreOp[bool]):
    """Go on behind the messages that ``ReadLog`` has returned last, and renew the lease. The answer is False if the
    relay no longer owns the cursor; then nothing has changed.

    What was not sent moves to the queue, and its stream goes on there: as long as a stream has messages in the queue,
    all that follow have to move. A repeat changes nothing.
    """

    relay: bytes
    lease: float
    mode: OutboxMode
    last: int
    """The position of the last message under way."""
    moved: tuple[Outgoing, ...] = ()
    """All that were not sent, in the order of their positions."""
    failed: tuple[Failure, ...] = ()
    """Those of them that have failed, by their positions in the log ..."""
    dead: tuple[DeadLetter, ...] = ()
    """... and those that are given up."""
    stays: bool = False
    """Nothing was sent, and nothing moves: ``ReadLog`` returns the same messages again."""
    then: int | None = None
    """The messages up to this position, which were read ahead, are under way from now on."""


@value
class SwitchMode(StoreOp[bool]):
    """Change how messages are stored. What is in the log moves to the queue. Raises ConfigurationError if the database
    cannot do it.

    The answer is False if only a part has moved yet, because there is much, and the mode is what it was: ask again.
    """

    mode: OutboxMode


@value
class DestinationDepth:
    """The messages in the outbox that go to one destination."""

    destination: str
    messages: int
    failing: int
    """How many of them have been started before, and not sent."""
    oldest: float
    """Seconds since the oldest one was added."""


@value
class HeldStream:
    """A stream whose messages wait."""

    stream: str
    messages: int
    seconds: float | None
    """Until the next try, 0 if it is due; None if the stream is parked."""
    reason: str


@value
class OutboxState:
    """What is in the outbox, and who sends it."""

    destinations: tuple[DestinationDepth, ...]
    held: tuple[HeldStream, ...]
    relays: int
    """Living relays."""
    lanes: int
    """How many lanes they own. What is in the others is not sent until a relay joins, or the lease of a dead one ends.
    """
    mode: OutboxMode = "queue"
    retained: int | None = None
    """How many bytes of its own log the database keeps for the outbox; None without a replication slot."""
    more: bool = False
    """Whether there are more messages than were counted."""


@value
class InspectOutbox(StoreOp[OutboxState]):
    """Show what is in the outbox. It changes nothing, and takes no longer because a million messages wait."""

    limit: int
    """How many streams that wait are listed, parked ones first."""
    look: int = 100_000
    """How many messages are counted, the oldest ones."""


# What became of a message that a relay has handed to a broker


@value
class Sent:
    """The broker has stored the message, and said so."""


@value
class TryAgain:
    """The message was not taken, or nobody knows. Another try may succeed."""

    reason: str
    after: float | None = None
    """Seconds, if the broker says when to try again."""


@value
class Refused:
    """The broker does not want this message, and never will: it is too large, or there is no such destination."""

    reason: str


@value
class BrokerDown:
    """The broker cannot be reached, or accepts nothing at all. It is not the fault of the message."""

    reason: str


@value
class DestinationDown:
    """The destination of this message cannot be reached, or accepts nothing. Others may. It is not the fault of the
    message."""

    reason: str


Result: TypeAlias = Sent | TryAgain | Refused | BrokerDown | DestinationDown


# The inbox, as a consumer uses it


@value
class SeeMessages(StoreOp["frozenset[str]"]):
    """Write down that a consumer has received these messages. The answer holds those that it had received before.

    Only for brokers that do not count: that way a message that killed its consumer is recognised when it comes again.
    """

    consumer: str
    ids: tuple[str, ...]


@value
class CountStart(StoreOp[int]):
    """Count one start of a message. The answer is how many are counted, this one included."""

    consumer: str
    message: str


@value
class ForgetStarts(StoreOp[None]):
    """The messages are done: forget what ``SeeMessages`` and ``CountStart`` wrote down."""

    consumer: str
    ids: tuple[str, ...]
    only_last: bool = False
    """Take back only the last start: the messages are not done, but it was not their fault. Not idempotent."""


@value
class ReadOffsets(StoreOp["dict[str, int]"]):
    """Read where a consumer goes on at these places: the offsets that were committed with its effects."""

    consumer: str
    places: tuple[str, ...]


@value
class PurgeInbox(StoreOp[int]):
    """Forget at most ``limit`` messages that were applied more than ``keep`` seconds ago. The answer is how many.

    Nothing is forgotten for a consumer that remembers for longer, and has said so.
    """

    keep: float
    limit: int
    consumer: str = ""
    """Write down that this consumer remembers for ``keep`` seconds."""


# The dead letters


@value
class BuryMessage(StoreOp[None]):
    """Write a message that a consumer has given up to the dead letters. A repeat writes it once."""

    consumer: str
    message: Message
    reason: str
    starts: int
    park: bool = False
    """Park its stream for this consumer: the later messages of the stream follow it, until it is applied or purged."""


@value
class Letter:
    """A message in the dead letters."""

    position: int
    """Where it stands in the dead letters. Identifies the row."""
    origin: str
    """The consumer that has given it up; empty if it was the relay."""
    died: float
    """When, in seconds since 1970."""
    reason: str
    starts: int
    message: Message


@value
class LetterFilter:
    """Which dead letters are meant: those that fit all of these."""

    origin: str | None = None
    """The consumer's name; ``""`` for the relay."""
    type: str | None = None
    destination: str | None = None
    stream: str | None = None
    message: str | None = None
    """The id of one message."""
    reason: str = ""
    """A part of the reason."""
    older: float = 0.0
    """Dead for at least this number of seconds."""


@value
class ListLetters(StoreOp["tuple[Letter, ...]"]):
    """Return at most ``limit`` dead letters after the position ``after``, in the order of their positions."""

    filter: LetterFilter
    after: int
    limit: int


@value
class CountLetters(StoreOp["tuple[int, int]"]):
    """Return how many dead letters there are, and the position of the last one."""

    filter: LetterFilter
    most: int = 2**31 - 1
    """How many are counted, the oldest ones."""


@value
class RedriveLetters(StoreOp[int]):
    """Move at most ``limit`` dead letters up to the position ``last`` back into the outbox. The answer is how many.

    Messages of a stream come back in the order of their sequences, and before those of the stream that are in the
    outbox. A stream that the relay has parked is free again when none of its messages is left in the dead letters.
    """

    filter: LetterFilter
    last: int
    limit: int


@value
class PurgeLetters(StoreOp[int]):
    """Delete at most ``limit`` dead letters up to the position ``last``. The answer is how many.

    Streams that were parked because of them are free again, as after a redrive.
    """

    filter: LetterFilter
    last: int
    limit: int
