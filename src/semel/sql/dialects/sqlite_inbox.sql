-- The inbox and the dead letters, for SQLite. The first statements run in the caller's transaction, the others are Ops of
-- the store. Times are in microseconds; :now is the clock of this machine.

-- name: insert (writes)
-- Takes the write lock of the file: a rival waits here until the first transaction ends.
INSERT INTO semel_inbox (consumer, id, received) VALUES (:consumer, :id, :now)
ON CONFLICT (consumer, id) DO NOTHING RETURNING 1

-- name: insert_many (writes)
INSERT INTO semel_inbox (consumer, id, received) SELECT :consumer, value, :now FROM json_each(:ids) WHERE true
ON CONFLICT (consumer, id) DO NOTHING RETURNING id

-- name: forget_messages (writes)
DELETE FROM semel_inbox WHERE consumer = :consumer AND id IN (SELECT value FROM json_each(:ids))

-- name: lock_places (writes)
INSERT INTO semel_inbox_stream (consumer, stream, sequence)
SELECT :consumer, value, 0 FROM json_each(:streams) WHERE true
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = sequence RETURNING stream, sequence

-- name: move_streams (writes)
-- Never backwards.
INSERT INTO semel_inbox_stream (consumer, stream, sequence)
SELECT :consumer, s.value, q.value FROM json_each(:streams) s JOIN json_each(:sequences) q USING (key) WHERE true
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = max(sequence, excluded.sequence)

-- name: places (reads)
SELECT stream, sequence FROM semel_inbox_stream
WHERE consumer = :consumer AND stream IN (SELECT value FROM json_each(:streams))

-- name: seen (reads)
SELECT id FROM semel_inbox_start WHERE consumer = :consumer AND id IN (SELECT value FROM json_each(:ids))

-- name: see (writes)
INSERT INTO semel_inbox_start (consumer, id, starts, last)
SELECT :consumer, value, 0, :now FROM json_each(:ids) WHERE true
ON CONFLICT (consumer, id) DO NOTHING

-- name: start (writes)
INSERT INTO semel_inbox_start (consumer, id, starts, last) VALUES (:consumer, :id, 1, :now)
ON CONFLICT (consumer, id) DO UPDATE SET starts = starts + 1, last = :now RETURNING starts

-- name: forget_starts (writes)
DELETE FROM semel_inbox_start WHERE consumer = :consumer AND id IN (SELECT value FROM json_each(:ids))

-- name: take_back_starts (writes)
UPDATE semel_inbox_start SET starts = starts - 1
WHERE consumer = :consumer AND id IN (SELECT value FROM json_each(:ids)) AND starts > 0

-- name: note_keep (writes)
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES (:consumer, :stream, :sequence)
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = excluded.sequence

-- name: longest_keep (reads)
SELECT coalesce(max(sequence), 0) FROM semel_inbox_stream WHERE consumer = :consumer

-- name: purge (writes)
DELETE FROM semel_inbox WHERE (consumer, id) IN (
    SELECT consumer, id FROM semel_inbox WHERE received < :now - :keep ORDER BY received LIMIT :most
) RETURNING 1

-- name: purge_starts (writes)
DELETE FROM semel_inbox_start WHERE last < :now - :keep

-- name: bury (writes)
-- A delivery from before a redrive may come late, so the number of redrives does not fall.
INSERT INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
) VALUES (
    :origin, :now, :reason, :sequence, CASE WHEN :created = 0 THEN :now ELSE :created END, :starts, :redrives, :id,
    :type, :source, :destination, :stream, :subject, :content_type, :headers, :data
)
ON CONFLICT (origin, id) DO UPDATE SET
    died = excluded.died, reason = excluded.reason, starts = excluded.starts, redrives = max(redrives, excluded.redrives)

-- name: applied (reads)
SELECT 1 FROM semel_inbox WHERE consumer = :consumer AND id = :id

-- name: park (writes)
-- A stream that is parked has the sequence of its first dead letter, as a negative number. It is not parked if it is
-- behind this message already: another process had the message delivered again, and applied it.
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES (:consumer, :stream, - :sequence)
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = excluded.sequence
WHERE sequence < excluded.sequence OR sequence BETWEEN 0 AND - excluded.sequence - 1

-- name: chosen (reads)
-- A part of the next three: the dead letters that fit a filter.
(:origin IS NULL OR origin = :origin) AND (:type IS NULL OR type = :type)
AND (:destination IS NULL OR destination = :destination) AND (:stream IS NULL OR stream = :stream)
AND (:message IS NULL OR id = :message) AND instr(reason, :reason) > 0 AND died <= :now - :older

-- name: letters (reads)
SELECT position, origin, died / 1e6, reason, starts, id, type, data, source, destination, stream, sequence, subject,
       content_type, created / 1e6, headers, redrives
FROM semel_dead_letter WHERE position > :after AND {{chosen}} ORDER BY position LIMIT :most

-- name: count (reads)
SELECT count(*), coalesce(max(position), 0)
FROM (SELECT position FROM semel_dead_letter WHERE {{chosen}} ORDER BY position LIMIT :most)

-- name: choose (writes)
SELECT position, id, stream, sequence, origin FROM semel_dead_letter WHERE position <= :last AND {{chosen}}
ORDER BY stream, sequence, position LIMIT :most

-- name: stage_outbox (reads)
-- A part of the next two.
INSERT OR IGNORE INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
)
SELECT '~', due, '', sequence, created, starts, redrives, id, type, source, destination, stream, subject, content_type,
       headers, data
FROM semel_outbox

-- name: stage (writes)
-- The messages of these streams that are in the outbox are to be sent after those that come back. So they leave it for a
-- moment, and come back with them.
{{stage_outbox}} WHERE stream IN (SELECT value FROM json_each(:streams))

-- name: stage_copies (writes)
-- The same for the messages that come back, if they are in the outbox as well. A relay may have sent such a row, and then
-- deletes it. What comes back must not go with it, so it gets a new row, and an id that is new to the broker.
{{stage_outbox}} WHERE id IN (SELECT value FROM json_each(:ids))

-- name: delete_staged (writes)
DELETE FROM semel_outbox WHERE id IN (SELECT id FROM semel_dead_letter WHERE origin = '~')

-- name: staged (writes)
SELECT position, id, stream, sequence, origin FROM semel_dead_letter WHERE origin = '~'

-- name: return_letters (writes)
INSERT INTO semel_outbox (
    sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
    headers, data
)
SELECT d.sequence, iif(d.origin = '~', d.died, :now), d.created, l.value, iif(d.origin = '~', d.starts, 0),
       max(d.redrives) OVER same + max(d.origin <> '~') OVER same, d.id, d.type, d.source, d.destination, d.stream,
       d.subject, d.content_type, d.headers, d.data
FROM json_each(:positions) p JOIN json_each(:lanes) l ON l.key = p.key JOIN semel_dead_letter d ON d.position = p.value
WHERE true WINDOW same AS (PARTITION BY d.id) ORDER BY d.stream, d.sequence, d.position
ON CONFLICT (id) DO NOTHING

-- name: forget_starts_of (writes)
-- A message that comes back has all of its tries, also if its consumer had no time to forget them.
DELETE FROM semel_inbox_start WHERE (consumer, id) IN (
    SELECT origin, id FROM semel_dead_letter WHERE position IN (SELECT value FROM json_each(:positions))
)

-- name: delete_letters (writes)
DELETE FROM semel_dead_letter WHERE position IN (SELECT value FROM json_each(:positions))

-- name: unpark (writes)
DELETE FROM semel_hold
WHERE stream IN (SELECT value FROM json_each(:streams)) AND until > :now + 315360000000000
  AND NOT EXISTS (SELECT 1 FROM semel_dead_letter d WHERE d.origin = '' AND d.stream = semel_hold.stream)

-- name: parked (reads)
-- Which consumers have parked these streams at a message that is no dead letter of theirs any more.
SELECT s.consumer, s.stream, s.sequence FROM semel_inbox_stream s
WHERE s.sequence < 0 AND s.stream IN (SELECT value FROM json_each(:streams)) AND NOT EXISTS (
    SELECT 1 FROM semel_dead_letter d WHERE d.origin = s.consumer AND d.stream = s.stream AND d.sequence = - s.sequence
)

-- name: leave_parked (writes)
-- The stream's first dead letter is applied or purged. If there are more, the stream is parked at the next one.
UPDATE semel_inbox_stream SET sequence = COALESCE((
    SELECT - MIN(d.sequence) FROM semel_dead_letter d
    WHERE d.origin = :consumer AND d.stream = :stream AND d.sequence > :sequence
), :sequence)
WHERE consumer = :consumer AND stream = :stream AND sequence = - :sequence
