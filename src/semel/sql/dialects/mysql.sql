-- The statements for MySQL 8 and MariaDB. [[…]] is repeated for every Op of a batch, so that concurrent Ops share a
-- round trip. Isolation is READ COMMITTED. Rows are found by primary key and locked in its order, also in a small
-- table; hence FORCE INDEX and, for DELETE, which ignores it, a join in the order written. Reading the whole table
-- instead would lock the rows of others, and wait for them. States: 1 running, 2 done, 3 unknown. Takeover: 0 retry, 1
-- reject, 2 recover. Times are the server's, in UTC; durations are in microseconds. {{now}} is UTC_TIMESTAMP(6), or a
-- moment that several statements share. In SET a column that is computed from others comes before them, because MySQL
-- assigns from left to right.

-- name: clock (reads)
SET @semel_now = UTC_TIMESTAMP(6)

-- name: claim (writes)
-- The insert decides. An existing record stays as it is; its nonce shows who owns it. MariaDB returns it by RETURNING;
-- for MySQL "look" follows in the same packet.
INSERT INTO semel_record (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after,
    fingerprint, tenant, operation, `key`
)
VALUES [[(
    :id, 1, :takeover, 1, {{token}}, {{token}}, :nonce, {{now}} + INTERVAL :lease MICROSECOND, {{now}},
    {{now}} + INTERVAL :ttl MICROSECOND, {{now}} + INTERVAL :ttl MICROSECOND,
    :fingerprint, :tenant, :operation, :key
)]]
ON DUPLICATE KEY UPDATE id = semel_record.id

-- name: look (reads)
SELECT {{columns}} FROM semel_record WHERE id IN ([[:id]])

-- name: replace (writes)
-- Replace an expired record. The token makes sure that it is still the record that was read.
UPDATE semel_record FORCE INDEX (PRIMARY) SET
    origin = GREATEST(token + 1, {{token}}), token = GREATEST(token + 1, {{token}}),
    state = 1, takeover = CASE id [[WHEN :id THEN :takeover]] END, attempt = 1,
    nonce = CASE id [[WHEN :id THEN :nonce]] END,
    lease_end = {{now}} + INTERVAL (CASE id [[WHEN :id THEN :lease]] END) MICROSECOND, created = {{now}},
    expires = {{now}} + INTERVAL (CASE id [[WHEN :id THEN :ttl]] END) MICROSECOND,
    sweep_after = {{now}} + INTERVAL (CASE id [[WHEN :id THEN :ttl]] END) MICROSECOND,
    fingerprint = CASE id [[WHEN :id THEN :fingerprint]] END, tenant = CASE id [[WHEN :id THEN :tenant]] END,
    operation = CASE id [[WHEN :id THEN :operation]] END, `key` = CASE id [[WHEN :id THEN :key]] END, snapshot = NULL
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND {{expired}}
ORDER BY id

-- name: take_over (writes)
UPDATE semel_record FORCE INDEX (PRIMARY) SET
    takeover = CASE id [[WHEN :id THEN :takeover]] END, attempt = attempt + 1,
    token = GREATEST(token + 1, {{token}}), nonce = CASE id [[WHEN :id THEN :nonce]] END,
    lease_end = {{now}} + INTERVAL (CASE id [[WHEN :id THEN :lease]] END) MICROSECOND,
    expires = {{now}} + INTERVAL (CASE id [[WHEN :id THEN :ttl]] END) MICROSECOND
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state = 1 AND lease_end <= {{now}}
ORDER BY id

-- name: refuse (writes)
UPDATE semel_record FORCE INDEX (PRIMARY) SET state = 3
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state = 1 AND lease_end <= {{now}}
ORDER BY id

-- name: steps (reads)
SELECT id, name, value FROM semel_step
WHERE id IN ([[:id]]) AND origin = CASE id [[WHEN :id THEN :origin]] END
ORDER BY id, position

-- name: held (writes)
-- The records that their owners still own. They are locked, so that what follows in the packet touches exactly these.
SELECT id FROM semel_record FORCE INDEX (PRIMARY)
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state IN (1, :state)
ORDER BY id FOR UPDATE

-- name: renew (writes)
-- A lease never ends earlier than before.
UPDATE semel_record FORCE INDEX (PRIMARY)
SET lease_end = GREATEST(lease_end, {{now}} + INTERVAL (CASE id [[WHEN :id THEN :lease]] END) MICROSECOND)
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state = 1
ORDER BY id

-- name: complete (writes)
UPDATE semel_record FORCE INDEX (PRIMARY)
SET state = 2, snapshot = CASE id [[WHEN :id THEN :snapshot]] END, lease_end = {{now}},
    expires = {{now}} + INTERVAL (CASE id [[WHEN :id THEN :ttl]] END) MICROSECOND
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state IN (1, 3)
ORDER BY id

-- name: completed (reads)
-- The records that the same owner has completed before, but got no answer.
SELECT id FROM semel_record
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state = 2

-- name: forget_steps_of_held (writes)
DELETE s FROM ([[SELECT :id AS id, :token AS token]]) AS g
STRAIGHT_JOIN semel_record AS r FORCE INDEX (PRIMARY) ON r.id = g.id AND r.token = g.token
STRAIGHT_JOIN semel_step AS s FORCE INDEX (PRIMARY) ON s.id = r.id
WHERE r.state IN (1, 3) AND r.steps > 0

-- name: release (writes)
DELETE r FROM ([[SELECT :id AS id, :token AS token]]) AS g
STRAIGHT_JOIN semel_record AS r FORCE INDEX (PRIMARY) ON r.id = g.id AND r.token = g.token
WHERE r.state IN (1, 3)

-- name: yield_lease (writes)
-- With a new token, so that a renewal that is still under way fails.
UPDATE semel_record FORCE INDEX (PRIMARY) SET lease_end = {{now}}, token = GREATEST(token + 1, {{token}})
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state = 1
ORDER BY id

-- name: give_up (writes)
UPDATE semel_record FORCE INDEX (PRIMARY) SET state = 3
WHERE id IN ([[:id]]) AND token = CASE id [[WHEN :id THEN :token]] END AND state IN (1, 3)
ORDER BY id

-- name: count_step (writes)
UPDATE semel_record SET steps = steps + 1 WHERE id = :id AND token = :token AND state = 1

-- name: save_step (writes)
-- The first value for a name is kept.
INSERT INTO semel_step (id, origin, name, position, value)
SELECT r.id, r.origin, :name, :position, :value FROM semel_record r
WHERE r.id = :id AND r.token = :token AND r.state = 1
ON DUPLICATE KEY UPDATE id = semel_step.id

-- name: lookup (reads)
SELECT id, state, token, attempt, fingerprint, snapshot, {{left}}, takeover, tenant, operation, `key`
FROM semel_record WHERE id IN ([[:id]])

-- name: count (reads)
-- The number of a tenant's live records. It reads at most :most of them. The collation ignores spaces at the end.
SELECT COUNT(*) FROM (
    SELECT 1 FROM semel_record
    WHERE tenant = :tenant AND LENGTH(tenant) = LENGTH(:tenant)
      AND (expires > {{now}} OR state = 3 OR (state = 1 AND (lease_end > {{now}} OR takeover <> 0)))
    LIMIT :most
) AS live

-- name: count_without_tenant (reads)
-- The index by tenant has these records, too.
{{count}}

-- name: newest (reads)
-- Records up to a place, by the index on "sweep_after" backwards. That column is set by the claim, so a record keeps its
-- place while it changes.
SELECT id, state, token, attempt, fingerprint, NULL, {{left}}, takeover, tenant, operation, `key`,
       CAST(sweep_after AS CHAR)
FROM semel_record FORCE INDEX (semel_record_sweep)
WHERE sweep_after <= CAST(:place AS DATETIME(6)) - INTERVAL :past MICROSECOND
ORDER BY sweep_after DESC LIMIT :most

-- name: by_id (reads)
SELECT id, state, token, attempt, fingerprint, NULL, {{left}}, takeover, tenant, operation, `key`,
       CAST(sweep_after AS CHAR)
FROM semel_record FORCE INDEX (PRIMARY) WHERE id < :id ORDER BY id DESC LIMIT :most

-- name: measure (reads)
-- It counts at most :most records; beyond that, the statistics say how many there are. A sweep takes the oldest records
-- first, so the first :oldest of them show for how long one has been overdue.
SELECT
    (SELECT COUNT(*) FROM (SELECT 1 FROM semel_record LIMIT :most) AS few),
    MAX(CASE WHEN table_name = 'semel_record' THEN table_rows END), SUM(data_length + index_length),
    (SELECT MAX(TIMESTAMPDIFF(MICROSECOND, GREATEST(sweep_after, expires), {{now}})) FROM (
        SELECT sweep_after, expires, state, lease_end FROM semel_record FORCE INDEX (semel_record_sweep)
        WHERE sweep_after <= {{now}} ORDER BY sweep_after LIMIT :oldest
    ) AS overdue WHERE expires <= {{now}} AND (state = 2 OR (state = 1 AND lease_end <= {{now}})))
FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name IN ('semel_record', 'semel_step')

-- name: inputs (reads)
-- The arguments of resumable operations (the step "~input"), page by page; the value only for abandoned ones.
SELECT s.id, r.state, r.takeover, r.token, r.attempt, r.fingerprint, {{left}}, r.tenant, r.operation, r.`key`,
       CASE WHEN r.state = 1 AND r.lease_end <= {{now}} THEN s.value END
FROM (
    SELECT id, origin, value FROM semel_step FORCE INDEX (semel_step_input)
    WHERE name = x'7e696e707574' AND id > :after ORDER BY id LIMIT :most
) AS s
LEFT JOIN semel_record AS r ON r.id = s.id AND r.origin = s.origin
ORDER BY s.id

-- name: forget_inputs (writes)
-- Remove from a page what nobody will ask for again: a record that is done stays done.
DELETE s FROM semel_step AS s FORCE INDEX (semel_step_input)
LEFT JOIN semel_record AS r ON r.id = s.id AND r.origin = s.origin AND r.state <> 2
WHERE s.name = x'7e696e707574' AND s.id > :after AND s.id <= :last AND r.id IS NULL

-- name: resolve_done (writes)
-- The state as well as the token: an owner renews, gives up and completes with the same token.
UPDATE semel_record
SET state = 2, token = GREATEST(token + 1, {{token}}), snapshot = :snapshot, lease_end = {{now}},
    expires = {{now}} + INTERVAL :ttl MICROSECOND
WHERE id = :id AND token = :token AND state = :stored AND (state <> 1 OR (lease_end > {{now}}) = :alive)

-- name: free (writes)
-- An expired record, which the next claim replaces or a sweep removes. Its new token makes the next one greater, even if
-- the clock is set back.
UPDATE semel_record
SET token = GREATEST(token + 1, {{token}}), snapshot = NULL, lease_end = {{now}}, expires = '1970-01-01',
    sweep_after = {{now}}, state = 2
WHERE id = :id AND token = :token AND state = :stored AND (state <> 1 OR (lease_end > {{now}}) = :alive)

-- name: dead (writes)
-- By this index and in its order. With another order, all matching rows would be locked before the limit applies.
SELECT id, steps FROM semel_record FORCE INDEX (semel_record_sweep)
WHERE sweep_after <= {{now}} AND {{expired}}
ORDER BY sweep_after LIMIT :most FOR UPDATE SKIP LOCKED

-- name: silent (writes)
SELECT id FROM semel_record FORCE INDEX (semel_record_sweep)
WHERE sweep_after <= {{now}} AND expires <= {{now}} AND state = 1 AND lease_end <= {{now}} AND takeover <> 0
ORDER BY sweep_after LIMIT :most FOR UPDATE SKIP LOCKED

-- name: forget_steps (writes)
DELETE s FROM ([[SELECT :id AS id]]) AS g STRAIGHT_JOIN semel_step AS s FORCE INDEX (PRIMARY) ON s.id = g.id

-- name: remove (writes)
DELETE r FROM ([[SELECT :id AS id]]) AS g STRAIGHT_JOIN semel_record AS r FORCE INDEX (PRIMARY) ON r.id = g.id

-- name: mark_unknown (writes)
UPDATE semel_record FORCE INDEX (PRIMARY) SET state = 3 WHERE id IN ([[:id]])
