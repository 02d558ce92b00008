-- The history of events: moments of single keys for hours, and the counts of each minute for days.
--
-- Writers insert moments in batches. A batch that is sent again finds its rows there. Times are microseconds since 1970,
-- by the clocks of the writers.
CREATE TABLE semel_moment (
    at bigint NOT NULL,
    number bytea NOT NULL,
    id bytea NOT NULL,
    root bytea NOT NULL,
    attempt integer NOT NULL,
    kind text NOT NULL,
    route text NOT NULL,
    who text NOT NULL,
    details text NOT NULL,
    PRIMARY KEY (at, number)
);

CREATE INDEX semel_moment_id ON semel_moment (id, at);

CREATE INDEX semel_moment_kind ON semel_moment (kind, at);

-- Few moments know their root.
CREATE INDEX semel_moment_root ON semel_moment (root, id) WHERE root <> '';

-- Each writer has its own row for a minute and a route, and replaces it by its newest counts. Readers add them.
CREATE TABLE semel_minute (
    at bigint NOT NULL,
    writer bytea NOT NULL,
    route text NOT NULL,
    count bigint NOT NULL,
    kinds text NOT NULL,
    PRIMARY KEY (at, writer, route)
) WITH (fillfactor = 50);
