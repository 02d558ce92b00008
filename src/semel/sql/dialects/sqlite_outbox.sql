-- The relay's statements for SQLite. They run in the writer's transaction. :rows is a list in JSON. Times are in
-- microseconds; :now is the writer's clock.

-- name: lock_lanes (writes)
SELECT lane, relay FROM semel_lane ORDER BY lane

-- name: add_lanes (writes)
INSERT OR IGNORE INTO semel_lane (lane) SELECT json_extract(value, '$.lane') FROM json_each(:rows)

-- name: relays (writes)
SELECT relay, lease_end > :now, started FROM semel_relay

-- name: count_starts (writes)
UPDATE semel_outbox SET starts = starts + 1
WHERE position IN (SELECT json_extract(value, '$.position') FROM json_each(:rows))

-- name: remove_relays (writes)
DELETE FROM semel_relay WHERE hex(relay) IN (SELECT json_extract(value, '$.relay') FROM json_each(:rows))

-- name: join (writes)
INSERT INTO semel_relay (relay, lease_end, started) VALUES (:relay, :now + :lease, '[]')
ON CONFLICT (relay) DO UPDATE SET lease_end = max(lease_end, excluded.lease_end), started = '[]'

-- name: free_lanes (writes)
UPDATE semel_lane SET relay = NULL WHERE lane IN (SELECT json_extract(value, '$.lane') FROM json_each(:rows))

-- name: take_lanes (writes)
UPDATE semel_lane SET relay = :relay WHERE lane IN (SELECT json_extract(value, '$.lane') FROM json_each(:rows))

-- name: renew (writes)
UPDATE semel_relay SET lease_end = max(lease_end, :now + :lease) WHERE relay = :relay AND lease_end > :now

-- name: found (writes)
-- The columns are read last, so that data beyond the limit is not.
SELECT o.position, o.starts, o.id, o.type, o.data, o.source, o.destination, o.stream, o.sequence, o.subject,
       o.content_type, o.created / 1e6, o.headers, o.redrives
FROM (SELECT position, sum(size) OVER (ORDER BY position) - size AS before FROM (
    SELECT o.position, length(o.data) AS size FROM semel_outbox o
    WHERE o.position > :after AND (o.due <= :now OR o.stream <> '')
      AND o.lane IN (
          SELECT l.lane FROM semel_lane l JOIN semel_relay r ON r.relay = l.relay
          WHERE l.relay = :relay AND r.lease_end > :now
      )
      AND NOT EXISTS (SELECT 1 FROM semel_hold h WHERE h.stream = o.stream AND h.until > :now)
    ORDER BY o.position LIMIT :most
)) AS summed
CROSS JOIN semel_outbox o ON o.position = summed.position
WHERE summed.before < {{bytes}}
ORDER BY o.position

-- name: lock (writes)
SELECT started FROM semel_relay WHERE relay = :relay AND lease_end > :now

-- name: started (writes)
UPDATE semel_relay SET started = :started WHERE relay = :relay

-- name: count (writes)
SELECT count(*) FROM semel_outbox
WHERE position IN (SELECT json_extract(value, '$.position') FROM json_each(:rows))

-- name: streams (writes)
SELECT position, stream, id FROM semel_outbox
WHERE position IN (SELECT json_extract(value, '$.position') FROM json_each(:rows)) ORDER BY position

-- name: release_holds (writes)
DELETE FROM semel_hold WHERE until <= :now AND stream IN (
    SELECT stream FROM semel_outbox WHERE position IN (SELECT json_extract(value, '$.position') FROM json_each(:rows))
)

-- name: delete (writes)
DELETE FROM semel_outbox WHERE position IN (SELECT json_extract(value, '$.position') FROM json_each(:rows))

-- name: put_off (writes)
UPDATE semel_outbox AS o SET due = :now + json_extract(g.value, '$.after')
FROM json_each(:rows) AS g WHERE o.position = json_extract(g.value, '$.position')

-- name: hold (writes)
INSERT INTO semel_hold (stream, until, reason)
SELECT json_extract(value, '$.stream'), :now + json_extract(value, '$.after'), json_extract(value, '$.reason')
FROM json_each(:rows)
WHERE true
ON CONFLICT (stream) DO UPDATE SET until = excluded.until, reason = excluded.reason WHERE until <= excluded.until

-- name: park (writes)
INSERT INTO semel_hold (stream, until, reason)
SELECT json_extract(value, '$.stream'), 9223372036854775807, json_extract(value, '$.reason') FROM json_each(:rows)
WHERE true
ON CONFLICT (stream) DO UPDATE SET until = excluded.until, reason = excluded.reason

-- name: bury (writes)
INSERT INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
)
SELECT '', :now, json_extract(g.value, '$.reason'), o.sequence, o.created, o.starts, o.redrives, o.id, o.type, o.source,
       o.destination, o.stream, o.subject, o.content_type, o.headers, o.data
FROM json_each(:rows) AS g JOIN semel_outbox o ON o.position = json_extract(g.value, '$.position')
WHERE true
ORDER BY o.position
ON CONFLICT (origin, id) DO UPDATE SET died = excluded.died, reason = excluded.reason, starts = excluded.starts,
    redrives = excluded.redrives

-- name: followers (writes)
SELECT position FROM semel_outbox WHERE stream = :stream AND position > :position ORDER BY position

-- name: leave (writes)
DELETE FROM semel_relay WHERE relay = :relay

-- name: free_lanes_of (writes)
UPDATE semel_lane SET relay = NULL WHERE relay = :relay

-- name: bump (writes)
-- For the caller's connection, as all that follow.
INSERT INTO semel_stream (name, sequence) VALUES (:stream, 1) ON CONFLICT (name) DO UPDATE SET sequence = sequence + 1

-- name: add (writes)
INSERT INTO semel_outbox (
    sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
    headers, data
)
SELECT coalesce((SELECT sequence FROM semel_stream WHERE name = :stream), 0), :now + :delay, :now, :lane, 0, 0, :id,
       :type, :source, :destination, :stream, :subject, :content_type, :headers, :data
WHERE true
ON CONFLICT (id) DO NOTHING
RETURNING 1

-- name: unbump (writes)
UPDATE semel_stream SET sequence = sequence - 1 WHERE name = :stream

-- name: depths (reads)
-- It counts the oldest :most messages.
SELECT destination, count(*), count(CASE WHEN starts > 0 THEN 1 END), (:now - min(created)) / 1e6
FROM (SELECT destination, starts, created FROM semel_outbox ORDER BY position LIMIT :most)
GROUP BY destination ORDER BY 2 DESC, 1

-- name: held (reads)
-- A stream whose next try is due waits as long as it has messages: maybe no relay is running.
SELECT h.stream, count(o.position), CASE WHEN h.until < 9223372036854775807 THEN (h.until - :now) / 1e6 END, h.reason
FROM semel_hold h
LEFT JOIN (SELECT position, stream FROM semel_outbox ORDER BY position LIMIT :look) AS o ON o.stream = h.stream
GROUP BY h.stream HAVING h.until > :now OR count(o.position) > 0 ORDER BY h.until DESC, h.stream LIMIT :most

-- name: owners (reads)
SELECT count(DISTINCT r.relay), count(l.lane)
FROM semel_relay r LEFT JOIN semel_lane l ON l.relay = r.relay WHERE r.lease_end > :now
