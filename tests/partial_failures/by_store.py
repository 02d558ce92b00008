"""What holds in each store at each failure, and which test proves it. The page of guarantees is made from it.

A claim without a proof is about a server's own promise, or about a server that does not run here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

STORES: Final = (
    "memory", "SQLite", "PostgreSQL", "MySQL, MariaDB", "Redis, also behind Sentinel", "Redis Cluster", "DynamoDB",
    "tiered",
)  # fmt: skip
MEMORY, SQLITE, POSTGRES, MYSQL, REDIS, CLUSTER, DYNAMODB, TIERED = STORES


class Claim(NamedTuple):
    """What holds, what does not, and what to set."""

    holds: str
    breaks: str
    remedy: str
    proof: str | None
    """``file::test``, below ``tests``."""


EVERYWHERE: Final = {
    "the process is killed before the effect": Claim(
        "the lease ends, and the next call runs: one effect",
        "`at_most_once`: unknown, no effect",
        "a shorter `lease`, to wait less",
        "faults/test_processes.py::test_a_killed_owner_blocks_its_key_for_one_lease_and_no_longer",
    ),
    "… while the effect happens, or after it and before it is recorded": Claim(
        "the decision that you chose: run again, report it as unknown, or ask a `recover` hook",
        "exactly one effect, by itself",
        "`op.derive()`, a [transaction](../how-to/transactional.md), `recover=`, or `at_most_once`",
        "faults/test_processes.py::test_after_kills_and_pauses_plain_retry_repeats_only_what_was_hurt",
    ),
    "… after the result is stored": Claim(
        "every later call gets the stored result",
        "",
        "",
        "partial_failures/test_partial_failures.py::test_the_table_is_true_on_postgres",
    ),
    "the store is down when a call comes": Claim(
        "nothing runs; the caller gets `StoreUnavailable` (503)",
        'with `on_store_error="open"`: the function runs without a record, once for each retry',
        "leave `on_store_error` at `closed` where a second effect hurts",
        "partial_failures/test_partial_failures.py::test_the_table_is_true_on_postgres",
    ),
    "the store is down when the result is to be stored": Claim(
        "the caller gets its result, marked as not stored; Semel keeps trying for ten minutes and holds the lease",
        "if the process ends meanwhile, or the store stays away: the attempt counts as abandoned",
        '`on_unstored="withhold"`, if no caller may act on a result that is not stored',
        "partial_failures/test_partial_failures.py::test_the_table_is_true_on_postgres",
    ),
    "the store's response is lost": Claim(
        "the request is sent again, and the store recognises it: nothing happens twice",
        "`resolve()` and `release()` are not sent again; they raise `StoreUncertain`",
        "look at the record before you call them again",
        "engine/test_store_failures.py::test_a_claim_whose_answer_was_lost_is_sent_again_and_recognised",
    ),
    "the process is paused for longer than its lease, and wakes": Claim(
        "its result is refused, and its caller gets that of the new owner, or `LeaseLost`",
        "its effects are not undone, and for a moment two attempts may run",
        "a `lease` longer than any pause; `op.derive()` or `op.token` for the other system",
        "faults/test_processes.py::test_a_paused_owner_that_wakes_finds_its_completion_refused",
    ),
    "the record has expired, and a retry comes after the window": Claim(
        "with `reject_expired_for`: it is refused for that time",
        "otherwise the key is new, and the operation runs again",
        "a `ttl` longer than the longest retry: [size the window](../how-to/size-the-window.md)",
        "engine/test_expired_keys.py::test_without_it_an_expired_key_is_a_new_one",
    ),
}
"""The same in every store."""

_STEP: Final = (
    "back: leases and records last longer by the step. Forward by more than a lease: owners that live are replaced, "
    "and their results refused; records expire early"
)
BY_STORE: Final = {
    "The process or the server of the store crashes": {
        MEMORY: Claim("nothing", "every record is lost with its process", "another store; this one is for tests", None),
        SQLITE: Claim(
            "every confirmed write, also at a power cut",
            'with `synchronous="normal"`: the last commits, at a power cut',
            "leave `synchronous` at `full`; a local disk",
            "stores/test_sqlite_file.py::test_every_answer_is_on_the_disk",
        ),
        POSTGRES: Claim(
            "every confirmed write",
            "with `fsync` or `synchronous_commit` off: the last operations, which then run again",
            "leave both on; `semel doctor` looks at them",
            "faults/test_restarts.py::test_restarts_under_load_lose_nothing_and_repeat_nothing",
        ),
        MYSQL: Claim(
            "every confirmed write",
            "with `innodb_flush_log_at_trx_commit` other than 1: the last second",
            "`innodb_flush_log_at_trx_commit=1`, `sync_binlog=1`",
            "faults/test_mariadb.py::test_restarts_under_load_lose_nothing_and_repeat_nothing",
        ),
        REDIS: Claim(
            "what the settings of the server keep",
            "without `appendonly`: all since the last snapshot; with `everysec`: about a second, at a power cut",
            "`appendonly yes`, and `appendfsync always` or `wait_aof=True`",
            "stores/test_redis_refusals.py::test_risks_are_named",
        ),
        CLUSTER: Claim("as Redis, on each master", "as Redis, and see failovers", "as Redis", None),
        DYNAMODB: Claim("every confirmed write: the service promises it", "", "", None),
        TIERED: Claim(
            "what the primary keeps; Redis may lose everything",
            "replays are slower until the copies are back",
            "as for the primary",
            "faults/test_tiered.py::test_redis_is_flushed_stopped_killed_and_started_again_under_load",
        ),
    },
    "A failover loses writes that were confirmed": {
        MEMORY: Claim("there is no failover", "", "", None),
        SQLITE: Claim(
            "there is no failover",
            "a file that is restored from a backup has forgotten what came later: those operations run again",
            "do not serve from an old copy",
            None,
        ),
        POSTGRES: Claim(
            "with a synchronous standby: every confirmed write",
            "with an asynchronous one: the last operations, which then run again",
            "`synchronous_standby_names`, and `synchronous_commit` at `on` or higher",
            None,
        ),
        MYSQL: Claim(
            "with semi-synchronous replication: every confirmed write",
            "with asynchronous replication: the last operations. Several writable nodes (Galera) are not tested",
            "semi-synchronous replication; send all writes to one node",
            None,
        ),
        REDIS: Claim(
            "with `wait_replicas=1` and Sentinel: every key that anybody got a response for",
            "without it: what no replica had yet. Those operations run again",
            "`wait_replicas`; [a failover](../how-to/redis.md#a-failover) has the details",
            "faults/test_redis_failover.py::test_sentinels_whose_replicas_confirm_lose_no_key_when_the_master_is_killed",
        ),
        CLUSTER: Claim(
            "with `wait_replicas` equal to the replicas of each master: every key that anybody got a response for",
            "with fewer: what the new master did not have",
            "`wait_replicas` equal to the number of replicas of each master",
            "faults/test_redis_failover.py::test_a_cluster_whose_replicas_confirm_loses_no_key_when_a_master_is_killed",
        ),
        DYNAMODB: Claim(
            "in one region: every confirmed write",
            "global tables: two regions that claim one key at once both win",
            "keep the keys of a tenant in one region",
            None,
        ),
        TIERED: Claim(
            "as the primary; a failover of Redis loses copies only",
            "a note that an outcome was released may be lost: it is replayed for up to `keep`",
            "as for the primary",
            "faults/test_tiered.py::test_tasks_go_on_whatever_becomes_of_redis",
        ),
    },
    "A clock steps": {
        MEMORY: Claim(
            "everything: its clock is monotonic",
            "",
            "",
            "stores/test_sqlite_hard_cases.py::test_the_memory_stores_leases_do_not_follow_the_wall_clock",
        ),
        SQLITE: Claim(
            "a replaced owner cannot change the record",
            f"the machine's clock counts. {_STEP[0].upper()}{_STEP[1:]}",
            "NTP that slews instead of stepping",
            "stores/test_sqlite_hard_cases.py::test_a_step_of_the_wall_clock_moves_leases_and_fences_the_owner",
        ),
        POSTGRES: Claim(
            "the clocks of workers do not matter; a replaced owner cannot change the record",
            "the server's clock counts, as for SQLite. A failover to a server with another clock is a step",
            "NTP that slews, on the database servers",
            None,
        ),
        MYSQL: Claim(
            "the clocks of workers do not matter; a replaced owner cannot change the record",
            "the server's clock counts, as for PostgreSQL",
            "NTP that slews, on the database servers",
            None,
        ),
        REDIS: Claim(
            "the clocks of workers do not matter; a replaced owner cannot change the record",
            "the server's clock counts, as for PostgreSQL; a failover may also set tokens back",
            "NTP that slews, on the Redis servers",
            None,
        ),
        CLUSTER: Claim("as Redis, for each master", "as Redis", "as Redis", None),
        DYNAMODB: Claim(
            "the clocks of workers do not matter: the service's is used, and a lease is taken over only after it has "
            "certainly ended",
            "a take-over may come up to a second late",
            "leases of five seconds or more",
            "stores/test_dynamodb_service.py::test_a_worker_with_a_wrong_clock_judges_leases_by_the_services",
        ),
        TIERED: Claim(
            "as the primary; copies expire before their records, whatever the clock of Redis says",
            "as the primary",
            "as for the primary",
            "stores/test_tiered_cache.py::test_a_servers_clock_is_an_interval_and_every_reckoning_errs_to_the_early_side",
        ),
    },
    "The store is full, or evicts": {
        MEMORY: Claim(
            "live records stay; new keys are refused beyond `max_records`",
            "",
            "`max_records`, a shorter `ttl`",
            "stores/test_memory.py::test_a_full_store_refuses_new_records_and_forgets_none",
        ),
        SQLITE: Claim(
            "nothing is half stored; calls are refused",
            "results of running operations cannot be stored until there is room",
            "room on the disk; [the size of a window](../how-to/size-the-window.md)",
            "stores/test_sqlite_file.py::test_a_full_disk_is_unavailable_and_nothing_is_half_stored",
        ),
        POSTGRES: Claim("same as SQLite", "same as SQLite", "room on the disk; sweeps that keep up", None),
        MYSQL: Claim("same as SQLite", "same as SQLite", "room on the disk; sweeps that keep up", None),
        REDIS: Claim(
            "with `noeviction`: new keys are refused, running operations finish, replays work",
            "with any other `maxmemory-policy`: records are dropped, and their operations run again",
            "`maxmemory-policy noeviction`; the store warns otherwise",
            "stores/test_redis_full.py::test_an_operation_that_runs_when_the_server_becomes_full_is_finished_and_does_not_run_again",
        ),
        CLUSTER: Claim(
            "as Redis, on each master", "as Redis", "as Redis",
            "stores/test_redis_full.py::test_nodes_of_a_cluster_take_the_flagged_scripts_in_full_as_well",
        ),
        DYNAMODB: Claim(
            "a throttled call is sent again for `retry_for`, then refused; nothing is dropped",
            "a result above 400 KB is recorded as done, without the result",
            "capacity; small results, or references to large ones",
            "faults/test_dynamodb_throttled.py::test_a_service_that_only_throttles_or_fails_is_told_apart_and_nothing_runs_twice",
        ),
        TIERED: Claim(
            "the cache may evict whatever it likes",
            "as the primary",
            "as for the primary",
            "stores/test_tiered_cache.py::test_a_server_that_is_killed_flushed_and_started_again_is_found_again",
        ),
    },
}  # fmt: skip
"""Where the stores differ."""
