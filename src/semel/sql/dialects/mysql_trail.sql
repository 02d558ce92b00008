-- The history of events, for MySQL 8 and MariaDB. [[…]] is repeated for each row. Each statement may be sent again.

-- name: add_moments (writes)
INSERT INTO semel_moment (at, number, id, root, attempt, kind, route, who, details)
VALUES [[(:at, :number, :id, :root, :attempt, :kind, :route, :who, :detail)]]
ON DUPLICATE KEY UPDATE number = semel_moment.number

-- name: add_minutes (writes)
-- The kinds come first: they are compared with the count as it was.
INSERT INTO semel_minute (at, writer, route, count, kinds) VALUES [[(:at, :writer, :route, :count, :kind)]]
ON DUPLICATE KEY UPDATE kinds = IF(count < VALUES(count), VALUES(kinds), kinds), count = GREATEST(count, VALUES(count))

-- name: forget_moments (writes)
DELETE FROM semel_moment WHERE at < {{now}} - :older ORDER BY at LIMIT :most

-- name: forget_minutes (writes)
DELETE FROM semel_minute WHERE at < {{now}} DIV 1000000 - :older ORDER BY at LIMIT :most

-- name: linked (reads)
SELECT DISTINCT id FROM semel_moment WHERE root = :root AND root <> '' LIMIT :most

-- name: stories (reads)
[[SELECT * FROM (
    SELECT at, id, kind, route, who, attempt, root, details, number
    FROM semel_moment WHERE id = :id ORDER BY at LIMIT :most
) AS m]]

-- name: newest (reads)
SELECT at, id, kind, route, who, attempt, root, details, number
FROM (SELECT * FROM semel_moment ORDER BY at DESC LIMIT :look) AS m
WHERE :route IS NULL OR route = :route
ORDER BY at DESC LIMIT :most

-- name: newest_of_kind (reads)
SELECT at, id, kind, route, who, attempt, root, details, number
FROM (SELECT * FROM semel_moment WHERE kind = :kind ORDER BY at DESC LIMIT :look) AS m
WHERE :route IS NULL OR route = :route
ORDER BY at DESC LIMIT :most

-- name: minutes (reads)
SELECT at, route, kinds FROM semel_minute WHERE at >= :since AND at < :until
