"""``semel size`` and ``semel stores``: bytes measured where the user asked, nothing left behind, the verdict."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import PolicyError
from semel.cli import main
from semel.cli.measuring import MEASURES, Sample
from semel.cli.sizing import Needs, bytes_in, duration, recommended, size
from semel.stores.capabilities import STORES, TRAITS
from semel.stores.urls import KINDS, migrate_store, open_store
from tests.servers import DynamoDBServer, MariaDBServer, PostgresServer, RedisClusterServers, RedisServer

FEW = 300


def sized(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["size", "--qps", "200", "--records", str(FEW), "--json", *words]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# The arithmetic


def test_the_window_is_the_longest_need_and_a_margin() -> None:
    assert recommended(Needs()) is None
    assert recommended(Needs(retry_budget=6 * 3600)) == 7 * 3600
    assert recommended(Needs(6 * 3600, 7 * 86400, 86400)) == 185 * 3600
    assert recommended(Needs(replay_horizon=100.0)) == pytest.approx(110.0)
    assert Needs(6 * 3600, 7 * 86400).longest() == ("broker retention", 7 * 86400)


@pytest.mark.parametrize(("text", "number"), [("512", 512), ("2kB", 2000), ("1KiB", 1024), ("1.5 MB", 1_500_000)])
def test_sizes_are_read(text: str, number: int) -> None:
    assert bytes_in(text) == number


@pytest.mark.parametrize("text", ["", "two", "-1", "2 GB", "1e9", "1kB1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="is no size"):
        bytes_in(text)


def test_numbers_are_shown_for_people() -> None:
    assert [size(n) for n in (7, 999, 1000, 1_380, 2_500_000, 27_100_000_000)] == [
        "7 B", "999 B", "1 kB", "1.38 kB", "2.5 MB", "27.1 GB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.25, 59, 3600, 666_000, 86400)] == ["250ms", "59s", "1h", "7d17h", "1d"]


# What is measured


def test_keys_and_bytes_follow_from_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = sized(capsys, "--window", "24h", "--store", f"sqlite:///{tmp_path / 'mine.db'}", "--body", "2kB")
    assert found["keys"] == 200 * 86400
    (store,) = found["store"]
    assert 2000 < store["bytes_per_record"] < 4500
    assert 20 < store["bytes_per_record_in_indexes"] < 500
    each = store["bytes_per_record"] + store["bytes_per_record_in_indexes"]
    assert store["bytes"] == pytest.approx(each * found["keys"], rel=0.01)
    assert list(tmp_path.iterdir()) == [], "the user's file is neither made nor touched"


def test_larger_answers_take_more_and_a_sample_is_compressed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps([{"id": n, "status": "captured"} for n in range(1000)]))
    small, large, real = (
        sized(capsys, *words)["store"][0]["bytes_per_record"]
        for words in (["--body", "10"], ["--body", "30kB"], ["--sample", str(answer)])
    )
    assert small < 1500
    assert large > 30_000
    assert small < real < answer.stat().st_size / 2


def test_memory_and_nothing_else_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    (store,) = sized(capsys)["store"]
    assert (store["store"], store["kind"], store["measured_by"]) == ("memory", "memory", "tracemalloc")
    assert 1000 < store["bytes_per_record"] < 4000


def test_postgres_is_measured_in_a_schema_of_its_own(
    capsys: pytest.CaptureFixture[str], postgres: PostgresServer, postgres_url: str
) -> None:
    migrate_store(postgres_url)
    Sample(b"mine", 5).write(open_store(postgres_url))
    (store,) = sized(capsys, "--store", postgres_url, "--body", "500")["store"]
    assert 500 < store["bytes_per_record"] < 3000
    assert 50 < store["bytes_per_record_in_indexes"] < 2000
    with psycopg.connect(postgres_url) as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'semel%'").fetchall()
        mine = connection.execute("SELECT count(*) FROM semel_record").fetchone()
    assert left == []
    assert mine == (5,)


def test_mariadb_is_measured_in_a_database_of_its_own(
    capsys: pytest.CaptureFixture[str], mariadb: MariaDBServer, mariadb_url: str
) -> None:
    migrate_store(mariadb_url)
    (store,) = sized(capsys, "--store", mariadb_url, "--body", "500")["store"]
    assert 500 < store["bytes_per_record"] < 6000
    import pymysql

    from semel.stores.mysql.settings import _parsed

    with pymysql.connect(**_parsed(mariadb_url)) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW DATABASES LIKE 'semel_size%'")
        assert cursor.fetchall() == ()


def test_redis_is_measured_under_a_prefix_of_its_own(
    capsys: pytest.CaptureFixture[str], redis: RedisServer, redis_url: str
) -> None:
    Sample(b"mine", 5).write(open_store(redis_url))
    (store,) = sized(capsys, "--store", redis_url, "--body", "500")["store"]
    assert 600 < store["bytes_per_record"] < 1500
    assert int(redis.cli("-n", redis_url.rpartition("/")[2], "DBSIZE")) == 5


def test_a_cluster_is_measured_on_all_its_nodes(
    capsys: pytest.CaptureFixture[str], redis_cluster: RedisClusterServers
) -> None:
    redis_cluster.flush()
    (store,) = sized(capsys, "--store", redis_cluster.url, "--body", "500")["store"]
    assert 600 < store["bytes_per_record"] < 1500
    assert {master.cli("DBSIZE") for master in redis_cluster.masters()} == {"0\n"}


def test_dynamodb_is_measured_in_a_table_of_its_own(
    capsys: pytest.CaptureFixture[str], dynamodb: DynamoDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    (store,) = sized(capsys, "--store", dynamodb.table(), "--body", "500", "--records", "20")["store"]
    assert 600 < store["bytes_per_record"] < 1200
    client = boto3.client("dynamodb", region_name="eu-central-1", endpoint_url=dynamodb.url)
    assert [name for name in client.list_tables()["TableNames"] if name.startswith("semel-size")] == []
    client.close()


def test_of_a_tiered_store_both_are_measured_and_copies_are_held_for_an_hour(
    capsys: pytest.CaptureFixture[str], redis: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    url = f"tiered:sqlite:///{tmp_path / 'mine.db'},{redis_url}"
    truth, cache = sized(capsys, "--window", "24h", "--store", url, "--body", "500")["store"]
    assert truth["keys"] == 200 * 86400
    assert (cache["kind"], cache["keys"]) == ("memory", 200 * 3600)
    assert 500 < cache["bytes_per_record"] < 1500
    assert int(redis.cli("-n", redis_url.rpartition("/")[2], "DBSIZE")) == 0
    assert list(tmp_path.iterdir()) == []


def test_samples_are_removed_when_measuring_is_ended_by_a_signal(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(self: Sample, store: object) -> list[bytes]:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr(Sample, "write", ended)
    assert main(["size", "--qps", "1", "--store", postgres_url]) == 130
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'semel%'").fetchall() == []


# The verdict, and what is refused


def test_a_window_that_is_too_short_is_said_and_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--retry-budget", "6h", "--broker-retention", "7d", "--replay-horizon", "1d"]
    found = sized(capsys, "--window", "24h", *words, code=1)
    assert (found["window_is_enough"], found["decided_by"]) == (False, "broker retention")
    assert found["recommended_window_seconds"] == 185 * 3600
    assert main(["size", "--qps", "1", "--records", "10", "--window", "24h", *words]) == 1
    out, err = capsys.readouterr()
    assert "window: 1d is TOO SHORT; 7d17h is recommended (broker retention and 10%)" in out
    assert "too short" in err


def test_without_a_window_the_recommended_one_is_sized(capsys: pytest.CaptureFixture[str]) -> None:
    found = sized(capsys, "--retry-budget", "6h")
    assert found["window_seconds"] == 7 * 3600
    assert found["window_is_enough"]
    assert sized(capsys)["window_seconds"] == 86400


def test_the_table_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--qps", "0.5", "--records", "10", "--window", "1h"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("0.5 new keys each second, kept for 1h: 1,800 keys\n1 writes each second")
    assert "memory, memory" in out
    assert "nobody said how long requests may come again" in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--qps", "0"], "--qps is how many new keys come each second"),
        (["--qps", "many"], "--qps is how many new keys come each second"),
        (["--qps", "1", "--window", "soon"], "--window: 'soon' is no duration"),
        (["--qps", "1", "--body", "big"], "'big' is no size"),
        (["--qps", "1", "--records", "1"], "--records is 10 to 1000000"),
        (["--qps", "1", "--sample", "/nowhere"], "--sample: "),
        (["--qps", "1", "--store", "postgre://x"], "no store is called 'postgre'; there are: memory, sqlite"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *words]) == 2
    assert complaint in capsys.readouterr().err


# semel stores


def test_the_stores_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stores"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [store.name for store in STORES]
    assert [line.split("  ")[0] for line in lines[1:]] == ["URL", *TRAITS.values()]
    assert main(["stores", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["PostgreSQL"]["wakes"] is True
    assert found["Redis"]["counts"] is False
    assert found["tiered"]["transactions"] == "as the truth"


def test_every_url_belongs_to_a_store_of_the_table() -> None:
    assert sorted(scheme for store in STORES for scheme in store.schemes) == sorted(KINDS)
    assert set(MEASURES) == set(KINDS)


def test_the_table_says_what_the_stores_declare(tmp_path: Path) -> None:
    urls = {
        "SQLite": f"sqlite:///{tmp_path / 'x.db'}", "PostgreSQL": "postgresql://h/d", "MySQL": "mysql://u@h/d",
        "Redis": "redis://h", "memory": "memory:",
    }  # fmt: skip
    for store in STORES:
        for awaited in (False, True):
            cls = store.store(awaited=awaited)
            assert getattr(cls, "counts", False) == getattr(store.store(), "counts", False)
            assert hasattr(cls, "adopt") == hasattr(store.store(), "adopt")
        if store.name in urls:
            opened = open_store(urls[store.name])
            assert opened.wakes is store.wakes, store.name
            opened.close()
        elif store.wakes is not None:
            assert store.store().wakes is store.wakes


def test_showing_the_stores_needs_no_driver() -> None:
    blocked = "import sys\nfor name in 'psycopg asyncpg pymysql asyncmy redis hiredis boto3 aiobotocore'.split():\n"
    program = f"{blocked}    sys.modules[name] = None\nfrom semel.cli import main\nsys.exit(main(['stores']))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
