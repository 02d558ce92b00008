"""WSGI: the middleware, and one request under it."""

from semel.http.wsgi.middleware import Idempotency, current_responder

__all__ = ["Idempotency", "current_responder"]
