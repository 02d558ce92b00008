"""A service without a resumable function."""

from semel import MemoryStore, Semel

guard = Semel(MemoryStore(), sweep_every=None)
