"""httpx: a transport that adds keys and retries with them.

::

    client = httpx.Client(transport=IdempotencyTransport(journal="calls.db"))
    response = client.post("https://pay.example/charges", json={"amount": 10})
    response.extensions["idempotency"].outcome
"""

from semel.client.httpx.aio import AsyncIdempotencyTransport
from semel.client.httpx.sync import IdempotencyTransport

__all__ = ["AsyncIdempotencyTransport", "IdempotencyTransport"]
