"""Inside a savepoint of the caller's: what is rolled back to it never happened, and the key is free again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from semel import State

OpenTill = Callable[..., Any]


class Undone(Exception):
    pass


def savepoint(till: Any) -> Any:
    """How each kind opens one inside a transaction; it is rolled back to by an exception."""
    kind = till.kind
    if kind.startswith(("sqlalchemy", "session", "scoped")):
        return till.conn.begin_nested
    if kind.startswith(("django", "psycopg", "async-psycopg", "asyncpg")):
        return till.transaction  # nested, each of these is a savepoint

    if till.lent.awaited:

        @asynccontextmanager
        async def by_hand_async() -> Any:
            await till.send("SAVEPOINT here")
            try:
                yield
            except BaseException:
                await till.send("ROLLBACK TO here")
                raise
            await till.send("RELEASE SAVEPOINT here")

        return by_hand_async

    @contextmanager
    def by_hand() -> Any:
        till.send("SAVEPOINT here")
        try:
            yield
        except BaseException:
            till.send("ROLLBACK TO here")
            raise
        till.send("RELEASE SAVEPOINT here")

    return by_hand


def test_a_savepoint_undoes_the_record_with_the_effect(open_till: OpenTill) -> None:
    till = open_till()
    nested = savepoint(till)
    if till.lent.awaited:

        async def work(op: Any) -> str:
            await till.send("INSERT INTO payment (key) VALUES ('k1')")
            return "paid"

        async def main() -> bool:
            async with till.transaction():
                await till.send("INSERT INTO payment (key) VALUES ('before')")
                with pytest.raises(Undone):  # noqa: PT012
                    async with nested():
                        await till.guard.run_in_transaction(till.conn, "pay", key="k1", call=work)
                        raise Undone
                async with nested():
                    outcome = await till.guard.run_in_transaction_outcome(till.conn, "pay", key="k1", call=work)
                return bool(outcome.replayed)

        replayed = till.run(main)
    else:

        def sync_work(op: Any) -> str:
            till.send("INSERT INTO payment (key) VALUES ('k1')")
            return "paid"

        with till.transaction():
            till.send("INSERT INTO payment (key) VALUES ('before')")
            with pytest.raises(Undone), nested():  # noqa: PT012
                till.guard.run_in_transaction(till.conn, "pay", key="k1", call=sync_work)
                raise Undone
            with nested():
                replayed = till.guard.run_in_transaction_outcome(till.conn, "pay", key="k1", call=sync_work).replayed
    assert replayed is False
    assert till.rows() == ["before", "k1"]
    assert till.lookup("k1").state is State.DONE


def test_a_second_call_in_the_same_transaction_is_a_replay(open_till: OpenTill) -> None:
    till = open_till()
    if till.lent.awaited:

        async def main() -> list[bool]:
            async with till.transaction():
                return [
                    (await till.guard.run_in_transaction_outcome(till.conn, "pay", key="k1", call=lambda: 1)).replayed
                    for _ in range(2)
                ]

        assert till.run(main) == [False, True]
        return
    with till.transaction():
        replays = [
            till.guard.run_in_transaction_outcome(till.conn, "pay", key="k1", call=lambda: 1).replayed for _ in range(2)
        ]
    assert replays == [False, True]
