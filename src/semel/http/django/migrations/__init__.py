"""One migration for each numbered file of the schema."""
