"""A record that changes between the look of an act and the act itself: the act must not reach what it has not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import MemoryStore, Semel
from semel.console import Access, Console
from semel.core.keys import identity, identity_hash
from semel.core.ops import Claim, Claimed, Complete, Lookup, Op, Release, Renew, Resolve
from semel.core.states import State, Takeover
from tests.console.conftest import Asking

ID = identity("", "pay", "k1", identity_hash(b""))
LEASE = 60.0


class RacyStore(MemoryStore):
    """Lets somebody else act on the record at a chosen moment of an act."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(clock=lambda: self.now)
        self.before_resolve: Callable[[], None] | None = None
        self.after_lookup: Callable[[], None] | None = None

    def execute(self, op: Op[Any]) -> Any:
        if type(op) is Resolve and self.before_resolve is not None:
            other, self.before_resolve = self.before_resolve, None
            other()
        answer = super().execute(op)
        if type(op) is Lookup and self.after_lookup is not None:
            other, self.after_lookup = self.after_lookup, None
            other()
        return answer

    def claim(self, nonce: int, takeover: Takeover = Takeover.RETRY) -> int:
        answer = self.execute(Claim(ID, nonce, b"", LEASE, 86400.0, takeover, "", "pay", "k1"))
        assert isinstance(answer, Claimed)
        return answer.token

    def bring_to(self, state: State, nonce: int) -> int:
        """Claim the key, and let this attempt end in that state. Returns its token."""
        token = self.claim(nonce)
        if state is State.ABANDONED:
            self.now += LEASE + 1
        elif state is State.UNKNOWN:
            assert self.execute(Release(ID, token, State.UNKNOWN))
        elif state is State.DONE:
            assert self.execute(Complete(ID, token, b"the outcome of another", 3600.0))
        return token

    def replace(self, state: State) -> None:
        """Somebody else frees the key, and another attempt comes to the same state as the first."""
        record = self.execute(Lookup(ID))
        assert self.execute(Resolve(ID, None, 60.0, True, record.token)) is state
        self.bring_to(state, 2)


WAYS = [
    ("release", State.UNKNOWN), ("release", State.ABANDONED), ("resolve", State.UNKNOWN), ("resolve", State.ABANDONED),
    ("force", State.RUNNING), ("forget", State.DONE),
]  # fmt: skip
MOMENTS = ["after_lookup", "before_resolve"]


def act(store: RacyStore, way: str, moment: str, other: Callable[[], None]) -> Any:
    """Confirm the act on the page of a record, while somebody else acts."""
    with Semel(store) as guard:
        asking = Asking(Console({"shop": guard}, allow=lambda request: Access(act=True)))
        try:
            path = f"/records/shop/{ID.hex()}/{way}"
            page = asking.get(path).text
            fields = {name: page.partition(f'name="{name}" value="')[2].partition('"')[0] for name in ("token", "form")}
            setattr(store, moment, other)
            answer = asking.post(path, {**fields, "result": '"paid"'}, Accept="application/json")
            assert getattr(store, moment) is None, "nobody has acted meanwhile"
            return answer
        finally:
            asking.close()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("way", "state"), WAYS, ids=lambda value: getattr(value, "name", value))
def test_an_act_does_not_reach_an_attempt_that_the_page_has_not_shown(way: str, state: State, moment: str) -> None:
    store = RacyStore()
    store.bring_to(state, 1)
    answer = act(store, way, moment, lambda: store.replace(state))
    record = store.execute(Lookup(ID))
    assert record is not None, "the key of the new attempt was freed"
    assert (record.state, record.snapshot) == (state, b"the outcome of another" if state is State.DONE else None)
    assert (answer.status_code, answer.json()["changed"]) == (409, False)
    assert "Look" in answer.json()["text"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("way", "state"), [way for way in WAYS if way[1] is not State.DONE], ids=lambda value: getattr(value, "name", value)
)
def test_an_act_does_not_drop_the_outcome_that_the_owner_reports_meanwhile(way: str, state: State, moment: str) -> None:
    """The owner keeps its token when it completes: the token alone does not tell the two states apart."""
    store = RacyStore()
    token = store.bring_to(state, 1)

    def complete() -> None:
        assert store.execute(Complete(ID, token, b"reported late", 3600.0))

    answer = act(store, way, moment, complete)
    assert store.execute(Lookup(ID)).snapshot == b"reported late"
    assert (answer.status_code, answer.json()["changed"]) == (409, False)
    assert "done now" in answer.json()["text"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["release", "resolve"])
def test_an_abandoned_attempt_that_renews_its_lease_meanwhile_goes_on(way: str, moment: str) -> None:
    store = RacyStore()
    token = store.bring_to(State.ABANDONED, 1)

    def renew() -> None:
        assert store.execute(Renew(ID, token, LEASE))

    answer = act(store, way, moment, renew)
    record = store.execute(Lookup(ID))
    assert (record.state, record.token) == (State.RUNNING, token)
    assert (answer.status_code, answer.json()["changed"]) == (409, False)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_running_attempt_that_is_abandoned_meanwhile_is_not_freed_by_force(moment: str) -> None:
    """The page of an abandoned record asks another question: the operator must see it first."""
    store = RacyStore()
    token = store.bring_to(State.RUNNING, 1)

    def lose() -> None:
        store.now += LEASE + 1

    answer = act(store, "force", moment, lose)
    record = store.execute(Lookup(ID))
    assert (record.state, record.token) == (State.ABANDONED, token)
    assert (answer.status_code, answer.json()["changed"]) == (409, False)
