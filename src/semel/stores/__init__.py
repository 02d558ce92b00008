"""Where records are kept. A store answers Ops; it knows nothing of handlers or policies."""
