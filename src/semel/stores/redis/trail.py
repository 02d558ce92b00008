"""The history of events in Redis: a program for each Op. It yields commands with their keys, and receives replies.

::

    {prefix}trail:story:{id}      sorted set   the moments of one id, by time
    {prefix}trail:root:{root}     sorted set   the ids of one chain
    {prefix}trail:recent          sorted set   the newest moments of all ids ...
    {prefix}trail:recent:{kind}   sorted set   ... and of one kind
    {prefix}trail:minute:{at}     hash         the counts of each writer and route ...
    {prefix}trail:minutes         sorted set   ... and which minutes there are

Each command is about one key, so that a cluster takes them, and may be sent again. Redis removes the keys that are old.
A member of a sorted set is a moment as JSON. It begins with the moment's number, which keeps apart what happened at one
time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable
from typing import Any, Final, TypeAlias

from semel.core.ops import Op
from semel.core.trail.minutes import MINUTE, sum_rows
from semel.core.trail.moments import (
    FindLinked,
    ForgetTrail,
    KeepTrail,
    Moment,
    ReadMinutes,
    ReadRecent,
    ReadStories,
    when,
)
from semel.observe.events import EVENTS
from semel.stores.redis.commands import RedisCommand, scripts

KeyedCommand: TypeAlias = tuple[bytes, RedisCommand]
TrailProgram: TypeAlias = Generator[list[KeyedCommand], list[Any], Any]

_LONGEST_STORY: Final = 1000
_NEWEST: Final = 5000
_NEWEST_OF_KIND: Final = 1000
_AT_ONCE: Final = 500
"""Minutes that are read in one round trip."""
_WRITER: Final = 8
"""Bytes of a writer's name, which stands before the route in a field of a minute."""


def trail_program(op: Op[Any], prefix: bytes) -> TrailProgram:
    """Return the program of an Op."""
    keys = prefix + b"trail:"
    match op:
        case KeepTrail():
            yield [*_add_moments(op, keys), *_add_minutes(op, keys)]
            return None
        case ForgetTrail():
            # What nobody writes to expires by itself. These are written to as long as anything happens.
            now = time.time()
            moments, index = b"(%d" % ((now - op.older) * 1e6), keys + b"minutes"
            old = [(_recent(keys, kind), moments) for kind in ("", *(event.name for event in EVENTS))]
            old.append((index, b"(%d" % (now - op.older_minutes)))
            gone = yield [(key, RedisCommand((b"ZREMRANGEBYSCORE", key, b"-inf", before))) for key, before in old]
            return int(gone[0]) + int(gone[-1])
        case FindLinked():
            (ids,) = yield [_range(keys + b"root:" + op.root.hex().encode(), op.limit)]
            return tuple(ids)
        case ReadStories():
            stories = yield [_range(_story(keys, id), op.limit) for id in op.ids]
            return _moments(stories)[: op.limit]
        case ReadRecent():
            places = [_recent(keys, kind) for kind in op.kinds or ("",)]
            look = op.limit if op.route is None else op.look
            found = yield [(key, RedisCommand((b"ZRANGE", key, 0, look - 1, b"REV"))) for key in places]
            chosen = [each for each in _moments(found) if op.route in (None, each.route)]
            return tuple(chosen[::-1][: op.limit])
        case ReadMinutes():
            index = keys + b"minutes"
            (found,) = yield [(index, RedisCommand((b"ZRANGE", index, op.since, b"(%d" % op.until, b"BYSCORE")))]
            rows: list[tuple[int, str, str]] = []
            for start in range(0, len(found), _AT_ONCE):
                times = [int(at) for at in found[start : start + _AT_ONCE]]
                replies = yield [(key, RedisCommand((b"HGETALL", key))) for key in (_minute(keys, at) for at in times)]
                rows += (row for at, reply in zip(times, replies, strict=True) for row in _rows(at, reply))
            return sum_rows(rows)
    raise AssertionError(f"{op} is no Op of a trail")


def _story(keys: bytes, id: bytes) -> bytes:
    return keys + b"story:" + id.hex().encode()


def _recent(keys: bytes, kind: str) -> bytes:
    return keys + b"recent" + (f":{kind}".encode() if kind else b"")


def _minute(keys: bytes, at: int) -> bytes:
    return keys + b"minute:%d" % at


def _range(key: bytes, limit: int) -> KeyedCommand:
    return key, RedisCommand((b"ZRANGE", key, 0, limit - 1))


def _add_moments(op: KeepTrail, keys: bytes) -> Iterable[KeyedCommand]:
    sets: dict[bytes, list[Any]] = {}
    for moment in op.moments:
        score, member = round(moment.at * 1e6), _member(moment)
        chosen = [_recent(keys, ""), _recent(keys, moment.kind)]
        if moment.id:
            chosen.append(_story(keys, moment.id))
        for key in chosen:
            sets.setdefault(key, []).extend((score, member))
        if moment.root:
            sets.setdefault(keys + b"root:" + moment.root.hex().encode(), []).extend((score, moment.id))
    keep = max(1, round(op.keep))
    for key, members in sets.items():
        # LT: an id that joins its chain again keeps its place.
        yield key, RedisCommand((b"ZADD", key, b"LT", *members))
        if key.startswith(keys + b"recent"):
            most = _NEWEST if key == _recent(keys, "") else _NEWEST_OF_KIND
            yield key, RedisCommand((b"ZREMRANGEBYRANK", key, 0, -most - 1))
        else:  # the beginning of a story says the most
            yield key, RedisCommand((b"ZREMRANGEBYRANK", key, _LONGEST_STORY, -1))
        yield key, RedisCommand((b"EXPIRE", key, keep))


def _add_minutes(op: KeepTrail, keys: bytes) -> Iterable[KeyedCommand]:
    keep = max(MINUTE, round(op.keep_minutes))
    minutes: dict[int, list[Any]] = {}
    for row in op.minutes:
        minutes.setdefault(row.at, []).extend((op.writer + row.route.encode(), row.count, row.kinds))
    for at, fields in minutes.items():
        key = _minute(keys, at)
        yield key, scripts()["keep_minutes"].call(key, keep, *fields)
    if minutes:
        index = keys + b"minutes"
        yield index, RedisCommand((b"ZADD", index, *(at for minute in minutes for at in (minute, minute))))
        yield index, RedisCommand((b"ZREMRANGEBYRANK", index, 0, -(keep // MINUTE) - 2))
        yield index, RedisCommand((b"EXPIRE", index, keep))


def _rows(at: int, reply: Any) -> Iterable[tuple[int, str, str]]:
    for field, counts in zip(reply[::2], reply[1::2], strict=True):
        yield at, field[_WRITER:].decode(), counts.partition(b" ")[2].decode()


def _member(moment: Moment) -> bytes:
    fields = (
        moment.number.hex(), round(moment.at * 1e6), moment.id.hex(), moment.kind, moment.route, moment.who,
        moment.attempt, moment.root.hex(), moment.details,
    )  # fmt: skip
    return json.dumps(fields, separators=(",", ":")).encode()


def _moments(replies: Iterable[Iterable[bytes]]) -> tuple[Moment, ...]:
    found, unhex = [], bytes.fromhex
    for member in (member for reply in replies for member in reply):
        number, at, id, kind, route, who, attempt, root, details = json.loads(member)
        found.append(Moment(at / 1e6, unhex(id), kind, route, who, attempt, unhex(root), details, unhex(number)))
    return tuple(sorted(found, key=when))
