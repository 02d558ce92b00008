"""Listing records page by page, and measuring a store. For stores that declare ``lists``.

Other records may be in the store, so each proof looks at its own operations only.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from semel.core.ops import Claimed, Complete, Listing, ListRecords, Lookup, Measure, Record, Release, Renew, Resolve
from semel.core.states import State, Takeover
from semel.testing.conformance.script import (
    LIVE,
    SHORT,
    TTL,
    Batch,
    Elapse,
    Elsewhere,
    Family,
    Request,
    Script,
    Together,
    abandoned,
    claim,
    done,
    drained,
    new_id,
    running,
    several,
    unknown,
    won,
)
from semel.testing.conformance.steps import new_operation

LIST = Family("list")
MEASURE = Family("measure")
MOST_PAGES: Final = 2000


def walk(*, elsewhere: bool = False, once: bool = True, **filters: Any) -> Generator[Request, Any, dict[bytes, Record]]:
    """Follow the pages to their end. Returns the records by id.

    :param once: no record may be shown by two pages.
    """
    found: dict[bytes, Record] = {}
    op = ListRecords(**filters)
    for _ in range(MOST_PAGES):
        page: Listing = yield Elsewhere(op) if elsewhere else op
        assert len(page.records) <= op.limit, "more than the page may have"
        assert page.looked_at <= op.look, "more than the store may look at"
        for record in page.records:
            assert not once or record.id not in found, "shown twice"
            assert record.snapshot is None
            found[record.id] = record
        if page.after is None:
            return found
        op = ListRecords(**{**filters, "after": page.after})
    raise AssertionError("the pages never end")


@LIST(lists=True)
def nothing_is_listed_where_nothing_was_claimed() -> Script:
    assert (yield from walk(operation=new_operation())) == {}


@LIST(lists=True)
def a_record_is_listed_as_a_lookup_shows_it() -> Script:
    operation = new_operation()
    id, _ = yield from running(operation=operation, fingerprint=b"f" * 16)
    looked_up = yield Lookup(id)
    found = yield from walk(operation=operation)
    assert list(found) == [id]
    record = found[id]
    for name in ("id", "state", "token", "attempt", "fingerprint", "tenant", "operation", "key"):
        assert getattr(record, name) == getattr(looked_up, name), name
    for name in ("lease_left", "age", "expires_in"):
        assert abs(getattr(record, name) - getattr(looked_up, name)) < LIVE, name
    assert (yield from walk(operation=operation, elsewhere=True)).keys() == {id}


@LIST(lists=True)
def every_state_is_listed_and_can_be_asked_for() -> Script:
    operation = new_operation()
    finished, _ = yield from done(operation=operation)
    doubtful, _ = yield from unknown(operation=operation)
    lost, _ = yield from abandoned(operation=operation)
    live, _ = yield from running(operation=operation)
    expected = {State.DONE: finished, State.UNKNOWN: doubtful, State.ABANDONED: lost, State.RUNNING: live}
    everything = yield from walk(operation=operation)
    assert {record.state: id for id, record in everything.items()} == expected
    for state, id in expected.items():
        assert (yield from walk(operation=operation, states=(state,))).keys() == {id}
    two = yield from walk(operation=operation, states=(State.RUNNING, State.ABANDONED))
    assert two.keys() == {lost, live}
    assert (yield from walk(operation=operation, states=(State.ABSENT,))) == {}


@LIST(lists=True)
def operations_and_tenants_are_told_apart() -> Script:
    operation, other = new_operation(), new_operation()
    mine, _ = yield from running(operation=operation, tenant="acme")
    yield from running(operation=operation, tenant="acme ")
    yield from running(operation=operation, tenant="")
    yield from running(operation=f"{operation} ", tenant="acme")
    yield from running(operation=operation.upper(), tenant="acme")
    theirs, _ = yield from running(operation=other, tenant="acme")
    assert (yield from walk(operation=operation, tenant="acme")).keys() == {mine}
    assert len((yield from walk(operation=operation))) == 3
    assert (yield from walk(operation=operation, tenant="nobody")) == {}
    assert {mine, theirs} <= (yield from walk(tenant="acme")).keys()


@LIST(lists=True)
def only_those_of_a_given_age_are_listed() -> Script:
    operation = new_operation()
    old, _ = yield from running(operation=operation)
    yield Elapse(0.3)
    yield from running(operation=operation)
    found = yield from walk(operation=operation, older=0.3)
    assert old in found
    assert all(record.age >= 0.3 for record in found.values())
    assert (yield from walk(operation=operation, older=LIVE)) == {}


@LIST(lists=True)
def what_has_ended_is_not_listed() -> Script:
    operation = new_operation()
    yield from done(operation=operation, answer_ttl=SHORT)
    free, claimed = yield from running(operation=operation)
    assert (yield Release(free, claimed.token)) is True
    resolved, _ = yield from unknown(operation=operation)
    assert (yield Resolve(resolved, None, TTL)) is State.UNKNOWN
    yield from abandoned(operation=operation, ttl=SHORT)
    assert (yield from walk(operation=operation)) == {}


@LIST(lists=True)
def what_is_in_doubt_is_listed_past_its_time() -> Script:
    operation = new_operation()
    id, _ = yield from abandoned(operation=operation, ttl=SHORT, takeover=Takeover.REJECT)
    found = yield from walk(operation=operation)
    assert {id: record.state for id, record in found.items()} == {id: State.ABANDONED}


@LIST(lists=True)
def one_that_was_claimed_again_is_listed_once() -> Script:
    operation = new_operation()
    expired, _ = yield from done(operation=operation, answer_ttl=SHORT)
    taken, _ = yield from abandoned(operation=operation)
    assert (yield from won(claim(expired, operation=operation))).attempt == 1
    assert (yield from won(claim(taken, operation=operation))).attempt == 2
    for limit in (1, 50):
        found = yield from walk(operation=operation, limit=limit)
        assert {id: (record.state, record.attempt) for id, record in found.items()} == {
            expired: (State.RUNNING, 1),
            taken: (State.RUNNING, 2),
        }


@LIST(lists=True)
def small_pages_list_each_of_them_once() -> Script:
    operation = new_operation()
    made = yield from several(7, operation=operation)
    for limit, look in ((1, 5000), (3, 5000), (7, 7), (8, 5000), (50, 3), (2, 2)):
        assert (yield from walk(operation=operation, limit=limit, look=look)).keys() == made.keys()


@LIST(lists=True)
def those_of_one_moment_are_listed_each_once() -> Script:
    """A batch of claims may be written at one moment, and have more records than a page may look at."""
    operation = new_operation()
    claims = [claim(new_id(), operation=operation) for _ in range(20)]
    answers = yield Batch(claims)
    assert all(type(answer) is Claimed for answer in answers)
    for limit, look in ((50, 5000), (3, 5000), (3, 6), (50, 6)):
        assert (yield from walk(operation=operation, limit=limit, look=look)).keys() == {op.id for op in claims}


@LIST(lists=True)
def a_page_looks_at_no_more_than_it_may() -> Script:
    operation = new_operation()
    yield from several(12, operation=operation)
    page = yield ListRecords(operation=new_operation(), look=5)
    assert page.records == ()
    assert page.looked_at <= 5
    assert page.after is not None
    assert (yield from walk(operation=new_operation(), look=5)) == {}


@LIST(lists=True)
def listing_is_one_of_a_batch() -> Script:
    operation = new_operation()
    id, _ = yield from running(operation=operation)
    answers = yield Batch([claim(new_id(), operation=operation), ListRecords(operation=operation), Lookup(id)])
    assert type(answers[0]) is Claimed
    assert id in {record.id for record in answers[1].records}
    assert answers[2].id == id


@LIST(lists=True)
def listing_changes_nothing() -> Script:
    operation = new_operation()
    id, claimed = yield from running(operation=operation)
    before = yield Lookup(id)
    yield from walk(operation=operation)
    after = yield Lookup(id)
    assert (after.state, after.token, after.attempt) == (before.state, before.token, before.attempt)
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True


@LIST(lists=True)
def those_that_stay_are_listed_while_others_come_go_and_change() -> Script:
    yield from readers_beside_writers(once=False)


@LIST(lists=True, lists_once=True)
def no_record_is_listed_twice_while_others_come_go_and_change() -> Script:
    yield from readers_beside_writers(once=True)


def readers_beside_writers(*, once: bool) -> Script:
    operation = new_operation()
    owners = yield from several(24, operation=operation)
    changed = list(owners)[::2]

    def change() -> Script:
        for id in changed:
            assert (yield Renew(id, owners[id].token, LIVE)) is True
            assert (yield Complete(id, owners[id].token, b"answer", TTL)) is True

    def come_and_go() -> Script:
        for _ in range(24):
            id, claimed = yield from running(operation=operation)
            assert (yield Release(id, claimed.token)) is True
            yield from running(operation=operation)

    def reader(limit: int) -> Script:
        for _ in range(3):
            found = yield from walk(operation=operation, limit=limit, once=once)
            assert owners.keys() <= found.keys(), "one that was there throughout is missing"

    yield Together([change(), come_and_go(), reader(2), reader(5), reader(50)])


@MEASURE(lists=True)
def the_number_of_records_is_known() -> Script:
    before = yield Measure()
    yield from several(3)
    after = yield Measure()
    assert after.records >= 0
    assert after.bytes is None or after.bytes >= 0
    if before.exact and after.exact:
        assert after.records - before.records == 3


@MEASURE(lists=True, keeps_expired=True)
def what_waits_for_a_sweep_is_measured() -> Script:
    yield from drained()
    assert (yield Measure()).sweep_lag == 0.0
    yield from done(ttl=SHORT)
    yield from abandoned(ttl=SHORT, takeover=Takeover.REJECT)
    lag = (yield Measure()).sweep_lag
    assert 0.0 < lag < LIVE
    yield from drained()
    assert (yield Measure()).sweep_lag == 0.0
