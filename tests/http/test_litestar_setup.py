"""The plugin in an app: mistakes in the set-up are loud and early, and what it finds there is told."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import warnings
from typing import Any

import pytest
from litestar import Controller, Litestar, Router, delete, get, post, put, route
from litestar.config.cors import CORSConfig
from litestar.exceptions import LitestarWarning
from litestar.params import FromPath

from semel import AsyncMemoryStore, AsyncOperation, AsyncSemel, ConfigurationError, MemoryStore, PolicyError, Semel
from semel.http.contract.routes import undeclared
from semel.http.litestar import SemelPlugin, conditional, endpoints, exempt, idempotent, natural
from tests.http.asking import ask, body_of, header, scope_of


def plugin() -> SemelPlugin:
    return SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=lambda request: "alice")


def made(*handlers: Any, **settings: Any) -> Litestar:
    return Litestar(list(handlers), plugins=[plugin()], logging_config=None, **settings)


@post("/pay")
@idempotent()
async def pay(op: AsyncOperation) -> str:
    return op.key


def test_a_declared_handler_without_the_plugin_is_an_error_and_does_not_run() -> None:
    runs, errors = [], []

    @post("/pay")
    @idempotent()
    async def pay() -> None:
        runs.append(1)

    async def failed(error: Exception, scope: Any) -> None:
        errors.append(error)

    app = Litestar([pay], after_exception=[failed], logging_config=None)
    sent = asyncio.run(ask(app, scope_of()))
    assert sent[0]["status"] == 500
    assert [type(error) for error in errors] == [ConfigurationError]
    assert runs == []


@pytest.mark.parametrize("settings", [{}, {"sync_to_thread": False}])
def test_a_plain_def_that_would_block_the_event_loop_is_refused_at_start_up(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LitestarWarning)

        @post("/pay", **settings)
        @idempotent()
        def pay_at_once() -> None: ...

    with pytest.raises(ConfigurationError, match=r"pay_at_once: .*sync_to_thread=True"):
        made(pay_at_once)


def test_a_cache_that_would_answer_without_a_claim_is_refused_at_start_up() -> None:
    """Litestar's cache knows the path alone: it would give Bob Alice's answer."""

    @post("/pay", cache=60)
    @idempotent()
    async def pay_from_cache() -> None: ...

    with pytest.raises(ConfigurationError, match=r"pay_from_cache: cache="):
        made(pay_from_cache)


@pytest.mark.parametrize("decorator", [idempotent(), conditional(), natural(), exempt("no harm")])
def test_a_decorator_above_the_routes_is_refused(decorator: Any) -> None:
    with pytest.raises(PolicyError, match=r"@post\(…\), and this one below it"):

        @decorator
        @post("/pay")
        async def pay_upside_down() -> None: ...


def test_one_plugin_for_one_app() -> None:
    with pytest.raises(ConfigurationError, match="installed in this app already"):
        Litestar([pay], plugins=[plugin(), plugin()])


def test_a_sync_guard_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        SemelPlugin(guard=Semel(MemoryStore()), tenant=lambda _: "alice")  # type: ignore[arg-type]


def test_no_tenant_is_one_loud_warning() -> None:
    with pytest.warns(UserWarning, match="tenant= is missing") as told:
        Litestar([pay], plugins=[SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()))], logging_config=None)
    assert len(told) == 1
    SemelPlugin(guard=AsyncSemel(AsyncMemoryStore(), tenant="shop"))


def test_a_tenant_that_cannot_be_told_is_the_services_error_and_nothing_runs() -> None:
    plugin = SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=lambda request: request.user)
    sent = asyncio.run(ask(Litestar([pay], plugins=[plugin], logging_config=None), scope_of()))
    assert sent[0]["status"] == 500


def test_problems_name_the_page_that_explains_them() -> None:
    page = "https://docs.example"
    plugin = SemelPlugin(guard=AsyncSemel(AsyncMemoryStore(), tenant="shop"), docs=page)
    sent = asyncio.run(ask(Litestar([pay], plugins=[plugin], logging_config=None), scope_of(key=None)))
    assert sent[0]["status"] == 400
    assert header(sent, b"link") == [b'<https://docs.example>; rel="describedby"']


def test_scripts_of_other_origins_may_read_our_headers() -> None:
    @post("/marked")
    @idempotent(replay_marker="x-again")
    async def marked() -> None: ...

    config = CORSConfig(allow_origins=["https://shop.example"], expose_headers=["X-Request-Id", "Link"])
    app = made(pay, marked, cors_config=config)
    scope = scope_of()
    scope["headers"].append((b"origin", b"https://shop.example"))
    exposed = header(asyncio.run(ask(app, scope)), b"access-control-expose-headers")
    wanted = {
        b"idempotent-stored",
        b"idempotency-key",
        b"idempotent-replayed",
        b"link",
        b"retry-after",
        b"x-again",
        b"x-request-id",
    }
    assert {word.strip().lower() for word in exposed[0].split(b",")} == wanted
    assert config.expose_headers == ["X-Request-Id", "Link"]  # the caller's own is left alone


class Orders(Controller):
    path = "/orders"

    @post("/")
    @idempotent(ttl="7d")
    async def place(self) -> None: ...

    @put("/{number:int}")
    @natural()
    async def replace(self, number: FromPath[int]) -> None: ...

    @delete("/{number:int}")
    async def cancel(self, number: FromPath[int]) -> None: ...

    @post("/{number:int}/notes")
    async def note(self, number: FromPath[int]) -> None: ...


@get("/orders/search")
async def search() -> None: ...


@post("/search")
@exempt("it only reads")
async def search_by_post() -> None: ...


@post("/refunds", sync_to_thread=True, name="refund")
@idempotent()
def refund() -> None: ...


@route("/both", http_method=["POST", "PATCH"])
async def both() -> None: ...


def listed() -> Litestar:
    return made(Router("/v1", route_handlers=[Orders]), search, search_by_post, refund, both, openapi_config=None)


def test_all_routes_are_listed_with_their_rules() -> None:
    found = endpoints(listed())
    kinds = {(each.method, each.path, each.name): each.rule and each.rule.kind for each in found}
    assert kinds == {
        ("POST", "/v1/orders", "place"): "action",
        ("PUT", "/v1/orders/{number}", "replace"): "natural",
        ("DELETE", "/v1/orders/{number}", "cancel"): None,
        ("POST", "/v1/orders/{number}/notes", "note"): None,
        ("GET", "/orders/search", "search"): None,
        ("POST", "/search", "search_by_post"): "exempt",
        ("POST", "/refunds", "refund"): "action",
        ("POST", "/both", "both"): None,
        ("PATCH", "/both", "both"): None,
    }
    assert len(undeclared(found)) == 3


def test_undeclared_routes_are_told_once_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    app = listed()

    async def run() -> None:
        async with app.lifespan():
            await ask(app, scope_of("/refunds"))
            await ask(app, scope_of("/v1/orders"))

    with caplog.at_level(logging.WARNING, "semel.http"):
        asyncio.run(run())
    told = [record.getMessage() for record in caplog.records if record.name == "semel.http"]
    assert len(told) == 1
    assert "3 routes" in told[0]
    for undeclared_route in ("POST /v1/orders/{number}/notes (note)", "POST /both (both)", "PATCH /both (both)"):
        assert undeclared_route in told[0]
    assert "/refunds" not in told[0]


def test_handlers_that_are_added_later_and_under_two_paths_are_protected() -> None:
    runs = []

    @post(["/a", "/b"])
    @idempotent()
    async def twice() -> int:
        runs.append(1)
        return len(runs)

    app = made(pay)
    app.register(twice)

    async def run() -> list[bytes]:
        return [body_of(await ask(app, scope_of(path))) for path in ("/a", "/a", "/b", "/b")]

    assert asyncio.run(run()) == [b"1", b"1", b"2", b"2"]


@pytest.mark.slow
def test_the_glue_says_what_to_install_when_litestar_is_missing() -> None:
    code = (
        "import sys; sys.modules['litestar'] = None\n"
        "from semel.errors import MissingDependency\n"
        "try:\n    import semel.http.litestar\n"
        "except MissingDependency as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "semel[litestar]" in done.stdout
