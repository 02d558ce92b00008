"""Statements are planned once, on a table that may still be empty: their plans must suit the full one all the same."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from semel.sql.dialects.postgres import _Q
from semel.stores.postgres import migrate
from semel.stores.postgres.connections import PostgresSettings, Psycopg

pytestmark = pytest.mark.server


@pytest.mark.parametrize("name", sorted(_Q))
def test_no_statement_reads_the_whole_table_of_records(postgres_url: str, name: str) -> None:
    migrate(postgres_url)
    text, names = _Q[name].rendered("numeric")
    casts = dict(re.findall(r":([a-z_]+)::(\w+(?:\[\])?)", _Q[name].sql))
    types = ", ".join(casts.get(parameter, "unknown") for parameter in names)
    nothing = ", ".join("NULL" for _ in names)
    with closing(Psycopg().connect(PostgresSettings(postgres_url)).raw) as raw:
        raw.execute(f"PREPARE asked ({types}) AS {text}".encode(), prepare=False)
        plan = [line for (line,) in raw.execute(f"EXPLAIN EXECUTE asked ({nothing})".encode(), prepare=False)]
    assert any("semel_" in line for line in plan)
    assert [line for line in plan if "Seq Scan" in line] == [], "\n".join(plan)
