-- The history of events: moments of single keys for hours, and the counts of each minute for days.
--
-- Writers insert moments in batches. A batch that is sent again finds its rows there. Times are microseconds since 1970,
-- by the clocks of the writers.
CREATE TABLE IF NOT EXISTS semel_moment (
    at bigint NOT NULL,
    number binary(16) NOT NULL,
    id varbinary(16) NOT NULL,
    root varbinary(16) NOT NULL,
    attempt int NOT NULL,
    kind varchar(64) NOT NULL,
    route varchar(255) NOT NULL,
    who varchar(400) NOT NULL,
    details text NOT NULL,
    PRIMARY KEY (at, number),
    KEY semel_moment_id (id, at),
    KEY semel_moment_kind (kind, at),
    KEY semel_moment_root (root, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Each writer has its own row for a minute and a route, and replaces it by its newest counts. Readers add them.
CREATE TABLE IF NOT EXISTS semel_minute (
    at bigint NOT NULL,
    writer binary(8) NOT NULL,
    route varchar(255) NOT NULL,
    count bigint NOT NULL,
    kinds mediumtext NOT NULL,
    PRIMARY KEY (at, writer, route)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
