-- An index of the arguments of resumable operations, which the resumer reads. Other steps are not in it.
--
-- On a table with many steps build it by hand first, with the same statement and CONCURRENTLY after INDEX.
CREATE INDEX IF NOT EXISTS semel_step_input ON semel_step (id) WHERE name = '~input';
