-- The relay's statements for messages that are not in the queue, but in the log of the outbox (PostgreSQL). The relay that
-- owns the cursor reads it. Each statement locks the relay's row before the cursor's.

-- name: take (writes)
-- The owner of the cursor is gone if its row is: relays remove the dead when they join. What it was sending is counted as
-- one start when it is read again.
UPDATE semel_cursor c SET relay = :relay::bytea,
    crashed = CASE WHEN c.relay IS DISTINCT FROM :relay THEN coalesce(c.started, c.crashed) ELSE c.crashed END,
    started = NULL
FROM semel_outbox_mode m
WHERE m.mode <> 'queue' AND EXISTS (SELECT 1 FROM semel_relay WHERE relay = :relay AND lease_end > {{now}})
  AND (c.relay IS NULL OR c.relay = :relay OR NOT EXISTS (SELECT 1 FROM semel_relay r WHERE r.relay = c.relay))
RETURNING m.mode, c.cluster = (SELECT system_identifier FROM pg_control_system())

-- name: trim (writes)
SELECT semel_trim()

-- name: switch (writes)
SELECT semel_switch(:mode::text)

-- name: low (writes)
-- Transactions that are not in the next snapshot take positions above this one. A snapshot names no running transaction that
-- is younger than the last one that has ended, so one ends here that is younger than all that have a position up to now.
SELECT last_value - 1, pg_current_xact_id()::text FROM semel_log_position

-- name: batch (reads)
-- A part of the next two: the messages behind the place "cur", each with the bytes of those before it. Messages of
-- transactions that were running when "seen" was taken are found by their transaction, the others by their position: what
-- a long transaction elsewhere holds up is not read again and again.
SELECT *, sum(octet_length(data)) OVER (ROWS UNBOUNDED PRECEDING) - octet_length(data) AS before FROM (
    SELECT l.* FROM cur CROSS JOIN LATERAL (
        SELECT position, id, type, data, source, destination, stream, sequence, subject, content_type, created, headers
        FROM semel_log l
        WHERE l.position > cur.above AND l.position <= cur.high
          AND l.xid >= pg_snapshot_xmax(cur.seen) AND pg_visible_in_snapshot(l.xid, cur.upto)
        ORDER BY l.position LIMIT :most::integer
    ) AS l
    UNION ALL
    SELECT l.* FROM cur CROSS JOIN LATERAL pg_snapshot_xip(cur.seen) AS x (xid) CROSS JOIN LATERAL (
        -- As l.xid = x.xid AND l.position > cur.passed, so that no other index can be taken.
        SELECT position, id, type, data, source, destination, stream, sequence, subject, content_type, created, headers
        FROM semel_log l
        WHERE (l.xid, l.position) > (x.xid, cur.passed) AND l.xid <= x.xid
          AND pg_visible_in_snapshot(l.xid, cur.upto)
        ORDER BY l.xid, l.position LIMIT :most
    ) AS l
    ORDER BY position LIMIT :most
) AS both_

-- name: ahead (reads)
-- As "read", for the messages that follow those under way in this turn. It changes nothing, so it waits for no disk.
WITH cur AS MATERIALIZED (
    SELECT c.seen, c.started AS passed, greatest(c.low, c.started) AS above, c.crashed, c.upto, c.high
    FROM semel_relay r JOIN semel_cursor c ON c.relay = r.relay
    WHERE r.relay = :relay::bytea AND r.lease_end > {{now}}
      AND c.started IS NOT NULL AND c.upto IS NOT NULL AND NOT c.ends
)
SELECT f.position, (f.position <= cur.crashed)::integer, f.id, f.type, f.data, f.source, f.destination, f.stream,
       f.sequence, f.subject, f.content_type, date_part('epoch', f.created), f.headers, 0
FROM cur JOIN ({{batch}}) AS f ON f.before < {{bytes}}

-- name: read (writes)
-- One row without a position says that there is nothing to send; its second column, that there may be now, behind the
-- messages of this turn. No row says that the lease has ended, or that another relay owns the cursor. "low" is from the
-- statement before, so that it is older than the snapshot.
WITH me AS (
    UPDATE semel_relay SET lease_end = greatest(lease_end, {{now}} + :lease::float8 * interval '1 second')
    WHERE relay = :relay::bytea AND lease_end > {{now}}
    RETURNING relay
), cur AS (
    SELECT c.relay, c.seen, c.passed, c.upto IS NOT NULL AS was_open, greatest(c.low, c.passed) AS above, c.crashed,
           coalesce(c.upto, pg_current_snapshot()) AS upto,
           CASE WHEN c.upto IS NULL THEN :low::bigint ELSE c.upto_low END AS upto_low,
           CASE WHEN c.upto IS NULL THEN (SELECT last_value FROM semel_log_position) ELSE c.high END AS high
    FROM me JOIN semel_cursor c ON c.relay = me.relay
    FOR UPDATE OF c
), next AS (
    {{batch}}
), noted AS (
    UPDATE semel_cursor c SET started = n.last, ends = n.all_ < :most AND n.all_ = n.taken,
        upto = CASE WHEN n.taken > 0 THEN cur.upto END, upto_low = cur.upto_low, high = cur.high,
        seen = CASE WHEN n.taken > 0 THEN c.seen ELSE cur.upto END,
        low = CASE WHEN n.taken > 0 THEN c.low ELSE cur.upto_low END,
        passed = CASE WHEN n.taken > 0 THEN c.passed ELSE 0 END
    FROM cur, (
        SELECT max(position) FILTER (WHERE before < {{bytes}}) AS last, count(*) FILTER (WHERE before < {{bytes}}) AS taken,
               count(*) AS all_
        FROM next
    ) AS n
    WHERE c.relay = cur.relay
)
SELECT f.position, (CASE WHEN f.position IS NULL THEN was_open ELSE f.position <= cur.crashed END)::integer, f.id, f.type,
       f.data, f.source, f.destination, f.stream, f.sequence, f.subject, f.content_type, date_part('epoch', f.created),
       f.headers, 0
FROM cur LEFT JOIN next f ON f.before < {{bytes}}

-- name: waiting (reads)
-- Which of these streams have messages in the queue, or are parked: what follows must go there too.
SELECT s.stream FROM unnest(:streams::text[]) AS s (stream)
WHERE EXISTS (SELECT 1 FROM semel_outbox o WHERE o.stream = s.stream AND o.stream <> '')
   OR EXISTS (SELECT 1 FROM semel_hold h WHERE h.stream = s.stream AND h.until > {{now}})

-- name: pass (writes)
-- The messages that were started, of which "last" is the last one, are done, or, if it "stays", were not sent. Those up to
-- "next" are started now, and the lease is renewed. A repeat changes nothing else, also if it comes late, when the next
-- messages are under way.
WITH me AS (
    UPDATE semel_relay SET lease_end = greatest(lease_end, {{now}} + :lease::float8 * interval '1 second')
    WHERE relay = :relay::bytea AND lease_end > {{now}}
    RETURNING relay
), cur AS (
    SELECT c.relay, NOT :stays::boolean AND c.started IS NOT NULL
           AND :last::bigint = CASE WHEN :wal::boolean THEN c.high ELSE c.started END AS moves
    FROM semel_cursor c JOIN me ON c.relay = me.relay
    FOR UPDATE OF c
)
UPDATE semel_cursor c SET started = CASE WHEN :stays THEN NULL WHEN moves THEN :next::bigint ELSE c.started END,
    ends = ends AND NOT moves,
    passed = CASE WHEN moves AND ends THEN 0 WHEN moves THEN c.started ELSE c.passed END,
    seen = CASE WHEN moves AND ends THEN c.upto ELSE c.seen END,
    low = CASE WHEN moves AND ends THEN c.upto_low ELSE c.low END,
    upto = CASE WHEN moves AND ends THEN NULL ELSE c.upto END,
    crashed = CASE WHEN moves AND c.started >= c.crashed THEN 0 ELSE c.crashed END
FROM cur WHERE c.relay = cur.relay
RETURNING 1

-- name: lock (writes)
SELECT c.started, c.high FROM semel_relay r JOIN semel_cursor c ON c.relay = r.relay
WHERE r.relay = :relay::bytea AND r.lease_end > {{now}} FOR UPDATE

-- name: move (writes)
-- To the queue, behind all that is there. The relay has started them, so that it can settle those that have failed.
WITH moved AS (
    INSERT INTO semel_outbox (
        sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, subject, content_type,
        headers, data
    )
    SELECT sequence, {{now}}, to_timestamp(created), lane, starts, 0, id, type, source, destination, stream, subject,
           content_type, headers, data
    FROM unnest(
        :sequences::bigint[], :createds::float8[], :lanes::smallint[], :starts::bigint[], :ids::text[], :types::text[],
        :sources::text[], :destinations::text[], :streams::text[], :subjects::text[], :content_types::text[],
        :headers::text[], :datas::bytea[]
    ) WITH ORDINALITY AS m (
        sequence, created, lane, starts, id, type, source, destination, stream, subject, content_type, headers, data, at
    )
    ORDER BY at
    ON CONFLICT (id) WHERE NOT fresh DO NOTHING
    RETURNING id, position
), noted AS (
    UPDATE semel_relay SET started = ARRAY(SELECT position FROM moved) WHERE relay = :relay::bytea
)
SELECT id, position FROM moved

-- name: slot (reads)
-- The replication slot of the mode "wal", and how many bytes of the database's log the server keeps for it.
SELECT current_setting('wal_level'), s.slot_name, coalesce(s.wal_status = 'lost', false),
       coalesce(pg_current_wal_lsn() - s.restart_lsn, 0)::bigint
FROM (SELECT 1) AS one LEFT JOIN pg_replication_slots s ON s.slot_name = {{slot}}

-- name: publication (reads)
SELECT 1 FROM pg_publication WHERE pubname = 'semel_outbox'

-- name: create_publication (writes)
-- Of no table. Messages need none, but the decoder wants a name.
CREATE PUBLICATION semel_outbox

-- name: create_slot (writes)
SELECT pg_create_logical_replication_slot({{slot}}, 'pgoutput')::text

-- name: forget (writes)
-- A place in the log of another server, from which the database was restored, means nothing.
UPDATE semel_cursor SET passed = 0, started = NULL, crashed = 0 WHERE EXISTS (
    SELECT 1 FROM semel_outbox_mode WHERE mode = 'wal'
)

-- name: drop_slot (writes)
SELECT pg_drop_replication_slot(slot_name)::text FROM pg_replication_slots WHERE slot_name = {{slot}}

-- name: lock_timeout (writes)
SELECT set_config('lock_timeout', '2s', true)

-- name: lock_mode (writes)
-- The log as well, before the cursor: a relay that reads has the log locked, and then locks the cursor.
LOCK TABLE semel_outbox_mode, semel_log IN ACCESS EXCLUSIVE MODE

-- name: lock_cursor (writes)
-- Before messages move to the queue: a relay that moves the same messages locks the cursor first as well.
SELECT m.mode, c.passed FROM semel_outbox_mode m, semel_cursor c FOR UPDATE OF c

-- name: skip (writes)
-- All up to :passed is in the queue now. Whatever the relay is sending, it does not pass the cursor.
UPDATE semel_cursor SET passed = greatest(passed, :passed::bigint), started = NULL

-- name: peek (reads)
-- Messages (77, "M") with our name, and commits (67, "C"), in the order of the commits. The first transaction comes whole,
-- however large it is. "at" counts all changes, also the messages of other programs: from :most on there may be more.
SELECT (w.upto - '0/0'::pg_lsn)::bigint, p.data, p.at
FROM (SELECT pg_current_wal_flush_lsn() AS upto) AS w
LEFT JOIN LATERAL (
    SELECT data, at FROM (
        SELECT data, at, sum(octet_length(data)) OVER so_far AS bytes,
               count(*) FILTER (WHERE get_byte(data, 0) = 67) OVER so_far AS commits
        FROM pg_logical_slot_peek_binary_changes(
            {{slot}}, w.upto, :most::integer,
            'proto_version', '1', 'publication_names', 'semel_outbox', 'messages', 'true'
        ) WITH ORDINALITY AS c (lsn, xid, data, at)
        WHERE get_byte(data, 0) = 67
           OR get_byte(data, 0) = 77 AND substr(data, 11, 13) = '\x73656d656c2e6f7574626f7800'::bytea
        WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
    ) AS summed
    WHERE bytes - octet_length(data) < {{bytes}} OR commits = 0 OR commits = 1 AND get_byte(data, 0) = 67
) AS p ON true

-- name: pause (reads)
SELECT pg_sleep(0.01)::text

-- name: note (writes)
-- In the mode "wal" a batch ends with a commit, "started", and "high" is its last message.
WITH me AS (
    UPDATE semel_relay SET lease_end = greatest(lease_end, {{now}} + :lease::float8 * interval '1 second')
    WHERE relay = :relay::bytea AND lease_end > {{now}}
    RETURNING relay
)
UPDATE semel_cursor c SET started = CASE WHEN :started::bigint > c.passed THEN :started END, high = :last::bigint,
    ends = false
FROM me WHERE c.relay = me.relay
RETURNING c.passed, c.crashed

-- name: advance (writes)
-- The server may forget what was passed. After a crash of the server the slot may be at an earlier place, so what counts is
-- the cursor. Without a relay: whoever owns it.
SELECT pg_replication_slot_advance(s.slot_name, '0/0'::pg_lsn + c.passed)::text
FROM semel_cursor c JOIN pg_replication_slots s ON s.slot_name = {{slot}}
WHERE (c.relay = :relay::bytea OR :relay::bytea IS NULL) AND '0/0'::pg_lsn + c.passed > s.confirmed_flush_lsn
