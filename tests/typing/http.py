"""The HTTP decorators as a type checker sees them: ``make check`` reads this file, and nobody runs it.

A misspelt setting fails in a decorator and in ``routes=``, a decorated function keeps its type, and every framework has
the same names. ``warn_unused_ignores`` turns each ``type: ignore`` into a proof that the line is an error.
"""

from typing import Any, assert_type

from fastapi import FastAPI
from flask import Flask

from semel import AsyncMemoryStore, AsyncSemel, KeyFormat, MemoryStore, Policy, Semel
from semel.http import asgi, django, fastapi, flask, litestar, wsgi
from semel.http.contract.rules import Conditional, Exempt, Idempotent, Natural


async def application(scope: Any, receive: Any, send: Any) -> None: ...


@fastapi.idempotent(ttl="7d", key_format="uuid", external_effects=True)
async def pay(amount: int) -> str:
    return str(amount)


@flask.conditional(required=True, precondition_required=False)
def change(number: int) -> str:
    return str(number)


@litestar.natural(absent=frozenset({404}))
async def remove(number: int) -> None: ...


@django.exempt("it only reads")
def search(request: object) -> str:
    return "found"


assert_type(change(7), str)
assert_type(search(None), str)


async def decorated_functions_keep_their_types() -> None:
    assert_type(await pay(10), str)
    await pay("10")  # type: ignore[arg-type]
    await remove("7")  # type: ignore[arg-type]


assert_type(fastapi.idempotent(), Idempotent)
assert_type(flask.conditional(), Conditional)
assert_type(django.natural(), Natural)
assert_type(litestar.exempt("it only reads"), Exempt)
assert_type(fastapi.idempotent(fastapi.idempotent(key_format=KeyFormat.named("uuid")), ttl=None), Idempotent)
fastapi.idempotent(policy=Policy(ttl="2h"), lease=9)

fastapi.idempotent(tll="7d")  # type: ignore[call-arg]
flask.idempotent(tll="7d")  # type: ignore[call-arg]
django.idempotent(tll="7d")  # type: ignore[call-arg]
litestar.idempotent(tll="7d")  # type: ignore[call-arg]
fastapi.conditional(precondition_require=True)  # type: ignore[call-arg]
fastapi.idempotent(precondition_required=True)  # type: ignore[call-arg]
fastapi.natural(ttl="7d")  # type: ignore[call-arg]
fastapi.exempt()  # type: ignore[call-arg]
fastapi.idempotent(required="yes")  # type: ignore[arg-type]
fastapi.idempotent(reused_status=418)  # type: ignore[arg-type]
fastapi.idempotent(in_use_status=503)
fastapi.idempotent(in_use_status=500)  # type: ignore[arg-type]
fastapi.idempotent(guarantee="exactly_once")  # type: ignore[arg-type]
fastapi.conditional(fastapi.idempotent())  # type: ignore[arg-type]

fastapi.install(FastAPI(), guard=AsyncSemel(AsyncMemoryStore()), tenant=lambda request: str(request.user.id))
fastapi.install(FastAPI(), guard=AsyncSemel(AsyncMemoryStore()), header="X-Idempotency-Key")
fastapi.install(FastAPI(), guard=AsyncSemel(AsyncMemoryStore()), header=b"x-key")  # type: ignore[arg-type]
fastapi.install(FastAPI(), guard=Semel(MemoryStore()))  # type: ignore[arg-type]
fastapi.install(FastAPI(), guard=AsyncSemel(AsyncMemoryStore()), tenent=None)  # type: ignore[call-arg]
flask.install(Flask("shop"), guard=Semel(MemoryStore()), tenant=lambda request: request.remote_user)
flask.install(Flask("shop"), guard=Semel(MemoryStore()), tenant=lambda request: 7)  # type: ignore[arg-type, return-value]
flask.install(Flask("shop"), guard=Semel(MemoryStore()), routes={"POST /pay": flask.idempotent(ttl="7d")})
litestar.SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=lambda request: str(request.user.id))

asgi.ASGIMiddleware(
    application,
    guard=AsyncSemel(AsyncMemoryStore()),
    tenant=lambda scope: str(scope["user"]),
    routes={
        "POST /orders": asgi.idempotent(ttl="7d"),
        "PUT /orders/{id}": asgi.conditional(),
        "DELETE /orders/{id}": asgi.natural(),
        "POST /search": asgi.exempt("it only reads"),
    },
)
wsgi.WSGIMiddleware(
    lambda environ, start_response: [],
    guard=Semel(MemoryStore()),
    routes={"POST /orders": wsgi.idempotent(ttl="7d"), "PUT /orders/{id}": wsgi.conditional()},
)
wsgi.WSGIMiddleware(
    lambda environ, start_response: [],
    guard=Semel(MemoryStore()),
    routes={"POST /orders": wsgi.idempotent(tll="7d")},  # type: ignore[call-arg]
)
wsgi.WSGIMiddleware(
    lambda environ, start_response: [],
    guard=Semel(MemoryStore()),
    routes={"POST /orders": "idempotent"},  # type: ignore[dict-item]
)
