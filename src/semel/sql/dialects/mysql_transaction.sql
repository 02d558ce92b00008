-- What the transactional mode asks of MySQL and MariaDB, on the caller's connection, at whatever isolation level and mode
-- it has. Times are the server's, in UTC; {{now}} is UTC_TIMESTAMP(6). States: 1 running, 2 done, 3 unknown.

-- name: lock (writes)
-- Takes the key by taking its place. Until the transaction ends the primary key keeps others out, and what they see
-- afterwards is the finished record, or nothing. Committed without having been finished, the row has expired at once and
-- counts as absent. A plain insert: where a row stands it fails, and that row is locked for readers alone, without a gap
-- beside it, so that replays do not stand in each other's way. MariaDB is told not to wait for a place that another
-- transaction has taken; MySQL cannot be told, and waits as long as the connection's innodb_lock_wait_timeout says.
/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
INSERT INTO semel_record (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint, tenant,
    operation
) VALUES (:id, 1, 0, 1, 0, 0, 0, {{now}}, {{now}}, {{now}}, {{now}}, x'', '', '')

-- name: look (reads)
-- What stands there, as it is committed by now: under REPEATABLE READ a plain read would show an older state of things.
SELECT state, takeover, attempt, token, nonce, origin, steps, fingerprint, snapshot,
       TIMESTAMPDIFF(MICROSECOND, {{now}}, lease_end), TIMESTAMPDIFF(MICROSECOND, {{now}}, created),
       TIMESTAMPDIFF(MICROSECOND, {{now}}, expires)
FROM semel_record WHERE id = :id LOCK IN SHARE MODE

-- name: undone (reads)
-- Whether this server undoes a whole transaction that has waited in vain for a lock, and not the statement alone.
SELECT @@GLOBAL.innodb_rollback_on_timeout

-- name: steps (reads)
SELECT name, value FROM semel_step WHERE id = :id AND origin = :origin ORDER BY position LOCK IN SHARE MODE

-- name: step_saved (reads)
-- Whether the record has this step: as it is by now, with what the caller's transaction has written itself.
SELECT 1 FROM semel_step s JOIN semel_record r ON r.id = s.id AND r.origin = s.origin
WHERE s.id = :id AND s.name = :name

-- name: keep (writes)
-- The row that took the key becomes the finished record. It is also the row of an attempt that has expired or was abandoned,
-- if that is still the one that was read: the token tells. Nothing hangs on the order of the assignments, which the
-- caller's sql_mode may change.
UPDATE semel_record SET
    state = 2, takeover = :takeover, attempt = :attempt,
    origin = CASE WHEN :attempt > 1 THEN origin ELSE {{token}} END, nonce = :nonce,
    created = CASE WHEN :attempt > 1 THEN created ELSE {{now}} END, lease_end = {{now}},
    expires = {{now}} + INTERVAL :ttl MICROSECOND, sweep_after = {{now}} + INTERVAL :ttl MICROSECOND,
    fingerprint = :fingerprint, tenant = :tenant, operation = :operation, `key` = :key, snapshot = :snapshot,
    token = {{token}}
WHERE id = :id AND token = :token AND state <> 3
