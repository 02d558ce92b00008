"""Concurrent calls share round trips to the store: the combiners, their limits, and how a batch is retried."""
