"""Moments: the events that matter for the story of one key, and the Ops by which a store keeps and reads them.

A moment never holds the key itself. It has the identity of the record, and hashes of the key at the start of the chain
and of the caller's key, by which the hops of one request find each other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

from semel.core.encoding.fingerprint import hash_key
from semel.core.ops import Op, StoreOp
from semel.core.trail.minutes import Minute, MinuteRow
from semel.core.values import value
from semel.observe import events
from semel.observe.events import Event

LONGEST_DETAIL: Final = 200
"""Characters of a text in the details."""
LONGEST_ROUTE: Final = 200
MOST_HOPS: Final = 100
"""How many records and messages of one chain are looked at."""
_NOT_KEPT: Final = frozenset({"operation", "tenant", "key", "route", "id", "token"})


@value
class Moment:
    """One event in the story of a key."""

    at: float
    """Seconds since 1970, by the clock of the process in which it happened."""
    id: bytes
    """The identity of the record: 16 bytes. If the event is about no record, such as one of a message or a client, it
    is the link of its key; empty if it has no key."""
    kind: str
    """The name of the event, such as ``replayed``."""
    route: str
    who: str
    """``service@host:pid``"""
    attempt: int
    """0 if the event has none."""
    root: bytes
    """``link(key)`` of the key at the start of the chain, where the event knows it; otherwise empty."""
    details: Mapping[str, Any]
    """The other fields of the event: texts, numbers and truth values."""
    number: bytes
    """16 bytes of its own: a moment that is written twice is there once."""


class Links:
    """Makes the moments of events, and the hashes by which they find each other."""

    def __init__(self, secret: bytes | None = None) -> None:
        """:param secret: without it, a key can be guessed from its hash. All services of a chain need the same one."""
        self._link = blake2b(digest_size=16, key=hash_key(secret), person=b"semel.link.1")

    def link(self, key: str) -> bytes:
        """Return the hash of a key, or of the id of a message, by which hops find each other."""
        digest = self._link.copy()
        digest.update(key.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def moment(self, at: float, event: Event, who: str, number: bytes) -> Moment:
        """Return the moment of an event."""
        kind = type(event)
        shape = shape_of(kind)
        key = event.key
        values = {name: getattr(event, name) for name in shape.fields}
        attempt, start, parent = (values.pop(name, None) for name in ("attempt", "root", "parent"))
        details = {name: _detail(content, key) for name, content in values.items()}
        root = b""
        if shape.root and key:
            root = self.link(start or key)
            if start:
                details["key"] = self.link(key).hex()
            if parent:
                details["parent"] = self.link(parent).hex()
        id = event.id or (self.link(key) if key else b"")
        return Moment(at, id, kind.name, route_of(event), who, attempt or 0, root, details, number)


def route_of(event: Event) -> str:
    """Return the route of an event, shortened and escaped so that every store accepts it."""
    route = event.route or event.operation
    if len(route) <= LONGEST_ROUTE and route.isprintable():
        return route
    return route.encode("ascii", "backslashreplace").decode().replace("\0", "")[:LONGEST_ROUTE]


def is_moment(event: Event) -> bool:
    """Whether the event is stored: it has a key, or is a problem. Renewals are left out: they are many."""
    return (bool(event.key) or event.level >= events.WARNING) and type(event) is not events.Renewed


class EventShape(NamedTuple):
    """What a trail needs to know of a class of events."""

    fields: tuple[str, ...]
    root: bool
    """Whether it has the fields of a lineage."""
    seconds: bool
    """Whether it says how long something took."""


SHAPES: Final[dict[type[Event], EventShape]] = {}
"""The shapes that are known."""


def shape_of(kind: type[Event]) -> EventShape:
    """Return the shape of a class of events."""
    known = SHAPES.get(kind)
    if known is not None:
        return known
    names = [field.name for field in fields(kind)]
    shown = tuple(name for name in names if name not in _NOT_KEPT)
    shape = SHAPES[kind] = EventShape(shown, "root" in names, "seconds" in names)
    return shape


def _detail(content: Any, key: str) -> Any:
    if isinstance(content, float):
        return round(content, 6)
    if content is None or isinstance(content, (bool, int)):
        return content
    text = str(content)
    if key and key in text:
        text = text.replace(key, "…")
    return text[:LONGEST_DETAIL]


# The Ops


@value
class KeepTrail(StoreOp[None]):
    """Keep these moments and the newest counts of one writer. A repeat changes nothing."""

    writer: bytes
    """Eight bytes of the writer's own."""
    moments: tuple[Moment, ...]
    minutes: tuple[MinuteRow, ...]
    keep: float
    """Seconds after which a store that removes old moments by itself does so."""
    keep_minutes: float
    """The same for minutes."""


@value
class ForgetTrail(StoreOp[int]):
    """Remove at most ``limit`` old moments, and as many old minutes. The answer is how many were removed."""

    older: float
    """Remove moments that are older than this, in seconds."""
    older_minutes: float
    """The same for minutes."""
    limit: int


@value
class FindLinked(StoreOp[tuple[bytes, ...]]):
    """Return the ids that have a moment with this root, at most ``limit``."""

    root: bytes
    limit: int


@value
class ReadStories(StoreOp[tuple[Moment, ...]]):
    """Return the moments of these ids, the oldest first, at most ``limit``."""

    ids: tuple[bytes, ...]
    limit: int


@value
class ReadRecent(StoreOp[tuple[Moment, ...]]):
    """Return the newest moments, the newest first. The store looks at ``look`` moments at most, of each kind."""

    limit: int
    kinds: tuple[str, ...] = ()
    """Empty: all."""
    route: str | None = None
    look: int = 5000


@value
class ReadMinutes(StoreOp[tuple[Minute, ...]]):
    """Return the minutes that begin at ``since`` or later, and before ``until``. Both are seconds since 1970."""

    since: int
    until: int


TRAIL_OPS: Final = frozenset({KeepTrail, ForgetTrail, FindLinked, ReadStories, ReadRecent, ReadMinutes})
"""All Ops of a trail."""
TrailFlow: TypeAlias = Generator[Op[Any], Any, tuple[Moment, ...]]


def follow_root(root: bytes, limit: int, links: Links) -> TrailFlow:
    """Find the moments of all hops of one root, of the messages that they emitted, and of the clients that called them;
    the oldest first."""
    linked: tuple[bytes, ...] = yield FindLinked(root, MOST_HOPS)
    # The id of a client's moment is the link of its key. For the first client that is the root.
    ids = {root, *linked}
    moments: tuple[Moment, ...] = yield ReadStories(tuple(sorted(ids)), limit)
    others = {links.link(str(each.details["message"])) for each in moments if "message" in each.details}
    others |= {bytes.fromhex(each.details["key"]) for each in moments if "key" in each.details}
    more = tuple(sorted(others - ids))[:MOST_HOPS]
    if more:
        moments += yield ReadStories(more, limit)
    return tuple(sorted(moments, key=when)[:limit])


def follow_id(id: bytes, limit: int, links: Links) -> TrailFlow:
    """Find the moments of the chain to which this id belongs. If no moment names the chain, return those of the id."""
    moments: tuple[Moment, ...] = yield ReadStories((id,), limit)
    root = next((each.root for each in moments if each.root), id)
    return (yield from follow_root(root, limit, links))


def when(moment: Moment) -> tuple[float, bytes]:
    """The sort key of a moment: its time. Moments of one process at the same time stay in their order."""
    return moment.at, moment.number
