-- Records and their steps. Times are microseconds since 1970, by the clock of the machine; all writers of a file share
-- it.
CREATE TABLE semel_record (
    id BLOB NOT NULL PRIMARY KEY,
    state INTEGER NOT NULL CHECK (state IN (1, 2, 3)),
    takeover INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    steps INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL,
    origin INTEGER NOT NULL,
    nonce INTEGER NOT NULL,
    lease_end INTEGER NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    sweep_after INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    tenant TEXT NOT NULL,
    operation TEXT NOT NULL,
    key TEXT,
    snapshot BLOB
) STRICT;

CREATE INDEX semel_record_sweep ON semel_record (sweep_after);

CREATE TABLE semel_step (
    id BLOB NOT NULL,
    origin INTEGER NOT NULL,
    name TEXT NOT NULL,
    position INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (id, origin, name)
) STRICT;
