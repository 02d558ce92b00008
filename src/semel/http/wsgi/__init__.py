"""WSGI: the middleware, and one request under it."""

from semel.http.contract.rules import conditional, exempt, idempotent, natural
from semel.http.wsgi.middleware import WSGIMiddleware

__all__ = ["WSGIMiddleware", "conditional", "exempt", "idempotent", "natural"]
