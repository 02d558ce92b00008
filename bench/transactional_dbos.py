"""DBOS at the same job: one business insert, in a transaction or a step of a workflow whose id is the key.

Its transactions commit the rows and the step's outcome together, as Semel's do; before and after them it writes that
the workflow has begun and how it ended. Transactions are on *read committed*, as the others here are, and its tables
are in the same database.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from bench import job
from bench.contest import Contestant
from bench.turns import threads

__all__ = ["IN_A_STEP", "IN_A_TRANSACTION", "contestants"]

IN_A_TRANSACTION: Final = "DBOS, a transaction in a workflow"
IN_A_STEP: Final = "DBOS, a step in a workflow"


def contestants(stack: ExitStack, url: str, clients: int, insert: str) -> tuple[list[Contestant], list[str]]:
    """Those that run here, and why not if none does."""
    try:
        import dbos
    except ImportError:
        return [], ["DBOS is not installed (pip install dbos), so it is not beside them"]
    if not hasattr(dbos, "SQLAlchemyDatasource"):
        return [], ["DBOS is of a version without data sources (3 has them), so it is not beside them"]
    try:
        calls = _launched(dbos, stack, url, clients, insert)
        for call in calls.values():
            call(0)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return [], [f"DBOS does not run here, so it is not beside them: {told}"]
    return [
        Contestant(name, "first", clients, threads(call, clients), peer=name == IN_A_TRANSACTION)
        for name, call in calls.items()
    ], []


def _launched(dbos: Any, stack: ExitStack, url: str, clients: int, insert: str) -> dict[str, Callable[[int], object]]:
    import sqlalchemy

    address = sqlalchemy.make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    pool = {"pool_size": clients, "max_overflow": 0}
    logging.getLogger("dbos").setLevel(logging.ERROR)
    system = {"name": "bench", "system_database_url": address, "sys_db_pool_size": clients, "log_level": "ERROR"}
    app = dbos.DBOS(config=system)
    stack.callback(dbos.DBOS.destroy)
    source = dbos.SQLAlchemyDatasource.create(address, engine_kwargs=pool)
    engine = sqlalchemy.create_engine(address, **pool)
    stack.callback(engine.dispose)
    statement = sqlalchemy.text(insert)

    @source.transaction(isolation_level="READ COMMITTED")  # type: ignore[untyped-decorator, unused-ignore]
    def pay() -> Any:
        source.sql_session().execute(statement)
        return job.handler()

    @app.step()  # type: ignore[untyped-decorator, unused-ignore]
    def pay_in_a_step() -> Any:
        with engine.begin() as connection:
            connection.execute(statement)
            return job.handler()

    @app.workflow()  # type: ignore[untyped-decorator, unused-ignore]
    def transaction() -> Any:
        return pay()

    @app.workflow()  # type: ignore[untyped-decorator, unused-ignore]
    def step() -> Any:
        return pay_in_a_step()

    app.launch()

    def under_a_key(workflow: Callable[[], Any]) -> Callable[[int], object]:
        def once(number: int) -> object:
            with dbos.SetWorkflowID(job.fresh_key()):
                return workflow()

        return once

    return {IN_A_TRANSACTION: under_a_key(transaction), IN_A_STEP: under_a_key(step)}
