"""Clients that keep their keys: a key for each call, retries with the same key, and a journal that survives a crash.

The client of each HTTP library is in its own module: ``httpx``, ``requests``, ``aiohttp`` and ``urllib3``.
"""

from semel.client.flow import Receipt
from semel.client.journal import Entry, Journal, JournalReport
from semel.client.retry import RETRIED_STATUSES, Retry, RetryQuota

__all__ = ["RETRIED_STATUSES", "Entry", "Journal", "JournalReport", "Receipt", "Retry", "RetryQuota"]
