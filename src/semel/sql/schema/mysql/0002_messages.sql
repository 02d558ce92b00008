-- The outbox: messages that are to be sent, added in the transaction of the state that they tell of.
--
-- A message is never claimed by an update. It belongs to the relay that owns its lane, and is deleted when it is sent.
-- Positions of one stream grow in the order of the commits, because the row of the stream is locked before a position
-- is taken. A message that is added twice, under the same id, is sent once. Debezium's outbox event router can read this
-- table as it is.
CREATE TABLE IF NOT EXISTS semel_outbox (
    position bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    sequence bigint NOT NULL,
    due datetime(6) NOT NULL,
    created datetime(6) NOT NULL,
    lane smallint NOT NULL,
    starts int NOT NULL,
    redrives int NOT NULL,
    id varchar(255) NOT NULL,
    type varchar(255) NOT NULL,
    source varchar(255) NOT NULL,
    destination varchar(255) NOT NULL,
    stream varchar(255) NOT NULL,
    subject varchar(255) NOT NULL,
    content_type varchar(255) NOT NULL,
    headers mediumtext NOT NULL,
    data longblob NOT NULL,
    UNIQUE KEY semel_outbox_id (id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The last sequence of each stream. Its row is locked until the end of the transaction that adds a message.
CREATE TABLE IF NOT EXISTS semel_stream (
    name varchar(255) NOT NULL PRIMARY KEY,
    sequence bigint NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Streams that wait: for the next try of their first message, or, parked, for a person (the year 9999).
CREATE TABLE IF NOT EXISTS semel_hold (
    stream varchar(255) NOT NULL PRIMARY KEY,
    until datetime(6) NOT NULL,
    reason text NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The living relays, what each of them is sending, and which lanes it owns.
CREATE TABLE IF NOT EXISTS semel_relay (
    relay binary(16) NOT NULL PRIMARY KEY,
    lease_end datetime(6) NOT NULL,
    started longtext NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS semel_lane (
    lane smallint NOT NULL PRIMARY KEY,
    relay binary(16)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The inbox: messages that were applied, written in the transaction of their effect.
CREATE TABLE IF NOT EXISTS semel_inbox (
    consumer varchar(255) NOT NULL,
    id varchar(255) NOT NULL,
    received datetime(6) NOT NULL,
    PRIMARY KEY (consumer, id),
    KEY semel_inbox_received (received)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The last sequence of each stream that a consumer has applied.
CREATE TABLE IF NOT EXISTS semel_inbox_stream (
    consumer varchar(255) NOT NULL,
    stream varchar(255) NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (consumer, stream)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- How often a consumer has begun a message that is not applied yet. Where the broker counts, nothing is written here.
CREATE TABLE IF NOT EXISTS semel_inbox_start (
    consumer varchar(255) NOT NULL,
    id varchar(255) NOT NULL,
    starts int NOT NULL,
    last datetime(6) NOT NULL,
    PRIMARY KEY (consumer, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Messages that were given up: by the relay (origin is empty), or by a consumer.
CREATE TABLE IF NOT EXISTS semel_dead_letter (
    position bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    origin varchar(255) NOT NULL,
    died datetime(6) NOT NULL,
    reason text NOT NULL,
    sequence bigint NOT NULL,
    created datetime(6) NOT NULL,
    starts int NOT NULL,
    redrives int NOT NULL,
    id varchar(255) NOT NULL,
    type varchar(255) NOT NULL,
    source varchar(255) NOT NULL,
    destination varchar(255) NOT NULL,
    stream varchar(255) NOT NULL,
    subject varchar(255) NOT NULL,
    content_type varchar(255) NOT NULL,
    headers mediumtext NOT NULL,
    data longblob NOT NULL,
    UNIQUE KEY semel_dead_letter_id (origin, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
