"""One worker process of the storm: clients in threads that call a protected handler, in one of three modes, and retry.

``Till.charge`` is the protected function. It is written as a user would write it, except for the places where it kills
its own process. The module is run as ``python -m semel.demo.worker``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from semel.core.call import NOT_DONE, Recovered, Verdict
from semel.core.policy import Wait
from semel.demo.evidence import Fenced, Ledger, Rows, Sightings
from semel.demo.processes import end_with_parent, read_settings, run_threads
from semel.engine.operation import INJECTED, Operation, current_operation
from semel.errors import InProgress, LeaseLost, StoreError
from semel.stores.guard import Semel
from semel.stores.urls import open_store

OPERATION: Final = "semel-demo.charge"
LEASE: Final = 1.0
FAILING: Final = 0.06
DYING: Final = 0.005
"""Chance of a first attempt to die, at each of the three places."""
SLOW: Final = 0.01
"""Chance of a slow handler."""
PATIENCE: Final = 20.0
"""Seconds after which a client gives a payment up, and leaves it to be counted as lost."""
HOT: Final = 24
"""Payments requested at the same time: few, so that clients of all processes compete."""
OLD: Final = 250
COMING_BACK: Final = 0.2
"""Share of clients that come back to a recent payment: they find answers, and what killed workers left."""
LOST_ANSWERS: Final = 0.5
"""Share of answers that a client discards, to retry with the same key."""


class PaymentFailed(Exception):
    """The handler fails before it has done anything: the client will ask again."""


@dataclass(frozen=True)
class Config:
    """What the storm tells a worker, as JSON in the first line of its standard input."""

    folder: str
    store: str
    run: str
    number: int
    seed: int
    threads: int
    began: float
    rate: float
    finishing: bool
    """Ask for each payment in ``finish.json`` once, without faults; False: the storm."""
    sabotage: str
    mode: str


def key_of(run: str, payment: int) -> str:
    return f"{run}-{payment}"


def amount_of(payment: int) -> int:
    return 100 + payment * 37 % 900


class Till:
    """The handler and what it works with."""

    slow: ClassVar[float] = LEASE * 1.6
    """Seconds of a slow handler: longer than its lease, which then must be renewed."""
    quick: ClassVar[float] = 0.015

    def __init__(self, config: Config, guard: Semel, ledger: Ledger, sightings: Sightings) -> None:
        self._config = config
        self._guard = guard
        self._ledger = ledger
        self._sightings = sightings
        self._mine = threading.local()
        self._random = random.Random(f"{config.seed}/{config.number}")
        self._ways = self._protected()
        if config.sabotage == "unprotected":
            self._ways = [lambda payment, amount: self.charge(payment, amount, _Nobody(payment))]

    def _protected(self) -> list[Callable[[int, int], Any]]:
        """The ways in which clients call the handler."""
        return self._decorated(recover=self.recover)

    def _decorated(self, **settings: Any) -> list[Callable[[int, int], Any]]:
        settings |= {
            "operation": OPERATION,
            "key": lambda payment: key_of(self._config.run, payment),
            "lease": LEASE,
            "ttl": "1h",
        }
        return [self._guard.once(**settings, on_duplicate=what)(self.charge) for what in ("raise", Wait("300ms"))]

    def charge(self, payment: int, amount: int, op: Operation = INJECTED) -> dict[str, int]:
        """The handler: charge once, and answer with the receipt."""
        fate = self._begin(payment, op)
        self._work(payment, fate, FAILING)
        if self._config.sabotage == "broken" and payment % 50 == 0:
            raise ZeroDivisionError
        if self._config.sabotage == "silent" and payment % 10 == 0:
            return {"payment": payment, "amount": amount, "receipt": -1}
        receipt = self._effect(payment, amount, op)
        self._die_if(DYING <= fate < 2 * DYING, payment, op, "between the effect and its record")
        self._mine.dies = 2 * DYING <= fate < 3 * DYING and self._may_die(payment, op)
        return {"payment": payment, "amount": amount, "receipt": receipt}

    def _begin(self, payment: int, op: Operation) -> float:
        """Note the attempt. Returns its fate, a number between 0 and 1 that the storm's seed decides."""
        self._mine.ran = True
        self._sightings.see("attempts", payment, attempt=op.attempt, token=op.token)
        fate = random.Random(f"{self._config.seed}/{payment}/{op.attempt}").random()
        self._die_if(fate < DYING, payment, op, "before the effect")
        return fate

    def _work(self, payment: int, fate: float, failing: float) -> None:
        """Take some time, and fail by chance before anything was done."""
        time.sleep(self.slow if fate > 1 - SLOW else self.quick * (0.5 + self._random.random()))
        if not self._config.finishing and self._random.random() < failing:
            raise PaymentFailed(f"payment {payment}")

    def _effect(self, payment: int, amount: int, op: Operation) -> int:
        return self._ledger.charge(op.derive("charge"), payment, amount, op.attempt, op.token)

    def recover(self, payment: int) -> Recovered[dict[str, int]] | Verdict:
        """An attempt fell silent: the ledger knows whether it charged, by the key that every attempt derives alike."""
        op = current_operation()
        assert op is not None
        self._mine.ran = True
        self._sightings.see("takeovers", payment, attempt=op.attempt, token=op.token)
        found = self._ledger.find(op.derive("charge"), op.token)
        if found is None or self._config.sabotage == "blind":
            return NOT_DONE
        self._sightings.see("recovered", payment, attempt=op.attempt, token=op.token)
        return Recovered({"payment": payment, "amount": found.amount, "receipt": found.receipt})

    def ask(self, payment: int, dice: random.Random) -> bool:
        """A client: asks until there is an answer, always with the same key."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            self._sightings.see("calls", payment)
            self._mine.ran = self._mine.dies = False
            try:
                answer = dice.choice(self._ways)(payment, amount_of(payment))
            except InProgress:
                self._sightings.see("refused", payment)
            except PaymentFailed:
                self._sightings.see("failures", payment)
            except (Fenced, LeaseLost):
                self._sightings.see("fenced", payment)
            except StoreError as error:
                self._sightings.see("store_errors", payment, error=str(error))
            else:
                if self._mine.dies:
                    self._die(payment, "after completion, before the answer")
                self._sightings.see("first" if self._mine.ran else "replays", payment, answer=answer)
                return True
            time.sleep(0.02 + 0.06 * dice.random())
        return False

    def _may_die(self, payment: int, op: Operation) -> bool:
        """Only in a first attempt, and never while the storm is being finished."""
        return not self._config.finishing and op.attempt == 1

    def _die_if(self, so: bool, payment: int, op: Operation, where: str) -> None:
        if so and self._may_die(payment, op):
            self._die(payment, where)

    def _die(self, payment: int, where: str) -> None:
        """Be killed at this very place."""
        self._sightings.see("died", payment, where=where)
        os.kill(os.getpid(), signal.SIGKILL)


class TransactionalTill(Till):
    """The payment is a row in the store's database, in one transaction with the record. There is no lease, no hook that
    looks for what was done, and no ledger that refuses: whatever dies is rolled back.
    """

    slow = 0.2  # it holds a transaction: others may have to wait for it
    quick = 0.003

    def _protected(self) -> list[Callable[[int, int], Any]]:
        self._rows = Rows(self._config.store, self._config.run)

        def way(what: Any) -> Callable[[int, int], Any]:
            def ask(payment: int, amount: int) -> Any:
                try:
                    return self._guard.run_in_transaction(
                        self._rows.connection(), OPERATION, key=key_of(self._config.run, payment),
                        call=lambda op: self.charge(payment, amount, op), own_transaction=True, ttl="1h",
                        on_duplicate=what,
                    )  # fmt: skip
                except StoreError:
                    self._rows.drop()
                    raise

            return ask

        return [way("raise"), way(Wait("300ms"))]

    def _effect(self, payment: int, amount: int, op: Operation) -> int:
        receipt = self._rows.insert(payment, amount, op.attempt, op.token)
        if self._config.sabotage == "torn":
            self._rows.tear()
        return receipt

    def _may_die(self, payment: int, op: Operation) -> bool:
        """A rolled-back attempt leaves nothing behind, so the next one is a first again: a file says that it died."""
        if self._config.finishing:
            return False
        try:
            os.close(os.open(f"{self._config.folder}/died-{payment}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class StepsTill(Till):
    """Two effects in the ledger, charge and ship, each a step with a key of its own; the ledger knows keys, as a good
    provider does. An attempt that takes over goes on after what is done.
    """

    slow = LEASE * 0.8
    quick = 0.007

    def _protected(self) -> list[Callable[[int, int], Any]]:
        return self._decorated()

    def charge(self, payment: int, amount: int, op: Operation = INJECTED) -> dict[str, int]:
        """The handler: charge, then ship."""
        fate = self._begin(payment, op)
        if op.attempt > 1:
            self._sightings.see("takeovers", payment, attempt=op.attempt, token=op.token)
        names = ("ship", "charge") if self._config.sabotage == "disordered" else ("charge", "ship")
        done: dict[str, int] = {}
        for name in names:
            self._work(payment, fate, FAILING / 2)

            def effect(name: str, payment: int, amount: int) -> int:
                self._sightings.see("ran", payment, step=name, token=op.token)
                receipt = self._ledger.charge(
                    op.derive(name), payment, amount, op.attempt, op.token, what=name,
                    once=self._config.sabotage != "blind",
                )  # fmt: skip
                self._die_if(DYING <= fate < 2 * DYING, payment, op, f"between the {name} and its mark")
                return receipt

            if self._config.sabotage == "forgetful":
                done[name] = effect(name, payment, amount)
            else:
                done[name] = op.step(name, effect, name, payment, amount)
            self._sightings.see("marked", payment, step=name, token=op.token)
        self._mine.dies = 2 * DYING <= fate < 3 * DYING and self._may_die(payment, op)
        return {"payment": payment, "amount": amount, "receipt": done["charge"], "parcel": done["ship"]}


class _Nobody(Operation):
    """Stands in for the operation when Semel is left out, to show that the verdict would notice."""

    def __init__(self, payment: int) -> None:
        self._payment = payment
        self.attempt = 1

    @property
    def token(self) -> int:
        return 0

    def derive(self, step: str) -> str:
        return f"{step}-{self._payment}"


TILLS: Final[dict[str, type[Till]]] = {"leased": Till, "transactional": TransactionalTill, "steps": StepsTill}


def storm(config: Config, till: Till, stopping: threading.Event, dice: random.Random) -> None:
    """One client of the storm: request recent payments, discard half of the answers, and retry."""
    while not stopping.is_set():
        newest = int((time.time() - config.began) * config.rate)
        payment = max(0, newest - dice.randrange(OLD if dice.random() < COMING_BACK else HOT))
        while till.ask(payment, dice) and dice.random() < LOST_ANSWERS and not stopping.is_set():
            time.sleep(0.01 * dice.random())


def finish(payments: list[int], till: Till, stopping: threading.Event, dice: random.Random) -> None:
    """One client after the storm: request each of these payments once."""
    while not stopping.is_set():
        try:
            payment = payments.pop()
        except IndexError:
            return
        till.ask(payment, dice)


def main() -> None:
    config = Config(**read_settings())
    stopping = threading.Event()
    end_with_parent(stopping.set)
    ledger = Ledger(f"{config.folder}/ledger.db")
    sightings = Sightings(Path(config.folder, f"worker-{config.number}.jsonl"))
    with Semel(open_store(config.store), sweep_every=None) as guard:
        till = TILLS[config.mode](config, guard, ledger, sightings)
        if config.finishing:
            begun = json.loads(Path(config.folder, "finish.json").read_text())
            work = partial(finish, begun, till, stopping)
        else:
            work = partial(storm, config, till, stopping)
        run_threads(work, [f"{config.seed}/{config.number}/{i}" for i in range(config.threads)])
    ledger.close()
    sightings.close()


if __name__ == "__main__":
    main()
