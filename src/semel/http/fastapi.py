"""FastAPI and Starlette: ``@action()`` on an endpoint, below the route's own decorator.

::

    app.add_middleware(Idempotency, guard=guard, tenant=lambda scope: scope["user"].id)

    @app.post("/payments", status_code=201)
    @action(ttl="24h")
    async def pay(payment: Payment, op: AsyncOperation): ...

The claim is made after the dependencies and the validation of the body, just before the function runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from semel.errors import MissingDependency
from semel.http.asgi import Idempotency
from semel.http.endpoints import protect
from semel.http.rules import Action

__all__ = ["Action", "Idempotency", "action"]

F = TypeVar("F", bound=Callable[..., Any])


def action(base: Action | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare an endpoint that needs a key and happens once for it. Settings of ``Action`` and of ``Policy``."""
    try:
        from starlette.responses import Response
    except ImportError as error:
        raise MissingDependency("starlette", "fastapi") from error
    rule = Action.declared(base, **settings)

    def decorate(function: F) -> F:
        return protect(function, rule, lambda: Response(status_code=204))

    return decorate
