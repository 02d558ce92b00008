-- The outbox: messages that are to be sent, added in the transaction of the state that they tell of.
--
-- A message is never claimed by an update. It belongs to the relay that owns its lane, and is deleted when it is sent.
-- Positions of one stream grow in the order of the commits, because the row of the stream is locked before a position
-- is taken.
CREATE TABLE semel_outbox (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    sequence INTEGER NOT NULL,
    due INTEGER NOT NULL,
    created INTEGER NOT NULL,
    lane INTEGER NOT NULL,
    starts INTEGER NOT NULL,
    redrives INTEGER NOT NULL,
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    source TEXT NOT NULL,
    destination TEXT NOT NULL,
    stream TEXT NOT NULL,
    subject TEXT NOT NULL,
    content_type TEXT NOT NULL,
    headers TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;

-- A message that is added twice, under the same id, is sent once.
CREATE UNIQUE INDEX semel_outbox_id ON semel_outbox (id);

-- The last sequence of each stream. Its row is locked until the end of the transaction that adds a message.
CREATE TABLE semel_stream (
    name TEXT NOT NULL PRIMARY KEY,
    sequence INTEGER NOT NULL
) STRICT;

-- Streams that wait: for the next try of their first message, or, parked, for a person (the end of time).
CREATE TABLE semel_hold (
    stream TEXT NOT NULL PRIMARY KEY,
    until INTEGER NOT NULL,
    reason TEXT NOT NULL
) STRICT;

-- The living relays, what each of them is sending, and which lanes it owns.
CREATE TABLE semel_relay (
    relay BLOB NOT NULL PRIMARY KEY,
    lease_end INTEGER NOT NULL,
    started TEXT NOT NULL
) STRICT;

CREATE TABLE semel_lane (
    lane INTEGER NOT NULL PRIMARY KEY,
    relay BLOB
) STRICT;

-- The inbox: messages that were applied, written in the transaction of their effect.
CREATE TABLE semel_inbox (
    consumer TEXT NOT NULL,
    id TEXT NOT NULL,
    received INTEGER NOT NULL,
    PRIMARY KEY (consumer, id)
) STRICT;

CREATE INDEX semel_inbox_received ON semel_inbox (received);

-- The last sequence of each stream that a consumer has applied.
CREATE TABLE semel_inbox_stream (
    consumer TEXT NOT NULL,
    stream TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (consumer, stream)
) STRICT;

-- How often a consumer has begun a message that is not applied yet. Where the broker counts, nothing is written here.
CREATE TABLE semel_inbox_start (
    consumer TEXT NOT NULL,
    id TEXT NOT NULL,
    starts INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (consumer, id)
) STRICT;

-- Messages that were given up: by the relay (origin is empty), or by a consumer.
CREATE TABLE semel_dead_letter (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    origin TEXT NOT NULL,
    died INTEGER NOT NULL,
    reason TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    created INTEGER NOT NULL,
    starts INTEGER NOT NULL,
    redrives INTEGER NOT NULL,
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    source TEXT NOT NULL,
    destination TEXT NOT NULL,
    stream TEXT NOT NULL,
    subject TEXT NOT NULL,
    content_type TEXT NOT NULL,
    headers TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX semel_dead_letter_id ON semel_dead_letter (origin, id);
