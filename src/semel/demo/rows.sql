-- The rows of the demo's transactional mode: payments in the store's own database. Nothing here keeps a payment from being
-- written twice.

-- name: table_on_sqlite (writes)
CREATE TABLE IF NOT EXISTS demo_effect (
    receipt INTEGER PRIMARY KEY AUTOINCREMENT, run text NOT NULL, payment integer NOT NULL, amount integer NOT NULL,
    pid integer NOT NULL, attempt integer NOT NULL, token bigint NOT NULL
)

-- name: table_on_postgresql (writes)
CREATE TABLE IF NOT EXISTS demo_effect (
    receipt bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run text NOT NULL, payment integer NOT NULL,
    amount integer NOT NULL, pid integer NOT NULL, attempt integer NOT NULL, token bigint NOT NULL
)

-- name: table_on_mysql (writes)
CREATE TABLE IF NOT EXISTS demo_effect (
    receipt bigint AUTO_INCREMENT PRIMARY KEY, run varchar(64) NOT NULL, payment integer NOT NULL,
    amount integer NOT NULL, pid integer NOT NULL, attempt integer NOT NULL, token bigint NOT NULL
)

-- name: insert (writes)
INSERT INTO demo_effect (run, payment, amount, pid, attempt, token)
VALUES (:run, :payment, :amount, :pid, :attempt, :token) RETURNING receipt

-- name: insert_on_mysql (writes)
INSERT INTO demo_effect (run, payment, amount, pid, attempt, token)
VALUES (:run, :payment, :amount, :pid, :attempt, :token)

-- name: receipt_on_mysql (reads)
SELECT LAST_INSERT_ID()

-- name: effects (reads)
SELECT receipt, run, payment, amount, pid, attempt, token FROM demo_effect WHERE run = :run ORDER BY receipt

-- name: count (reads)
SELECT count(*) FROM demo_effect WHERE run = :run

-- name: commit (writes)
COMMIT

-- name: begin_on_sqlite (writes)
BEGIN IMMEDIATE

-- name: begin (writes)
BEGIN
