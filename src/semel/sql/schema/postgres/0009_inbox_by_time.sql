-- An inbox that is divided by time, for those who want it: `semel migrate URL --partition-inbox`.
--
-- It has a partition for each day, by the time in ids that are UUIDs of version 7. Such ids, as text, sort by their time,
-- so the id itself is the key of the partitions, and it is unique in all of them. Other ids, and what was there before,
-- go to the default partition, semel_inbox_rest. An id is never in two partitions, whatever it looks like.

-- How the ids of messages begin that were made at the start of this day.
CREATE FUNCTION semel_first_id(day date) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT regexp_replace(lpad(to_hex((day - date '1970-01-01')::bigint * 86400000), 12, '0'), '^(.{8})', '\1-')
$$;

-- Make the partitions of the next days. One that cannot be made is left out: its messages go to the rest.
CREATE FUNCTION semel_add_inbox_days() RETURNS void
LANGUAGE plpgsql VOLATILE SET lock_timeout = '200ms' AS $$
DECLARE
    today date := (now() AT TIME ZONE 'UTC')::date;
    day date;
    name text;
BEGIN
    FOR ahead IN 1..7 LOOP
        day := today + ahead;
        name := 'semel_inbox_' || to_char(day, 'YYYYMMDD');
        IF to_regclass(name) IS NULL THEN
            BEGIN
                EXECUTE 'CREATE TABLE ' || name || ' PARTITION OF semel_inbox FOR VALUES FROM ('
                        || quote_literal(semel_first_id(day)) || ') TO (' || quote_literal(semel_first_id(day + 1)) || ')';
            EXCEPTION
                WHEN check_violation THEN NULL;  -- the rest has ids of that day
                WHEN lock_not_available OR deadlock_detected THEN RETURN;
            END;
        END IF;
    END LOOP;
END
$$;

-- Divide the inbox. Returns whether it was not divided yet.
CREATE FUNCTION semel_partition_inbox() RETURNS boolean
LANGUAGE plpgsql VOLATILE SET lock_timeout = '5s' AS $$
BEGIN
    LOCK TABLE semel_inbox IN ACCESS EXCLUSIVE MODE;
    IF (SELECT relkind FROM pg_class WHERE oid = 'semel_inbox'::regclass) = 'p' THEN
        RETURN false;
    END IF;
    ALTER TABLE semel_inbox RENAME TO semel_inbox_rest;
    ALTER INDEX semel_inbox_pkey RENAME TO semel_inbox_rest_pkey;
    ALTER INDEX semel_inbox_received RENAME TO semel_inbox_rest_received;
    ALTER TABLE semel_inbox_rest ALTER COLUMN id TYPE text COLLATE "C";  -- ids sort by their bytes
    CREATE TABLE semel_inbox (
        consumer text NOT NULL,
        id text COLLATE "C" NOT NULL,
        received timestamptz NOT NULL,
        PRIMARY KEY (consumer, id)
    ) PARTITION BY RANGE (id);
    CREATE INDEX semel_inbox_received ON semel_inbox (received);
    PERFORM semel_add_inbox_days();
    ALTER TABLE semel_inbox ATTACH PARTITION semel_inbox_rest DEFAULT;  -- last, so that the rest is read once
    RETURN true;
END
$$;

-- Look after a divided inbox: add days, drop those of which everything is old enough, and forget some old messages of the
-- rest. Returns how many of those; null if the inbox is not divided.
--
-- A day is dropped by the times at which its messages were applied. An id may be much older than that.
CREATE FUNCTION semel_tend_inbox(keep double precision, most integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SET lock_timeout = '200ms' AS $$
DECLARE
    oldest timestamptz := now() - keep * interval '1 second';
    day text;
    look text;
    is_new boolean;
    gone integer := 0;
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = 'semel_inbox'::regclass) <> 'p' THEN
        RETURN NULL;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtext('semel_tend_inbox')) THEN
        RETURN 0;
    END IF;
    PERFORM semel_add_inbox_days();
    FOR day IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'semel_inbox'::regclass
          AND c.relname < 'semel_inbox_' || to_char(oldest AT TIME ZONE 'UTC', 'YYYYMMDD') AND c.relname <> 'semel_inbox_rest'
        ORDER BY c.relname
    LOOP
        look := 'SELECT EXISTS (SELECT 1 FROM ' || day || ' WHERE received >= ' || quote_literal(oldest) || ')';
        BEGIN
            EXECUTE look INTO is_new;
            CONTINUE WHEN is_new;
            -- Nobody writes from here on. What was written since the first look counts.
            EXECUTE 'LOCK TABLE semel_inbox, ' || day || ' IN ACCESS EXCLUSIVE MODE';
            EXECUTE look INTO is_new;
            IF NOT is_new THEN
                EXECUTE 'DROP TABLE ' || day;
            END IF;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN EXIT;  -- the next call does it
        END;
    END LOOP;
    DELETE FROM semel_inbox_rest WHERE (consumer, id) IN (
        SELECT r.consumer, r.id FROM semel_inbox_rest r WHERE r.received < oldest
        ORDER BY r.received LIMIT most FOR UPDATE SKIP LOCKED
    );
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END
$$;
