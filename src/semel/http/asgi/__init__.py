"""ASGI: the middleware, and endpoints of frameworks that run under it."""

from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.rules import conditional, exempt, idempotent, natural

__all__ = ["ASGIMiddleware", "conditional", "exempt", "idempotent", "natural"]
