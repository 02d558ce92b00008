"""Routes that are bound to hosts, which are operations of their own, and the names of routes on events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import flask
import httpx
import pytest

from tests.http.django_project import MIDDLEWARE, Project  # first: Django wants settings when it is imported

from django.http import HttpResponse  # isort: skip
from django.urls import include, path, re_path  # isort: skip

from fastapi import APIRouter, FastAPI
from litestar import Litestar, post
from litestar.params import FromPath
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Host, Mount, Route, Router

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http import quart as for_quart
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.routes import Endpoint
from semel.http.contract.rules import idempotent
from semel.http.describe.design import design_of, find_installation
from semel.http.wsgi import WSGIMiddleware
from semel.observe.events import Event
from tests.http.asking import Counting, whose

quart = pytest.importorskip("quart")

Send = Callable[[str, str], str]
"""Post to a host and a path; the answer."""
KEY = {"Idempotency-Key": "k"}


def over_asgi(app: Any) -> Send:
    async def send(host: str, path: str) -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return (await client.post(path, headers={**KEY, "Host": host})).text

    return lambda host, path: asyncio.run(send(host, path))


def over_wsgi(app: Any) -> Send:
    def send(host: str, path: str) -> str:
        with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://x") as client:
            return client.post(path, headers={**KEY, "Host": host}).text

    return send


def shop(name: str, **settings: Any) -> Any:
    @for_fastapi.idempotent(**settings)
    async def pay(request: Any) -> Response:
        return PlainTextResponse(name)

    return pay


def paying(name: str, **settings: Any) -> Route:
    return Route("/pay", shop(name, **settings), methods=["POST"])


# -- hosts


def starlette(**settings: Any) -> Send:
    app = Starlette(
        routes=[
            Mount("/free", routes=[paying("free", **settings)]),
            Host("a.example", app=Router([paying("a", **settings)])),
            Host("{name}.test", app=Router([paying("b", **settings)])),
            paying("all", **settings),
        ]
    )
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return over_asgi(app)


def starlette_with_one_endpoint(**settings: Any) -> Send:
    """The same function under both hosts and under none."""

    @for_fastapi.idempotent(**settings)
    async def pay(request: Any) -> Response:
        host = request.url.hostname
        return PlainTextResponse({"a.example": "a", "b.test": "b"}.get(host, "all"))

    @for_fastapi.idempotent(**settings)
    async def free(request: Any) -> Response:
        return PlainTextResponse("free")

    route = Route("/pay", pay, methods=["POST"])
    app = Starlette(routes=[Mount("/free", routes=[Route("/pay", free, methods=["POST"])])])
    app.router.routes += [Host("a.example", app=Router([route])), Host("b.test", app=Router([route])), route]
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return over_asgi(app)


def of_fastapi(**settings: Any) -> Send:
    def sub(name: str) -> FastAPI:
        app = FastAPI()
        router = APIRouter()

        @router.post("/pay")
        @for_fastapi.idempotent(**settings)
        async def pay() -> Response:
            return PlainTextResponse(name)

        app.include_router(router)
        return app

    app = FastAPI()
    app.mount("/free", sub("free"))
    app.host("a.example", sub("a"))
    app.host("b.test", sub("b"))
    app.mount("", sub("all"))
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return over_asgi(app)


def _flask_like(app: Any, module: Any, settings: dict[str, Any], **binding: list[str]) -> None:
    (setting, values), names = *binding.items(), ["a", "b", "all"]
    for name, value in zip(names, values, strict=True):

        def pay(name: str = name) -> str:
            return name

        app.add_url_rule(
            "/pay", name, module.idempotent(**settings)(pay), methods=["POST"], **({setting: value} if value else {})
        )


def flask_hosts(**settings: Any) -> Send:
    app = flask.Flask("shop", host_matching=True, static_host="static.example")
    _flask_like(app, for_flask, settings, host=["a.example", "b.test", "<any>"])
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=whose)
    return over_wsgi(app)


def flask_subdomains(**settings: Any) -> Send:
    app = flask.Flask("shop", subdomain_matching=True)
    app.config["SERVER_NAME"] = "example"
    _flask_like(app, for_flask, settings, subdomain=["a", "<name>", ""])
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=whose)
    send = over_wsgi(app)
    return lambda host, path: send(
        {"b.test": "b.example", "c.example": "example", "d.example": "example"}.get(host, host), path
    )


def quart_hosts(**settings: Any) -> Send:
    app = quart.Quart("shop", host_matching=True, static_host="static.example")
    _flask_like(app, for_quart, settings, host=["a.example", "b.test", "<any>"])
    for_quart.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    return over_asgi(app)


BOUND = [starlette, starlette_with_one_endpoint, of_fastapi, flask_hosts, flask_subdomains, quart_hosts]


@pytest.mark.parametrize("scope", ["operation", "tenant"])
@pytest.mark.parametrize("service", BOUND, ids=lambda service: service.__name__)
def test_a_shop_never_gets_the_answer_of_another_host(service: Any, scope: str) -> None:
    send = service(scope=scope)

    assert [send("a.example", "/pay") for _ in range(2)] == ["a", "a"]
    other = send("b.test", "/pay")
    assert other == "b" if scope == "operation" else "idempotency_key_reused" in other


@pytest.mark.parametrize("service", [starlette, starlette_with_one_endpoint, of_fastapi])
def test_a_route_that_serves_all_hosts_is_one_operation(service: Any) -> None:
    """It runs once: under a scope of the tenant another operation would be refused."""
    send = service(scope="tenant")

    assert [send(host, "/pay") for host in ("c.example", "d.example")] == ["all", "all"]


@pytest.mark.parametrize("service", [starlette, starlette_with_one_endpoint, of_fastapi])
def test_a_route_before_the_hosts_serves_all_of_them(service: Any) -> None:
    send = service(scope="tenant")

    assert [send(host, "/free/pay") for host in ("a.example", "c.example", "b.test")] == ["free"] * 3


def test_a_view_of_flask_without_a_subdomain_is_one_operation() -> None:
    send = flask_subdomains()
    assert [send(host, "/pay") for host in ("c.example", "d.example")] == ["all", "all"]


def test_routes_at_the_edge_are_bound_to_hosts_as_well() -> None:
    """In front of applications that Semel knows nothing of."""

    def answering(name: str) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await PlainTextResponse(name)(scope, receive, send)

        return app

    app = Starlette(routes=[Host("a.example", app=answering("a")), Host("b.test", app=answering("b"))])
    for_fastapi.install(
        app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose, routes={"POST /pay": for_fastapi.idempotent()}
    )
    send = over_asgi(app)
    assert [send(host, "/pay") for host in ("a.example", "b.test", "a.example:80")] == ["a", "b", "a"]
    assert send("[", "/pay") == "Not Found"


@pytest.mark.parametrize("kind", ["flask", "quart"])
def test_views_at_the_edge_are_bound_to_hosts_as_well(kind: str) -> None:
    app: Any
    if kind == "flask":
        app = flask.Flask("shop", host_matching=True, static_host="static.example")
        for_flask.install(app, guard=Semel(MemoryStore()), tenant=whose, routes={"POST /pay": idempotent()})
    else:
        app = quart.Quart("shop", host_matching=True, static_host="static.example")
        guard = AsyncSemel(AsyncMemoryStore())
        for_quart.install(app, guard=guard, tenant=whose, routes={"POST /pay": idempotent()})
    app.add_url_rule("/pay", "a", lambda: "a", methods=["POST"], host="a.example")
    app.add_url_rule("/pay", "b", lambda: "b", methods=["POST"], host="b.test")
    send = over_wsgi(app) if kind == "flask" else over_asgi(app)

    assert [send(host, "/pay") for host in ("a.example", "b.test", "a.example")] == ["a", "b", "a"]
    assert "Not Found" in send("c.example", "/pay")


@pytest.mark.parametrize("in_loop", [False, True], ids=["wsgi", "asgi"])
def test_a_urlconf_of_the_hosts_own_binds_django_views_to_the_host(in_loop: bool) -> None:
    def by_host(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            request.urlconf = urlconfs.get(request.get_host())
            if request.urlconf is None:
                del request.urlconf
            return get_response(request)

        return middleware

    def pattern(name: str) -> Any:
        view = for_django.idempotent()(lambda request: HttpResponse(name))
        return path("pay", view)

    urlconfs = {"a.example": (pattern("a"),), "b.test": (pattern("b"),)}
    with Project(Semel(MemoryStore())) as project:
        project.serve(pattern("all"), middleware=(by_host, MIDDLEWARE))
        project._change(USE_X_FORWARDED_HOST=True)

        def send(host: str) -> str:
            client: Any = project.async_client() if in_loop else project.client()
            answer = client.post("/pay", headers={**KEY, "X-Forwarded-Host": host})
            return str((asyncio.run(answer) if in_loop else answer).content.decode())

        assert [send(host) for host in ("a.example", "b.test", "a.example")] == ["a", "b", "a"]
        assert [send(host) for host in ("c.example", "d.example")] == ["all", "all"]


def test_endpoints_below_a_host_are_listed_with_it() -> None:
    app = Starlette(routes=[Host("{name}.test", app=Router([paying("b")])), paying("all")])
    rule = for_fastapi.idempotent()

    assert [str(each) for each in for_fastapi.endpoints(app)] == ["POST {name}.test/pay (pay)", "POST /pay (pay)"]
    assert for_fastapi.endpoints(app)[0] == Endpoint("POST", "/pay", rule, "pay", "{name}.test")


# -- the names of routes on events


@pytest.fixture
def seen() -> list[Event]:
    return []


def starlette_orders(seen: list[Event]) -> Send:
    class Orders(HTTPEndpoint):
        @for_fastapi.idempotent()
        async def post(self, request: Any) -> Response:
            return PlainTextResponse("paid")

    app = Starlette(
        routes=[Mount("/api", routes=[Route("/orders/{id:int}/pay", Orders), Route("/bills/{id}/pay", Orders)])]
    )
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore(), on_event=seen.append), tenant=whose)
    return over_asgi(app)


def fastapi_orders(seen: list[Event]) -> Send:
    router = APIRouter(prefix="/orders")

    @router.post("/{id}/pay")
    @for_fastapi.idempotent()
    async def pay(id: int) -> str:
        return "paid"

    app = FastAPI()
    app.include_router(router, prefix="/api")
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore(), on_event=seen.append), tenant=whose)
    return over_asgi(app)


def flask_orders(seen: list[Event]) -> Send:
    app = flask.Flask("shop")
    app.add_url_rule("/api/orders/<int:id>/pay", "pay", for_flask.idempotent()(lambda id: "paid"), methods=["POST"])
    for_flask.install(app, guard=Semel(MemoryStore(), on_event=seen.append), tenant=whose)
    return over_wsgi(app)


def quart_orders(seen: list[Event]) -> Send:
    app = quart.Quart("shop")
    app.add_url_rule("/api/orders/<int:id>/pay", "pay", for_quart.idempotent()(lambda id: "paid"), methods=["POST"])
    for_quart.install(app, guard=AsyncSemel(AsyncMemoryStore(), on_event=seen.append), tenant=whose)
    return over_asgi(app)


def litestar_orders(seen: list[Event]) -> Send:
    @post("/api/orders/{id:int}/pay")
    @for_litestar.idempotent()
    async def pay(id: FromPath[int]) -> str:
        return "paid"

    guard = AsyncSemel(AsyncMemoryStore(), on_event=seen.append)
    return over_asgi(Litestar([pay], plugins=[for_litestar.SemelPlugin(guard=guard, tenant=whose)]))


def asgi_orders(seen: list[Event]) -> Send:
    guard = AsyncSemel(AsyncMemoryStore(), on_event=seen.append)
    rule = idempotent()
    routes = {"POST /api/bills/{id}": rule, "POST /api/orders/{id}/pay": rule}
    return over_asgi(ASGIMiddleware(Counting(), guard=guard, tenant=whose, routes=routes))


def wsgi_orders(seen: list[Event]) -> Send:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"paid"]

    guard = Semel(MemoryStore(), on_event=seen.append)
    return over_wsgi(WSGIMiddleware(app, guard=guard, tenant=whose, routes={"POST /api/orders/{id}/pay": idempotent()}))


def django_orders(seen: list[Event], *, regular: bool = False) -> Send:
    view = for_django.idempotent()(lambda request, id: HttpResponse("paid"))
    orders = re_path(r"^orders/(?P<id>[0-9]+)/pay$", view) if regular else path("orders/<int:id>/pay", view)
    guard = Semel(MemoryStore(), on_event=seen.append)

    def send(host: str, where: str) -> str:
        with Project(guard) as project:
            project.serve(path("api/", include([orders])))
            return str(project.client().post(where, headers=KEY).content.decode())

    return send


def django_orders_by_regex(seen: list[Event]) -> Send:
    return django_orders(seen, regular=True)


ORDERS = [
    starlette_orders, fastapi_orders, flask_orders, quart_orders, litestar_orders, asgi_orders, wsgi_orders,
    django_orders, django_orders_by_regex,
]  # fmt: skip


@pytest.mark.parametrize("service", ORDERS, ids=lambda service: service.__name__)
def test_events_name_the_template_of_the_route_and_the_operation_its_path(service: Any, seen: list[Event]) -> None:
    send = service(seen)
    for number in (7, 8, 8):
        send("x", f"/api/orders/{number}/pay")

    assert {event.name for event in seen} >= {"started", "completed", "replayed"}
    assert {event.route for event in seen} == {"POST /api/orders/{id}/pay"}
    assert {event.operation for event in seen} == {f"POST /api/orders/{number}/pay" for number in (7, 8)}


def test_the_route_of_a_host_has_its_pattern(seen: list[Event]) -> None:
    app = Starlette(routes=[Host("{name}.test", app=Router([paying("b")]))])
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore(), on_event=seen.append), tenant=whose)
    send = over_asgi(app)
    send("b.test", "/pay")
    send("c.test", "/pay")

    assert {event.route for event in seen} == {"POST {name}.test/pay"}
    assert {event.operation for event in seen} == {"POST b.test/pay", "POST c.test/pay"}


def test_a_function_has_its_operation_as_its_route(seen: list[Event]) -> None:
    Semel(MemoryStore(), on_event=seen.append).run("ship", key="k", call=lambda: 1)
    assert {event.route for event in seen} == {"ship"}


def test_a_request_without_its_optional_key_names_the_route_too(seen: list[Event]) -> None:
    app = flask.Flask("shop")
    app.add_url_rule("/orders/<id>", "pay", for_flask.idempotent(required=False)(lambda id: "paid"), methods=["POST"])
    for_flask.install(app, guard=Semel(MemoryStore(), on_event=seen.append), tenant=whose)
    app.test_client().post("/orders/7")

    assert [(event.name, event.route) for event in seen] == [("unkeyed", "POST /orders/{id}")]


# -- a request that a view makes itself


@pytest.mark.parametrize("kind", ["flask", "quart"])
def test_a_request_that_a_view_makes_has_a_tenant_of_its_own(kind: str) -> None:
    tenants: list[str] = []

    def tenant(request: Any) -> str:
        tenants.append(request.headers["X-User"])
        return tenants[-1]

    app: Any
    if kind == "flask":
        app = flask.Flask("shop")
        for_flask.install(app, guard=Semel(MemoryStore()), tenant=tenant, routes={"POST /inner": idempotent()})

        @app.post("/outer")  # type: ignore[untyped-decorator]
        @for_flask.idempotent()
        def outer() -> str:
            return str(app.test_client().post("/inner", headers={**KEY, "X-User": "bob"}).text)

        app.add_url_rule("/inner", "inner", lambda: "inner", methods=["POST"])
        answer = app.test_client().post("/outer", headers={**KEY, "X-User": "alice"}).text
    else:
        app = quart.Quart("shop")
        guard = AsyncSemel(AsyncMemoryStore())
        for_quart.install(app, guard=guard, tenant=tenant, routes={"POST /inner": idempotent()})

        @app.post("/outer")  # type: ignore[untyped-decorator]
        @for_quart.idempotent()
        async def outer_async() -> str:
            inner = await app.test_client().post("/inner", headers={**KEY, "X-User": "bob"})
            return str(await inner.get_data(as_text=True))

        app.add_url_rule("/inner", "inner", lambda: "inner", methods=["POST"])

        async def main() -> str:
            sent = await app.test_client().post("/outer", headers={**KEY, "X-User": "alice"})
            return str(await sent.get_data(as_text=True))

        answer = asyncio.run(main())

    assert (answer, tenants) == ("inner", ["alice", "bob"])


def test_the_design_of_a_service_shows_the_hosts_of_its_routes() -> None:
    app = Starlette(routes=[Host("a.example", app=Router([paying("a")])), Host("b.test", app=Router([paying("b")]))])
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    design = design_of("shop:app", find_installation(app))
    assert [route["path"] for route in design["routes"]] == ["a.example/pay", "b.test/pay"]
    assert design["errors"][0]["routes"] == ["POST a.example/pay", "POST b.test/pay"]
