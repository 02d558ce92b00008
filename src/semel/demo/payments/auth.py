"""Authentication: a bearer key stands for a tenant. A dependency, so it runs before an idempotency key is claimed."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

__all__ = ["KEYS", "Tenant", "authenticated", "tenant_of"]

KEYS: Final = {"sk_alice": "alice", "sk_bob": "bob"}
"""The demo's two keys. Real keys are secrets, stored as hashes and compared in constant time."""

_bearer = HTTPBearer(auto_error=False, description="`sk_alice` or `sk_bob`: two tenants that never see each other")


async def authenticated(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> str:
    """Return the tenant, or answer 401."""
    tenant = KEYS.get(credentials.credentials) if credentials is not None else None
    if tenant is None:
        raise HTTPException(401, "send Authorization: Bearer sk_alice", {"WWW-Authenticate": "Bearer"})
    request.state.tenant = tenant
    return tenant


Tenant = Annotated[str, Depends(authenticated)]


def tenant_of(request: Request) -> str:
    """Return the tenant that authentication has found. The guard asks for it when it claims a key."""
    tenant: str = request.state.tenant
    return tenant
