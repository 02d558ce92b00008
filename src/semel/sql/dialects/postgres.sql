-- The statements for PostgreSQL. Each takes arrays with one element per Op, so that concurrent Ops share a round trip,
-- and is atomic under READ COMMITTED. States: 1 running, 2 done, 3 unknown. Takeover: 0 retry, 1 reject, 2 recover.
-- Times are the server's; "now" is when the statement began.

-- name: claim (writes)
-- The insert decides. The same statement reads the existing records, so a replay writes nothing. A record that is
-- neither inserted nor read was created between the statement's snapshot and its insert; the program claims it again.
WITH given AS (
    SELECT * FROM unnest(
        :ids::bytea[], :nonces::bigint[], :fingerprints::bytea[], :leases::float8[], :ttls::float8[],
        :takeovers::smallint[], :tenants::text[], :operations::text[], :keys::text[]
    ) AS g (id, nonce, fingerprint, lease, ttl, takeover, tenant, operation, key)
), won AS (
    INSERT INTO semel_record (
        id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after,
        fingerprint, tenant, operation, key
    )
    SELECT id, 1, takeover, 1, {{token}}, {{token}}, nonce, {{now}} + lease * interval '1 second', {{now}},
           {{now}} + ttl * interval '1 second', {{now}} + ttl * interval '1 second',
           fingerprint, tenant, operation, key
    FROM given ORDER BY id
    ON CONFLICT (id) DO NOTHING
    RETURNING id, token
)
SELECT id, token, 0::smallint, NULL::smallint, NULL::integer, NULL::bigint, NULL::bigint, NULL::integer, NULL::bytea,
       NULL::bytea, NULL::float8, NULL::float8, NULL::float8
FROM won
UNION ALL
SELECT r.id, r.token, r.state, r.takeover, r.attempt, r.nonce, r.origin, r.steps, r.fingerprint, r.snapshot,
       extract(epoch FROM r.lease_end - {{now}})::float8, extract(epoch FROM {{now}} - r.created)::float8,
       extract(epoch FROM r.expires - {{now}})::float8
FROM given g JOIN semel_record r ON r.id = g.id
WHERE g.id NOT IN (SELECT id FROM won) -- one that went after the snapshot was taken is still seen here

-- name: replace (writes)
-- Replace an expired record. The token makes sure that it is still the record that was read.
WITH given AS (
    SELECT * FROM unnest(
        :ids::bytea[], :tokens::bigint[], :nonces::bigint[], :fingerprints::bytea[], :leases::float8[], :ttls::float8[],
        :takeovers::smallint[], :tenants::text[], :operations::text[], :keys::text[]
    ) AS g (id, token, nonce, fingerprint, lease, ttl, takeover, tenant, operation, key)
)
UPDATE semel_record r SET
    state = 1, takeover = g.takeover, attempt = 1, token = greatest(r.token + 1, {{token}}),
    origin = greatest(r.token + 1, {{token}}), nonce = g.nonce, lease_end = {{now}} + g.lease * interval '1 second',
    created = {{now}}, expires = {{now}} + g.ttl * interval '1 second',
    sweep_after = {{now}} + g.ttl * interval '1 second', fingerprint = g.fingerprint, tenant = g.tenant,
    operation = g.operation, key = g.key, snapshot = NULL, awaited = false
FROM given g
WHERE r.id = g.id AND r.token = g.token AND r.expires <= {{now}}
  AND (r.state = 2 OR (r.state = 1 AND r.lease_end <= {{now}} AND r.takeover = 0))
RETURNING r.id, r.token, r.attempt, r.origin, r.steps

-- name: take_over (writes)
WITH given AS (
    SELECT * FROM unnest(
        :ids::bytea[], :tokens::bigint[], :nonces::bigint[], :leases::float8[], :ttls::float8[], :takeovers::smallint[]
    ) AS g (id, token, nonce, lease, ttl, takeover)
)
UPDATE semel_record r SET
    takeover = g.takeover, attempt = r.attempt + 1, token = greatest(r.token + 1, {{token}}), nonce = g.nonce,
    lease_end = {{now}} + g.lease * interval '1 second', expires = {{now}} + g.ttl * interval '1 second'
FROM given g
WHERE r.id = g.id AND r.token = g.token AND r.state = 1 AND r.lease_end <= {{now}}
RETURNING r.id, r.token, r.attempt, r.origin, r.steps

-- name: refuse (writes)
WITH given AS (SELECT * FROM unnest(:ids::bytea[], :tokens::bigint[]) AS g (id, token))
UPDATE semel_record r SET state = 3
FROM given g
WHERE r.id = g.id AND r.token = g.token AND r.state = 1 AND r.lease_end <= {{now}}
RETURNING r.id

-- name: steps (reads)
SELECT id, name, value FROM semel_step
WHERE (id, origin) IN (SELECT * FROM unnest(:ids::bytea[], :origins::bigint[]))
ORDER BY id, position

-- name: renew (writes)
WITH given AS (SELECT * FROM unnest(:ids::bytea[], :tokens::bigint[], :leases::float8[]) AS g (id, token, lease))
-- A lease never ends earlier than before.
UPDATE semel_record r SET lease_end = greatest(r.lease_end, {{now}} + g.lease * interval '1 second')
FROM given g WHERE r.id = g.id AND r.token = g.token AND r.state = 1
RETURNING r.id

-- name: complete (writes)
-- Notify only if someone waits: a notification in every transaction would serialise all commits.
WITH given AS (
    SELECT * FROM unnest(:ids::bytea[], :tokens::bigint[], :snapshots::bytea[], :ttls::float8[])
        AS g (id, token, snapshot, ttl)
), finished AS (
    UPDATE semel_record r
    SET state = 2, snapshot = g.snapshot, lease_end = {{now}},
        expires = {{now}} + g.ttl * interval '1 second'
    FROM given g WHERE r.id = g.id AND r.token = g.token AND r.state IN (1, 3)
    RETURNING r.id, r.awaited
)
SELECT id, CASE WHEN awaited THEN {{notify}} END FROM finished

-- name: completed (reads)
-- The records that the same owner has completed before, but got no answer. It is a separate statement because the first
-- completion may have been committed after the snapshot of "complete" was taken.
SELECT r.id FROM unnest(:ids::bytea[], :tokens::bigint[]) AS g (id, token)
JOIN semel_record r ON r.id = g.id AND r.token = g.token AND r.state = 2

-- name: release (writes)
WITH given AS (SELECT * FROM unnest(:ids::bytea[], :tokens::bigint[]) AS g (id, token)),
gone AS (
    DELETE FROM semel_record r USING given g WHERE r.id = g.id AND r.token = g.token AND r.state IN (1, 3)
    RETURNING r.id, r.awaited, r.steps
), forgotten AS (
    DELETE FROM semel_step s USING gone WHERE gone.steps > 0 AND s.id = gone.id
)
SELECT id, CASE WHEN awaited THEN {{notify}} END FROM gone

-- name: yield_lease (writes)
-- With a new token, so that a renewal that is still under way fails.
WITH given AS (SELECT * FROM unnest(:ids::bytea[], :tokens::bigint[]) AS g (id, token)),
yielded AS (
    UPDATE semel_record r SET lease_end = {{now}}, token = greatest(r.token + 1, {{token}})
    FROM given g WHERE r.id = g.id AND r.token = g.token AND r.state = 1
    RETURNING r.id, r.awaited
)
SELECT id, CASE WHEN awaited THEN {{notify}} END FROM yielded

-- name: give_up (writes)
WITH given AS (SELECT * FROM unnest(:ids::bytea[], :tokens::bigint[]) AS g (id, token)),
given_up AS (
    UPDATE semel_record r SET state = 3
    FROM given g WHERE r.id = g.id AND r.token = g.token AND r.state IN (1, 3)
    RETURNING r.id, r.awaited
)
SELECT id, CASE WHEN awaited THEN {{notify}} END FROM given_up

-- name: save_step (writes)
-- The update locks the row, so no other owner can take over between the check of the token and the insert of the step.
WITH held AS (
    UPDATE semel_record SET steps = steps + 1 WHERE id = :id AND token = :token AND state = 1 RETURNING id, origin
), saved AS (
    INSERT INTO semel_step (id, origin, name, position, value)
    SELECT id, origin, :name::text, :position::integer, :value::bytea FROM held
    ON CONFLICT (id, origin, name) DO NOTHING
)
SELECT id FROM held

-- name: lookup (reads)
SELECT id, state, token, attempt, fingerprint, snapshot,
       extract(epoch FROM lease_end - {{now}})::float8,
       extract(epoch FROM {{now}} - created)::float8,
       extract(epoch FROM expires - {{now}})::float8, takeover, tenant, operation, key
FROM semel_record WHERE id = ANY (:ids::bytea[])

-- name: count (reads)
-- The number of a tenant's live records. It reads at most :most of them.
SELECT count(*)::integer FROM (
    SELECT 1 FROM semel_record
    WHERE tenant = :tenant::text AND tenant <> ''
      AND (expires > {{now}} OR state = 3 OR (state = 1 AND (lease_end > {{now}} OR takeover <> 0)))
    LIMIT :most::integer
) AS live

-- name: count_without_tenant (reads)
-- Records without a tenant have no index of their own. "sweep_after" is roughly when a record expires, so a few records
-- that live longer than their claim asked for are not counted.
SELECT count(*)::integer FROM (
    SELECT 1 FROM semel_record WHERE sweep_after > {{now}} AND tenant = '' LIMIT :most::integer
) AS live

-- name: newest (reads)
-- Records up to a place, by the index on "sweep_after" backwards. That column is set by the claim, so a record keeps its
-- place while it changes. A place is text, because it has to be exact to the microsecond.
SELECT {{listed}} FROM semel_record
WHERE sweep_after <= (:place::text::timestamp AT TIME ZONE 'UTC') - :past::integer * interval '1 microsecond'
ORDER BY sweep_after DESC LIMIT :most::integer

-- name: by_id (reads)
SELECT {{listed}} FROM semel_record WHERE id < :id::bytea ORDER BY id DESC LIMIT :most::integer

-- name: measure (reads)
-- It counts at most :most records. Beyond that, it estimates as the planner does: how many were on a page when the table
-- was analyzed, for the pages that it has now. A sweep takes the oldest records first, so the first :oldest of them show
-- for how long one has been overdue.
SELECT
    (SELECT count(*) FROM (SELECT 1 FROM semel_record LIMIT :most::integer) AS few)::bigint,
    (SELECT CASE WHEN c.reltuples > 0 AND c.relpages > 0
        THEN (c.reltuples / c.relpages * pg_relation_size(c.oid) / current_setting('block_size')::integer)::bigint
        ELSE pg_stat_get_live_tuples(c.oid) END
     FROM pg_class AS c WHERE c.oid = 'semel_record'::regclass),
    pg_total_relation_size('semel_record'::regclass) + pg_total_relation_size('semel_step'::regclass),
    (SELECT max(extract(epoch FROM {{now}} - greatest(sweep_after, expires)))::float8 FROM (
        SELECT sweep_after, expires, state, lease_end FROM semel_record
        WHERE sweep_after <= {{now}} ORDER BY sweep_after LIMIT :oldest::integer
    ) AS overdue WHERE expires <= {{now}} AND (state = 2 OR (state = 1 AND lease_end <= {{now}})))

-- name: inputs (reads)
-- The arguments of resumable operations, page by page; the value only for abandoned ones.
SELECT s.id, r.state, r.takeover, r.token, r.attempt, r.fingerprint,
       extract(epoch FROM r.lease_end - {{now}})::float8,
       extract(epoch FROM {{now}} - r.created)::float8,
       extract(epoch FROM r.expires - {{now}})::float8,
       r.tenant, r.operation, r.key, CASE WHEN r.state = 1 AND r.lease_end <= {{now}} THEN s.value END
FROM (
    SELECT id, origin, value FROM semel_step
    WHERE name = '~input' AND id > :after::bytea ORDER BY id LIMIT :most::integer
) AS s
LEFT JOIN semel_record AS r ON r.id = s.id AND r.origin = s.origin
ORDER BY s.id

-- name: forget_inputs (writes)
-- Remove from a page what nobody will ask for again: a record that is done stays done.
DELETE FROM semel_step AS s
WHERE s.name = '~input' AND s.id > :after::bytea AND s.id <= :last::bytea AND NOT EXISTS (
    SELECT 1 FROM semel_record AS r WHERE r.id = s.id AND r.origin = s.origin AND r.state <> 2
)

-- name: resolve_done (writes)
-- The state as well as the token: an owner renews, gives up and completes with the same token.
WITH finished AS (
    UPDATE semel_record r
    SET state = 2, token = greatest(token + 1, {{token}}), snapshot = :snapshot::bytea,
        lease_end = {{now}}, expires = {{now}} + :ttl::float8 * interval '1 second'
    WHERE id = :id AND token = :token AND state = :stored::integer
      AND (state <> 1 OR (lease_end > {{now}}) = :alive::boolean)
    RETURNING r.id, r.awaited
)
SELECT id, CASE WHEN awaited THEN {{notify}} END FROM finished

-- name: free (writes)
-- An expired record, which the next claim replaces or a sweep removes. Its new token makes the next one greater, even if
-- the clock is set back.
WITH freed AS (
    UPDATE semel_record r
    SET state = 2, token = greatest(token + 1, {{token}}), snapshot = NULL, lease_end = {{now}}, expires = 'epoch',
        sweep_after = {{now}}
    WHERE id = :id AND token = :token AND state = :stored::integer
      AND (state <> 1 OR (lease_end > {{now}}) = :alive::boolean)
    RETURNING r.id, r.awaited
)
SELECT id, CASE WHEN awaited THEN {{notify}} END FROM freed

-- name: watch (writes)
UPDATE semel_record r SET awaited = true
FROM unnest(:ids::bytea[]) AS g (id)
WHERE r.id = g.id AND r.state = 1 AND r.lease_end > {{now}}
RETURNING r.id, extract(epoch FROM r.lease_end - {{now}})::float8

-- name: sweep (writes)
WITH dead AS (
    SELECT id FROM semel_record
    WHERE sweep_after <= {{now}} AND expires <= {{now}}
      AND (state = 2 OR (state = 1 AND lease_end <= {{now}} AND takeover = 0))
    ORDER BY sweep_after LIMIT :count::integer FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM semel_record r USING dead WHERE r.id = dead.id RETURNING r.id, r.steps
), forgotten AS (
    DELETE FROM semel_step s USING gone WHERE gone.steps > 0 AND s.id = gone.id
)
SELECT count(*)::integer FROM gone

-- name: sweep_unknown (writes)
WITH silent AS (
    SELECT id FROM semel_record
    WHERE sweep_after <= {{now}} AND expires <= {{now}}
      AND state = 1 AND lease_end <= {{now}} AND takeover <> 0
    ORDER BY sweep_after LIMIT :count::integer FOR UPDATE SKIP LOCKED
), marked AS (
    UPDATE semel_record r SET state = 3 FROM silent WHERE r.id = silent.id RETURNING r.id
)
SELECT count(*)::integer FROM marked
