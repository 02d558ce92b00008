-- The outbox: messages that are to be sent, added in the transaction of the state that they tell of.
--
-- A message is never claimed by an update. It belongs to the relay that owns its lane, and is deleted when it is sent.
-- Positions of one stream grow in the order of the commits, because the row of the stream is locked before a position
-- is taken. Debezium's outbox event router can read this table as it is.
CREATE TABLE semel_outbox (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sequence bigint NOT NULL,
    due timestamptz NOT NULL,
    created timestamptz NOT NULL,
    lane smallint NOT NULL,
    starts integer NOT NULL,
    redrives integer NOT NULL,
    id text NOT NULL,
    type text NOT NULL,
    source text NOT NULL,
    destination text NOT NULL,
    stream text NOT NULL,
    subject text NOT NULL,
    content_type text NOT NULL,
    headers text NOT NULL,
    data bytea NOT NULL
);

-- A message that is added twice, under the same id, is sent once.
CREATE UNIQUE INDEX semel_outbox_id ON semel_outbox (id);

-- The last sequence of each stream. Its row is locked until the end of the transaction that adds a message.
CREATE TABLE semel_stream (
    name text NOT NULL PRIMARY KEY,
    sequence bigint NOT NULL
) WITH (fillfactor = 50);

-- Streams that wait: for the next try of their first message, or, parked, for a person ('infinity').
CREATE TABLE semel_hold (
    stream text NOT NULL PRIMARY KEY,
    until timestamptz NOT NULL,
    reason text NOT NULL
);

-- The living relays, what each of them is sending, and which lanes it owns.
CREATE TABLE semel_relay (
    relay bytea NOT NULL PRIMARY KEY,
    lease_end timestamptz NOT NULL,
    started bigint[] NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE semel_lane (
    lane smallint NOT NULL PRIMARY KEY,
    relay bytea
) WITH (fillfactor = 50);

-- The inbox: messages that were applied, written in the transaction of their effect.
CREATE TABLE semel_inbox (
    consumer text NOT NULL,
    id text NOT NULL,
    received timestamptz NOT NULL,
    PRIMARY KEY (consumer, id)
);

CREATE INDEX semel_inbox_received ON semel_inbox (received);

-- The last sequence of each stream that a consumer has applied.
CREATE TABLE semel_inbox_stream (
    consumer text NOT NULL,
    stream text NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (consumer, stream)
) WITH (fillfactor = 50);

-- How often a consumer has begun a message that is not applied yet. Where the broker counts, nothing is written here.
CREATE TABLE semel_inbox_start (
    consumer text NOT NULL,
    id text NOT NULL,
    starts integer NOT NULL,
    last timestamptz NOT NULL,
    PRIMARY KEY (consumer, id)
);

-- Messages that were given up: by the relay (origin is empty), or by a consumer.
CREATE TABLE semel_dead_letter (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    origin text NOT NULL,
    died timestamptz NOT NULL,
    reason text NOT NULL,
    sequence bigint NOT NULL,
    created timestamptz NOT NULL,
    starts integer NOT NULL,
    redrives integer NOT NULL,
    id text NOT NULL,
    type text NOT NULL,
    source text NOT NULL,
    destination text NOT NULL,
    stream text NOT NULL,
    subject text NOT NULL,
    content_type text NOT NULL,
    headers text NOT NULL,
    data bytea NOT NULL
);

CREATE UNIQUE INDEX semel_dead_letter_id ON semel_dead_letter (origin, id);

-- Add a message in the caller's transaction, in one call. Returns whether it is new. The row of its stream is locked
-- before the position is taken, by the insert. A notification in every transaction would serialise all commits, so only
-- one transaction at a time sends one, and the relay looks again soon after it was woken. The payload is what a relay
-- waits for, "semel.outbox" in hex; the number is that of the lock, "semelout".
CREATE FUNCTION semel_add(
    new_id text, new_type text, new_data bytea, new_source text, new_destination text, new_stream text,
    new_subject text, new_content_type text, new_headers text, new_lane integer, delay float8
) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    place bigint := 0;
BEGIN
    IF new_stream <> '' THEN
        INSERT INTO semel_stream AS s (name, sequence) VALUES (new_stream, 1)
        ON CONFLICT (name) DO UPDATE SET sequence = s.sequence + 1
        RETURNING s.sequence INTO place;
    END IF;
    INSERT INTO semel_outbox (
        sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
        headers, data
    ) VALUES (
        place, statement_timestamp() + delay * interval '1 s', statement_timestamp(), new_lane, 0, 0, new_id, new_type,
        new_source, new_destination, new_stream, new_subject, new_content_type, new_headers, new_data
    )
    ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN
        UPDATE semel_stream s SET sequence = s.sequence - 1 WHERE s.name = new_stream;
        RETURN false;
    END IF;
    IF pg_try_advisory_xact_lock(8315172569387857268) THEN
        PERFORM pg_notify('semel', '73656d656c2e6f7574626f78');
    END IF;
    RETURN true;
END
$$;
