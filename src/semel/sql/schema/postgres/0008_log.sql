-- How messages are stored on their way to the relay. "queue": rows of semel_outbox, deleted when they are sent. "log":
-- rows of semel_log, which is only appended to. "wal": messages in the database's own log, read by logical decoding.
-- Whoever adds a message reads this row, and holds the lock of that read until the end of its transaction.
CREATE TABLE semel_outbox_mode (
    mode text NOT NULL PRIMARY KEY
);

INSERT INTO semel_outbox_mode (mode) VALUES ('queue');

-- A relay that reads the log asks which streams have messages in the queue.
CREATE INDEX IF NOT EXISTS semel_outbox_stream ON semel_outbox (stream) WHERE stream <> '';

CREATE SEQUENCE semel_log_position;

-- Every 262144 positions the other slot is written, so that the old one can be emptied by TRUNCATE.
CREATE TABLE semel_log (
    position bigint NOT NULL,
    slot smallint NOT NULL,
    xid xid8 NOT NULL,
    sequence bigint NOT NULL,
    created timestamptz NOT NULL,
    lane smallint NOT NULL,
    id text NOT NULL,
    type text NOT NULL,
    source text NOT NULL,
    destination text NOT NULL,
    stream text NOT NULL,
    subject text NOT NULL,
    content_type text NOT NULL,
    headers text NOT NULL,
    data bytea NOT NULL
) PARTITION BY LIST (slot);

CREATE TABLE semel_log_0 PARTITION OF semel_log FOR VALUES IN (0);

CREATE TABLE semel_log_1 PARTITION OF semel_log FOR VALUES IN (1);

CREATE INDEX semel_log_at ON semel_log (position);

CREATE INDEX semel_log_xid ON semel_log (xid, position);

-- Where the relays are in the log. One relay owns the cursor, as long as it has a row in semel_relay. A message was read
-- if its transaction is visible in the snapshot "seen". The relay reads what is visible in "upto" and not in "seen", in
-- the order of positions, and has passed those up to "passed". Messages of transactions that began after "seen" are
-- above "low"; those of transactions that are visible in "upto" are not above "high". Positions in the mode "wal" are
-- those of the database's log.
CREATE TABLE semel_cursor (
    relay bytea,
    cluster bigint NOT NULL,
    seen pg_snapshot NOT NULL,
    low bigint NOT NULL,
    upto pg_snapshot,
    upto_low bigint NOT NULL,
    high bigint NOT NULL,
    passed bigint NOT NULL,
    started bigint,
    ends boolean NOT NULL,
    crashed bigint NOT NULL
) WITH (fillfactor = 50);

INSERT INTO semel_cursor (cluster, seen, low, upto_low, high, passed, ends, crashed)
SELECT system_identifier, pg_current_snapshot(), 0, 0, 0, 0, false, 0 FROM pg_control_system();

CREATE OR REPLACE FUNCTION semel_add(
    new_id text, new_type text, new_data bytea, new_source text, new_destination text, new_stream text,
    new_subject text, new_content_type text, new_headers text, new_lane integer, delay float8
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    way text;
    place bigint := 0;
    my_xid xid8;
    my_position bigint;
BEGIN
    SELECT mode INTO STRICT way FROM semel_outbox_mode;
    IF way <> 'queue' AND current_setting('transaction_isolation') <> 'read committed' THEN
        -- An old snapshot may show an old mode. Then this fails, and the transaction has to be repeated.
        PERFORM 1 FROM semel_outbox_mode FOR KEY SHARE;
    END IF;
    IF new_stream <> '' THEN
        INSERT INTO semel_stream AS s (name, sequence) VALUES (new_stream, 1)
        ON CONFLICT (name) DO UPDATE SET sequence = s.sequence + 1
        RETURNING s.sequence INTO place;
    END IF;
    IF way = 'queue' OR delay > 0 THEN
        INSERT INTO semel_outbox (
            sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject,
            content_type, headers, data
        ) VALUES (
            place, statement_timestamp() + delay * interval '1 s', statement_timestamp(), new_lane, 0, 0, new_id,
            new_type, new_source, new_destination, new_stream, new_subject, new_content_type, new_headers, new_data
        )
        ON CONFLICT (id) DO NOTHING;
        IF NOT FOUND THEN
            UPDATE semel_stream s SET sequence = s.sequence - 1 WHERE s.name = new_stream;
            RETURN false;
        END IF;
    ELSIF way = 'log' THEN
        -- The transaction has its number before it takes a position: see semel_cursor.low.
        my_xid := pg_current_xact_id();
        my_position := nextval('semel_log_position');
        INSERT INTO semel_log (
            position, slot, xid, sequence, created, lane, id, type, source, destination, stream, subject, content_type,
            headers, data
        ) VALUES (
            my_position, my_position >> 18 & 1, my_xid, place, statement_timestamp(), new_lane, new_id, new_type,
            new_source, new_destination, new_stream, new_subject, new_content_type, new_headers, new_data
        );
    ELSE
        PERFORM pg_logical_emit_message(true, 'semel.outbox', convert_to(json_build_array(
            new_id, new_type, new_source, new_destination, new_stream, place, new_subject, new_content_type,
            extract(epoch FROM statement_timestamp())::float8, new_headers
        ) || E'\n', 'UTF8') || new_data);
    END IF;
    IF pg_try_advisory_xact_lock(8315172569387857268) THEN
        PERFORM pg_notify('semel', '73656d656c2e6f7574626f78');
    END IF;
    RETURN true;
END
$$;

-- Change the mode, and move what is in the log to the queue. It waits for the transactions that have added messages;
-- others wait for it. So the messages of a stream stay in order: all that come later are sent after what was moved. In
-- a restored database the numbers of transactions mean nothing, and what may not have been sent is sent.
CREATE FUNCTION semel_switch(new_mode text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c semel_cursor;
    here bigint;
BEGIN
    PERFORM set_config('lock_timeout', '2s', true);
    LOCK TABLE semel_outbox_mode IN ACCESS EXCLUSIVE MODE;
    SELECT system_identifier INTO here FROM pg_control_system();
    SELECT * INTO c FROM semel_cursor FOR UPDATE;
    INSERT INTO semel_outbox (
        sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
        headers, data
    )
    SELECT sequence, statement_timestamp(), created, lane, 0, 0, id, type, source, destination, stream, subject,
           content_type, headers, data
    FROM semel_log
    WHERE (NOT pg_visible_in_snapshot(xid, c.seen)
           AND NOT (c.upto IS NOT NULL AND pg_visible_in_snapshot(xid, c.upto) AND position <= c.passed))
       OR (c.cluster <> here AND position > c.low)
    ORDER BY position
    ON CONFLICT (id) DO NOTHING;
    TRUNCATE semel_log;
    SELECT last_value - 1 INTO c.low FROM semel_log_position;
    UPDATE semel_cursor SET relay = NULL, cluster = here, seen = pg_current_snapshot(), low = c.low, upto = NULL,
        passed = 0, started = NULL, crashed = 0;
    UPDATE semel_outbox_mode SET mode = new_mode;
END
$$;

-- Empty the slot of the log that is not written now, if all of it was read. If somebody uses it, it is done later.
CREATE FUNCTION semel_trim() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c semel_cursor;
    unread boolean;
    slot text;
BEGIN
    SELECT * INTO c FROM semel_cursor;
    SELECT 'semel_log_' || (~last_value >> 18 & 1) INTO slot FROM semel_log_position;
    IF pg_relation_size(slot::regclass) > 0 THEN
        EXECUTE 'LOCK TABLE ' || slot || ' IN ACCESS EXCLUSIVE MODE NOWAIT';
        EXECUTE 'SELECT EXISTS (SELECT 1 FROM ' || slot || ' WHERE xid >= ' || quote_literal(pg_snapshot_xmax(c.seen))
            || '::xid8) OR EXISTS (SELECT 1 FROM ' || slot || ' WHERE xid = ANY ('
            || quote_literal(ARRAY(SELECT pg_snapshot_xip(c.seen))) || '::xid8[]))'
        INTO unread;
        IF NOT unread THEN
            EXECUTE 'TRUNCATE ' || slot;
        END IF;
    END IF;
EXCEPTION WHEN lock_not_available THEN NULL;
END
$$;
