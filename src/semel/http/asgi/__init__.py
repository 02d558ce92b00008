"""ASGI: the middleware, and endpoints of frameworks that run under it."""

from semel.http.asgi.middleware import Idempotency, current_responder

__all__ = ["Idempotency", "current_responder"]
