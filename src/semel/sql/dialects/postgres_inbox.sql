-- The inbox and the dead letters, for PostgreSQL. The first statements run in the caller's transaction, the others are
-- Ops of the store.

-- name: insert (writes, as text insert)
-- A rival waits here until the first transaction ends. If that one is rolled back, the rival inserts the row.
INSERT INTO semel_inbox (consumer, id, received) VALUES (:consumer, :id, {{now}})
ON CONFLICT (consumer, id) DO NOTHING RETURNING 1

-- name: insert_many (writes)
INSERT INTO semel_inbox (consumer, id, received) SELECT :consumer::text, id, {{now}} FROM unnest(:ids::text[]) AS g (id)
ON CONFLICT (consumer, id) DO NOTHING RETURNING id

-- name: forget_messages (writes)
DELETE FROM semel_inbox WHERE consumer = :consumer::text AND id = ANY (:ids::text[])

-- name: lock_places (writes)
-- Lock the streams' rows for the rest of the transaction, and read them. A new row has the sequence 0.
INSERT INTO semel_inbox_stream AS s (consumer, stream, sequence)
SELECT :consumer::text, stream, 0 FROM unnest(:streams::text[]) AS g (stream)
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = s.sequence RETURNING stream, sequence

-- name: move_streams (writes)
-- Never backwards.
INSERT INTO semel_inbox_stream AS s (consumer, stream, sequence)
SELECT :consumer::text, stream, sequence FROM unnest(:streams::text[], :sequences::bigint[]) AS g (stream, sequence)
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = GREATEST(s.sequence, excluded.sequence)

-- name: places (reads)
SELECT stream, sequence FROM semel_inbox_stream WHERE consumer = :consumer::text AND stream = ANY (:streams::text[])

-- name: seen (reads)
SELECT id FROM semel_inbox_start WHERE consumer = :consumer::text AND id = ANY (:ids::text[])

-- name: see (writes)
INSERT INTO semel_inbox_start (consumer, id, starts, last)
SELECT :consumer::text, id, 0, {{now}} FROM unnest(:ids::text[]) AS g (id)
ON CONFLICT (consumer, id) DO NOTHING

-- name: start (writes)
INSERT INTO semel_inbox_start AS s (consumer, id, starts, last) VALUES (:consumer::text, :id::text, 1, {{now}})
ON CONFLICT (consumer, id) DO UPDATE SET starts = s.starts + 1, last = {{now}} RETURNING starts

-- name: forget_starts (writes)
DELETE FROM semel_inbox_start WHERE consumer = :consumer::text AND id = ANY (:ids::text[])

-- name: take_back_starts (writes)
UPDATE semel_inbox_start SET starts = starts - 1 WHERE consumer = :consumer::text AND id = ANY (:ids::text[]) AND starts > 0

-- name: note_keep (writes)
INSERT INTO semel_inbox_stream (consumer, stream, sequence) VALUES (:consumer::text, :stream::text, :sequence::bigint)
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = excluded.sequence

-- name: longest_keep (reads)
SELECT coalesce(max(sequence), 0) FROM semel_inbox_stream WHERE consumer = :consumer::text

-- name: purge (writes)
DELETE FROM semel_inbox WHERE (consumer, id) IN (
    SELECT consumer, id FROM semel_inbox WHERE received < {{now}} - :keep::float8 * interval '1 second'
    ORDER BY received LIMIT :most::integer FOR UPDATE SKIP LOCKED
) RETURNING 1

-- name: tend (writes)
SELECT semel_tend_inbox(:keep::float8, :most::integer)

-- name: purge_starts (writes)
DELETE FROM semel_inbox_start WHERE last < {{now}} - :keep::float8 * interval '1 second'

-- name: bury (writes)
-- A delivery from before a redrive may come late, so the number of redrives does not fall.
INSERT INTO semel_dead_letter AS d (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
) VALUES (
    :origin::text, {{now}}, :reason::text, :sequence::bigint,
    CASE WHEN :created::float8 = 0 THEN {{now}} ELSE to_timestamp(:created) END, :starts::integer, :redrives::integer,
    :id::text, :type::text, :source::text, :destination::text, :stream::text, :subject::text, :content_type::text,
    :headers::text, :data::bytea
)
ON CONFLICT (origin, id) DO UPDATE SET
    died = excluded.died, reason = excluded.reason, starts = excluded.starts,
    redrives = greatest(d.redrives, excluded.redrives)

-- name: applied (reads)
SELECT 1 FROM semel_inbox WHERE consumer = :consumer::text AND id = :id::text

-- name: park (writes)
-- A stream that is parked has the sequence of its first dead letter, as a negative number. It is not parked if it is
-- behind this message already: another process had the message delivered again, and applied it.
INSERT INTO semel_inbox_stream AS s (consumer, stream, sequence)
VALUES (:consumer::text, :stream::text, - :sequence::bigint)
ON CONFLICT (consumer, stream) DO UPDATE SET sequence = excluded.sequence
WHERE s.sequence < excluded.sequence OR s.sequence BETWEEN 0 AND - excluded.sequence - 1

-- name: chosen (reads)
-- A part of the next three: the dead letters that fit a filter.
(:origin::text IS NULL OR origin = :origin) AND (:type::text IS NULL OR type = :type)
AND (:destination::text IS NULL OR destination = :destination) AND (:stream::text IS NULL OR stream = :stream)
AND (:message::text IS NULL OR id = :message) AND strpos(reason, :reason::text) > 0
AND died <= {{now}} - :older::float8 * interval '1 second'

-- name: letters (reads)
SELECT position, origin, extract(epoch FROM died)::float8, reason, starts, id, type, data, source, destination, stream,
       sequence, subject, content_type, extract(epoch FROM created)::float8, headers, redrives
FROM semel_dead_letter WHERE position > :after::bigint AND {{chosen}} ORDER BY position LIMIT :most::integer

-- name: count (reads)
SELECT count(*)::integer, coalesce(max(position), 0)::bigint
FROM (SELECT position FROM semel_dead_letter WHERE {{chosen}} ORDER BY position LIMIT :most::integer) AS counted

-- name: choose (writes)
SELECT position, id, stream, sequence, origin FROM semel_dead_letter WHERE position <= :last::bigint AND {{chosen}}
ORDER BY stream, sequence, position LIMIT :most::integer FOR UPDATE

-- name: lock_streams (writes)
-- Whoever adds a message to these streams has committed it by now, or waits until the end of this transaction.
SELECT name FROM semel_stream WHERE name = ANY (:streams::text[]) ORDER BY name FOR UPDATE

-- name: lock_cursor (writes)
-- So has a relay that moves messages of these streams from the log to the outbox.
SELECT relay FROM semel_cursor FOR UPDATE

-- name: stage_gone (reads)
-- A part of the next two.
INSERT INTO semel_dead_letter (
    origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
    content_type, headers, data
)
SELECT '~', due, '', sequence, created, starts, redrives, id, type, source, destination, stream, subject, content_type,
       headers, data
FROM gone
ORDER BY position
ON CONFLICT (origin, id) DO NOTHING

-- name: stage (writes)
-- The messages of these streams that are in the outbox are to be sent after those that come back. So they leave it for a
-- moment, and come back with them.
WITH gone AS (DELETE FROM semel_outbox WHERE stream = ANY (:streams::text[]) RETURNING *)
{{stage_gone}}

-- name: stage_copies (writes)
-- The same for the messages that come back, if they are in the outbox as well. A relay may have sent such a row, and then
-- deletes it. What comes back must not go with it, so it gets a new row, and an id that is new to the broker.
WITH gone AS (DELETE FROM semel_outbox WHERE id = ANY (:ids::text[]) AND NOT fresh RETURNING *)
{{stage_gone}}

-- name: staged (writes)
SELECT position, id, stream, sequence, origin FROM semel_dead_letter WHERE origin = '~'

-- name: return_letters (writes)
INSERT INTO semel_outbox (
    sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
    headers, data
)
SELECT sequence, CASE WHEN origin = '~' THEN died ELSE {{now}} END, created, lane,
       CASE WHEN origin = '~' THEN starts ELSE 0 END,
       max(redrives) OVER same + max(CASE WHEN origin = '~' THEN 0 ELSE 1 END) OVER same, id, type, source, destination,
       stream, subject, content_type, headers, data
FROM unnest(:positions::bigint[], :lanes::smallint[]) AS g (position, lane) JOIN semel_dead_letter d USING (position)
WINDOW same AS (PARTITION BY id)
ORDER BY stream, sequence, position
ON CONFLICT (id) WHERE NOT fresh DO NOTHING

-- name: forget_starts_of (writes)
-- A message that comes back has all of its tries, also if its consumer had no time to forget them.
DELETE FROM semel_inbox_start s USING semel_dead_letter d
WHERE d.position = ANY (:positions::bigint[]) AND s.consumer = d.origin AND s.id = d.id

-- name: delete_letters (writes)
DELETE FROM semel_dead_letter WHERE position = ANY (:positions::bigint[])

-- name: unpark (writes)
DELETE FROM semel_hold h
WHERE h.stream = ANY (:streams::text[]) AND h.until > {{now}} + interval '10 years'
  AND NOT EXISTS (SELECT 1 FROM semel_dead_letter d WHERE d.origin = '' AND d.stream = h.stream)

-- name: parked (reads)
-- Which consumers have parked these streams at a message that is no dead letter of theirs any more.
SELECT s.consumer, s.stream, s.sequence FROM semel_inbox_stream s
WHERE s.sequence < 0 AND s.stream = ANY (:streams::text[]) AND NOT EXISTS (
    SELECT 1 FROM semel_dead_letter d WHERE d.origin = s.consumer AND d.stream = s.stream AND d.sequence = - s.sequence
)

-- name: lock_parked (writes)
-- Whoever gives up a message of this stream has committed it by now, or waits until the end of this transaction.
SELECT 1 FROM semel_inbox_stream
WHERE consumer = :consumer::text AND stream = :stream::text AND sequence = - :sequence::bigint FOR UPDATE

-- name: leave_parked (writes)
-- The stream's first dead letter is applied or purged. If there are more, the stream is parked at the next one.
UPDATE semel_inbox_stream SET sequence = COALESCE((
    SELECT - MIN(d.sequence) FROM semel_dead_letter d
    WHERE d.origin = :consumer::text AND d.stream = :stream::text AND d.sequence > :sequence::bigint
), :sequence::bigint)
WHERE consumer = :consumer::text AND stream = :stream::text AND sequence = - :sequence::bigint
