"""``WatchRecord``, on each store whose server sends a message when an attempt ends."""

from __future__ import annotations

import os

import pytest

from semel.core.ops import Claim, Claimed, Release, WatchRecord
from semel.core.states import State, Takeover
from semel.stores.urls import migrate_store, open_store

LEASE = 30.0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[getattr(pytest.mark, kind), pytest.mark.server]) for kind in ("postgres", "redis")],
)
def test_the_answer_is_the_rest_of_the_lease_of_a_running_attempt(kind: str, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue(f"{kind}_url"))
    migrate_store(url)
    store = open_store(url)
    id = os.urandom(16)
    try:
        assert store.execute(WatchRecord(id)) is None
        claimed = store.execute(Claim(id, 1, b"", LEASE, 3600.0, Takeover.RETRY, "", "ship", "k1"))
        assert isinstance(claimed, Claimed)
        left = store.execute(WatchRecord(id))
        assert left is not None
        assert LEASE - 10 < left <= LEASE
        assert store.execute(Release(id, claimed.token, State.ABANDONED))
        assert store.execute(WatchRecord(id)) is None
    finally:
        store.close()
