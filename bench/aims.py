"""The aims, each judged by the figure of this run. They say what we want, not what we have: never bend them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench import http_services
from bench.client import SHARED_FSYNC, WITH_KEYS
from bench.contest import Match
from bench.http_wire import WireMatch
from bench.inbox import BATCH, WITH_THE_INBOX
from bench.large import EXPIRIES, JOBS, Large
from bench.memory import EVENTS, WITH_METRICS, Cost
from bench.outbox import IN_A_STREAM, WITH_A_MESSAGE
from bench.redis import STORE_ALONE
from bench.relay import IN_A_LOG, ONE_RELAY, PRODUCER
from bench.sqlite import ONE_COMMIT_PER_OP
from bench.transactional import IN_THE_CALLERS, ONE_STATEMENT, OPENED_BY_SEMEL

__all__ = ["Verdict", "judge", "judge_large"]

METRICS: Final = 3.0
"""Microseconds for each event."""
POSTGRES: Final = 0.8
SQLITE: Final = 5.0
TRANSACTIONAL: Final = {
    ("asyncpg", ONE_STATEMENT, "first"): 1.1,
    ("asyncpg", OPENED_BY_SEMEL, "first"): 0.68,
    ("asyncpg", OPENED_BY_SEMEL, "replay"): 1.2,
    ("asyncpg", IN_THE_CALLERS, "first"): 0.5,
    ("psycopg", ONE_STATEMENT, "first"): 1.1,
    ("psycopg", OPENED_BY_SEMEL, "first"): 0.68,
    ("psycopg", OPENED_BY_SEMEL, "replay"): 1.2,
    ("psycopg", IN_THE_CALLERS, "first"): 0.58,
}
"""The unprotected transaction's rate, and what is left of it, by driver."""
OUTBOX: Final = 0.55
"""What is left of the unprotected transaction's rate when it adds a message."""
INBOX: Final = 20_000
"""Messages in a second."""
RELAY: Final = {ONE_RELAY: 20_000, IN_A_LOG: 100_000}
"""Messages a second."""
KAFKA: Final = 0.5
"""The rate of the library alone, and what is left of it."""
REDIS: Final = 4.5
HTTP: Final = {
    ("Starlette", http_services.SEMEL, "first"): 0.5,
    ("Starlette", http_services.SEMEL, "replay"): 0.7,
    ("Starlette", http_services.EDGE, "first"): 0.55,
    ("Starlette", http_services.EDGE, "replay"): 1.2,
    ("FastAPI", http_services.SEMEL, "first"): 0.62,
    ("FastAPI", http_services.SEMEL, "replay"): 0.75,
    ("FastAPI", http_services.EDGE, "first"): 0.78,
    ("FastAPI", http_services.EDGE, "replay"): 2.1,
}
"""An empty route's unprotected rate, and what is left of it on Redis."""
CLIENT: Final = 1.15
JOURNAL: Final = 5.0
LARGE: Final = 1.5
SWEPT: Final = 2.0


@dataclass(frozen=True)
class Verdict:
    """One aim and what came of it."""

    aim: str
    figure: float
    unit: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        return {"aim": self.aim, "figure": round(self.figure, 2), "unit": self.unit, "met": self.met}


def judge(costs: Sequence[Cost], matches: Iterable[Match], callers: int) -> list[Verdict]:
    """``callers``: how many at once the stores are judged by."""
    verdicts = _in_process(costs)
    for match in matches:
        if isinstance(match, WireMatch):
            verdicts += _over_http(match)
        elif match.store == "client":
            verdicts += _of_client(match)
        elif match.store == "outbox":
            verdicts += _with_messages(match)
        elif match.store == "inbox":
            verdicts += _of_inbox(match)
        elif match.store == "relay":
            verdicts += _of_relay(match)
        elif match.store == "kafka":
            verdicts += _to_kafka(match)
        elif match.store == "transactional":
            verdicts += _in_transactions(match)
        else:
            verdicts += _of_store(match, callers)
    return verdicts


def _in_process(costs: Sequence[Cost]) -> list[Verdict]:
    """On the memory store a call is cheaper than with any peer, and metrics cost little."""
    ours = {(cost.job, cost.shell): cost.microseconds for cost in costs if cost.name == "Semel"}
    found = []
    for peer in costs:
        if peer.name == WITH_METRICS:
            each = (peer.microseconds - ours[peer.job, peer.shell]) / EVENTS[peer.job]
            aim = f"metrics for Prometheus, {peer.job}: less than {METRICS:g} µs for each event"
            found.append(Verdict(aim, each, "µs", each < METRICS))
        elif peer.name not in ("Semel", "unprotected"):
            times = ours[peer.job, peer.shell] / peer.microseconds
            aim = f"engine overhead, memory store, {peer.shell}, {peer.job}: less than {peer.name}"
            found.append(Verdict(aim, times, "×", times < 1))
    return found


def _of_store(match: Match, callers: int) -> list[Verdict]:
    """The first executions of many callers, beside the driver alone. On SQLite beside one commit for each Op, since a
    group commit shares just these, and with threads: asyncio has one connection for all."""
    rates = {s.name: s for s in match.standings() if s.job == "first" and s.callers == callers}
    found = []
    if match.store == "postgres" and (times := rates["Semel"].times_bare) is not None:
        found.append((f"at least {POSTGRES:g}× two bare statements", times, POSTGRES))
    elif match.store == "redis" and (times := rates[STORE_ALONE].times_bare) is not None:
        aim = f"claim and complete, at least {REDIS:g}× the same two commands by redis.asyncio"
        found.append((aim, times, REDIS))
    elif match.store == "sqlite" and "threads" in match.title:
        times = rates["Semel"].rate / rates[ONE_COMMIT_PER_OP].rate
        found.append((f"at least {SQLITE:g}× one commit per Op", times, SQLITE))
    return [
        Verdict(f"{match.title}, {callers} callers: {aim}", times, "×", times >= least) for aim, times, least in found
    ]


def _of_inbox(match: Match) -> list[Verdict]:
    (standing,) = (each for each in match.standings() if each.name == WITH_THE_INBOX)
    rate = standing.rate * BATCH
    return [Verdict(f"{match.title}: at least {INBOX:,} messages/s", rate, "messages/s", rate >= INBOX)]


def _in_transactions(match: Match) -> list[Verdict]:
    found = []
    driver = "asyncpg" if "asyncpg" in match.title else "psycopg"
    for standing in match.standings():
        least = TRANSACTIONAL.get((driver, standing.name, standing.job))
        if least is not None and standing.times_bare is not None:
            aim = f"{match.title}, {standing.name}, {standing.job}: at least {least:g}× unprotected"
            found.append(Verdict(aim, standing.times_bare, "×", standing.times_bare >= least))
    return found


def _with_messages(match: Match) -> list[Verdict]:
    return [
        Verdict(
            f"{match.title}, {one.name}: at least {OUTBOX:g}× unprotected",
            one.times_bare,
            "×",
            one.times_bare >= OUTBOX,
        )
        for one in match.standings()
        if one.name in (WITH_A_MESSAGE, IN_A_STREAM) and one.times_bare is not None
    ]


def _of_relay(match: Match) -> list[Verdict]:
    rates = {one.name: one.rate for one in match.standings()}
    return [
        Verdict(
            f"{match.title}, {name}: at least {least:,} a second to a broker that takes 5 ms for a batch",
            rates[name],
            "/s",
            rates[name] >= least,
        )
        for name, least in RELAY.items()
    ]


def _to_kafka(match: Match) -> list[Verdict]:
    return [
        Verdict(
            f"{match.title}, {one.name}: at least {KAFKA:g}× {PRODUCER}", one.times_bare, "×", one.times_bare >= KAFKA
        )
        for one in match.standings()
        if one.name in RELAY and one.times_bare is not None
    ]


def _over_http(match: WireMatch) -> list[Verdict]:
    """By the clock, for both ways to declare a route: only a claim at the edge can spare a replay the framework."""
    found = []
    for standing in match.standings():
        least = HTTP.get((match.framework, standing.name, standing.job))
        if match.judged and least is not None and standing.times_bare is not None:
            aim = f"{match.framework} on Redis, {standing.name}, {standing.job}: at least {least:g}× unprotected"
            found.append(Verdict(aim, standing.times_bare, "×", standing.times_bare >= least))
    return found


def _of_client(match: Match) -> list[Verdict]:
    found = []
    for standing in match.standings():
        if standing.name == WITH_KEYS and standing.times_bare:
            aim, cost = f"{match.title}: a call at most {CLIENT:g}× httpx alone", 1 / standing.times_bare
            found.append(Verdict(aim, cost, "×", cost <= CLIENT))
        elif standing.name == SHARED_FSYNC and standing.times_bare:
            aim = f"{match.title}, {standing.callers} callers: at least {JOURNAL:g}× one fsync per call"
            found.append(Verdict(aim, standing.times_bare, "×", standing.times_bare >= JOURNAL))
    return found


def judge_large(found: Iterable[Large]) -> list[Verdict]:
    verdicts = []
    for large in found:
        for job in JOBS:
            for told, name in (("median latency", "p50"), ("CPU", "cpu")):
                times = large.times(job, name)
                aim = f"{large.store}, {large.many:,} records, {job}: {told} at most {LARGE:g}× that of {large.few:,}"
                verdicts.append(Verdict(aim, times, "×", times <= LARGE))
        times = large.sweep_times()
        aim = f"{large.store}, {EXPIRIES:g} expiries a second: the claim's p99 at most {SWEPT:g}× that of a quiet store"
        verdicts.append(Verdict(aim, times, "×", times <= SWEPT))
        if large.sweeps:
            aim = f"{large.store}, {EXPIRIES:g} expiries a second: at the end no more than a second's worth is left"
            verdicts.append(Verdict(aim, large.left, "", large.left <= EXPIRIES))
    return verdicts
