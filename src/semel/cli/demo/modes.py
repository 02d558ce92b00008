"""The other two ways of being atomic, under the same storm: in the payment's own transaction, and in steps."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

from semel.cli.demo.rows import Rows
from semel.cli.demo.till import DYING, FAILING, LEASE, OPERATION, SLOW, Declined, Till, key_of
from semel.core.policy import Wait
from semel.engine.operation.operation import INJECTED, Operation
from semel.errors import StoreError

__all__ = ["TILLS"]

LONG: Final = 0.2
"""Seconds of a slow handler that holds a transaction: others may have to wait for it."""


class TransactionalTill(Till):
    """The payment is a row in the store's database, in one transaction with the record. There is no lease, no hook that
    looks for what was done, and no ledger that refuses: whatever dies is rolled back.
    """

    def _protected(self) -> list[Callable[[int, int], Any]]:
        self._rows = Rows(self._config.store, self._config.run)

        def way(what: Any) -> Callable[[int, int], Any]:
            def ask(payment: int, amount: int) -> Any:
                try:
                    return self._guard.run_in_transaction(
                        self._rows.connection(), OPERATION, key=key_of(self._config.run, payment),
                        call=lambda op: self.charge(payment, amount, op), own_transaction=True, ttl="1h", on_duplicate=what,
                    )  # fmt: skip
                except StoreError:
                    self._rows.drop()
                    raise

            return ask

        return [way("raise"), way(Wait("300ms"))]

    def charge(self, payment: int, amount: int, op: Operation = INJECTED) -> dict[str, int]:
        """The handler: one row."""
        self._mine.ran = True
        self._sightings.see("attempt", payment, attempt=op.attempt, token=op.token)
        fate = random.Random(f"{self._config.seed}/{payment}/1").random()
        self._die_once(fate < DYING, payment, "before the row")
        time.sleep(LONG if fate > 1 - SLOW else 0.001 + 0.004 * self._random.random())
        if not self._config.finishing and self._random.random() < FAILING:
            raise Declined(f"payment {payment}")
        if self._config.sabotage == "silent" and payment % 10 == 0:
            return {"payment": payment, "amount": amount, "receipt": -1}
        receipt = self._rows.insert(payment, amount, op.attempt, op.token)
        if self._config.sabotage == "torn":
            self._rows.tear()
        self._die_once(DYING <= fate < 2 * DYING, payment, "between the row and the commit")
        self._mine.dies = 2 * DYING <= fate < 3 * DYING and self._first_death(payment)
        return {"payment": payment, "amount": amount, "receipt": receipt}

    def _die_once(self, so: bool, payment: int, where: str) -> None:
        self._die_if(so and self._first_death(payment), payment, None, where)

    def _first_death(self, payment: int) -> bool:
        """A rolled-back attempt leaves nothing behind, so the next one is a first again: a file says that it died."""
        if self._config.finishing:
            return False
        try:
            os.close(os.open(self._config.folder / f"died-{payment}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class StepsTill(Till):
    """Two effects in the ledger, charge and ship, each a step with a key of its own; the ledger knows keys, as a good
    provider does. An attempt that takes over goes on after what is done.
    """

    def _protected(self) -> list[Callable[[int, int], Any]]:
        return self._decorated()

    def charge(self, payment: int, amount: int, op: Operation = INJECTED) -> dict[str, int]:
        """The handler: charge, then ship."""
        self._mine.ran = True
        self._sightings.see("attempt", payment, attempt=op.attempt, token=op.token)
        if op.attempt > 1:
            self._sightings.see("taken_over", payment, attempt=op.attempt, token=op.token)
        fate = random.Random(f"{self._config.seed}/{payment}/{op.attempt}").random()
        self._die_if(fate < DYING, payment, op, "before the first step")
        names = ("ship", "charge") if self._config.sabotage == "disordered" else ("charge", "ship")
        done: dict[str, int] = {}
        for name in names:
            time.sleep(LEASE * 0.8 if fate > 1 - SLOW else 0.002 + 0.01 * self._random.random())
            if not self._config.finishing and self._random.random() < FAILING / 2:
                raise Declined(f"payment {payment}")

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
        self._mine.dies = 2 * DYING <= fate < 3 * DYING and op.attempt == 1
        return {"payment": payment, "amount": amount, "receipt": done["charge"], "parcel": done["ship"]}


TILLS: Final[dict[str, type[Till]]] = {"leased": Till, "transactional": TransactionalTill, "steps": StepsTill}
