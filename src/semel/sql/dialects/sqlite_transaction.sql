-- The statements of the transactional mode, for the caller's connection. Times are in microseconds; :now is the clock
-- of this machine. States: 1 running, 2 done, 3 unknown.

-- name: lock (writes)
-- Changes nothing. It is an update because an update takes the file's write lock even if it finds no row. From here to
-- the end of the transaction nobody else can write.
UPDATE semel_record SET nonce = nonce WHERE id = :id
RETURNING state, takeover, attempt, token, nonce, origin, steps, fingerprint, snapshot, lease_end, created, expires

-- name: steps (reads)
SELECT name, value FROM semel_step WHERE id = :id AND origin = :origin ORDER BY position

-- name: step_saved (reads)
-- Whether the record has this step, as the caller's transaction sees it, with its own writes.
SELECT 1 FROM semel_step s JOIN semel_record r ON r.id = s.id AND r.origin = s.origin
WHERE s.id = :id AND s.name = :name

-- name: keep (writes)
INSERT INTO semel_record (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint, tenant,
    operation, key, snapshot
)
VALUES (
    :id, 2, :takeover, :attempt, :now, :now, :nonce, :now, :now, :now + :ttl, :now + :ttl, :fingerprint, :tenant,
    :operation, :key, :snapshot
)

-- name: keep_instead (writes)
-- Replace a record that has expired or was abandoned. Under the write lock it is still the one that was read.
UPDATE semel_record SET
    state = 2, takeover = :takeover, attempt = :attempt, token = max(token + 1, :now),
    origin = CASE WHEN :attempt > 1 THEN origin ELSE max(token + 1, :now) END, nonce = :nonce, lease_end = :now,
    created = CASE WHEN :attempt > 1 THEN created ELSE :now END, expires = :now + :ttl, sweep_after = :now + :ttl,
    fingerprint = :fingerprint, tenant = :tenant, operation = :operation, key = :key, snapshot = :snapshot
WHERE id = :id AND token = :token
RETURNING 1
