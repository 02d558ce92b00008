-- The relay's statements for MySQL 8 and MariaDB. [[…]] is repeated for each row. Each Op is one transaction. A join
-- locks all lanes, so joins come one after the other; every Op but a join locks only the row of its relay.

-- name: lock_lanes (writes)
SELECT lane, relay FROM semel_lane FORCE INDEX (PRIMARY) ORDER BY lane FOR UPDATE

-- name: add_lanes (writes)
INSERT IGNORE INTO semel_lane (lane) VALUES [[(:lane)]]

-- name: relays (writes)
SELECT relay, lease_end > {{now}}, started FROM semel_relay FORCE INDEX (PRIMARY) ORDER BY relay FOR UPDATE

-- name: count_starts (writes)
UPDATE semel_outbox FORCE INDEX (PRIMARY) SET starts = starts + 1 WHERE position IN ([[:position]]) ORDER BY position

-- name: remove_relays (writes)
DELETE FROM semel_relay WHERE relay IN ([[UNHEX(:relay)]])

-- name: join (writes)
INSERT INTO semel_relay (relay, lease_end, started) VALUES (:relay, {{now}} + INTERVAL :lease MICROSECOND, '[]')
ON DUPLICATE KEY UPDATE lease_end = GREATEST(lease_end, {{now}} + INTERVAL :lease MICROSECOND), started = '[]'

-- name: free_lanes (writes)
UPDATE semel_lane SET relay = NULL WHERE lane IN ([[:lane]])

-- name: take_lanes (writes)
UPDATE semel_lane SET relay = :relay WHERE lane IN ([[:lane]])

-- name: renew (writes)
UPDATE semel_relay SET lease_end = GREATEST(lease_end, {{now}} + INTERVAL :lease MICROSECOND)
WHERE relay = :relay AND lease_end > {{now}}

-- name: found (reads)
-- The columns are read last: MySQL puts a derived table with texts and blobs on the disk.
SELECT o.position, o.starts, o.id, o.type, o.data, o.source, o.destination, o.stream, o.sequence, o.subject,
       o.content_type, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', o.created) / 1e6, o.headers, o.redrives
FROM (SELECT position, SUM(size) OVER (ORDER BY position) - size AS size_before FROM (
    SELECT o.position, LENGTH(o.data) AS size
    FROM semel_outbox o FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN semel_lane l FORCE INDEX (PRIMARY) ON l.lane = o.lane AND l.relay = :relay
    STRAIGHT_JOIN semel_relay r FORCE INDEX (PRIMARY) ON r.relay = :relay AND r.lease_end > {{now}}
    LEFT JOIN semel_hold h ON h.stream = o.stream AND h.until > {{now}}
    WHERE o.position > :after AND (o.due <= {{now}} OR o.stream <> '') AND h.stream IS NULL
    ORDER BY o.position LIMIT :most
) AS next) AS summed
STRAIGHT_JOIN semel_outbox o FORCE INDEX (PRIMARY) ON o.position = summed.position
WHERE size_before < {{bytes}}
ORDER BY o.position

-- name: lock (writes)
SELECT started FROM semel_relay WHERE relay = :relay AND lease_end > {{now}} FOR UPDATE

-- name: started (writes)
UPDATE semel_relay SET started = :started WHERE relay = :relay

-- name: count (reads)
SELECT COUNT(*) FROM semel_outbox WHERE position IN ([[:position]])

-- name: streams (reads)
SELECT position, stream, id FROM semel_outbox WHERE position IN ([[:position]]) ORDER BY position

-- name: release_holds (writes)
DELETE h FROM semel_outbox AS o FORCE INDEX (PRIMARY)
STRAIGHT_JOIN semel_hold AS h FORCE INDEX (PRIMARY) ON h.stream = o.stream
WHERE o.position IN ([[:position]]) AND h.until <= {{now}}

-- name: delete (writes)
DELETE FROM semel_outbox WHERE position IN ([[:position]])

-- name: put_off (writes)
UPDATE semel_outbox FORCE INDEX (PRIMARY)
SET due = {{now}} + INTERVAL (CASE position [[WHEN :position THEN :after]] END) MICROSECOND
WHERE position IN ([[:position]]) ORDER BY position

-- name: hold (writes)
INSERT INTO semel_hold (stream, until, reason)
VALUES [[(:stream, {{now}} + INTERVAL :after MICROSECOND, :reason)]]
ON DUPLICATE KEY UPDATE reason = IF(until <= VALUES(until), VALUES(reason), reason),
    until = GREATEST(until, VALUES(until))

-- name: park (writes)
INSERT INTO semel_hold (stream, until, reason) VALUES [[(:stream, '9999-12-31', :reason)]]
ON DUPLICATE KEY UPDATE until = VALUES(until), reason = VALUES(reason)

-- name: bury (writes)
INSERT INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
)
SELECT '', {{now}}, CASE position [[WHEN :position THEN :reason]] END, sequence, created, starts, redrives, id, type,
       source, destination, stream, subject, content_type, headers, data
FROM semel_outbox FORCE INDEX (PRIMARY) WHERE position IN ([[:position]]) ORDER BY position
ON DUPLICATE KEY UPDATE died = VALUES(died), reason = VALUES(reason), starts = VALUES(starts),
    redrives = VALUES(redrives)

-- name: followers (writes)
SELECT position FROM semel_outbox FORCE INDEX (PRIMARY)
WHERE stream = :stream AND position > :position ORDER BY position

-- name: leave (writes)
DELETE FROM semel_relay WHERE relay = :relay

-- name: free_lanes_of (writes)
UPDATE semel_lane SET relay = NULL WHERE relay = :relay

-- name: bump (writes)
-- For the caller's connection, as all that follow.
INSERT INTO semel_stream (name, sequence) VALUES (:stream, 1) ON DUPLICATE KEY UPDATE sequence = sequence + 1

-- name: add_to_stream (writes)
-- Fails if the message is there.
INSERT INTO semel_outbox (
    sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
    headers, data
)
SELECT sequence, {{now}} + INTERVAL :delay MICROSECOND, {{now}}, :lane, 0, 0, :id, :type, :source, :destination, name,
       :subject, :content_type, :headers, :data
FROM semel_stream WHERE name = :stream

-- name: add (writes)
INSERT INTO semel_outbox (
    sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
    headers, data
)
VALUES (
    0, {{now}} + INTERVAL :delay MICROSECOND, {{now}}, :lane, 0, 0, :id, :type, :source, :destination, :stream,
    :subject, :content_type, :headers, :data
)

-- name: unbump (writes)
UPDATE semel_stream SET sequence = sequence - 1 WHERE name = :stream

-- name: depths (reads)
-- It counts the oldest :most messages.
SELECT destination, COUNT(*), COUNT(CASE WHEN starts > 0 THEN 1 END),
       TIMESTAMPDIFF(MICROSECOND, MIN(created), {{now}}) / 1e6
FROM (SELECT destination, starts, created FROM semel_outbox ORDER BY position LIMIT :most) AS oldest
GROUP BY destination ORDER BY 2 DESC, 1

-- name: held (reads)
-- A stream whose next try is due waits as long as it has messages: maybe no relay is running.
SELECT h.stream, COUNT(o.position),
       CASE WHEN h.until < '9999-12-31' THEN TIMESTAMPDIFF(MICROSECOND, {{now}}, h.until) / 1e6 END, h.reason
FROM semel_hold h
LEFT JOIN (SELECT position, stream FROM semel_outbox ORDER BY position LIMIT :look) AS o ON o.stream = h.stream
GROUP BY h.stream, h.until, h.reason HAVING h.until > {{now}} OR COUNT(o.position) > 0 ORDER BY h.until DESC, h.stream LIMIT :most

-- name: owners (reads)
SELECT COUNT(DISTINCT r.relay), COUNT(l.lane)
FROM semel_relay r LEFT JOIN semel_lane l ON l.relay = r.relay WHERE r.lease_end > {{now}}
