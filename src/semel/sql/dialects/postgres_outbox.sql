-- The relay's statements for PostgreSQL. Each is atomic under READ COMMITTED, and locks the relay's row first: either the
-- relay lives and goes on, or another one has removed it. Lanes that a statement reads before it has that lock are right
-- nevertheless, because lanes change hands only by their owner, or with the removal of its row.

-- name: bury (writes)
-- Remove the relays whose lease has ended, free their lanes, and count a start for what they were sending. A row that is
-- locked is being removed by another relay, or belongs to a relay that is alive.
WITH lanes AS (
    INSERT INTO semel_lane (lane) SELECT lane FROM generate_series(0, {{lanes}} - 1) AS g (lane)
    WHERE NOT EXISTS (SELECT 1 FROM semel_lane)
    ON CONFLICT (lane) DO NOTHING
), dead AS (
    DELETE FROM semel_relay r
    USING (SELECT relay FROM semel_relay WHERE lease_end <= {{now}} FOR UPDATE SKIP LOCKED) AS d
    WHERE r.relay = d.relay
    RETURNING r.relay, r.started
), counted AS (
    UPDATE semel_outbox o SET starts = o.starts + 1
    FROM (SELECT unnest(started) AS position FROM dead) AS s
    WHERE o.position = s.position
)
UPDATE semel_lane l SET relay = NULL FROM dead WHERE l.relay = dead.relay

-- name: join (writes)
INSERT INTO semel_relay (relay, lease_end, started)
VALUES (:relay::bytea, {{now}} + :lease::float8 * interval '1 second', '{}')
ON CONFLICT (relay) DO UPDATE SET lease_end = greatest(semel_relay.lease_end, excluded.lease_end), started = '{}'

-- name: balance (writes)
WITH me AS (
    SELECT relay FROM semel_relay WHERE relay = :relay::bytea AND lease_end > {{now}} FOR UPDATE
), mine AS (
    SELECT lane, row_number() OVER (ORDER BY lane) AS place FROM semel_lane WHERE relay = :relay
), share AS (
    SELECT ceil({{lanes}} / greatest(count(*), 1)::numeric)::integer AS most
    FROM semel_relay WHERE lease_end > {{now}}
), taken AS (
    UPDATE semel_lane l SET relay = :relay
    FROM (
        SELECT lane FROM semel_lane WHERE relay IS NULL ORDER BY lane
        LIMIT (SELECT greatest(0, most - (SELECT count(*) FROM mine)) FROM share) FOR UPDATE SKIP LOCKED
    ) AS free
    WHERE l.lane = free.lane AND EXISTS (SELECT 1 FROM me)
    RETURNING l.lane
), surplus AS (
    UPDATE semel_lane l SET relay = NULL
    FROM mine, share, me
    WHERE l.lane = mine.lane AND mine.place > share.most
)
SELECT lane FROM taken
UNION ALL
SELECT mine.lane FROM mine, share, me WHERE mine.place <= share.most
ORDER BY lane

-- name: batch (reads)
-- A part of the next two: the messages that are due, up to a limit of bytes.
SELECT * FROM (
    SELECT *, sum(octet_length(data)) OVER (ORDER BY position) - octet_length(data) AS before FROM (
        SELECT o.* FROM semel_outbox o
        WHERE o.position > :after::bigint AND (o.due <= {{now}} OR o.stream <> '')
          AND o.lane = ANY (ARRAY(SELECT lane FROM semel_lane WHERE relay = :relay::bytea))
          AND NOT EXISTS (SELECT 1 FROM semel_hold h WHERE h.stream = o.stream AND h.until > {{now}})
        ORDER BY o.position LIMIT :most::integer
    ) AS next
) AS summed
WHERE before < {{bytes}}

-- name: ahead (reads)
-- It changes nothing, so it waits for no disk.
SELECT f.position, f.starts, f.id, f.type, f.data, f.source, f.destination, f.stream, f.sequence, f.subject,
       f.content_type, date_part('epoch', f.created), f.headers, f.redrives
FROM ({{batch}}) AS f
WHERE EXISTS (SELECT 1 FROM semel_relay WHERE relay = :relay AND lease_end > {{now}})
ORDER BY f.position

-- name: start (writes)
-- One row without a position says that there is nothing to send; no row, that the lease has ended.
WITH found AS (
    {{batch}}
), me AS (
    UPDATE semel_relay SET lease_end = greatest(lease_end, {{now}} + :lease::float8 * interval '1 second'),
        started = ARRAY(SELECT position FROM found)
    WHERE relay = :relay AND lease_end > {{now}}
    RETURNING relay
)
SELECT f.position, f.starts, f.id, f.type, f.data, f.source, f.destination, f.stream, f.sequence, f.subject,
       f.content_type, date_part('epoch', f.created), f.headers, f.redrives
FROM me LEFT JOIN found f ON true
ORDER BY f.position

-- name: settle (writes)
-- Only what the relay has started is settled. A repeat finds nothing there, and changes nothing. What was read ahead is
-- started only if all of it is still there: otherwise a redrive has put other messages before it. The later messages of a
-- parked stream are looked for without an index: that is rare.
WITH me AS (
    SELECT started FROM semel_relay WHERE relay = :relay::bytea AND lease_end > {{now}} FOR UPDATE
), ahead AS (
    SELECT count(*) = cardinality(:next::bigint[]) AS whole FROM semel_outbox WHERE position = ANY (:next)
), ended AS (
    UPDATE semel_relay r SET started = CASE WHEN ahead.whole THEN :next::bigint[] ELSE '{}' END,
        lease_end = greatest(r.lease_end, {{now}} + :lease::float8 * interval '1 second')
    FROM me, ahead WHERE r.relay = :relay
), gone AS (
    DELETE FROM semel_outbox o
    USING (SELECT unnest(:sent::bigint[]) INTERSECT SELECT unnest(started) FROM me) AS s (position)
    WHERE o.position = s.position
    RETURNING o.stream
), counted AS (
    UPDATE semel_outbox o SET starts = o.starts + g.counts,
        due = CASE WHEN o.stream = '' THEN {{now}} + g.after * interval '1 second' ELSE o.due END
    FROM unnest(:failed::bigint[], :failures::text[], :afters::float8[], :counts::smallint[])
        AS g (position, reason, after, counts), me
    WHERE o.position = g.position AND g.position = ANY (me.started)
    RETURNING o.position, o.stream, {{now}} + g.after * interval '1 second' AS until, g.reason
), buried AS (
    DELETE FROM semel_outbox o
    USING unnest(:dead::bigint[], :causes::text[], :parks::smallint[]) AS g (position, reason, park), me
    WHERE o.position = g.position AND g.position = ANY (me.started)
    RETURNING o.*, g.reason, g.park
), parked AS (
    SELECT DISTINCT ON (stream) stream, position, id, reason FROM buried WHERE park = 1 AND stream <> ''
    ORDER BY stream, position
), followers AS (
    DELETE FROM semel_outbox o USING parked p
    WHERE o.stream = p.stream AND o.position > p.position AND o.position <> ALL (:sent || :dead)
    RETURNING o.*, 'its stream is parked since ' || p.id AS reason, 0::smallint AS park
), held AS (
    INSERT INTO semel_hold AS h (stream, until, reason)
    SELECT DISTINCT ON (stream) stream, until, reason FROM (
        SELECT stream, position, until, reason FROM counted WHERE stream <> ''
        UNION ALL SELECT stream, position, 'infinity', reason FROM parked
    ) AS holds
    ORDER BY stream, until DESC, position
    ON CONFLICT (stream) DO UPDATE SET until = excluded.until, reason = excluded.reason WHERE h.until <= excluded.until
), released AS (
    DELETE FROM semel_hold h
    WHERE h.until <= {{now}} AND h.stream IN (
        SELECT stream FROM gone WHERE stream <> ''
        EXCEPT (SELECT stream FROM counted UNION ALL SELECT stream FROM parked)
    )
), letters AS (
    INSERT INTO semel_dead_letter AS d (
        origin, died, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
        content_type, headers, data
    )
    SELECT '', {{now}}, reason, sequence, created, starts, redrives, id, type, source, destination, stream, subject,
           content_type, headers, data
    FROM (
        -- A message may stand in the outbox twice: added, and redriven after a consumer had given it up.
        SELECT DISTINCT ON (id) * FROM (SELECT * FROM buried UNION ALL SELECT * FROM followers) AS moved
        ORDER BY id, redrives DESC
    ) AS each
    ORDER BY position
    ON CONFLICT (origin, id) DO UPDATE SET died = excluded.died, reason = excluded.reason, starts = excluded.starts,
        redrives = excluded.redrives
)
SELECT ahead.whole FROM me, ahead

-- name: settle_sent (writes)
-- The same, if all that is to be settled was sent.
WITH me AS (
    SELECT started FROM semel_relay WHERE relay = :relay::bytea AND lease_end > {{now}} FOR UPDATE
), ahead AS (
    SELECT count(*) = cardinality(:next::bigint[]) AS whole FROM semel_outbox WHERE position = ANY (:next)
), ended AS (
    UPDATE semel_relay r SET started = CASE WHEN ahead.whole THEN :next::bigint[] ELSE '{}' END,
        lease_end = greatest(r.lease_end, {{now}} + :lease::float8 * interval '1 second')
    FROM me, ahead WHERE r.relay = :relay
), gone AS (
    DELETE FROM semel_outbox o
    USING (SELECT unnest(:sent::bigint[]) INTERSECT SELECT unnest(started) FROM me) AS s (position)
    WHERE o.position = s.position
    RETURNING o.stream
), released AS (
    DELETE FROM semel_hold h WHERE h.until <= {{now}} AND h.stream = ANY (ARRAY(SELECT stream FROM gone WHERE stream <> ''))
)
SELECT ahead.whole FROM me, ahead

-- name: leave (writes)
-- It has no message of the log under way either, so the next owner of the cursor counts no start.
WITH gone AS (
    DELETE FROM semel_relay WHERE relay = :relay::bytea RETURNING relay
), passed_on AS (
    UPDATE semel_cursor c SET relay = NULL, started = NULL FROM gone WHERE c.relay = gone.relay
)
UPDATE semel_lane l SET relay = NULL FROM gone WHERE l.relay = gone.relay

-- name: add (writes, as text add)
-- For the caller's connection. The function is in schema/postgres/0010_fresh_ids.sql.
SELECT semel_add(
    :id, :type, :data, :source, :destination, :stream, :subject, :content_type, :headers, :lane, :delay, :fresh
)

-- name: columns (reads)
-- A part of the next two.
(sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type, headers,
 data, fresh)

-- name: notification (reads)
-- A part of the next two: wake a relay, unless another transaction does that already.
CASE WHEN pg_try_advisory_xact_lock(8315172569387857268) THEN pg_notify('semel', '73656d656c2e6f7574626f78') END

-- name: add_fresh (writes)
-- What the function does with a fresh id in the mode "queue". Where the driver prepares it, it takes less time than the
-- function; elsewhere it is planned each time, and takes more. In the other modes it does nothing and returns no row.
INSERT INTO semel_outbox {{columns}}
SELECT 0, {{now}} + :delay::float8 * interval '1 second', {{now}}, :lane::smallint, 0, 0, :id::text, :type::text,
       :source::text, :destination::text, '', :subject::text, :content_type::text, :headers::text, :data::bytea, true
FROM semel_outbox_mode WHERE mode = 'queue'
RETURNING {{notification}}

-- name: add_fresh_to_stream (writes)
-- The same. The mode is locked first, as in the function, and the stream before the insert takes a position.
WITH place AS (
    INSERT INTO semel_stream AS s (name, sequence)
    SELECT :stream::text, 1 FROM semel_outbox_mode WHERE mode = 'queue'
    ON CONFLICT (name) DO UPDATE SET sequence = s.sequence + 1
    RETURNING s.sequence
)
INSERT INTO semel_outbox {{columns}}
SELECT sequence, {{now}}, {{now}}, :lane::smallint, 0, 0, :id::text, :type::text, :source::text, :destination::text,
       :stream, :subject::text, :content_type::text, :headers::text, :data::bytea, true
FROM place
RETURNING {{notification}}

-- name: depths (reads)
-- It counts the oldest :most messages. Of the log, what was not read.
SELECT destination, count(*), count(*) FILTER (WHERE starts > 0), extract(epoch FROM {{now}} - min(created))::float8
FROM (
    (SELECT destination, starts, created FROM semel_outbox ORDER BY position LIMIT :most::integer)
    UNION ALL
    (SELECT l.destination, 0, l.created FROM semel_cursor c JOIN semel_log l ON NOT pg_visible_in_snapshot(l.xid, c.seen)
     WHERE c.upto IS NULL OR l.position > c.passed OR NOT pg_visible_in_snapshot(l.xid, c.upto) LIMIT :most)
    LIMIT :most
) AS messages
GROUP BY destination ORDER BY 2 DESC, 1

-- name: mode (reads)
SELECT mode, (
    SELECT coalesce(pg_current_wal_lsn() - restart_lsn, 0)::bigint FROM pg_replication_slots
    WHERE slot_name = 'semel_outbox_' || (SELECT oid FROM pg_database WHERE datname = current_database())
)
FROM semel_outbox_mode

-- name: held (reads)
-- A stream whose next try is due waits as long as it has messages: maybe no relay is running.
SELECT h.stream, coalesce(o.messages, 0),
       CASE WHEN h.until < 'infinity' THEN extract(epoch FROM h.until - {{now}})::float8 END, h.reason
FROM semel_hold h
LEFT JOIN (
    SELECT stream, count(*) AS messages
    FROM (SELECT stream FROM semel_outbox ORDER BY position LIMIT :look::integer) AS oldest
    WHERE EXISTS (SELECT FROM semel_hold w WHERE w.stream = oldest.stream)
    GROUP BY stream
) AS o ON o.stream = h.stream
WHERE h.until > {{now}} OR o.messages > 0
ORDER BY h.until DESC, h.stream LIMIT :most::integer

-- name: owners (reads)
SELECT count(DISTINCT r.relay), count(l.lane)
FROM semel_relay r LEFT JOIN semel_lane l ON l.relay = r.relay WHERE r.lease_end > {{now}}
