-- The history of events, for PostgreSQL. Each statement may be sent again.

-- name: add_moments (writes)
INSERT INTO semel_moment (at, number, id, root, attempt, kind, route, who, details)
SELECT * FROM unnest(
    :ats::bigint[], :numbers::bytea[], :ids::bytea[], :roots::bytea[], :attempts::bigint[], :kinds::text[],
    :routes::text[], :whos::text[], :details::text[]
)
ON CONFLICT (at, number) DO NOTHING

-- name: add_minutes (writes)
INSERT INTO semel_minute AS m (at, writer, route, count, kinds)
SELECT * FROM unnest(:ats::bigint[], :writers::bytea[], :routes::text[], :counts::bigint[], :kinds::text[])
ON CONFLICT (at, writer, route) DO UPDATE SET count = excluded.count, kinds = excluded.kinds
WHERE m.count < excluded.count

-- name: forget_moments (writes)
DELETE FROM semel_moment WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM semel_moment WHERE at < {{now}} - :older::bigint ORDER BY at LIMIT :most::integer
    FOR UPDATE SKIP LOCKED
))
RETURNING 1

-- name: forget_minutes (writes)
DELETE FROM semel_minute WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM semel_minute WHERE at < {{now}} / 1000000 - :older::bigint ORDER BY at LIMIT :most::integer
    FOR UPDATE SKIP LOCKED
))
RETURNING 1

-- name: linked (reads)
SELECT DISTINCT id FROM semel_moment WHERE root = :root::bytea AND root <> '' LIMIT :most::integer

-- name: stories (reads)
SELECT m.at, m.id, m.kind, m.route, m.who, m.attempt, m.root, m.details, m.number
FROM unnest(:ids::bytea[]) AS g (id)
CROSS JOIN LATERAL (
    SELECT * FROM semel_moment s WHERE s.id = g.id ORDER BY s.at LIMIT :most::integer
) AS m

-- name: newest (reads)
SELECT at, id, kind, route, who, attempt, root, details, number
FROM (SELECT * FROM semel_moment ORDER BY at DESC LIMIT :look::integer) AS m
WHERE :route::text IS NULL OR route = :route
ORDER BY at DESC LIMIT :most::integer

-- name: newest_of_kind (reads)
-- The kind is a range, and not "kind = ...": then only the index on both columns has this order. A plan that does not
-- know the kind takes it for a frequent one, and would walk through the whole history by time.
SELECT at, id, kind, route, who, attempt, root, details, number
FROM (
    SELECT * FROM semel_moment
    WHERE (kind, at) >= (:kind::text, 0) AND (kind, at) <= (:kind, 9223372036854775807)
    ORDER BY kind DESC, at DESC LIMIT :look::integer
) AS m
WHERE :route::text IS NULL OR route = :route
ORDER BY at DESC LIMIT :most::integer

-- name: minutes (reads)
SELECT at, route, kinds FROM semel_minute WHERE at >= :since::bigint AND at < :until::bigint
