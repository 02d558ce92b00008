-- The inbox and the dead letters, for MySQL 8 and MariaDB. [[…]] is repeated for each row. The first statements run in the
-- caller's transaction, the others are Ops of the store.

-- name: insert (writes)
-- A plain insert: INSERT IGNORE would also ignore an id that does not fit. If the row exists, it fails, and only the
-- statement is undone. A rival waits here until the first transaction ends. If that one is rolled back, the rival inserts
-- the row.
INSERT INTO semel_inbox (consumer, id, received) VALUES [[(:consumer, :id, {{now}})]]

-- name: known (reads)
-- As it is committed now. Under REPEATABLE READ a plain read would show an older state.
SELECT id FROM semel_inbox WHERE consumer = :consumer AND id IN ([[:id]]) LOCK IN SHARE MODE

-- name: forget_messages (writes)
DELETE FROM semel_inbox WHERE consumer = :consumer AND id IN ([[:id]])

-- name: add_places (writes)
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES [[(:consumer, :stream, 0)]]
ON DUPLICATE KEY UPDATE sequence = sequence

-- name: lock_places (reads)
SELECT stream, sequence FROM semel_inbox_stream WHERE consumer = :consumer AND stream IN ([[:stream]]) FOR UPDATE

-- name: move_streams (writes)
-- Never backwards.
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES [[(:consumer, :stream, :sequence)]]
ON DUPLICATE KEY UPDATE sequence = GREATEST(sequence, VALUES(sequence))

-- name: places (reads)
SELECT stream, sequence FROM semel_inbox_stream WHERE consumer = :consumer AND stream IN ([[:stream]])

-- name: seen (reads)
SELECT id FROM semel_inbox_start WHERE consumer = :consumer AND id IN ([[:id]])

-- name: see (writes)
INSERT IGNORE INTO semel_inbox_start (consumer, id, starts, last) VALUES [[(:consumer, :id, 0, {{now}})]]

-- name: start (writes)
INSERT INTO semel_inbox_start (consumer, id, starts, last) VALUES (:consumer, :id, 1, {{now}})
ON DUPLICATE KEY UPDATE starts = starts + 1, last = {{now}}

-- name: starts (reads)
SELECT starts FROM semel_inbox_start WHERE consumer = :consumer AND id = :id

-- name: forget_starts (writes)
DELETE FROM semel_inbox_start WHERE consumer = :consumer AND id IN ([[:id]])

-- name: take_back_starts (writes)
UPDATE semel_inbox_start SET starts = starts - 1 WHERE consumer = :consumer AND id IN ([[:id]]) AND starts > 0

-- name: note_keep (writes)
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES (:consumer, :stream, :sequence)
ON DUPLICATE KEY UPDATE sequence = VALUES(sequence)

-- name: longest_keep (reads)
SELECT COALESCE(MAX(sequence), 0) FROM semel_inbox_stream WHERE consumer = :consumer

-- name: purge (writes)
DELETE FROM semel_inbox WHERE received < {{now}} - INTERVAL :keep MICROSECOND ORDER BY received LIMIT :most

-- name: purge_starts (writes)
DELETE FROM semel_inbox_start WHERE last < {{now}} - INTERVAL :keep MICROSECOND

-- name: bury (writes)
-- A delivery from before a redrive may come late, so the number of redrives does not fall.
INSERT INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
) VALUES (
    :origin, {{now}}, :reason, :sequence,
    CASE WHEN :created = 0 THEN {{now}} ELSE '1970-01-01' + INTERVAL :created MICROSECOND END, :starts, :redrives, :id,
    :type, :source, :destination, :stream, :subject, :content_type, :headers, :data
)
ON DUPLICATE KEY UPDATE
    died = VALUES(died), reason = VALUES(reason), starts = VALUES(starts), redrives = GREATEST(redrives, VALUES(redrives))

-- name: applied (reads)
SELECT 1 FROM semel_inbox WHERE consumer = :consumer AND id = :id

-- name: park (writes)
-- A stream that is parked has the sequence of its first dead letter, as a negative number. It is not parked if it is
-- behind this message already: another process had the message delivered again, and applied it.
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES (:consumer, :stream, - :sequence)
ON DUPLICATE KEY UPDATE sequence = IF(
    sequence < VALUES(sequence) OR sequence BETWEEN 0 AND - VALUES(sequence) - 1, VALUES(sequence), sequence
)

-- name: chosen (reads)
-- A part of the next three: the dead letters that fit a filter.
(:origin IS NULL OR origin = :origin) AND (:type IS NULL OR type = :type)
AND (:destination IS NULL OR destination = :destination) AND (:stream IS NULL OR stream = :stream)
AND (:message IS NULL OR id = :message) AND LOCATE(:reason, reason) > 0
AND died <= {{now}} - INTERVAL :older MICROSECOND

-- name: letters (reads)
SELECT position, origin, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', died) / 1e6, reason, starts, id, type, data, source,
       destination, stream, sequence, subject, content_type, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created) / 1e6,
       headers, redrives
FROM semel_dead_letter WHERE position > :after AND {{chosen}} ORDER BY position LIMIT :most

-- name: count (reads)
SELECT COUNT(*), COALESCE(MAX(position), 0)
FROM (SELECT position FROM semel_dead_letter WHERE {{chosen}} ORDER BY position LIMIT :most) AS counted

-- name: choose (writes)
SELECT position, id, stream, sequence, origin FROM semel_dead_letter WHERE position <= :last AND {{chosen}}
ORDER BY stream, sequence, position LIMIT :most FOR UPDATE

-- name: lock_streams (writes)
-- Whoever adds a message to these streams has committed it by now, or waits until the end of this transaction.
SELECT name FROM semel_stream WHERE name IN ([[:stream]]) ORDER BY name FOR UPDATE

-- name: stage_outbox (reads)
-- A part of the next two.
INSERT IGNORE INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
)
SELECT '~', due, '', sequence, created, starts, redrives, id, type, source, destination, stream, subject, content_type,
       headers, data
FROM semel_outbox

-- name: stage (writes)
-- The messages of these streams that are in the outbox are to be sent after those that come back. So they leave it for a
-- moment, and come back with them.
{{stage_outbox}} WHERE stream IN ([[:stream]])

-- name: stage_copies (writes)
-- The same for the messages that come back, if they are in the outbox as well. A relay may have sent such a row, and then
-- deletes it. What comes back must not go with it, so it gets a new row, and an id that is new to the broker.
{{stage_outbox}} WHERE id IN ([[:id]])

-- name: delete_staged (writes)
-- Only these: the stream may be new here, and somebody adds its first message just now.
DELETE o FROM semel_dead_letter d STRAIGHT_JOIN semel_outbox o ON o.id = d.id WHERE d.origin = '~'

-- name: staged (writes)
SELECT position, id, stream, sequence, origin FROM semel_dead_letter WHERE origin = '~' FOR UPDATE

-- name: return_letters (writes)
INSERT IGNORE INTO semel_outbox (
    sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
    headers, data
)
SELECT sequence, IF(origin = '~', died, {{now}}), created, CASE position [[WHEN :position THEN :lane]] END,
       IF(origin = '~', starts, 0), MAX(redrives) OVER same + MAX(origin <> '~') OVER same, id, type, source,
       destination, stream, subject, content_type, headers, data
FROM semel_dead_letter WHERE position IN ([[:position]]) WINDOW same AS (PARTITION BY id)
ORDER BY stream, sequence, position

-- name: forget_starts_of (writes)
-- A message that comes back has all of its tries, also if its consumer had no time to forget them.
DELETE s FROM semel_dead_letter d STRAIGHT_JOIN semel_inbox_start s ON s.consumer = d.origin AND s.id = d.id
WHERE d.position IN ([[:position]])

-- name: delete_letters (writes)
DELETE FROM semel_dead_letter WHERE position IN ([[:position]])

-- name: unpark (writes)
DELETE FROM semel_hold WHERE stream IN ([[:stream]]) AND until > {{now}} + INTERVAL 10 YEAR
  AND NOT EXISTS (SELECT 1 FROM semel_dead_letter d WHERE d.origin = '' AND d.stream = semel_hold.stream)

-- name: parked (reads)
-- Which consumers have parked these streams at a message that is no dead letter of theirs any more.
SELECT s.consumer, s.stream, s.sequence FROM semel_inbox_stream s
WHERE s.sequence < 0 AND s.stream IN ([[:stream]]) AND NOT EXISTS (
    SELECT 1 FROM semel_dead_letter d WHERE d.origin = s.consumer AND d.stream = s.stream AND d.sequence = - s.sequence
)

-- name: lock_parked (writes)
-- Whoever gives up a message of this stream has committed it by now, or waits until the end of this transaction.
SELECT 1 FROM semel_inbox_stream
WHERE consumer = :consumer AND stream = :stream AND sequence = - :sequence FOR UPDATE

-- name: leave_parked (writes)
-- The stream's first dead letter is applied or purged. If there are more, the stream is parked at the next one.
UPDATE semel_inbox_stream SET sequence = COALESCE((
    SELECT - MIN(d.sequence) FROM semel_dead_letter d
    WHERE d.origin = :consumer AND d.stream = :stream AND d.sequence > :sequence
), :sequence)
WHERE consumer = :consumer AND stream = :stream AND sequence = - :sequence
