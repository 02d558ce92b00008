"""Every cell of the table of partial failures, carried out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from semel import MemoryStore
from semel.core.states import State
from semel.errors import (
    InProgress,
    OutcomeUnknown,
    RememberedFailure,
    StoreUnavailable,
    StoreUncertain,
    TransactionConflict,
)
from semel.stores.urls import KINDS
from tests.messaging.pitfalls import PITFALLS
from tests.partial_failures.by_store import BY_STORE, EVERYWHERE, STORES
from tests.partial_failures.nursery import Nursery
from tests.partial_failures.table import CELLS, Cell, First, Mode, Moment, Retry
from tests.partial_failures.trouble import STRIKES, DriverLost, EffectFailed, RollBack, Trouble
from tests.partial_failures.worlds import TRANSACTIONAL, Clock, Teller, World
from tests.servers import PostgresServer

KILLED = {moment for moment, strikes in STRIKES.items() if any(strike.how == "kill" for strike in strikes)}
IN_MEMORY = [cell for cell in CELLS if cell.moment not in KILLED and cell.mode not in TRANSACTIONAL]
numbers = count(1)


def named(cell: Cell) -> str:
    return f"{cell.mode.name}-{cell.moment.name}".lower().replace("_", "-")


def struck(cell: tuple[World, Mode, Moment, str]) -> None:
    """The first call, in a process that dies of it."""
    world, mode, moment, name = cell
    Teller(world, mode, name, Trouble(mode, moment)).call()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery(struck)
    yield nursery
    nursery.close()


@pytest.fixture
def in_memory(tmp_path: Path) -> World:
    clock = Clock()
    world = World("memory", str(tmp_path), memory=(MemoryStore(clock=clock), clock))
    world.set_up()
    return world


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World("sqlite", str(tmp_path_factory.mktemp("sqlite")))
    world.store().close()
    world.set_up()
    return world


@pytest.fixture(scope="module")
def on_postgres(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[World]:
    from semel.stores.postgres import migrate

    world = World("postgres", str(tmp_path_factory.mktemp("postgres")), postgres.create_database())
    migrate(world.url)
    world.set_up()
    yield world
    postgres.drop_database(world.url)


@pytest.mark.parametrize("cell", IN_MEMORY, ids=named)
def test_the_table_is_true_in_memory(cell: Cell, in_memory: World) -> None:
    carry_out(cell, in_memory, None)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_the_table_is_true_on_sqlite(cell: Cell, on_sqlite: World, nursery: Nursery) -> None:
    carry_out(cell, on_sqlite, nursery)


@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_the_table_is_true_on_postgres(cell: Cell, on_postgres: World, nursery: Nursery) -> None:
    carry_out(cell, on_postgres, nursery)


def carry_out(cell: Cell, world: World, nursery: Nursery | None) -> None:
    name = f"{named(cell)}-{next(numbers)}"
    assert first_call(cell, world, nursery, name) is cell.first
    teller = Teller(world, cell.mode, name, Trouble())
    try:
        if cell.waits:
            with pytest.raises(InProgress):
                teller.call()
            world.end_lease(name)
        assert second_call(teller) is cell.retry
        record = teller.guard.lookup("pay", name)
        assert (State.ABSENT if record is None else record.state) is cell.state
        assert world.effects(name) == cell.effects
    finally:
        teller.close()


def first_call(cell: Cell, world: World, nursery: Nursery | None, name: str) -> First:
    if cell.moment in KILLED:
        assert nursery is not None
        assert nursery.run((world, cell.mode, cell.moment, name)) == -signal.SIGKILL
        return First.NOTHING
    trouble = Trouble(cell.mode, cell.moment)
    teller = Teller(world, cell.mode, name, trouble)
    try:
        assert teller.call() == "paid"
        return First.ANSWER
    except RollBack:
        return First.ANSWER
    except EffectFailed:
        return First.ERROR
    except TransactionConflict:
        return First.CONFLICT
    except StoreUnavailable:
        return First.UNAVAILABLE
    except StoreUncertain:
        return First.UNCERTAIN
    except DriverLost:
        return First.DRIVER
    finally:
        assert not trouble.left, f"the moment never came: {trouble.left}"
        teller.close()


def second_call(teller: Teller) -> Retry:
    try:
        assert teller.call() == "paid"
    except RememberedFailure:  # the policy names no classes of errors, so none is rebuilt
        assert teller.seen == []
        return Retry.REPLAYS_FAILURE
    except OutcomeUnknown:
        assert teller.seen == []
        return Retry.REFUSED
    if teller.seen == ["handler", "effect"]:
        return Retry.RUNS
    if teller.seen == ["handler"]:
        return Retry.RESUMES
    assert teller.seen == ["found"] or not teller.seen
    return Retry.RECOVERS if teller.seen else Retry.REPLAYS


# The table itself


def test_every_mode_says_what_every_moment_that_it_has_does() -> None:
    """A moment that is left out is one that the mode cannot meet."""
    leased = {moment for moment in Moment if "STEP" not in moment.name and "COMMIT" not in moment.name}
    leased -= {Moment.CONFLICT, Moment.ROLLED_BACK}
    for mode in Mode:
        moments = {cell.moment for cell in CELLS if cell.mode is mode}
        if mode in TRANSACTIONAL:
            assert moments - leased <= {
                Moment.CONFLICT, Moment.ROLLED_BACK, Moment.KILLED_BEFORE_COMMIT, Moment.COMMIT_ANSWER_LOST,
            }  # fmt: skip
            assert leased - moments <= {
                Moment.CLAIM_ANSWER_LOST, Moment.FAILURE_KILLED, Moment.FAILURE_NOT_STORED, Moment.FAILURE_ANSWER_LOST,
                Moment.OUTCOME_LATE, Moment.OUTCOME_ANSWER_LOST,
            }  # fmt: skip
        else:
            steps = {moment for moment in Moment if "STEP" in moment.name} if mode is Mode.STEPS else set()
            assert moments == leased | steps


def test_the_claims_about_stores_are_complete_and_their_proofs_exist() -> None:
    names = {name.partition(",")[0] for name in STORES}
    assert {kind.name for kind in KINDS} | {"Redis Cluster"} == names
    assert [failure for failure, claims in BY_STORE.items() if tuple(claims) != STORES] == []
    claims = [*EVERYWHERE.values(), *(claim for by_store in BY_STORE.values() for claim in by_store.values())]
    assert missing({claim.proof for claim in claims if claim.proof}) == []


def test_the_proofs_about_messages_exist() -> None:
    pitfalls = [pitfall for part in PITFALLS.values() for pitfall in part.values()]
    assert [pitfall for pitfall in pitfalls if not pitfall.proofs] == []
    assert missing({proof for pitfall in pitfalls for proof in pitfall.proofs}) == []


def missing(proofs: set[str]) -> list[str]:
    """Those of the tests, named ``file::test``, that do not exist."""
    tests = Path(__file__).parents[1]
    places = {proof: proof.partition("::")[::2] for proof in proofs}
    return [proof for proof, (file, name) in places.items() if f"def {name}(" not in (tests / file).read_text("utf-8")]


def test_whoever_loses_an_effect_or_doubles_one_is_known() -> None:
    """The promises in a line each: more than one effect only without a key, none only where nobody may run it again."""
    assert {cell.mode for cell in CELLS if cell.effects > 1} == {Mode.LEASED, Mode.RECOVER_HOOK, Mode.STEPS}
    assert {cell.mode for cell in CELLS if cell.effects < 1} == {Mode.AT_MOST_ONCE}
    assert all(cell.state is State.UNKNOWN for cell in CELLS if cell.retry is Retry.REFUSED)
