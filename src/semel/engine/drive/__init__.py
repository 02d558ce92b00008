"""Drives one call: single flight, leases and their keepers, waiting, and the attempts that adapters end."""
