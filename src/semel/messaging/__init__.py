"""Messages around a broker: the outbox, the relay, the inbox, and the dead letters."""
