-- The statements of the transactional mode, for the caller's connection, with any isolation level and sql_mode. Times
-- are the server's, in UTC; {{now}} is UTC_TIMESTAMP(6). States: 1 running, 2 done, 3 unknown.

-- name: lock (writes)
-- Lock the key by inserting its row. Until the transaction ends the primary key keeps others out. Afterwards they see
-- the finished record, or nothing. If the row is committed unfinished, it has expired already and counts as absent. It
-- is a plain insert: if the row exists, it fails and takes a shared lock on that row, without a gap, so that replays do
-- not block each other. On MariaDB it does not wait for a row that another transaction has inserted. MySQL has no such
-- option and waits up to the connection's innodb_lock_wait_timeout.
/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */
INSERT INTO semel_record (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint, tenant,
    operation
) VALUES (:id, 1, 0, 1, 0, 0, 0, {{now}}, {{now}}, {{now}}, {{now}}, x'', '', '')

-- name: look (reads)
-- The row as it is committed now. Under REPEATABLE READ a plain read would show an older state.
SELECT state, takeover, attempt, token, nonce, origin, steps, fingerprint, snapshot,
       TIMESTAMPDIFF(MICROSECOND, {{now}}, lease_end), TIMESTAMPDIFF(MICROSECOND, {{now}}, created),
       TIMESTAMPDIFF(MICROSECOND, {{now}}, expires)
FROM semel_record WHERE id = :id LOCK IN SHARE MODE

-- name: undone (reads)
-- Whether this server rolls back the whole transaction after a lock wait timeout, and not only the statement.
SELECT @@GLOBAL.innodb_rollback_on_timeout

-- name: steps (reads)
SELECT name, value FROM semel_step WHERE id = :id AND origin = :origin ORDER BY position LOCK IN SHARE MODE

-- name: step_saved (reads)
-- Whether the record has this step now, with the own writes of the caller's transaction.
SELECT 1 FROM semel_step s JOIN semel_record r ON r.id = s.id AND r.origin = s.origin
WHERE s.id = :id AND s.name = :name

-- name: keep (writes)
-- The row that locked the key becomes the finished record. So does the row of an attempt that has expired or was
-- abandoned, if it is still the one that was read, as the token shows. Nothing depends on the order of the assignments,
-- which the caller's sql_mode may change.
UPDATE semel_record SET
    state = 2, takeover = :takeover, attempt = :attempt,
    origin = CASE WHEN :attempt > 1 THEN origin ELSE {{token}} END, nonce = :nonce,
    created = CASE WHEN :attempt > 1 THEN created ELSE {{now}} END, lease_end = {{now}},
    expires = {{now}} + INTERVAL :ttl MICROSECOND, sweep_after = {{now}} + INTERVAL :ttl MICROSECOND,
    fingerprint = :fingerprint, tenant = :tenant, operation = :operation, `key` = :key, snapshot = :snapshot,
    token = {{token}}
WHERE id = :id AND token = :token AND state <> 3
