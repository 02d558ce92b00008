-- Records and their steps. Times are the server's, in UTC. Tables are created only if they are missing, because MySQL
-- commits each of these statements by itself: a migration that was interrupted is simply run again.
--
-- The primary key is the only unique key, so that a claim of an existing record locks that row and no gap beside it.
-- "sweep_after" is set when a record is claimed and never changes. It is a hint for the sweep; "expires" decides.
CREATE TABLE IF NOT EXISTS semel_record (
    id binary(16) NOT NULL,
    state tinyint NOT NULL,
    takeover tinyint NOT NULL,
    attempt int NOT NULL,
    steps int NOT NULL DEFAULT 0,
    token bigint NOT NULL,
    origin bigint NOT NULL,
    nonce bigint NOT NULL,
    lease_end datetime(6) NOT NULL,
    created datetime(6) NOT NULL,
    expires datetime(6) NOT NULL,
    sweep_after datetime(6) NOT NULL,
    fingerprint varbinary(255) NOT NULL,
    tenant text NOT NULL,
    operation text NOT NULL,
    `key` varchar(255),
    snapshot longblob,
    PRIMARY KEY (id),
    KEY semel_record_sweep (sweep_after),
    KEY semel_record_tenant (tenant(64))
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Names of steps are bytes, because a collation would treat "a" and "a " as equal. With "semel_step_input" the resumer
-- finds the arguments of resumable operations.
CREATE TABLE IF NOT EXISTS semel_step (
    id binary(16) NOT NULL,
    origin bigint NOT NULL,
    name varbinary(1024) NOT NULL,
    position int NOT NULL,
    value longblob NOT NULL,
    PRIMARY KEY (id, origin, name),
    KEY semel_step_input (name, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
