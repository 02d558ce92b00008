"""One SQL program, any connection: statements, dialects, schema, and the drivers' connections."""
