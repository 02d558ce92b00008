-- The statements of the transactional mode, for the caller's connection. They have plain values only: a statement may
-- travel as text, in one message with BEGIN or COMMIT. It is then parsed and planned each time, so the frequent ones
-- are calls. States: 1 running, 2 done, 3 unknown.

-- name: lock (writes, as text lock)
-- The function and its reasons are in schema/postgres/0005_transaction_calls.sql.
SELECT semel_guard(:id, :place)

-- name: steps (reads)
SELECT name, value FROM semel_step WHERE id = :id AND origin = :origin ORDER BY position

-- name: step_saved (reads)
-- Whether the record has this step, as the caller's transaction sees it, with its own writes.
SELECT 1 FROM semel_step s JOIN semel_record r ON r.id = s.id AND r.origin = s.origin
WHERE s.id = :id AND s.name = :name

-- name: keep (writes, as text keep_call)
-- A plain insert. If there is a record by now, it fails, and the transaction with it, so that nobody can commit an
-- effect twice by ignoring the error. Nobody owned the record under a lease, so it has no token, and no steps with an
-- origin.
INSERT INTO semel_record (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint, tenant,
    operation, key, snapshot
) VALUES (
    :id, 2, :takeover, 1, 0, 0, :nonce, {{now}}, {{now}}, {{now}} + :ttl * interval '1 s',
    {{now}} + :ttl * interval '1 s', :fingerprint, :tenant, :operation, :key, :snapshot
)

-- name: keep_call (writes)
-- The same as a short call. The procedure is in the same migration as the function.
CALL semel_keep(:id, :takeover, :nonce, :ttl, :fingerprint, :tenant, :operation, :key, :snapshot)

-- name: keep_instead (writes)
-- Replace a record that has expired or was abandoned, if it is still the one that was read, as the token shows.
-- Otherwise the insert fails, and the transaction with it. An attempt that was taken over keeps its time of creation
-- and its steps.
WITH gone AS (
    DELETE FROM semel_record r WHERE r.id = :id AND r.token = :token
    RETURNING r.token, r.origin, r.created, r.steps, r.awaited
), made AS (
    INSERT INTO semel_record (
        id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint,
        tenant, operation, key, snapshot, steps
    )
    SELECT :id::bytea, 2, :takeover::smallint, :attempt::integer, greatest(gone.token + 1, {{token}}),
           CASE WHEN :attempt::integer > 1 THEN coalesce(gone.origin, 0) ELSE 0 END, :nonce::bigint, {{now}},
           CASE WHEN :attempt::integer > 1 THEN coalesce(gone.created, {{now}}) ELSE {{now}} END,
           {{now}} + :ttl::float8 * interval '1 s', {{now}} + :ttl::float8 * interval '1 s', :fingerprint::bytea,
           :tenant::text, :operation::text, :key::text, :snapshot::bytea, coalesce(gone.steps, 0)
    FROM (SELECT 1) AS one LEFT JOIN gone ON true
    RETURNING id
)
SELECT CASE WHEN gone.awaited THEN {{notify}} END FROM made LEFT JOIN gone ON true
