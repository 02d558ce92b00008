"""The story of one key: what each moment means in words, and which hops it went through. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from semel.console.words import clock, instant
from semel.core.ops import Record
from semel.core.policy import duration
from semel.core.states import State
from semel.trail import Moment


class StoryLine(NamedTuple):
    """How a kind of moment reads."""

    text: str
    """Details are filled in by their names."""
    tone: str
    """``good``, ``plain``, ``warn`` or ``bad``."""


LINES: Final = {
    "lost": StoryLine("Attempt {attempt} was claimed, and its process left no trace: it died, or was cut off", "warn"),
    "call_retried": StoryLine(
        "The client got no answer that it can use ({reason}), and sends its request again", "plain"
    ),
    "call_resumed": StoryLine("The client sends a request again that its journal has kept for {age}", "plain"),
    "call_ended": StoryLine("The client knows the outcome: {outcome} (sent {times}, {seconds})", "good"),
    "call_unknown": StoryLine("The client has given up and does not know what happened: {reason}", "bad"),
    "started": StoryLine("Attempt {attempt} started: the key was free", "plain"),
    "taken_over": StoryLine("Attempt {attempt} took over: the lease of the attempt before had ended", "warn"),
    "completed": StoryLine("It ran, and its answer is stored ({size} bytes, {seconds})", "good"),
    "prepared": StoryLine("It ran; its answer commits with the caller's transaction", "good"),
    "conflicted": StoryLine("The transaction conflicted with another one and was rolled back: {error}", "plain"),
    "failure_remembered": StoryLine("It failed, and the failure is stored: {error}", "warn"),
    "recovered": StoryLine("The recover hook found out what the lost attempt did", "good"),
    "released": StoryLine("It failed and the key is free again: {error}", "warn"),
    "replayed": StoryLine("A duplicate got the stored answer; nothing ran ({seconds})", "good"),
    "waited": StoryLine("A duplicate waited {seconds} for the first call", "plain"),
    "turned_away": StoryLine("A duplicate was turned away with 409: the first call still ran", "plain"),
    "mismatched": StoryLine("Refused: the key belongs to a different request", "warn"),
    "went_unknown": StoryLine("Refused: nobody can tell whether it happened", "bad"),
    "lease_lost": StoryLine("Attempt {attempt} came back too late: its outcome was refused", "warn"),
    "renewal_failed": StoryLine("The lease could not be renewed: {error}", "warn"),
    "step_saved": StoryLine("Step {step} is done and saved", "plain"),
    "step_replayed": StoryLine("Step {step} was done before, and is not run again", "good"),
    "undo_failed": StoryLine("Step {step} could not be undone: {error}", "bad"),
    "result_dropped": StoryLine("Done, but the result could not be stored: {reason}", "bad"),
    "unstored": StoryLine("It ran, but its outcome could not be stored yet: {error}", "bad"),
    "store_failed": StoryLine("The store failed at {op}: {error}", "bad"),
    "unprotected": StoryLine("The store was down: it ran without a record", "bad"),
    "expired": StoryLine("Refused: the stored answer has expired", "warn"),
    "body_too_large": StoryLine("Refused: the body of the request is too long", "warn"),
    "precondition_refused": StoryLine("Refused with {status}, because of its If-Match or If-None-Match", "plain"),
    "body_omitted": StoryLine("The answer is longer than {limit} bytes, so it is stored without its body", "warn"),
    "over_quota": StoryLine("Refused: the tenant holds {live_keys} keys, as many as its quota allows", "warn"),
    "resolved": StoryLine("Settled by a person or a program (it happened: {happened})", "good"),
    "outcome_released": StoryLine("The stored {outcome} was dropped: the next call runs it again", "warn"),
    "recovery_failed": StoryLine("A resumer could not resume it: {error}", "warn"),
    "recovery_given_up": StoryLine("Resumers have given it up", "bad"),
    "emitted": StoryLine("A message was added to the outbox: {type}", "plain"),
    "published": StoryLine("Sent to the broker", "good"),
    "publish_failed": StoryLine("The message could not be sent: {error}", "warn"),
    "publish_given_up": StoryLine("The message was given up and is a dead letter: {error}", "bad"),
    "stream_blocked": StoryLine("The stream {stream} waits for this message: {error}", "bad"),
    "applied": StoryLine("Applied by the consumer {consumer} ({seconds})", "good"),
    "skipped": StoryLine("Delivered to {consumer} again, and not applied again", "good"),
    "apply_failed": StoryLine("The handler of the message failed: {error}", "warn"),
    "apply_given_up": StoryLine("The consumer gave the message up; it is a dead letter: {error}", "bad"),
    "stream_gap": StoryLine("Applied although {missing} earlier messages of its stream were not", "warn"),
}
"""How each kind of moment reads."""
_TIMES: Final = frozenset({"seconds", "age", "retry_after", "store_seconds"})


class _Details(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return "?"


def tell(kind: str, attempt: int, details: dict[str, Any]) -> tuple[str, str]:
    """Return what a moment says, and its tone."""
    line = LINES.get(kind) or StoryLine(kind.replace("_", " ").capitalize(), "plain")
    shown = {name: duration(value) if name in _TIMES and isinstance(value, float) else value
             for name, value in details.items()}  # fmt: skip
    if "attempts" in shown:
        shown["times"] = "once" if shown["attempts"] == 1 else f"{shown['attempts']} times"
    if isinstance(shown.get("happened"), bool):
        shown["happened"] = "yes" if shown["happened"] else "no"
    return line.text.format_map(_Details(shown, attempt=attempt)), line.tone


def describe_moment(store: str, moment: Moment) -> dict[str, Any]:
    """Return a moment as plain values, with what it says."""
    text, tone = tell(moment.kind, moment.attempt, dict(moment.details))
    return {
        "at": instant(moment.at),
        "clock": clock(moment.at),
        "store": store,
        "id": moment.id.hex(),
        "kind": moment.kind,
        "text": text,
        "tone": tone,
        "operation": moment.route,
        "who": moment.who,
    }


def hops(found: Sequence[tuple[str, Moment]], current: bytes) -> list[dict[str, Any]]:
    """Return the records and messages of a chain, each below the one that called it.

    :param found: the store of each moment, and the moment, by time.
    """
    nodes: dict[bytes, dict[str, Any]] = {}
    parents: dict[str, str] = {}
    for store, moment in found:
        if not moment.id:
            continue
        node = nodes.setdefault(
            moment.id, {"store": store, "id": moment.id.hex(), "operation": moment.route, "link": None, "moments": 0,
                        "record": False, "call": moment.kind.startswith("call_"), "at": moment.at,
                        "current": moment.id == current},
        )  # fmt: skip
        node["moments"] += 1
        if moment.kind in ("started", "taken_over"):
            node["record"] = True
            node["operation"] = moment.route
        own = moment.details.get("key") or (moment.root.hex() if moment.root else None)
        if own is not None and node["link"] is None:
            node["link"] = own
            if moment.details.get("parent"):
                parents[own] = str(moment.details["parent"])
    # A client's call is known by the same hash as the key that it sent: the record of that key stands for both.
    answered = {node["link"] for node in nodes.values() if node["record"]}
    shown = [node for node in nodes.values() if not (node["call"] and node["id"] in answered)]
    for node in shown:
        node["depth"] = _depth(node["link"], parents)
    return sorted(shown, key=lambda node: node["at"])


def _depth(link: str | None, parents: dict[str, str]) -> int:
    depth = 0
    while link is not None and depth < 6:  # a chain that names itself does not end
        link = parents.get(link)
        depth += link is not None
    return depth


def with_lost_attempt(
    found: Sequence[tuple[str, Moment]], store: str, record: Record, now: float
) -> list[tuple[str, Moment]]:
    """Add the first attempt if only its record tells of it: a process that is killed takes its last events with it."""
    own = [moment for _, moment in found if moment.id == record.id]
    lost = record.state in (State.ABANDONED, State.UNKNOWN) or (record.attempt > 1 and own)
    if not lost or any(moment.kind == "started" for moment in own):
        return list(found)
    began = min([now - record.age, *(moment.at for moment in own)])
    first = Moment(began, record.id, "lost", record.operation, "unknown", 1, b"", {}, b"")
    return sorted([*found, (store, first)], key=lambda pair: (pair[1].at, pair[1].number))


def timeline(found: Iterable[tuple[str, Moment]], current: bytes) -> list[dict[str, Any]]:
    """Return the lines of a timeline, the oldest first."""
    lines = []
    before: float | None = None
    for store, moment in found:
        lines.append(
            {
                **describe_moment(store, moment),
                "after": None if before is None else max(0.0, moment.at - before),
                "attempt": moment.attempt,
                "here": moment.id == current,
            }
        )
        before = moment.at
    return lines
