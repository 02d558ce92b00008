-- The transactional mode in two calls. Both travel as text in one message with BEGIN or COMMIT, so they are parsed and
-- planned each time. The body of a function is planned once per session, and a call is parsed quickly.
--
-- semel_guard replaces semel_lock, for the same reasons and in the same order (see 0003). It returns one value: NULL if
-- the key is ours and there is no record, an empty value if another transaction holds the key, otherwise the time and
-- the record in PostgreSQL's binary form. It first asks whether there is a record at all, without its columns, because
-- usually there is none. semel_lock stays for workers of the previous version.
CREATE FUNCTION semel_guard(wanted bytea, place bigint) RETURNS bytea
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    found_record bytea;
BEGIN
    IF pg_try_advisory_xact_lock(place) THEN
        PERFORM FROM semel_record r WHERE r.id = wanted;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        SELECT timestamptz_send(statement_timestamp()) || record_send(r) INTO found_record
        FROM semel_record r WHERE r.id = wanted;
        RETURN found_record;
    END IF;
    SELECT timestamptz_send(statement_timestamp()) || record_send(r) INTO found_record
    FROM semel_record r WHERE r.id = wanted AND r.state = 2 AND r.expires > statement_timestamp();
    RETURN coalesce(found_record, ''::bytea);
END
$$;

-- Write the finished record by a plain insert. If there is a record by now, it fails, and the transaction with it.
-- Sessions that have prepared the insert send that instead.
CREATE PROCEDURE semel_keep(
    id bytea, takeover integer, nonce bigint, ttl float8, fingerprint bytea, tenant text, operation text, key text,
    snapshot bytea
)
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO semel_record (
        id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, sweep_after, fingerprint,
        tenant, operation, key, snapshot
    ) VALUES (
        id, 2, takeover, 1, 0, 0, nonce, statement_timestamp(), statement_timestamp(),
        statement_timestamp() + ttl * interval '1 s', statement_timestamp() + ttl * interval '1 s', fingerprint,
        tenant, operation, key, snapshot
    );
END
$$;

-- PostgreSQL parses the text of a check constraint again for every statement that writes a row. For a claim or a
-- finished record that costs as much as both indexes. Only the statements of this library write here.
ALTER TABLE semel_record DROP CONSTRAINT semel_record_state;
