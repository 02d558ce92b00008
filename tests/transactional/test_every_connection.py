"""The transactional mode on every kind of connection that a caller may hold: the same behaviour on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import ConfigurationError, KeyReused, State
from semel.observe import events

OpenTill = Callable[..., Any]


class Refused(Exception):
    pass


def fail() -> None:
    raise Refused


def test_the_effect_happens_once_and_its_answer_is_replayed(open_till: OpenTill) -> None:
    till = open_till()
    assert till.pay("k1").replayed is False
    again = till.pay("k1")
    assert again.replayed is True
    assert again.value == {"paid": "k1"}
    assert till.rows() == ["k1"]
    assert till.lookup("k1").state is State.DONE


def test_another_connection_sees_the_record_once_it_is_committed(open_till: OpenTill) -> None:
    first, second = open_till(), open_till()
    first.pay("k1")
    assert second.pay("k1").replayed is True
    assert second.rows() == ["k1"]


def test_what_the_caller_rolls_back_never_happened(open_till: OpenTill) -> None:
    till = open_till()
    with pytest.raises(Refused):
        till.pay("k1", then=fail)
    assert till.lookup("k1") is None
    assert till.rows() == []
    assert till.pay("k1").replayed is False
    assert till.rows() == ["k1"]


def test_a_handler_that_raises_leaves_nothing(open_till: OpenTill) -> None:
    till = open_till()
    with pytest.raises(Refused):
        till.pay("k1", call=lambda op: fail())
    assert (till.lookup("k1"), till.rows()) == (None, [])


def test_semel_opens_and_commits_where_it_is_asked_to(open_till: OpenTill) -> None:
    till = open_till()
    assert till.pay("k1", own_transaction=True).replayed is False
    assert till.lent.begun() is False
    assert till.pay("k1", own_transaction=True).replayed is True
    assert till.lent.begun() is False
    with pytest.raises(Refused):
        till.pay("k2", own_transaction=True, call=lambda op: fail())
    assert till.lent.begun() is False
    assert till.rows() == ["k1"]
    assert till.lookup("k2") is None


def test_a_remembered_failure_is_replayed_and_its_effect_undone(open_till: OpenTill) -> None:
    till = open_till()
    for _ in range(2):
        with pytest.raises(Refused):
            till.pay("k1", own_transaction=True, call=lambda op: fail(), remember_errors=Refused)
        assert till.rows() == []
    assert till.lookup("k1").state is State.DONE


def test_another_request_under_the_key_is_refused(open_till: OpenTill) -> None:
    till = open_till()
    till.pay("k1", fingerprint={"amount": 1})
    with pytest.raises(KeyReused):
        till.pay("k1", fingerprint={"amount": 2})
    assert till.rows() == ["k1"]


def test_the_handle_knows_its_operation_and_captures_without_storing(open_till: OpenTill) -> None:
    till = open_till()
    seen = till.pay("k1", tenant="acme", insert=False, call=lambda op: [op.key, op.tenant, op.token, op.derive("x")])
    assert seen.value[:3] == ["k1", "acme", 0]
    assert len(seen.value[3]) == 36


def test_begin_inside_an_open_transaction_is_an_error(open_till: OpenTill) -> None:
    till = open_till()

    if till.lent.awaited:

        async def inside() -> None:
            async with till.transaction():
                await till.send("INSERT INTO payment (key) VALUES ('mine')")
                await till.pay_async("k1", own_transaction=True)
    else:

        def inside() -> None:  # type: ignore[misc]
            with till.transaction():
                till.send("INSERT INTO payment (key) VALUES ('mine')")
                till.pay("k1", own_transaction=True)

    with pytest.raises(ConfigurationError, match="one is open already"):
        till.run(inside)
    assert till.rows() == []


def test_completion_is_told_as_prepared_until_the_commit_is_ours_to_make(open_till: OpenTill) -> None:
    told: list[Any] = []
    till = open_till(on_event=told.append)
    till.pay("k1")
    assert [type(event) for event in told] == [events.Started, events.Prepared]
    told.clear()
    till.pay("k2", own_transaction=True)
    assert [type(event) for event in told] == [events.Started, events.Completed]
    told.clear()
    till.pay("k2")
    assert [type(event) for event in told] == [events.Replayed]


def test_a_handler_may_open_savepoints_in_a_transaction_of_semels(open_till: OpenTill) -> None:
    from tests.transactional.test_savepoints import savepoint

    till = open_till()
    nested = savepoint(till)
    if till.lent.awaited:

        async def work() -> str:
            async with nested():
                await till.send("INSERT INTO payment (key) VALUES ('k1')")
            return "paid"
    else:

        def work() -> str:  # type: ignore[misc]
            with nested():
                till.send("INSERT INTO payment (key) VALUES ('k1')")
            return "paid"

    till.run(lambda: till.guard.run_in_transaction(till.conn, "pay", key="k1", call=work, own_transaction=True))
    assert till.lent.begun() is False
    assert till.rows() == ["k1"]
