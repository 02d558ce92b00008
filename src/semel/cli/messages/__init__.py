"""``semel relay``, ``outbox`` and ``dlq``: send messages, and look after those that wait or were given up."""
