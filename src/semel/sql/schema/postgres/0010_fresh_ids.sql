-- A message whose id was made at random for it cannot be in the outbox already. It is not looked for in the index of ids,
-- nor entered there. All others are: they have an id that the caller chose or that a re-run makes again, or they come back
-- from the dead letters or the log.
ALTER TABLE semel_outbox ADD COLUMN fresh boolean NOT NULL DEFAULT false;

DROP INDEX semel_outbox_id;

CREATE UNIQUE INDEX semel_outbox_id ON semel_outbox (id) WHERE NOT fresh;

DROP FUNCTION semel_add(text, text, bytea, text, text, text, text, text, text, integer, float8);

-- Add a message in the caller's transaction, in one call: see 0006_messages.sql and 0008_log.sql. Returns whether it is new.
CREATE FUNCTION semel_add(
    new_id text, new_type text, new_data bytea, new_source text, new_destination text, new_stream text,
    new_subject text, new_content_type text, new_headers text, new_lane integer, delay float8,
    is_fresh boolean DEFAULT false
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
            content_type, headers, data, fresh
        ) VALUES (
            place, statement_timestamp() + delay * interval '1 s', statement_timestamp(), new_lane, 0, 0, new_id,
            new_type, new_source, new_destination, new_stream, new_subject, new_content_type, new_headers, new_data,
            is_fresh
        )
        ON CONFLICT (id) WHERE NOT fresh DO NOTHING;
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
        IF current_setting('synchronous_commit') = 'off' THEN
            -- Logical decoding shows a commit only when it is on the disk. A change of the mode waits for this
            -- transaction, but then could not see its messages, and would drop the slot.
            PERFORM set_config('synchronous_commit', 'local', true);
        END IF;
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
CREATE OR REPLACE FUNCTION semel_switch(new_mode text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c semel_cursor;
    here bigint;
BEGIN
    PERFORM set_config('lock_timeout', '2s', true);
    -- The log before the cursor, as a relay that reads it.
    LOCK TABLE semel_outbox_mode, semel_log IN ACCESS EXCLUSIVE MODE;
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
    ON CONFLICT (id) WHERE NOT fresh DO NOTHING;
    TRUNCATE semel_log;
    SELECT last_value - 1 INTO c.low FROM semel_log_position;
    UPDATE semel_cursor SET relay = NULL, cluster = here, seen = pg_current_snapshot(), low = c.low, upto = NULL,
        passed = 0, started = NULL, crashed = 0;
    UPDATE semel_outbox_mode SET mode = new_mode;
END
$$;
