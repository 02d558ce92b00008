"""DynamoDB: the conformance suite, sync and async, on DynamoDB Local; a part of it on moto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore, migrate
from semel.testing import conformance
from tests.servers import DynamoDBServer, MotoServer

pytestmark = pytest.mark.server

FUTURE = 4_000_000_000.0
"""When the suite plays: the server removes what has expired by its own clock, and nothing may go under our hands."""


@pytest.fixture(scope="module")
def tables(dynamodb: DynamoDBServer) -> dict[str, str]:
    """Two tables for the whole module: most proofs have records of their own, but those that sweep or list see all."""
    return {}


@pytest.fixture
def table(dynamodb: DynamoDBServer, tables: dict[str, str], request: pytest.FixtureRequest) -> str:
    alone = ("sweep", "model", "test_list", "test_measure")
    name = "swept" if any(part in request.node.name for part in alone) else "kept"
    if name == "swept" or name not in tables:
        tables[name] = dynamodb.table()
        migrate(tables[name])
    return tables[name]


class _InTheFuture:
    @pytest.fixture
    def clock(self) -> conformance.ManualClock:
        return conformance.ManualClock(FUTURE)


class TestDynamoDBStore(_InTheFuture, conformance.StoreSuite):
    examples = 8
    lists = True

    @pytest.fixture
    def open_store(self, table: str, clock: conformance.ManualClock) -> Callable[[], DynamoDBStore]:
        return lambda: DynamoDBStore(table, clock=clock, connect_timeout="20s")


class TestAsyncDynamoDBStore(_InTheFuture, conformance.AsyncStoreSuite):
    sampled = True
    examples = 8
    lists = True

    @pytest.fixture
    def open_store(self, table: str, clock: conformance.ManualClock) -> Callable[[], AsyncDynamoDBStore]:
        return lambda: AsyncDynamoDBStore(table, clock=clock, connect_timeout="20s")


@pytest.fixture(scope="module")
def moto_table(moto: MotoServer) -> str:
    return moto.table()


@pytest.mark.parametrize(
    "proof",
    [
        proof
        for family in conformance.FAMILIES
        if family.name in ("claim", "fencing")
        for proof in family.proofs[:: 3 if family.name == "claim" else 1]
    ],
    ids=str,
)
def test_on_a_second_implementation(moto_table: str, proof: Any) -> None:
    migrate(moto_table)
    clock = conformance.ManualClock(FUTURE)
    conformance.play(proof, lambda: DynamoDBStore(moto_table, clock=clock), clock=clock)
