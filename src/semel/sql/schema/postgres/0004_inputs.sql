-- What resumable operations were called with: the recoverer looks through these alone. Other steps are not in it.
--
-- On a table with many steps make it by hand first, by the same statement with CONCURRENTLY after INDEX.
CREATE INDEX IF NOT EXISTS semel_step_input ON semel_step (id) WHERE name = '~input';
