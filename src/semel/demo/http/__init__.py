"""Storms over HTTP, against the payments service."""
