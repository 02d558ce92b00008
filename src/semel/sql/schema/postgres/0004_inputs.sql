-- What resumable operations were called with: the recoverer looks through these alone. Other steps are not in it.
CREATE INDEX semel_step_input ON semel_step (id) WHERE name = '~input';
