"""``semel size`` and ``semel stores``: bytes measured where the user asked, nothing left behind, the verdict."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import PolicyError, Semel, StoreUnavailable
from semel.cli import main
from semel.cli.sizing import size as size_command
from semel.cli.sizing.measure import MEASURES, _prefix
from semel.cli.sizing.samples import Sample, in_pages
from semel.core.encoding.snapshot import SIZE_LIMIT
from semel.stores.dynamodb import DynamoDBStore
from semel.stores.sizing import Needs, bytes_in, recommended, size
from semel.stores.urls import KINDS, SCHEMES, TRAITS, migrate_store, open_store
from tests.servers import DynamoDBServer, MariaDBServer, PostgresServer, RedisClusterServers, RedisServer
from tests.servers.base import free_port

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


def test_no_room_at_all_is_no_measurement() -> None:
    with pytest.raises(StoreUnavailable, match="10 records took no more room in mysql than it had ready; write more"):
        in_pages("mysql", 10, 0, 0, "a database of its own", ())
    measured = in_pages("mysql", 10, 160, 0, "a database of its own", ())
    assert (measured.record, measured.index, measured.each) == (16, None, 16)


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


@pytest.mark.slow
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
    with closing(open_store(postgres_url)) as mine_too:
        Sample(b"mine", 5).write(mine_too)
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

    from semel.stores.mysql.connections import MySQLSettings

    with pymysql.connect(**MySQLSettings(mariadb_url).where) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW DATABASES LIKE 'semel_size%'")
        assert cursor.fetchall() == ()


def test_redis_is_measured_under_a_prefix_of_its_own(
    capsys: pytest.CaptureFixture[str], redis: RedisServer, redis_url: str
) -> None:
    Sample(b"mine", 5).write(open_store(redis_url))
    (store,) = sized(capsys, "--store", redis_url, "--body", "500")["store"]
    assert 700 < store["bytes_per_record"] < 1500
    assert int(redis.cli("-n", redis_url.rpartition("/")[2], "DBSIZE")) == 5


def test_a_redis_cluster_is_measured_on_all_its_nodes(
    capsys: pytest.CaptureFixture[str], redis_cluster: RedisClusterServers
) -> None:
    redis_cluster.flush()
    (store,) = sized(capsys, "--store", redis_cluster.url, "--body", "500")["store"]
    assert 600 < store["bytes_per_record"] < 1500
    assert {master.cli("DBSIZE") for master in redis_cluster.masters()} == {"0\n"}


def test_dynamodb_is_measured_in_a_table_of_its_own(
    capsys: pytest.CaptureFixture[str], dynamodb: DynamoDBServer
) -> None:
    import boto3

    (store,) = sized(capsys, "--store", dynamodb.table(), "--body", "500", "--records", "20")["store"]
    assert 600 < store["bytes_per_record"] < 1200
    client = boto3.client("dynamodb", region_name="eu-central-1", endpoint_url=dynamodb.url)
    assert [name for name in client.list_tables()["TableNames"] if name.startswith("semel-size")] == []
    client.close()


def test_of_a_tiered_store_both_are_measured_and_copies_are_held_for_an_hour(
    capsys: pytest.CaptureFixture[str], redis: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    url = f"tiered:sqlite:///{tmp_path / 'mine.db'},{redis_url}"
    primary, cache = sized(capsys, "--window", "24h", "--store", url, "--body", "500")["store"]
    assert primary["keys"] == 200 * 86400
    assert (cache["kind"], cache["keys"]) == ("memory", 200 * 3600)
    assert 500 < cache["bytes_per_record"] < 1500
    assert int(redis.cli("-n", redis_url.rpartition("/")[2], "DBSIZE")) == 0
    assert list(tmp_path.iterdir()) == []


def test_of_a_large_answer_a_tier_has_no_copies_and_says_so(
    capsys: pytest.CaptureFixture[str], redis: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    words = ["--window", "24h", "--store", f"tiered:memory:,{redis_url}", "--records", "10"]
    primary, cache = sized(capsys, *words, "--body", "257KiB")["store"]
    assert primary["bytes_per_record"] > 257 * 1024
    assert [cache[name] for name in ("keys", "bytes_per_record", "bytes", "measured_records")] == [0] * 4
    assert cache["measured_by"] == "no copies are made of answers above 256 KiB (max_copy_bytes=)"
    assert works({"store": [cache]}) == {"commands": (200, 1, 1)}
    assert main(["size", "--qps", "200", *words, "--body", "257KiB"]) == 0
    assert (
        "\ncache in redis: no copies are made of answers above 256 KiB (max_copy_bytes=)\n" in capsys.readouterr().out
    )
    # What counts are the bytes that are kept: the same answer, if it compresses, has copies.
    answer = tmp_path / "answer.json"
    answer.write_bytes(b"[]" * 300_000)
    assert sized(capsys, *words, "--sample", str(answer))["store"][1]["measured_records"] == 10
    assert int(redis.cli("-n", redis_url.rpartition("/")[2], "DBSIZE")) == 0


USERS = ["", "s:", "size:", "size-", "size-:", "size-.", "semel:", "ümlaut:", "shop-of-somebody:"]


@pytest.mark.parametrize("users", USERS)
def test_samples_in_redis_have_another_prefix_than_the_users_keys(users: str) -> None:
    ours = {_prefix(f"redis://h/0?prefix={users}", "semel:") for _ in range(50)}
    assert all(one.startswith("size-") for one in ours)
    assert users not in ours
    assert {len(one) for one in ours} == {max(6, len(users.encode()))}, "as long, for that is measured, too"


@pytest.mark.parametrize("users", USERS[:5])
def test_a_user_of_redis_who_may_write_samples_needs_no_other_keys(
    users: str, capsys: pytest.CaptureFixture[str], private_redis: RedisServer
) -> None:
    private_redis.cli("ACL", "SETUSER", "sizes", "on", ">s3cret", "~size-[:.]*", "allchannels", "+@all")
    url = f"redis://sizes:s3cret@127.0.0.1:{private_redis.port}/0?prefix={users}"
    assert main(["size", "--qps", "1", "--records", "20", "--store", url]) == 0, capsys.readouterr().err
    assert int(private_redis.cli("DBSIZE")) == 0


@pytest.mark.parametrize("body", ["10"])
def test_few_records_are_not_told_as_pages(
    body: str, capsys: pytest.CaptureFixture[str], postgres_url: str, mariadb_url: str
) -> None:
    """A page holds many of them: as many are written as it takes to tell, and what is told is what many tell."""
    # InnoDB reserves a megabyte or several at a time. The pages of an index with random keys are all full at about the
    # same time, and then all half full. PostgreSQL keeps old versions of rows as long as another transaction may see
    # them, which is longer on a busy machine. Told as pages, ten records would take thousands of bytes each.
    for url, near in (("sqlite:///mine.db", 0.1), (postgres_url, 0.5), (mariadb_url, 0.5)):
        few, many = (
            sized(capsys, "--store", url, "--body", body, "--records", count)["store"][0] for count in ("10", "15000")
        )
        assert 2000 <= few["measured_records"] <= 10_000
        assert few["bytes_per_record"] == pytest.approx(many["bytes_per_record"], rel=near), url
        assert 50 < few["bytes_per_record_in_indexes"] < 250, url


def test_few_large_answers_are_enough_and_no_index_takes_0_bytes(
    capsys: pytest.CaptureFixture[str], mariadb_url: str
) -> None:
    for url in ("sqlite:///mine.db", mariadb_url):
        (store,) = sized(capsys, "--store", url, "--body", "3MB", "--records", "10")["store"]
        assert store["measured_records"] == 10
        assert 3_000_000 < store["bytes_per_record"] < 5_000_000
        assert store["bytes_per_record_in_indexes"] is None
        assert "indexes fill no page" in store["measured_by"]


@pytest.mark.parametrize(("body", "count"), [(10, 10_000), (100, 16_000), (1000, 9_000)])
def test_redis_uses_as_much_memory_as_was_told(
    body: int, count: int, capsys: pytest.CaptureFixture[str], private_redis: RedisServer
) -> None:
    """Within 5 % of what the server uses with that many of them: its tables just doubled, or nearly full."""

    def used() -> int:
        return int(private_redis.cli("INFO", "memory").partition("used_memory:")[2].split()[0])

    (told,) = sized(capsys, "--store", private_redis.url, "--body", str(body))["store"]
    store = open_store(private_redis.url)
    Sample(b"warm", 300).write(store)  # the buffers of its connections
    private_redis.cli("FLUSHALL")
    before = used()
    Sample(secrets.token_bytes(body), count).write(store)
    taken = (used() - before) / count
    store.close()
    assert told["bytes_per_record"] == pytest.approx(taken, rel=0.05)


def test_a_cache_counts_what_memory_usage_leaves_out(
    capsys: pytest.CaptureFixture[str], redis: RedisServer, redis_url: str
) -> None:
    words = ["--body", "10"]
    _, cache = sized(capsys, "--store", f"tiered:memory:,{redis_url}", *words)["store"]
    (record,) = sized(capsys, "--store", redis_url, *words)["store"]
    assert 200 < cache["bytes_per_record"] < record["bytes_per_record"] + 200
    assert "72 B that it leaves out" in cache["measured_by"]


# The work


def works(found: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    (store,) = found["store"]
    return {each["unit"]: (each["per_second"], each["per_new_key"], each["per_retry"]) for each in store["work"]}


def test_a_store_is_told_what_it_has_to_do(
    capsys: pytest.CaptureFixture[str], postgres_url: str, mariadb_url: str, redis_url: str
) -> None:
    assert works(sized(capsys)) == {}
    assert works(sized(capsys, "--store", "sqlite:///mine.db")) == {"commits": (400, 2, 0)}
    assert works(sized(capsys, "--store", postgres_url)) == {"statements": (400, 2, 1)}
    assert works(sized(capsys, "--store", mariadb_url)) == {"statements": (400, 2, 1)}
    assert works(sized(capsys, "--store", redis_url)) == {"commands": (400, 2, 1)}
    assert main(["size", "--qps", "1000000", "--records", "10", "--store", redis_url]) == 0
    assert "redis: 2,000,000 commands each second (2 for a new key), 1 for each retry\n" in capsys.readouterr().out


def test_behind_a_cache_only_those_retries_cost_that_it_has_no_copy_of(
    capsys: pytest.CaptureFixture[str], postgres_url: str, redis_url: str
) -> None:
    words = ["size", "--qps", "200", "--records", "10", "--store", f"tiered:{postgres_url},{redis_url}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "postgresql: 400 statements each second (2 for a new key), 1 for each retry that the cache has no" in said
    assert "cache in redis: 400 commands each second (2 for a new key), 1 for each retry\n" in said
    assert main([*words, "--body", "300kB"]) == 0
    said = capsys.readouterr().out
    assert "postgresql: 400 statements each second (2 for a new key), 1 for each retry\n" in said


def test_statements_and_commits_are_as_many_as_told(mariadb: MariaDBServer, mariadb_url: str, tmp_path: Path) -> None:
    import sqlite3

    migrate_store(mariadb_url)
    said: list[int] = []
    with Semel(open_store(mariadb_url), sweep_every=None) as guard:

        def asked() -> int:
            kinds = ("Com_insert", "Com_update", "Com_select", "Com_begin", "Com_commit")
            rows = mariadb.execute(f"SHOW GLOBAL STATUS WHERE Variable_name IN {kinds}")
            return sum(int(number) for _, number in rows)

        for key in "1", "2", "2":
            before = asked()
            guard.run("ship", key=key, call=str)
            said.append(asked() - before)
    assert said[1:] == [2, 1]

    path = tmp_path / "mine.db"
    with Semel(open_store(f"sqlite:///{path}"), sweep_every=None) as guard, sqlite3.connect(path) as raw:

        def changes() -> int:
            found: int = raw.execute("PRAGMA data_version").fetchone()[0]  # grows with commits of others
            return found

        seen = [changes()]
        for key in "1", "1":
            guard.run("ship", key=key, call=lambda: seen.append(changes()))
            seen.append(changes())
    assert [after - before for before, after in pairwise(seen)] == [1, 1, 0]
    raw.close()


@pytest.mark.parametrize(("body", "units"), [(10, (2, 1)), (1500, (3, 2)), (9000, (11, 10))])
def test_capacity_units_are_those_that_dynamodb_counts(
    body: int,
    units: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    dynamodb: DynamoDBServer,
) -> None:
    url = dynamodb.table()
    found = sized(capsys, "--store", url, "--body", str(body), "--records", "20")
    new, again = units
    assert works(found) == {
        "write capacity units": (200 * new, new, again),
        "read capacity units": (0, 0, 0),
    }
    assert found["store"][0]["work"][1]["per_sweep_at_most"] == 2048

    migrate_store(url)
    store = DynamoDBStore(url)
    counted: list[float] = []
    events = store._open().meta.events
    for action in ("PutItem", "UpdateItem", "GetItem"):
        events.register(
            f"provide-client-params.dynamodb.{action}",
            lambda params, **_: {**params, "ReturnConsumedCapacity": "TOTAL"},
        )
        events.register(
            f"after-call.dynamodb.{action}",
            lambda parsed, **_: counted.append(parsed["ConsumedCapacity"]["CapacityUnits"]),
        )
    Sample(secrets.token_bytes(body), 1).write(store)
    store.close()
    assert len(counted) == 2
    assert sum(counted) == new


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


@pytest.mark.slow
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
    "url",
    [
        "postgresql://u@127.0.0.1:{}/d",
        "mysql://u@127.0.0.1:{}/d",
        "redis://127.0.0.1:{}",
        "redis+cluster://127.0.0.1:{}",
        "tiered:memory:,redis://127.0.0.1:{}",
        "dynamodb://eu-central-1/t?endpoint=http://127.0.0.1:{}",
    ],
)
def test_a_store_that_is_away_is_said_in_a_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--qps", "1", "--records", "10", "--store", url.format(free_port())]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "could not be removed" not in said, "nothing was written"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--qps", "0"], "--qps is how many new keys come each second"),
        (["--qps", "many"], "--qps is how many new keys come each second"),
        (["--qps", "1", "--window", "soon"], "--window: 'soon' is not a duration"),
        (["--qps", "1", "--body", "big"], "'big' is no size"),
        (["--qps", "1", "--window", "0"], "--window: 0 is no time"),
        (["--qps", "1", "--window", "0h"], "--window: 0h is no time"),
        (["--qps", "1", "--retry-budget", "0"], "--retry-budget: 0 is no time"),
        (["--qps", "1", "--body", "999999999MB"], "--body: 999999999MB is too large for an answer"),
        (["--qps", "1", "--body", "67.2MB"], "--body: 67.2MB is too large for an answer; write at most 67.1 MB"),
        (["--qps", "1", "--body", "50MB", "--records", "100"], "100 answers of 50 MB are too much to write; 42 are"),
        (["--qps", "1", "--sample", "/dev/zero"], "--sample: the file is too large"),
        (["--qps", "1", "--store", "sqlite"], "is no URL: write sqlite:///app.db"),
        (["--qps", "1", "--store", "sqlite:"], "is no SQLite URL: write sqlite:///file.db"),
        (["--qps", "1", "--store", "sqlite://foo/bar?x=1"], "is no SQLite URL: write sqlite:///file.db"),
        (["--qps", "1", "--store", "dynamodb:"], "a DynamoDB URL is dynamodb://region/table"),
        (["--qps", "1", "--store", "tiered:memory:,redis://h/x"], "Redis URL"),
        (["--qps", "1", "--store", "tiered:sqlite,redis://h"], "is no URL"),
        (["--qps", "1", "--records", "1"], "--records is 10 to 1000000"),
        (["--qps", "1", "--sample", "/nowhere"], "--sample: "),
        (["--qps", "1", "--store", "postgre://x"], "no store is called 'postgre'; there are: memory, sqlite"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("length", "count"), [(0, 2000), (1000, 2000), (1_000_000, 200), (size_command.LARGEST_ANSWER, 2)]
)
def test_nobody_who_asks_for_no_records_gets_more_than_is_much(length: int, count: int) -> None:
    assert size_command._records(None, length) == count
    assert count * length <= size_command.DEFAULT_BYTES


@pytest.mark.slow
def test_the_largest_answer_is_the_largest_that_is_kept_and_few_of_them_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    monkeypatch.setattr(Sample, "write", lambda self, store: written.append(len(self.answer) * self.count))
    assert main(["size", "--qps", "1", "--body", "64MiB"]) == 0
    assert size_command.LARGEST_ANSWER == SIZE_LIMIT
    assert 2 * SIZE_LIMIT <= sum(written) <= size_command.DEFAULT_BYTES


def test_the_help_names_every_kind_of_store(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("size", "migrate", "lookup"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert [store.name for store in KINDS if not any(f"{scheme}:" in said for scheme in store.schemes)] == []


REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_reference_names_all_that_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = sized(capsys, "--store", "sqlite:///mine.db")
    names = {*found, *found["store"][0], *found["store"][0]["work"][0]}
    section = REFERENCE.read_text("utf-8").partition("## `semel size`")[2].partition("\n## ")[0]
    assert [name for name in sorted(names) if f"`{name}`" not in section] == []


def test_the_reference_names_every_kind_of_url() -> None:
    page = REFERENCE.read_text("utf-8")
    assert [scheme for scheme in SCHEMES if f"{scheme}:" not in page] == []


# semel stores


def test_the_stores_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stores"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [store.name for store in KINDS]
    assert [line.split("  ")[0] for line in lines[1:]] == ["URL", *TRAITS.values()]
    assert main(["stores", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["PostgreSQL"]["wakes"] is True
    assert found["Redis"]["counts"] is False
    assert found["tiered"]["transactions"] == "as the primary"


def test_every_url_belongs_to_a_store_of_the_table() -> None:
    assert sorted(scheme for store in KINDS for scheme in store.schemes) == sorted(SCHEMES)
    assert set(MEASURES) == {kind.name for kind in SCHEMES.values()}


def test_the_table_says_what_the_stores_declare(tmp_path: Path) -> None:
    urls = {
        "SQLite": f"sqlite:///{tmp_path / 'x.db'}", "PostgreSQL": "postgresql://h/d", "MySQL": "mysql://u@h/d",
        "Redis": "redis://h", "memory": "memory:",
    }  # fmt: skip
    for store in KINDS:
        for awaited in (False, True):
            cls = store.store(awaited=awaited)
            if store.wakes is None:
                continue  # a tiered store declares what the store behind it does
            assert cls.counts == store.store().counts
            assert cls.resumes == store.store().resumes
            assert (cls.adopt is None) == (store.store().adopt is None)
            assert (cls.accept is None) == (store.store().accept is None)
        if store.name in urls:
            opened = open_store(urls[store.name])
            assert opened.wakes is store.wakes, store.name
            opened.close()
        elif store.wakes is not None:
            assert store.store().wakes is store.wakes


@pytest.mark.slow
def test_showing_the_stores_needs_no_driver() -> None:
    blocked = "import sys\nfor name in 'psycopg asyncpg pymysql asyncmy redis hiredis boto3 aiobotocore'.split():\n"
    program = f"{blocked}    sys.modules[name] = None\nfrom semel.cli import main\nsys.exit(main(['stores']))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
