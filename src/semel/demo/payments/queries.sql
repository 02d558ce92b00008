-- The business rows of the demo service. The same statements run on SQLite and on PostgreSQL.

-- name: payment_table (writes)
CREATE TABLE IF NOT EXISTS demo_payment (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, amount BIGINT NOT NULL, currency TEXT NOT NULL, customer TEXT NOT NULL,
    note TEXT NOT NULL, refunded BIGINT NOT NULL, version BIGINT NOT NULL, created TEXT NOT NULL,
    changed_by TEXT NOT NULL, deleted BIGINT NOT NULL, CHECK (refunded <= amount)
)

-- name: payment_index (writes)
CREATE INDEX IF NOT EXISTS demo_payment_newest ON demo_payment (tenant, created)

-- name: refund_table (writes)
CREATE TABLE IF NOT EXISTS demo_refund (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, payment TEXT NOT NULL, amount BIGINT NOT NULL, created TEXT NOT NULL
)

-- name: customer_table (writes)
CREATE TABLE IF NOT EXISTS demo_customer (
    tenant TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, email TEXT NOT NULL, PRIMARY KEY (tenant, id)
)

-- name: execution_table (writes)
CREATE TABLE IF NOT EXISTS demo_execution (
    key TEXT NOT NULL, operation TEXT NOT NULL, attempt BIGINT NOT NULL, what TEXT NOT NULL, worker BIGINT NOT NULL
)

-- name: begin_on_sqlite (writes)
BEGIN IMMEDIATE

-- name: begin (writes)
BEGIN

-- name: commit (writes)
COMMIT

-- name: rollback (writes)
ROLLBACK

-- name: insert_payment (writes)
INSERT INTO demo_payment (
    id, tenant, amount, currency, customer, note, refunded, version, created, changed_by, deleted
)
VALUES (:id, :tenant, :amount, :currency, :customer, '', 0, 1, :created, '', 0)
ON CONFLICT (id) DO NOTHING
RETURNING id, amount, currency, customer, note, refunded, version, created, changed_by, deleted

-- name: find_payment (reads)
SELECT id, amount, currency, customer, note, refunded, version, created, changed_by, deleted
FROM demo_payment WHERE id = :id AND tenant = :tenant

-- name: newest_payments (reads)
SELECT id, amount, currency, customer, note, refunded, version, created, changed_by, deleted
FROM demo_payment WHERE tenant = :tenant AND deleted = 0 ORDER BY created DESC, id DESC LIMIT :most

-- name: change_payment (writes)
UPDATE demo_payment
SET amount = :amount, customer = :customer, note = :note, version = version + 1, changed_by = :changed_by
WHERE id = :id AND tenant = :tenant AND version = :version AND deleted = 0
RETURNING id, amount, currency, customer, note, refunded, version, created, changed_by, deleted

-- name: delete_payment (writes)
UPDATE demo_payment SET deleted = 1, version = version + 1 WHERE id = :id AND tenant = :tenant AND deleted = 0
RETURNING id

-- name: insert_refund (writes)
INSERT INTO demo_refund (id, tenant, payment, amount, created) VALUES (:id, :tenant, :payment, :amount, :created)
ON CONFLICT (id) DO NOTHING
RETURNING id, payment, amount, created

-- name: find_refund (reads)
SELECT id, payment, amount, created FROM demo_refund WHERE id = :id AND tenant = :tenant

-- name: take_back (writes)
UPDATE demo_payment SET refunded = refunded + :amount, version = version + 1
WHERE id = :id AND tenant = :tenant AND refunded + :amount <= amount AND deleted = 0
RETURNING id

-- name: put_customer (writes)
INSERT INTO demo_customer (tenant, id, name, email) VALUES (:tenant, :id, :name, :email)
ON CONFLICT (tenant, id) DO UPDATE SET name = excluded.name, email = excluded.email

-- name: note_execution (writes)
INSERT INTO demo_execution (key, operation, attempt, what, worker) VALUES (:key, :operation, :attempt, :what, :worker)

-- name: stats (reads)
SELECT
    (SELECT count(*) FROM demo_execution WHERE what = 'run'),
    (SELECT count(*) FROM demo_payment WHERE deleted = 0),
    (SELECT count(*) FROM demo_refund),
    (SELECT count(*) FROM demo_customer),
    (SELECT count(*) FROM demo_execution WHERE what = 'run' AND attempt > 1),
    (SELECT count(*) FROM demo_execution WHERE what = 'found')

-- name: executions_of (reads)
SELECT what, attempt, count(*) FROM demo_execution WHERE substr(key, 1, :length) = :beginning GROUP BY what, attempt

-- name: payments_of (reads)
SELECT customer, id, amount FROM demo_payment WHERE substr(customer, 1, :length) = :beginning

-- name: payments_count (reads)
SELECT count(*) FROM demo_payment WHERE substr(customer, 1, :length) = :beginning
