"""The verdict: compares the ledger with what the clients saw. Semel's own records are only a cross-check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from semel.core.states import State
from semel.demo.direct.evidence import Effect, Totals
from semel.errors import StoreError
from semel.stores.guard import Semel
from semel.stores.urls import open_any_store

__all__ = ["StormVerdict", "headed", "judge", "one_line", "table", "unsettled"]


@dataclass(frozen=True)
class StormVerdict:
    """The result of a storm. Every number comes from the ledger or from what the workers wrote down."""

    operations: int = 0
    """Payments that clients requested."""
    calls: int = 0
    attempts: int = 0
    """Handlers that started."""
    effects: int = 0
    """Lines in the ledger, or rows of the service."""
    declined: int = 0
    """Payments that the simulation declined: a normal answer without an effect."""
    replays: int = 0
    """Answers for which no handler ran."""
    takeovers: int = 0
    recovered: int = 0
    """Take-overs that found the effect done, and did not do it again."""
    refused: int = 0
    """Calls refused (409) because the first call was still running."""
    failures: int = 0
    """Calls that failed or had no answer, and were retried."""
    fenced: int = 0
    """Owners that were replaced while they were only slow."""
    store_errors: int = 0
    kills: int = 0
    crashes: int = 0
    """WorkerPool that exited with an unexpected error."""
    duplicates: int = 0
    """Payments with more than one line in the ledger."""
    lost: int = 0
    """Payments acknowledged without an effect, never finished, or answered in two ways."""
    mismatched: int = 0
    """Lost payments that were answered in two ways, or with a receipt that the ledger does not have."""
    unsettled: int = 0
    """Payments that are not done according to the store."""
    repeated: int = 0
    """Steps that ran again in a later attempt although they were stored."""
    disordered: int = 0
    """Payments that were shipped before they were charged."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        wrong = (self.duplicates, self.lost, self.unsettled, self.crashes, self.repeated, self.disordered)
        return self.operations > 0 and not any(wrong)

    def __add__(self, other: StormVerdict) -> StormVerdict:
        return StormVerdict(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 2), "clean": self.clean}


def judge(
    tally: Totals,
    effects: Iterable[Effect],
    kills: int,
    crashes: int,
    seconds: float,
    unsettled: int,
    *,
    steps: bool = False,
) -> StormVerdict:
    """:param steps: each payment has two effects, a charge and then a shipment."""
    lines = list(effects)
    per_effect = Counter((effect.payment, effect.what) for effect in lines)
    charged = {
        effect.payment: {"payment": effect.payment, "amount": effect.amount, "receipt": effect.receipt}
        for effect in lines
        if effect.what == "charge"
    }
    shipped = {effect.payment: effect.receipt for effect in lines if effect.what == "ship"}
    if steps:
        for payment in charged.keys() & shipped.keys():
            charged[payment]["parcel"] = shipped[payment]
    unfinished = tally.begun - tally.answers.keys()
    without_line = tally.answers.keys() - charged.keys()
    mismatched = tally.mismatched | {
        payment for payment in tally.answers.keys() & charged.keys() if tally.answer(payment) != charged[payment]
    }
    counts = tally.counts
    return StormVerdict(
        operations=len(tally.begun),
        calls=counts["asked"],
        attempts=counts["attempt"],
        effects=len(lines),
        replays=counts["replay"],
        takeovers=counts["taken_over"],
        recovered=counts["recovered"],
        refused=counts["refused"],
        failures=counts["failed"],
        fenced=counts["fenced"],
        store_errors=counts["store_error"],
        kills=kills,
        crashes=crashes,
        duplicates=len({payment for (payment, _), count in per_effect.items() if count > 1}),
        lost=len(unfinished | without_line | mismatched),
        mismatched=len(mismatched),
        unsettled=unsettled,
        repeated=tally.repeated(),
        disordered=sum(
            payment not in charged or receipt < charged[payment]["receipt"] for payment, receipt in shipped.items()
        ),
        seconds=seconds,
    )


def unsettled(store: str, operation: str, keys: Iterable[str], tenant: str | None = None) -> int:
    """How many payments are not done according to Semel's own records: a cross-check at the end."""
    with Semel(open_any_store(store), sweep_every=None) as guard:

        def is_done(key: str) -> bool:
            try:
                record = guard.lookup(operation, key, tenant=tenant)
            except StoreError:
                return False
            return record is not None and record.state is State.DONE

        return sum(not is_done(key) for key in keys)


_ROWS = (
    ("operations", "operations", "payments that clients asked for"),
    ("calls", "calls", "how often they asked"),
    ("attempts", "attempts", "handlers that began"),
    ("effects", "effects", "what was done: lines in the ledger, rows of the service"),
    ("declined", "declined", "refused as asked for, and remembered"),
    ("replays", "replays", "answered again, nothing run"),
    ("refused", "refused", "409: the first still ran"),
    ("kills", "kills", "worker processes killed"),
    ("takeovers", "take-overs", "abandoned attempts taken over"),
    ("recovered", "recovered", "of these, found done and not done again"),
    ("fenced", "fenced", "slow owners that were replaced"),
    ("failures", "failures", "calls that failed and were tried again"),
    ("store_errors", "store errors", "calls that the store failed"),
    ("crashes", "crashes", "workers that ended of an unexpected error"),
    ("duplicates", "duplicates", "payments charged more than once"),
    ("lost", "lost", "acknowledged but not charged, not finished, or answered in two ways"),
    ("unsettled", "unsettled", "payments the store does not show as done"),
    ("repeated", "repeated", "steps that ran again although they were done"),
    ("disordered", "disordered", "payments shipped before they were charged"),
)


def table(verdict: StormVerdict, *, color: bool) -> str:
    """The verdict as a table."""
    lines = [f"  {name:<13}{getattr(verdict, field):>8}   {meaning}" for field, name, meaning in _ROWS]
    word = "CLEAN" if verdict.clean else "NOT CLEAN"
    if color:
        word = f"\x1b[1;{32 if verdict.clean else 31}m{word}\x1b[0m"
    return "\n".join([*lines, f"  {word}"])


def headed(title: str, verdict: StormVerdict, text: str) -> str:
    return f"{title} · {verdict.seconds:.1f} s\n{text}\n"


def one_line(title: str, verdict: StormVerdict) -> str:
    """The verdict as one line, when another storm follows."""
    numbers = (
        f"{verdict.operations} payments, {verdict.calls} requests, {verdict.replays} replays, {verdict.kills} kills, "
        f"{verdict.duplicates} duplicates, {verdict.lost} lost"
    )
    return f"{title} · {numbers} · {'CLEAN' if verdict.clean else 'NOT CLEAN'}"
