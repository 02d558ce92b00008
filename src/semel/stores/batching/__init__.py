"""Ops of concurrent callers that share a round trip."""
