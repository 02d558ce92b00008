"""Stores of records: they execute Ops, and know nothing of handlers or policies."""
