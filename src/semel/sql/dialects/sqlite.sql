-- The statements for SQLite. Times are in microseconds; :now is the writer's clock. States: 1 running, 2 done, 3
-- unknown. Takeover: 0 retry, 1 reject, 2 recover. A record counts as absent when it has expired and its outcome is
-- known.

-- name: find (reads)
SELECT state, token, attempt, fingerprint, snapshot, lease_end, created, expires, nonce, takeover, origin, steps
FROM semel_record WHERE id = :id

-- name: claim (writes)
INSERT INTO semel_record AS r (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after,
    fingerprint, tenant, operation, key
)
VALUES (
    :id, 1, :takeover, 1, :now, :now, :nonce, :now + :lease, :now, :now + :ttl, :now + :ttl,
    :fingerprint, :tenant, :operation, :key
)
ON CONFLICT (id) DO UPDATE SET
    state = 1, takeover = excluded.takeover, attempt = 1,
    token = max(r.token + 1, :now), origin = max(r.token + 1, :now), nonce = excluded.nonce,
    lease_end = excluded.lease_end, created = excluded.created, expires = excluded.expires,
    sweep_after = excluded.sweep_after, fingerprint = excluded.fingerprint, tenant = excluded.tenant,
    operation = excluded.operation, key = excluded.key, snapshot = NULL
WHERE r.expires <= :now AND (r.state = 2 OR (r.state = 1 AND r.lease_end <= :now AND r.takeover = 0))
RETURNING token

-- name: take_over (writes)
UPDATE semel_record SET
    takeover = :takeover, attempt = attempt + 1, token = max(token + 1, :now), nonce = :nonce,
    lease_end = :now + :lease, expires = :now + :ttl
WHERE id = :id AND token = :token AND state = 1 AND lease_end <= :now
RETURNING token, attempt

-- name: refuse (writes)
UPDATE semel_record SET state = 3 WHERE id = :id AND token = :token AND state = 1 AND lease_end <= :now RETURNING 1

-- name: steps (reads)
SELECT name, value FROM semel_step WHERE id = :id AND origin = :origin ORDER BY position

-- name: renew (writes)
-- A lease never ends earlier than before.
UPDATE semel_record SET lease_end = max(lease_end, :now + :lease)
WHERE id = :id AND token = :token AND state = 1 RETURNING 1

-- name: complete (writes)
UPDATE semel_record SET state = 2, snapshot = :snapshot, lease_end = :now, expires = :now + :ttl
WHERE id = :id AND token = :token AND state IN (1, 3) RETURNING 1

-- name: completed (reads)
SELECT 1 FROM semel_record WHERE id = :id AND token = :token AND state = 2

-- name: release (writes)
DELETE FROM semel_record WHERE id = :id AND token = :token AND state IN (1, 3) RETURNING steps

-- name: yield_lease (writes)
-- With a new token, so that a renewal that is still under way fails.
UPDATE semel_record SET lease_end = :now, token = max(token + 1, :now)
WHERE id = :id AND token = :token AND state = 1 RETURNING 1

-- name: give_up (writes)
UPDATE semel_record SET state = 3 WHERE id = :id AND token = :token AND state IN (1, 3) RETURNING 1

-- name: count_step (writes)
UPDATE semel_record SET steps = steps + 1 WHERE id = :id AND token = :token AND state = 1 RETURNING origin

-- name: save_step (writes)
INSERT INTO semel_step (id, origin, name, position, value) VALUES (:id, :origin, :name, :position, :value)
ON CONFLICT (id, origin, name) DO NOTHING

-- name: forget_steps (writes)
DELETE FROM semel_step WHERE id = :id

-- name: lookup (reads)
SELECT id, state, token, attempt, fingerprint, snapshot, lease_end - :now, :now - created, expires - :now, takeover,
       tenant, operation, key
FROM semel_record WHERE id = :id

-- name: count (reads)
-- The number of a tenant's live records. It reads at most :most of them.
SELECT count(*) FROM (
    SELECT 1 FROM semel_record
    WHERE tenant = :tenant AND tenant <> ''
      AND (expires > :now OR state = 3 OR (state = 1 AND (lease_end > :now OR takeover <> 0)))
    LIMIT :most
)

-- name: count_without_tenant (reads)
-- Records without a tenant have no index of their own. "sweep_after" is roughly when a record expires, so a few records
-- that live longer than their claim asked for are not counted.
SELECT count(*) FROM (SELECT 1 FROM semel_record WHERE sweep_after > :now AND tenant = '' LIMIT :most)

-- name: newest (reads)
-- Records up to a place, by the index on "sweep_after" backwards. That column is set by the claim, so a record keeps its
-- place while it changes.
SELECT id, state, token, attempt, fingerprint, NULL, lease_end - :now, :now - created, expires - :now, takeover, tenant,
       operation, key, CAST(sweep_after AS TEXT)
FROM semel_record WHERE sweep_after <= :place - :past ORDER BY sweep_after DESC LIMIT :most

-- name: by_id (reads)
SELECT id, state, token, attempt, fingerprint, NULL, lease_end - :now, :now - created, expires - :now, takeover, tenant,
       operation, key, CAST(sweep_after AS TEXT)
FROM semel_record WHERE id < :id ORDER BY id DESC LIMIT :most

-- name: measure (reads)
-- It counts at most :most records. SQLite has no statistics of its own: beyond that, the range of row numbers is the
-- estimate, because the oldest rows are removed first. A sweep takes the oldest records first, so the first :oldest of
-- them show for how long one has been overdue.
SELECT
    (SELECT count(*) FROM (SELECT 1 FROM semel_record LIMIT :most)),
    (SELECT max(rowid) FROM semel_record) - (SELECT min(rowid) FROM semel_record) + 1,
    (SELECT page_count * page_size FROM pragma_page_count, pragma_page_size),
    (SELECT max(:now - max(sweep_after, expires)) FROM (
        SELECT sweep_after, expires, state, lease_end FROM semel_record
        WHERE sweep_after <= :now ORDER BY sweep_after LIMIT :oldest
    ) WHERE expires <= :now AND (state = 2 OR (state = 1 AND lease_end <= :now)))

-- name: inputs (reads)
-- The arguments of resumable operations, page by page; the value only for abandoned ones.
SELECT s.id, r.state, r.takeover, r.token, r.attempt, r.fingerprint, r.lease_end - :now, :now - r.created,
       r.expires - :now, r.tenant, r.operation, r.key, CASE WHEN r.state = 1 AND r.lease_end <= :now THEN s.value END
FROM (
    SELECT id, origin, value FROM semel_step WHERE name = '~input' AND id > :after ORDER BY id LIMIT :most
) AS s
LEFT JOIN semel_record AS r ON r.id = s.id AND r.origin = s.origin
ORDER BY s.id

-- name: forget_inputs (writes)
-- Remove from a page what nobody will ask for again: a record that is done stays done.
DELETE FROM semel_step
WHERE name = '~input' AND id > :after AND id <= :last AND NOT EXISTS (
    SELECT 1 FROM semel_record AS r
    WHERE r.id = semel_step.id AND r.origin = semel_step.origin AND r.state <> 2
)

-- name: resolve_done (writes)
-- The state as well as the token: an owner renews, gives up and completes with the same token.
UPDATE semel_record SET
    state = 2, token = max(token + 1, :now), snapshot = :snapshot, lease_end = :now, expires = :now + :ttl
WHERE id = :id AND token = :token AND state = :stored AND (state <> 1 OR (lease_end > :now) = :alive) RETURNING 1

-- name: free (writes)
-- An expired record, which the next claim replaces or a sweep removes. Its new token makes the next one greater, even if
-- the clock is set back.
UPDATE semel_record SET
    state = 2, token = max(token + 1, :now), snapshot = NULL, lease_end = :now, expires = 0, sweep_after = :now
WHERE id = :id AND token = :token AND state = :stored AND (state <> 1 OR (lease_end > :now) = :alive) RETURNING 1

-- name: sweep (writes)
DELETE FROM semel_record WHERE id IN (
    SELECT id FROM semel_record
    WHERE sweep_after <= :now AND expires <= :now
      AND (state = 2 OR (state = 1 AND lease_end <= :now AND takeover = 0))
    ORDER BY sweep_after LIMIT :count
)
RETURNING id, steps

-- name: sweep_unknown (writes)
UPDATE semel_record SET state = 3 WHERE id IN (
    SELECT id FROM semel_record
    WHERE sweep_after <= :now AND expires <= :now AND state = 1 AND lease_end <= :now AND takeover <> 0
    ORDER BY sweep_after LIMIT :count
)
RETURNING 1
