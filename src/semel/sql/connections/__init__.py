"""One module per driver: it runs a statement on a connection and raises our errors."""
