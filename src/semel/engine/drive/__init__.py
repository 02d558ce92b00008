"""Driving a call: single flight, leases and their keepers, waiting, and attempts that an adapter ends."""
