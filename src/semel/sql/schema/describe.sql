-- What a database has, to compare it with what the migrations make: one row (kind, name, definition) for each of our
-- objects in the current schema. MySQL lists its tables only; SHOW CREATE TABLE describes each.

-- name: sqlite (reads)
SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'semel\_%' ESCAPE '\' AND sql IS NOT NULL

-- name: mysql (reads)
SELECT table_name FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name LIKE 'semel\\_%' ORDER BY table_name

-- name: fixed (reads)
-- The partitions of the inbox come and go with time.
c.oid NOT IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass('semel_inbox'))

-- name: postgres (reads)
SELECT 'column', c.relname || '.' || a.attname,
       format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
           || coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '') || ' storage ' || a.attstorage::text
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') AND c.relname LIKE 'semel\_%'
  AND {{fixed}}
  AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'index', i.relname, regexp_replace(pg_get_indexdef(i.oid), ' ON (ONLY )?[^ ]+\.', ' ON ')
FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class c ON c.oid = x.indrelid
WHERE c.relnamespace = current_schema()::regnamespace AND c.relname LIKE 'semel\_%' AND x.indisvalid
  AND {{fixed}}
UNION ALL
SELECT 'constraint', k.conname, pg_get_constraintdef(k.oid)
FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
WHERE c.relnamespace = current_schema()::regnamespace AND c.relname LIKE 'semel\_%'
  AND {{fixed}}
  AND k.contype IN ('p', 'u', 'c', 'f')
UNION ALL
SELECT 'options', c.relname, coalesce(array_to_string(c.reloptions, ','), '')
FROM pg_class c
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') AND c.relname LIKE 'semel\_%'
  AND {{fixed}}
UNION ALL
SELECT 'function', p.proname, pg_get_function_arguments(p.oid)
       || coalesce(' returns ' || pg_get_function_result(p.oid), '') || ' ' || p.provolatile::text || ' '
       || coalesce(array_to_string(p.proconfig, ','), '') || p.prosrc
FROM pg_proc p
WHERE p.pronamespace = current_schema()::regnamespace AND p.proname LIKE 'semel\_%'
