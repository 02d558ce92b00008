-- The history of events, for SQLite. Each statement may be sent again.

-- name: add_moments (writes)
INSERT INTO semel_moment (at, number, id, root, attempt, kind, route, who, details)
VALUES (:at, :number, :id, :root, :attempt, :kind, :route, :who, :detail)
ON CONFLICT (at, number) DO NOTHING

-- name: add_minutes (writes)
INSERT INTO semel_minute (at, writer, route, count, kinds) VALUES (:at, :writer, :route, :count, :kind)
ON CONFLICT (at, writer, route) DO UPDATE SET count = excluded.count, kinds = excluded.kinds
WHERE semel_minute.count < excluded.count

-- name: forget_moments (writes)
DELETE FROM semel_moment WHERE (at, number) IN (
    SELECT at, number FROM semel_moment WHERE at < :now - :older ORDER BY at LIMIT :most
)
RETURNING 1

-- name: forget_minutes (writes)
DELETE FROM semel_minute WHERE (at, writer, route) IN (
    SELECT at, writer, route FROM semel_minute WHERE at < :now / 1000000 - :older ORDER BY at LIMIT :most
)
RETURNING 1

-- name: linked (reads)
SELECT DISTINCT id FROM semel_moment WHERE root = :root AND root <> x'' LIMIT :most

-- name: stories (reads)
SELECT at, id, kind, route, who, attempt, root, details, number
FROM semel_moment WHERE id = :id ORDER BY at LIMIT :most

-- name: newest (reads)
SELECT at, id, kind, route, who, attempt, root, details, number
FROM (SELECT * FROM semel_moment ORDER BY at DESC LIMIT :look)
WHERE :route IS NULL OR route = :route
ORDER BY at DESC LIMIT :most

-- name: newest_of_kind (reads)
SELECT at, id, kind, route, who, attempt, root, details, number
FROM (SELECT * FROM semel_moment WHERE kind = :kind ORDER BY at DESC LIMIT :look)
WHERE :route IS NULL OR route = :route
ORDER BY at DESC LIMIT :most

-- name: minutes (reads)
SELECT at, route, kinds FROM semel_minute WHERE at >= :since AND at < :until
