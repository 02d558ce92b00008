"""What each page shows, as plain values: the templates draw them, and the JSON twins are them.

A view asks the stores, puts their answers together, and masks what the reader may not see. It knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode

from semel.console.figures import HourCounts, new_keys_per_second, start_of_hour, summarize
from semel.console.gate import Access
from semel.console.story import describe_moment, hops, timeline, with_lost_attempt
from semel.console.watched import LOOK, WatchedStore
from semel.console.ways import Way, reason, ways_out
from semel.console.words import clock, instant, mask, whole_number
from semel.core.messaging.messages import Letter, LetterFilter, OutboxState
from semel.core.ops import Listing, Record, Size
from semel.core.policy import duration, seconds
from semel.core.states import State
from semel.engine.outcomes import describe_outcome
from semel.errors import PolicyError, SemelError, StoreError
from semel.stores.sizing import Needs, bytes_in, recommended, size
from semel.trail import Moment

View = dict[str, Any]
R = TypeVar("R")
LONGEST_FIELD: Final = 512
PAGE: Final = 50
LETTER_FILTERS: Final = ("origin", "type", "reason", "stream", "destination", "message")
"""The fields of ``letter_filter``. All of them go from page to page: without one, an act would take other letters."""
STATES: Final = {state.name.lower(): state for state in (State.RUNNING, State.DONE, State.UNKNOWN, State.ABANDONED)}
TROUBLE: Final = ("went_unknown", "lease_lost", "unstored", "result_dropped", "recovery_given_up", "unprotected",
                  "apply_given_up", "publish_given_up", "stream_blocked")  # fmt: skip
"""Moments that somebody should look at."""


class BadQuery(Exception):
    """The address asks for something that there is not. The text says what to write."""


class NotThere(Exception):
    """There is no such thing. The text says what is missing."""


def field(query: Mapping[str, str], name: str, longest: int = LONGEST_FIELD) -> str:
    """Return a field of the address, without space around it. Raises BadQuery if it is too long."""
    text = query.get(name, "").strip()
    if len(text) > longest:
        raise BadQuery(f"{name} is too long: at most {longest} characters")
    if "\0" in text:
        raise BadQuery(f"{name} has a character that no store can hold")
    return text


def time_field(query: Mapping[str, str], name: str, default: float | None = None) -> float | None:
    """Return a duration of the address in seconds."""
    text = field(query, name, 20)
    if not text:
        return default
    try:
        found = seconds(float(text) if text.replace(".", "", 1).isdigit() else text, name)
    except (PolicyError, ValueError):
        raise BadQuery(f"{name} is a time, such as 30s, 10m, 2h or 7d") from None
    if not 0 <= found < 1e9:
        raise BadQuery(f"{name} is a time, such as 30s, 10m, 2h or 7d")
    return found


class _Part(NamedTuple):
    """What the first page needs from one store."""

    hour: tuple[HourCounts, HourCounts]
    trouble: tuple[Moment, ...]
    attention: Listing
    size: Size | None
    sample: Listing | None
    """The newest records, of a store without a history."""

    @property
    def history(self) -> bool:
        return any(tally.routes for tally in self.hour)


class Views:
    """The pages of one console."""

    def __init__(self, watched: dict[str, WatchedStore], running_too_long: float) -> None:
        self.watched = watched
        self._too_long = running_too_long

    def find(self, name: str) -> WatchedStore:
        """Return the store of this name, or the first one. Raises NotThere."""
        try:
            return self.watched[name or next(iter(self.watched))]
        except KeyError:
            raise NotThere(f"There is no store called {name[:40]} here.") from None

    async def warm(self) -> None:
        """Ask what the first page asks, so that nobody waits for connections and for the last hour."""
        with suppress(SemelError):  # the page says so
            await self.overview(Access(), {})
            for watched in self.watched.values():
                await watched.wait_for_hour()

    # -- the first page

    async def overview(self, access: Access, query: Mapping[str, str]) -> View:
        """Did it happen once? What was asked for, what ran, what was absorbed, what is in doubt, what is stuck."""
        now = time.time()
        since = start_of_hour(now)
        parts, errors = await self._of_each(lambda watched: self._part(watched, since))
        view = summarize(((name, tally) for name, part in parts.items() for tally in part.hour), now)
        trouble = [(name, moment) for name, part in parts.items() for moment in part.trouble]
        trouble.sort(key=lambda pair: -pair[1].at)
        states = Counter(record.state for part in parts.values() for record in part.attention.records)
        blind = self._blind(errors)
        in_doubt, stuck = states[State.UNKNOWN], states[State.ABANDONED] + states[State.RUNNING]
        unknown = None if len(blind) == len(self.watched) else 0
        view["totals"] |= {"in_doubt": in_doubt or unknown, "stuck": stuck or unknown}
        return {
            **view,
            "page": "overview",
            "now": instant(now),
            "since": instant(since),
            "history": any(part.history for part in parts.values()),
            "reading": any(watched.reading for watched in self.watched.values()),
            "sampled": _sampled(parts),
            "looked_at": _looked_at(part.attention for part in parts.values()),
            "blind": blind,
            "stores": [
                {"store": name, "error": errors.get(name), **_show_size(parts[name].size if name in parts else None)}
                for name in self.watched
            ],
            "trouble": [describe_moment(name, moment) for name, moment in trouble[:8]],
        }

    async def _part(self, watched: WatchedStore, since: int) -> _Part:
        hour, trouble, attention, measured = await asyncio.gather(
            watched.hour(since),
            watched.recent(20, TROUBLE),
            self._attention(watched),
            _maybe(watched.lists, watched.measure),
        )
        part = _Part(hour, trouble, attention, measured, None)
        if part.history or not watched.lists:
            return part
        return part._replace(sample=await watched.list(limit=LOOK))

    async def _attention(self, watched: WatchedStore) -> Listing:
        """The records that are in doubt, abandoned, or running for too long.

        They are looked for among the newest records, and among those that went into doubt according to the history.
        """
        listing = Listing((), None, 0)
        if watched.lists:
            listing = await watched.list((State.UNKNOWN, State.ABANDONED, State.RUNNING), limit=LOOK)
        known = {record.id for record in listing.records}
        doubts = await watched.recent(100, ("went_unknown", "recovery_given_up"))
        older = await asyncio.gather(*map(watched.lookup, {moment.id for moment in doubts} - known))
        return Listing(
            tuple(record for record in (*listing.records, *older) if record is not None and self._is_stuck(record)),
            listing.after, listing.looked_at,
        )  # fmt: skip

    def _blind(self, errors: Mapping[str, str]) -> list[str]:
        """The stores of which nobody can say that nothing is stuck: they do not answer, or cannot list."""
        return [name for name, watched in self.watched.items() if name in errors or not watched.lists]

    def _is_stuck(self, record: Record) -> bool:
        if record.state is State.RUNNING:
            return record.age >= self._too_long
        return record.state in (State.UNKNOWN, State.ABANDONED)

    async def _of_each(self, ask: Callable[[WatchedStore], Awaitable[R]]) -> tuple[dict[str, R], dict[str, str]]:
        """Ask all stores at once. Returns their answers, and the errors of the stores that do not answer, by name."""

        async def one(watched: WatchedStore) -> R | StoreError:
            try:
                return await ask(watched)
            except StoreError as error:  # one store that does not answer must not hide the others
                return error

        answers = dict(zip(self.watched, await asyncio.gather(*map(one, self.watched.values())), strict=True))
        errors = {name: str(answer) for name, answer in answers.items() if isinstance(answer, StoreError)}
        return {name: answer for name, answer in answers.items() if not isinstance(answer, StoreError)}, errors

    # -- records

    async def operations(self, access: Access, query: Mapping[str, str]) -> View:
        """A page of records, the newest first as far as the store can tell."""
        watched = self.find(field(query, "store", 40))
        state, older = field(query, "state", 20), time_field(query, "older", 0.0)
        if state and state not in STATES:
            raise BadQuery(f"state is one of {', '.join(STATES)}")
        filters = {name: field(query, name) for name in ("operation", "tenant")}
        view: View = {
            "page": "operations",
            "store": watched.name,
            "stores": list(self.watched),
            "filters": {"state": state, "older": field(query, "older", 20), **filters},
            "states": list(STATES),
            "lists": watched.lists,
        }
        if not watched.lists:
            return {**view, "records": [], "next": None, "looked_at": 0, "known": []}
        listing = await watched.list(
            (STATES[state],) if state else (), filters["operation"] or None, filters["tenant"] or None, older or 0.0,
            PAGE, field(query, "after", 2048) or None,
        )  # fmt: skip
        return {
            **view,
            "records": [show_record(watched, record, access) for record in listing.records],
            "next": listing.after,
            "looked_at": listing.looked_at,
            "known": await self._known_operations(watched, listing),
        }

    async def _known_operations(self, watched: WatchedStore, listing: Listing) -> list[str]:
        """Names to complete the filter with: those of this page and of the last minutes."""
        return sorted(await watched.recent_routes() | {record.operation for record in listing.records})[:200]

    async def search(self, access: Access, query: Mapping[str, str]) -> tuple[str, str] | None:
        """Find a record by its key, or by its identity. Returns the store and the identity, or None.

        Without an operation, those of the last minutes and of the newest records are tried.
        """
        key, operation, tenant = (field(query, name) for name in ("key", "operation", "tenant"))
        if not key:
            raise BadQuery("write the key as the client sent it, or the 32 digits of an identity")
        wanted = self.watched.values() if not field(query, "store", 40) else [self.find(field(query, "store", 40))]
        failed: StoreError | None = None
        for watched in wanted:
            try:
                id = await self._find_in(watched, key, operation, tenant)
            except StoreError as error:
                failed = failed or error
            else:
                if id is not None:
                    return watched.name, id.hex()
        if failed is not None:  # it may be there
            raise failed
        return None

    async def _find_in(self, watched: WatchedStore, key: str, operation: str, tenant: str) -> bytes | None:
        if len(key) == 32 and not set(key.lower()) - set("0123456789abcdef"):
            id = bytes.fromhex(key)
            if await watched.lookup(id) is not None or await watched.story(id):
                return id
        names = [operation]
        if not operation:
            listing = await watched.list(limit=LOOK) if watched.lists else Listing((), None, 0)
            names = await self._known_operations(watched, listing)
        try:
            records = await asyncio.gather(*(watched.guard.lookup(name, key, tenant=tenant or None) for name in names))
        except StoreError:
            raise
        except SemelError as error:
            raise BadQuery(str(error)) from None
        return next((record.id for record in records if record is not None), None)

    async def record(self, access: Access, store: str, id: bytes) -> View:
        """The story of one key."""
        watched = self.find(store)
        record, (found, silent) = await asyncio.gather(watched.lookup(id), self._chain(id))
        for other in self.watched.values() if record is None else ():  # a history may be in another store
            with suppress(StoreError):
                if record is None and (record := await other.lookup(id)) is not None:
                    watched = other
        if record is None and not found:
            raise NotThere("There is no record with this identity. It was released, or it has expired.")
        state = State.ABSENT if record is None else record.state
        if record is not None:
            found = with_lost_attempt(found, watched.name, record, time.time())
        hop_list = hops(found, id)
        return {
            "page": "record",
            "store": watched.name,
            "id": id.hex(),
            "state": state.name.lower(),
            "reason": reason(state),
            "record": None if record is None else show_record(watched, record, access),
            "operation": record.operation if record else next((m.route for _, m in found if m.id == id), ""),
            "outcome": None if record is None else _outcome(watched, record, access),
            "timeline": timeline(found, id),
            "hops": hop_list if len(hop_list) > 1 else [],
            "history": watched.trail is not None,
            "silent": silent,
            "ways": [_way(way) for way in ways_out(state)],
            "may_act": access.act,
        }

    async def _chain(self, id: bytes) -> tuple[list[tuple[str, Moment]], list[str]]:
        """All moments of the chain of a record, from all stores, by time, and the stores that do not answer.

        The history may be in another store than the record.
        """
        found, silent = await self._moments(lambda watched: watched.story(id))
        root = next((moment.root for _, moment in found if moment.root), b"")
        if root and len(self.watched) > 1:
            found += (await self._moments(lambda watched: watched.lineage(root)))[0]
        unique = {moment.number: (name, moment) for name, moment in found}
        return sorted(unique.values(), key=lambda pair: (pair[1].at, pair[1].number)), silent

    async def _moments(
        self, ask: Callable[[WatchedStore], Awaitable[tuple[Moment, ...]]]
    ) -> tuple[list[tuple[str, Moment]], list[str]]:
        found, errors = await self._of_each(ask)
        return [(name, moment) for name, moments in found.items() for moment in moments], list(errors)

    async def stuck(self, access: Access, query: Mapping[str, str]) -> View:
        """What does not go on by itself: why, and the way out."""
        found, errors = await self._of_each(self._attention)
        groups = []
        for state, title in (
            (State.UNKNOWN, "In doubt"),
            (State.ABANDONED, "Abandoned"),
            (State.RUNNING, "Running too long"),
        ):
            rows = [
                show_record(self.watched[name], record, access)
                for name, listing in found.items()
                for record in listing.records
                if record.state is state
            ]
            rows.sort(key=lambda row: -row["age"])
            groups.append(
                {"state": state.name.lower(), "title": title, "reason": reason(state), "count": len(rows),
                 "records": rows[:100], "ways": [_way(way) for way in ways_out(state)]}
            )  # fmt: skip
        return {
            "page": "stuck",
            "groups": groups,
            "too_long": self._too_long,
            "count": sum(group["count"] for group in groups),
            "looked_at": _looked_at(found.values()),
            "blind": self._blind(errors),
            "errors": _show_errors(errors),
        }

    # -- messages

    async def outbox(self, access: Access, query: Mapping[str, str]) -> View:
        """What is in the outbox of each store, and why it waits."""

        async def one(watched: WatchedStore) -> View | None:
            if not watched.has_messages:
                return None
            state = await watched.outbox(PAGE)
            dead = await watched.count_letters(LetterFilter())
            return {"store": watched.name, **_show_outbox(state, access), "dead": dead}

        found, errors = await self._of_each(one)
        stores = [each for each in found.values() if each is not None]
        return {"page": "outbox", "stores": stores, "errors": _show_errors(errors)}

    async def letters(self, access: Access, query: Mapping[str, str]) -> View:
        """Dead letters: grouped by cause, and one by one."""
        able = [watched for watched in self.watched.values() if watched.has_messages]
        view: View = {"page": "letters", "stores": [watched.name for watched in able], "may_act": access.act}
        if not able:
            return {**view, "store": None, "letters": [], "causes": [], "count": 0, "next": None, "filters": {}}
        name = field(query, "store", 40)
        watched = able[0] if not name else self.find(name)
        if watched not in able:
            raise NotThere(f"{watched.name} has no dead letters: they are in SQL databases.")
        filter = letter_filter(query)
        after = whole_number(field(query, "after", 20) or "0")
        if after is None:
            raise BadQuery("after is the position of the last letter of the page before")
        found, count = await asyncio.gather(watched.letters(filter, after, PAGE), watched.count_letters(filter))
        causes = Counter((letter.origin, letter.reason[:200]) for letter in found)
        return {
            **view,
            "store": watched.name,
            "count": count,
            "filters": {each: field(query, each) for each in LETTER_FILTERS},
            "letters": [show_letter(letter, access) for letter in found],
            "causes": [
                {"origin": origin, "reason": why, "count": number} for (origin, why), number in causes.most_common(10)
            ],
            "next": found[-1].position if len(found) == PAGE else None,
        }

    async def letter(self, access: Access, store: str, position: int) -> View:
        """One dead letter."""
        watched = self.find(store)
        if not watched.has_messages:
            raise NotThere("This store has no dead letters.")
        shown = show_letter(await find_letter(watched, position), access, whole=True)
        return {"page": "letter", "store": watched.name, "letter": shown, "may_act": access.act}

    # -- the window

    async def window(self, access: Access, query: Mapping[str, str]) -> View:
        """How long the window must be, and the room that it takes, from what the store holds now."""
        watched = self.find(field(query, "store", 40))
        now = time.time()
        measured, hour = await asyncio.gather(_maybe(watched.lists, watched.measure), watched.hour(start_of_hour(now)))
        rate_now = new_keys_per_second(hour, now)
        bytes_now = None
        if measured is not None and measured.records and measured.bytes:
            bytes_now = measured.bytes / measured.records
        needs = Needs(*(time_field(query, name) for name in ("retry_budget", "broker_retention", "replay_horizon")))
        needed = recommended(needs)
        longest = needs.longest()
        span = time_field(query, "window") or needed or 86400.0
        per_second = _number(query, "qps", rate_now)
        each = float(_bytes(query)) or bytes_now or 1000.0
        keys = None if per_second is None else per_second * span
        return {
            "page": "window",
            "store": watched.name,
            "stores": list(self.watched),
            "fields": {
                name: field(query, name, 20)
                for name in ("qps", "window", "bytes", "retry_budget", "broker_retention", "replay_horizon")
            },
            "now": {**_show_size(measured), "bytes_per_record": bytes_now, "new_keys_per_second": rate_now},
            "qps": per_second,
            "bytes_per_record": each,
            "window_seconds": span,
            "window": duration(span),
            "keys": keys,
            "bytes": None if keys is None else keys * each,
            "room": None if keys is None else size(keys * each),
            "recommended_seconds": needed,
            "recommended": None if needed is None else duration(needed),
            "decided_by": None if longest is None else longest[0],
            "enough": longest is None or span >= longest[1],
        }


async def _maybe(able: bool, ask: Any) -> Any:
    return await ask() if able else None


def _looked_at(attention: Iterable[Listing]) -> int | None:
    """How many records of each store were looked at for what is stuck; None if all were."""
    return LOOK if any(listing.after for listing in attention) else None


def _show_errors(errors: Mapping[str, str]) -> list[View]:
    return [{"store": name, "error": error} for name, error in errors.items()]


def _show_size(measured: Size | None) -> View:
    return {
        "records": None if measured is None else measured.records,
        "exact": measured is not None and measured.exact,
        "bytes": None if measured is None else measured.bytes,
        "sweep_lag": None if measured is None else measured.sweep_lag,
    }


def _show_outbox(state: OutboxState, access: Access) -> View:
    return {
        "messages": sum(each.messages for each in state.destinations),
        "destinations": [
            {"destination": each.destination, "messages": each.messages, "failing": each.failing,
             "oldest": each.oldest}
            for each in state.destinations
        ],
        "held": [
            {"stream": _masked(each.stream, access), "messages": each.messages, "next_try": each.seconds,
             "reason": each.reason}
            for each in state.held
        ],
        "relays": state.relays,
        "lanes": state.lanes,
        "mode": state.mode,
        "retained": state.retained,
        "more": state.more,
    }  # fmt: skip


def _sampled(parts: Mapping[str, _Part]) -> list[View]:
    """Without a history: the newest records, counted by operation and state."""
    counted: dict[tuple[str, str], Counter[str]] = {}
    for name, part in parts.items():
        for record in part.sample.records if part.sample is not None else ():
            counted.setdefault((name, record.operation), Counter())[record.state.name.lower()] += 1
    rows: list[View] = [
        {"store": store, "operation": operation, "count": states.total(), "states": dict(states)}
        for (store, operation), states in counted.items()
    ]
    return sorted(rows, key=lambda row: (-row["count"], row["operation"]))[:200]


def _masked(text: str | None, access: Access) -> str | None:
    return text if access.show_keys else mask(text)


def show_record(watched: WatchedStore, record: Record, access: Access) -> View:
    """A record as plain values."""
    began = time.time() - record.age
    return {
        "store": watched.name,
        "id": record.id.hex(),
        "state": record.state.name.lower(),
        "operation": record.operation,
        "tenant": _masked(record.tenant, access),
        "key": _masked(record.key, access),
        "readable": record.key is not None,
        "attempt": record.attempt,
        "token": record.token,
        "age": round(record.age, 3),
        "began": instant(began),
        "clock": clock(began),
        "lease_left": round(record.lease_left, 3) if record.state in (State.RUNNING, State.ABANDONED) else None,
        "expires_in": round(record.expires_in, 3) if record.state is State.DONE else None,
        "root": _masked(record.root, access),
        "parent": _masked(record.parent, access),
    }


def _outcome(watched: WatchedStore, record: Record, access: Access) -> View | None:
    """What is stored. Without permission only its kind, its status and its size."""
    if record.state is not State.DONE:
        return None
    outcome = describe_outcome(record, watched.guard.codec)
    kind = next(iter(outcome))
    shown: View = {"kind": kind, "stored_bytes": len(record.snapshot or b""), "hidden": not access.show_bodies}
    if kind == "response":
        shown["status"] = outcome["response"]["status"]
    if kind in ("not_kept", "unreadable"):
        shown["hidden"] = False
    if not shown["hidden"]:
        shown["content"] = outcome[kind]
    return shown


def _way(way: Way) -> View:
    return {"name": way.name, "title": way.title, "effect": way.effect, "caution": way.caution}


def letter_filter(query: Mapping[str, str]) -> LetterFilter:
    """Return the filter of an address: an origin that is ``relay`` means the relay."""
    origin = field(query, "origin")
    return LetterFilter(
        origin=None if not origin else "" if origin == "relay" else origin,
        type=field(query, "type") or None,
        destination=field(query, "destination") or None,
        stream=field(query, "stream") or None,
        message=field(query, "message") or None,
        reason=field(query, "reason"),
    )


def letters_address(store: str, query: Mapping[str, str]) -> str:
    """Return the address of the dead letters that the same filter chooses."""
    chosen = {name: text for name in LETTER_FILTERS if (text := field(query, name))}
    return f"/letters?{urlencode({**chosen, 'store': store})}"


async def find_letter(watched: WatchedStore, position: int) -> Letter:
    """Return the dead letter at this position. Raises NotThere."""
    found = await watched.letters(LetterFilter(), position - 1, 1)
    if not found or found[0].position != position:
        raise NotThere("There is no such dead letter any more: it was redriven or deleted.")
    return found[0]


def show_letter(letter: Letter, access: Access, whole: bool = False) -> View:
    """A dead letter as plain values."""
    message = letter.message
    shown: View = {
        "position": letter.position,
        "id": _masked(message.id, access),
        "origin": letter.origin,
        "reason": letter.reason,
        "died": instant(letter.died),
        "clock": clock(letter.died),
        "starts": letter.starts,
        "redrives": message.redrives,
        "type": message.type,
        "destination": message.destination,
        "stream": _masked(message.stream, access),
        "bytes": len(message.data),
    }
    if whole:
        shown |= {
            "source": message.source,
            "subject": _masked(message.subject, access),
            "sequence": message.sequence,
            "content_type": message.content_type,
            "time": instant(message.time),
            "hidden": not access.show_bodies,
        }
        if access.show_bodies:
            shown["headers"] = dict(message.headers)
            shown["data"] = message.data[:100_000].decode("utf-8", "backslashreplace")
    return shown


def _number(query: Mapping[str, str], name: str, default: float | None) -> float | None:
    text = field(query, name, 20)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise BadQuery(f"{name} is how many new keys come each second, such as 200 or 0.5")
    return number


def _bytes(query: Mapping[str, str]) -> int:
    text = field(query, "bytes", 20)
    try:
        return bytes_in(text) if text else 0
    except PolicyError as error:
        raise BadQuery(str(error)) from None
