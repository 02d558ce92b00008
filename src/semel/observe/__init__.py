"""Seeing what happens: frozen events in one table, and one small module per sink."""
