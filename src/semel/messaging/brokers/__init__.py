"""One module per broker: how messages are published to it, and consumed from it."""
