-- The history of events: moments of single keys for hours, and the counts of each minute for days.
--
-- Writers insert moments in batches. A batch that is sent again finds its rows there. Times are microseconds since 1970,
-- by the clocks of the writers.
CREATE TABLE semel_moment (
    at INTEGER NOT NULL,
    number BLOB NOT NULL,
    id BLOB NOT NULL,
    root BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,
    route TEXT NOT NULL,
    who TEXT NOT NULL,
    details TEXT NOT NULL,
    PRIMARY KEY (at, number)
) STRICT, WITHOUT ROWID;

CREATE INDEX semel_moment_id ON semel_moment (id, at);

CREATE INDEX semel_moment_kind ON semel_moment (kind, at);

-- Few moments know their root.
CREATE INDEX semel_moment_root ON semel_moment (root, id) WHERE root <> x'';

-- Each writer has its own row for a minute and a route, and replaces it by its newest counts. Readers add them.
CREATE TABLE semel_minute (
    at INTEGER NOT NULL,
    writer BLOB NOT NULL,
    route TEXT NOT NULL,
    count INTEGER NOT NULL,
    kinds TEXT NOT NULL,
    PRIMARY KEY (at, writer, route)
) STRICT, WITHOUT ROWID;
