-- A statement of the caller's that writes its own record. It stands before this one: WITH semel_effect AS (…).

-- name: record (writes)
-- The lock is taken last. If another transaction has it, the state is NULL, which the table refuses at once: without the
-- lock the insert would wait for the end of that transaction. The primary key decides in any case.
INSERT INTO semel_record (
    id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint,
    tenant, operation, key, snapshot
)
SELECT record.id, CASE WHEN pg_try_advisory_xact_lock(CAST(:place AS bigint)) THEN 2 END,
       CAST(:takeover AS smallint), 1, 0, 0, CAST(:nonce AS bigint), statement_timestamp(),
       statement_timestamp(), record.expires, record.expires, CAST(:fingerprint AS bytea),
       CAST(:tenant AS text), CAST(:operation AS text), CAST(:key AS text), {{snapshot}}
FROM (
    SELECT CAST(:id AS bytea) AS id, CAST(:header AS bytea) AS header,
           statement_timestamp() + CAST(:ttl AS float8) * interval '1 s' AS expires, {{result}}
    FROM semel_effect
) AS record
RETURNING snapshot
