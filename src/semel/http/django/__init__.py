"""Django: a middleware, decorators for views, and the tables by Django's own migrations.

::

    MIDDLEWARE = [..., "semel.http.django.IdempotencyMiddleware"]      # the last one
    SEMEL = {"GUARD": "shop.once.guard", "TENANT": "semel.http.django.user"}

    @require_POST
    @idempotent(ttl="24h")
    def pay(request, op: Operation): ...

The settings take the place of ``install``: Django has no application object. The decorator makes the claim just before
the view, after all middlewares, the decorators above it, and what REST framework does first (authentication,
permissions, throttles). The middleware takes the answer when it is rendered and the view's transaction
(ATOMIC_REQUESTS) has ended. It runs the responders of ``semel.http.wsgi`` and ``semel.http.asgi`` as a server would, so
the whole contract is theirs.
"""

try:
    import django as _django  # noqa: F401
except ImportError as _error:
    from semel.errors import MissingDependency

    raise MissingDependency("django", "django") from _error

from semel.http.contract.conditional import check_match, etag
from semel.http.django.handling import user
from semel.http.django.middleware import IdempotencyMiddleware
from semel.http.django.urls import endpoints
from semel.http.django.views import conditional, exempt, idempotent, natural

__all__ = [
    "IdempotencyMiddleware", "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "natural",
    "user",
]  # fmt: skip
