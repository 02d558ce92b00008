-- Records and their steps.
--
-- No column that changes is indexed: "id" and "sweep_after" are set when a record is claimed, so renewing and
-- completing are HOT updates and touch no index. "sweep_after" is a hint for the sweep; "expires" decides.
CREATE TABLE semel_record (
    id bytea NOT NULL PRIMARY KEY,
    state smallint NOT NULL,
    takeover smallint NOT NULL,
    awaited boolean NOT NULL DEFAULT false,
    attempt integer NOT NULL,
    steps integer NOT NULL DEFAULT 0,
    token bigint NOT NULL,
    origin bigint NOT NULL,
    nonce bigint NOT NULL,
    lease_end timestamptz NOT NULL,
    created timestamptz NOT NULL,
    expires timestamptz NOT NULL,
    sweep_after timestamptz NOT NULL,
    fingerprint bytea NOT NULL,
    tenant text NOT NULL,
    operation text NOT NULL,
    key text,
    snapshot bytea,
    CONSTRAINT semel_record_state CHECK (state IN (1, 2, 3))
) WITH (fillfactor = 75);

-- Snapshots are compressed before they are stored.
ALTER TABLE semel_record ALTER COLUMN snapshot SET STORAGE EXTERNAL;

CREATE INDEX semel_record_sweep ON semel_record (sweep_after);

CREATE TABLE semel_step (
    id bytea NOT NULL,
    origin bigint NOT NULL,
    name text NOT NULL,
    position integer NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (id, origin, name)
);
