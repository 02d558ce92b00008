-- An index of the arguments of resumable operations, which the resumer reads. Other steps are not in it.
CREATE INDEX semel_step_input ON semel_step (id) WHERE name = '~input';
