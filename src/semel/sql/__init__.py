"""One SQL program, any connection: statements, dialects, the schema, and a connection for each driver."""
