"""Statements are planned once, on a table that may still be empty: their plans must suit the full one all the same."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from semel.sql import outbox, trail
from semel.sql.dialects import postgres
from semel.stores.postgres import migrate
from semel.stores.postgres.connections import PostgresSettings, Psycopg

pytestmark = pytest.mark.server
# A message is added by a function; the others are parts of statements.
NOT_PLANNED = {"add", "columns", "notification"}
QUERIES = {
    **postgres._Q,
    **{f"outbox_{name}": query for name, query in outbox._P.items() if name not in NOT_PLANNED},
    **{f"trail_{name}": query for name, query in trail._TABLES["postgresql"]._queries.items()},
}


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_no_statement_reads_a_whole_table(postgres_url: str, name: str) -> None:
    migrate(postgres_url)
    text, names = QUERIES[name].rendered("numeric")
    casts = dict(re.findall(r":([a-z_]+)::(\w+(?:\[\])?)", QUERIES[name].sql))
    types = f"({', '.join(casts.get(parameter, 'unknown') for parameter in names)})" if names else ""
    nothing = f"({', '.join('NULL' for _ in names)})" if names else ""
    with closing(Psycopg().connect(PostgresSettings(postgres_url)).raw) as raw:
        raw.execute(f"PREPARE asked {types} AS {text}".encode(), prepare=False)
        plan = [line for (line,) in raw.execute(f"EXPLAIN EXECUTE asked {nothing}".encode(), prepare=False)]
    assert any("semel_" in line for line in plan)
    read = [
        line for line in plan if "Seq Scan" in line and not re.search("semel_(lane|relay|cursor|log_)", line)
    ]  # these are small, and the log has little that was not read
    assert read == [], "\n".join(plan)
