"""The documents that FastAPI, Litestar and Django REST framework make, with what is declared in them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from litestar import Controller, Litestar, patch, post
from litestar.openapi.config import OpenAPIConfig
from litestar.params import FromPath, JSONBody
from openapi_spec_validator import validate
from pydantic import BaseModel

from semel import AsyncMemoryStore, AsyncOperation, AsyncSemel, Policy
from semel.http import litestar as in_litestar
from semel.http.fastapi import conditional, endpoints, exempt, idempotent, install, natural


class Payment(BaseModel):
    amount: int


def tenant(whose: Any) -> str:
    return "alice"


def classes(spec: dict[str, Any]) -> dict[str, str]:
    """What each operation is declared to be."""
    return {
        f"{method.upper()} {path}": operation["x-idempotency"]["class"]
        for path, item in spec["paths"].items()
        for method, operation in item.items()
        if "x-idempotency" in operation
    }


def key_of(operation: dict[str, Any]) -> dict[str, Any]:
    (found,) = [each for each in operation["parameters"] if each["name"] == "Idempotency-Key"]
    return dict(found)


# FastAPI


def fastapi_app(**settings: Any) -> FastAPI:
    guard = AsyncSemel(AsyncMemoryStore(), policy=Policy(ttl="7d"))
    app = FastAPI(**settings)
    install(app, guard=guard, tenant=tenant, docs="https://docs.example")
    router = APIRouter(prefix="/v1")

    @router.post("/payments", status_code=201)
    @idempotent(guarantee="at_most_once")
    async def pay(payment: Payment, op: AsyncOperation) -> dict[str, str]:
        return {}

    @router.patch("/payments/{payment_id}")
    @conditional()
    async def change(payment_id: int, payment: Payment) -> dict[str, str]:
        return {}

    @app.delete("/payments/{payment_id}")
    @natural()
    async def remove(payment_id: int) -> None: ...

    @app.post("/search")
    @exempt("reads only")
    async def search() -> None: ...

    @app.post("/undeclared")
    async def undeclared() -> None: ...

    app.include_router(router)
    return app


def test_fastapi_documents_what_is_declared() -> None:
    spec = fastapi_app().openapi()
    validate(spec)
    assert spec["openapi"].startswith("3.1")
    assert classes(spec) == {
        "POST /v1/payments": "action",
        "PATCH /v1/payments/{payment_id}": "conditional",
        "DELETE /payments/{payment_id}": "natural",
        "POST /search": "exempt",
    }
    operation = spec["paths"]["/v1/payments"]["post"]
    assert key_of(operation)["required"] is True
    assert operation["x-idempotency"]["ttl"] == "7d", "the guard's policy counts"
    assert set(operation["responses"]) == {"201", "400", "409", "413", "422", "500", "503"}
    validation = operation["responses"]["422"]["content"]
    assert validation["application/json"]["schema"] == {"$ref": "#/components/schemas/HTTPValidationError"}
    assert "idempotency_key_reused" in validation["application/problem+json"]["examples"]
    assert "Link" in operation["responses"]["409"]["headers"]
    assert "op" not in [each["name"] for each in operation["parameters"]]


def test_fastapi_serves_the_document_and_makes_it_anew_when_a_route_is_added() -> None:
    import asyncio

    app = fastapi_app()

    async def served() -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            found: dict[str, Any] = (await client.get("/openapi.json")).json()
            return found

    first = asyncio.run(served())
    assert first == app.openapi()
    assert app.openapi() is app.openapi(), "it is made once"

    @app.post("/late")
    @idempotent()
    async def late() -> None: ...

    app.openapi_schema = None  # as FastAPI's own documentation says; newer ones notice by themselves
    assert "POST /late" in classes(asyncio.run(served()))


def test_a_document_of_fastapis_in_version_3_0_stays_one() -> None:
    app = fastapi_app()
    app.openapi_version = "3.0.2"
    spec = app.openapi()
    assert spec["openapi"] == "3.0.2"
    validate(spec)


def test_an_installed_app_lists_its_endpoints() -> None:
    found = {f"{each.method} {each.path}" for each in endpoints(fastapi_app())}
    assert {"POST /v1/payments", "POST /undeclared"} <= found


# Litestar


@post("/payments")
@in_litestar.idempotent(ttl="24h", key_format="uuid")
async def pay(data: JSONBody[dict[str, int]], op: AsyncOperation) -> dict[str, str]:
    return {}


class Payments(Controller):
    path = "/payments/{payment_id:int}"

    @patch()
    @in_litestar.conditional()
    async def change(self, payment_id: FromPath[int], data: JSONBody[dict[str, int]]) -> dict[str, str]:
        return {}

    @post("/undeclared")
    async def undeclared(self, payment_id: FromPath[int]) -> None: ...


def litestar_app(**settings: Any) -> Litestar:
    guard = AsyncSemel(AsyncMemoryStore())

    plugin = in_litestar.SemelPlugin(guard=guard, tenant=tenant, docs="https://docs.example")
    return Litestar([pay, Payments], plugins=[plugin], logging_config=None, **settings)


def test_litestar_documents_what_is_declared() -> None:
    app = litestar_app()
    spec = app.openapi_schema.to_schema()
    validate(spec)
    assert spec["openapi"].startswith("3.1")
    assert classes(spec) == {"POST /payments": "action", "PATCH /payments/{payment_id}": "conditional"}
    operation = spec["paths"]["/payments"]["post"]
    assert key_of(operation)["required"] is True
    assert "[0-9A-Fa-f]{8}" in key_of(operation)["schema"]["pattern"]
    assert set(operation["responses"]) == {"201", "400", "409", "413", "422", "503"}
    assert "Link" in operation["responses"]["409"]["headers"]
    assert set(operation["responses"]["400"]["content"]) == {"application/json", "application/problem+json"}
    changed = spec["paths"]["/payments/{payment_id}"]["patch"]
    assert {"412", "428"} <= set(changed["responses"])


def test_litestar_serves_the_same_document() -> None:
    import asyncio

    app = litestar_app()

    async def served() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:  # type: ignore[arg-type]
            return (await client.get("/schema/openapi.json")).json()

    assert classes(asyncio.run(served())) == classes(app.openapi_schema.to_schema())


def test_a_config_of_litestars_that_apps_share_is_left_as_it_is() -> None:
    config = OpenAPIConfig(title="Shop", version="1")
    assert classes(litestar_app(openapi_config=config).openapi_schema.to_schema())
    other = Litestar([post("/payments")(_plain)], openapi_config=config, logging_config=None)
    assert classes(other.openapi_schema.to_schema()) == {}


async def _plain() -> None: ...


def test_a_litestar_app_without_a_document_is_left_alone() -> None:
    assert litestar_app(openapi_config=None).openapi_config is None


# Django REST framework: its settings are global, so it has a process of its own

PROJECT = """
import json, sys
import django
from django.conf import settings

settings.configure(
    ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["*"], DATABASES={}, USE_TZ=True,
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "rest_framework", "drf_spectacular"],
    MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"],
    SEMEL={"GUARD": "__main__.guard", "TENANT": "semel.http.django.user", "DOCS": "https://docs.example"},
    REST_FRAMEWORK={
        "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema", "UNAUTHENTICATED_USER": None,
        "DEFAULT_AUTHENTICATION_CLASSES": [],
    },
    SPECTACULAR_SETTINGS={
        "POSTPROCESSING_HOOKS": ["semel.http.describe.drf.postprocess"], "SCHEMA_PATH_PREFIX": "/api",
    },
)
django.setup()

from django.urls import include, path
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.settings import patched_settings
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, viewsets
from rest_framework.decorators import action as route
from rest_framework.decorators import api_view
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView

from semel import MemoryStore, Policy, Semel
from semel.http.django import conditional, idempotent, natural

guard = Semel(MemoryStore(), policy=Policy(ttl="7d"))


class PaymentSerializer(serializers.Serializer):
    amount = serializers.IntegerField()


class Payments(viewsets.ViewSet):
    serializer_class = PaymentSerializer

    def list(self, request): ...

    @idempotent(ttl="24h")
    def create(self, request): ...

    @conditional()
    def partial_update(self, request, pk=None): ...

    @natural()
    def destroy(self, request, pk=None): ...

    @route(detail=True, methods=["post"])
    @idempotent(guarantee="at_most_once")
    def refund(self, request, pk=None): ...

    @route(detail=True, methods=["post"])
    def undeclared(self, request, pk=None): ...


class Orders(APIView):
    serializer_class = PaymentSerializer

    @idempotent(required=False)
    def post(self, request, number): ...


@extend_schema(request=PaymentSerializer, responses=PaymentSerializer)
@api_view(["POST"])
@idempotent(scope="tenant")
def notify(request): ...


router = DefaultRouter()
router.register("payments", Payments, basename="payment")
urlpatterns = [
    path("api/", include(router.urls)), path("api/orders/<int:number>/", Orders.as_view()), path("api/notify/", notify),
]
for variant in json.loads(sys.argv[1]):
    with patched_settings(variant):
        print(json.dumps(SchemaGenerator().get_schema(request=None, public=True)))
"""


VARIANTS: dict[str, dict[str, Any]] = {
    "/api": {"OAS_VERSION": "3.1.0"},
    "/api of 3.0": {"OAS_VERSION": "3.0.3"},
    "": {"OAS_VERSION": "3.1.0", "SCHEMA_PATH_PREFIX_TRIM": True},
    "/shop": {"OAS_VERSION": "3.1.0", "SCHEMA_PATH_PREFIX_TRIM": True, "SCHEMA_PATH_PREFIX_INSERT": "/shop"},
}


@pytest.fixture(scope="module")
def rest_documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    project = tmp_path_factory.mktemp("drf") / "project.py"
    project.write_text(PROJECT)
    made = subprocess.run(
        [sys.executable, str(project), json.dumps(list(VARIANTS.values()))],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return dict(zip(VARIANTS, map(json.loads, made.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_rest_framework_documents_what_is_declared(variant: str, rest_documents: dict[str, dict[str, Any]]) -> None:
    spec, prefix, version = rest_documents[variant], variant.partition(" ")[0], VARIANTS[variant]["OAS_VERSION"]
    validate(spec)
    assert spec["openapi"] == version
    assert classes(spec) == {
        f"POST {prefix}/payments/": "action",
        f"PATCH {prefix}/payments/{{id}}/": "conditional",
        f"DELETE {prefix}/payments/{{id}}/": "natural",
        f"POST {prefix}/payments/{{id}}/refund/": "action",
        f"POST {prefix}/orders/{{number}}/": "action",
        f"POST {prefix}/notify/": "action",
    }
    created = spec["paths"][f"{prefix}/payments/"]["post"]
    assert key_of(created)["required"] is True
    assert created["x-idempotency"]["ttl"] == "24h"
    assert "Link" in created["responses"]["409"]["headers"]
    refunded = spec["paths"][f"{prefix}/payments/{{id}}/refund/"]["post"]
    assert refunded["x-idempotency"]["ttl"] == "7d", "the guard's policy counts"
    assert "500" in refunded["responses"]
    assert key_of(spec["paths"][f"{prefix}/orders/{{number}}/"]["post"])["required"] is False
