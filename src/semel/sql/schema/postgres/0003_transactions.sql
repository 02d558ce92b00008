-- The guard of the transactional mode: take the key for this transaction, then look its record up.
--
-- In this order and in one function, because the look-up must read a snapshot taken after the lock: of a single SELECT
-- that does both, the snapshot is older than the lock, and a record committed in between would not be seen. A volatile
-- function takes a new snapshot for each of its statements (under READ COMMITTED; under the stricter levels the
-- primary key decides). The lock, "place", is 64 bits of the record's identity, and ends with the transaction: two
-- identities that share them only wait for each other.
--
-- No row: the key is ours and nothing is stored. An empty value: another transaction has the key now. Else the time, and
-- the record in PostgreSQL's own binary form: as one value, for most of the cost of a row is to describe its columns. A
-- record that is done never changes, so it is shown also while others have the key: they are only replaying it.
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
