-- The guard of the transactional mode: lock the key for this transaction, then look up its record.
--
-- It does so in this order and in one function, because the look-up must use a snapshot that was taken after the lock.
-- In a single SELECT that does both, the snapshot is older than the lock, and a record that was committed in between
-- would not be seen. A volatile function takes a new snapshot for each of its statements (under READ COMMITTED; under
-- the stricter levels the primary key decides). The lock, "place", is 64 bits of the record's identity and ends with
-- the transaction. Two identities that share these bits only wait for each other.
--
-- It returns no row if the key is ours and there is no record; an empty value if another transaction holds the key;
-- otherwise the time and the record in PostgreSQL's binary form. That is one value, because most of the cost of a row
-- is the description of its columns. A finished record never changes, so it is returned even if others hold the key:
-- they are only replaying it.
CREATE FUNCTION semel_lock(wanted bytea, place bigint) RETURNS SETOF bytea
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(place) THEN
        RETURN QUERY
            SELECT timestamptz_send(statement_timestamp()) || record_send(r)
            FROM semel_record r WHERE r.id = wanted AND r.state = 2 AND r.expires > statement_timestamp();
        IF NOT FOUND THEN
            RETURN NEXT ''::bytea;
        END IF;
        RETURN;
    END IF;
    RETURN QUERY
        SELECT timestamptz_send(statement_timestamp()) || record_send(r) FROM semel_record r WHERE r.id = wanted;
END
$$;
