"""Quart, whose views are awaited, and whose requests' bodies are read beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from semel import (
    AsyncMemoryStore,
    AsyncOperation,
    AsyncSemel,
    AsyncSQLiteStore,
    ConfigurationError,
    MemoryStore,
    Operation,
    PolicyError,
    Semel,
    State,
    StoreUnavailable,
    TransactionConflict,
    Wait,
)
from semel.engine.transaction.rules import TRIES
from tests.engine.driving import renew_early
from tests.http.asking import ask, body_of, header, scope_of
from tests.servers.install import missing_is_an_error

try:
    import quart
except ImportError:
    if missing_is_an_error():
        raise
    pytest.skip("Quart is not installed", allow_module_level=True)

from semel.http.describe.design import find_installation
from semel.http.quart import check_match, conditional, endpoints, etag, exempt, idempotent, install, natural

KEY = {"Idempotency-Key": "k"}


class Shop:
    """A service, and what happened in it."""

    def __init__(self, guard: AsyncSemel | None = None, **settings: Any) -> None:
        self.guard = guard or AsyncSemel(AsyncMemoryStore())
        self.app = quart.Quart("shop")
        self.asgi: Any = self.app
        self.runs = 0
        self.came, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()
        install(self.app, guard=self.guard, tenant=lambda request: request.headers.get("X-User", "alice"), **settings)
        self.client = self.app.test_client()

    async def post(self, path: str = "/pay", json: Any = None, **headers: str) -> Any:
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=json or {"amount": 10}, headers=KEY | lines)

    def serve(self, **settings: Any) -> Shop:
        @self.app.post("/pay")
        @idempotent(**settings)
        async def pay(op: AsyncOperation) -> tuple[dict[str, Any], int]:
            self.runs += 1
            self.came.set()
            await self.open.wait()
            said = await quart.request.get_json()
            return {"run": self.runs, "amount": said["amount"], "key": op.key}, 201

        return self


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(run())


def test_a_retry_gets_the_first_answer() -> None:
    async def scene() -> None:
        shop = Shop().serve()
        first, retry = await shop.post(), await shop.post()
        assert (first.status_code, retry.status_code, shop.runs) == (201, 201, 1)
        assert await first.get_data() == await retry.get_data() == b'{"amount":10,"key":"k","run":1}\n'
        assert "Idempotent-Replayed" not in first.headers
        assert retry.headers["Idempotent-Replayed"] == "true"
        assert (await shop.post(X_User="bob")).status_code == 201
        assert shop.runs == 2

    play(scene)


def test_another_request_with_the_key_and_one_without_a_key_are_refused() -> None:
    async def scene() -> None:
        shop = Shop(docs="https://errors.example").serve()
        await shop.post()
        other = await shop.post(json={"amount": 99})
        assert (other.status_code, (await other.get_json(force=True))["code"]) == (422, "idempotency_key_reused")
        assert other.headers["Link"] == '<https://errors.example>; rel="describedby"'
        assert (await shop.client.post("/pay", json={"amount": 1})).status_code == 400
        assert shop.runs == 1

    play(scene)


def test_a_key_that_is_in_use_is_refused_or_waited_for() -> None:
    async def scene() -> None:
        for settings, status in (({}, 409), ({"on_duplicate": Wait("20s")}, 201)):
            shop = Shop().serve(**settings)
            shop.open.clear()
            first = asyncio.ensure_future(shop.post())
            await shop.came.wait()
            second = asyncio.ensure_future(shop.post())
            if status == 409:
                assert (await second).headers["Retry-After"]
            else:
                await asyncio.sleep(0.05)
            shop.open.set()
            assert ((await first).status_code, (await second).status_code, shop.runs) == (201, status, 1)

    play(scene)


def test_what_before_request_refuses_is_not_claimed() -> None:
    async def scene() -> None:
        shop = Shop().serve()

        @shop.app.before_request
        async def authenticate() -> Any:
            return ("who are you?", 401) if "X-User" not in quart.request.headers else None

        assert (await shop.post()).status_code == 401
        assert (await shop.post(X_User="alice")).status_code == 201
        assert (await shop.post()).status_code == 401  # a replay is authorised too
        assert shop.runs == 1

    play(scene)


def test_a_plain_view_runs_in_a_thread() -> None:
    async def scene() -> None:
        shop = Shop()

        @shop.app.post("/pay")
        @idempotent()
        def pay(op: Operation) -> dict[str, Any]:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            shop.runs += 1
            return {"key": op.key, "id": op.capture("id", lambda: 7)}

        first, retry = await shop.post(), await shop.post()
        assert (await first.get_json(), await retry.get_json()) == ({"key": "k", "id": 7}, {"key": "k", "id": 7})
        assert shop.runs == 1

    play(scene)


def test_a_conditional_view_changes_only_what_its_caller_has_seen() -> None:
    async def scene() -> None:
        shop = Shop()
        closed: list[Any] = []

        @shop.app.patch("/notes/<id>")
        @conditional()
        async def change(id: str) -> dict[str, str]:
            check_match(etag(7))
            shop.runs += 1
            return {"id": id}

        @shop.app.teardown_request
        async def close(error: BaseException | None) -> None:
            closed.append(error)

        async def patch(**headers: str) -> int:
            lines = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await shop.client.patch("/notes/1", json={}, headers=lines)).status_code

        assert [await patch(), await patch(If_Match='"6"'), await patch(If_Match='"7"')] == [428, 412, 200]
        assert await patch(If_Match='"6"', Idempotency_Key="k") == 412
        assert await patch(If_Match='"7"', Idempotency_Key="k") == 200  # the refusal has freed the key
        assert (shop.runs, len(closed)) == (2, 5)

    play(scene)


def test_a_natural_deletion_of_nothing_is_done() -> None:
    async def scene() -> None:
        shop = Shop()

        @shop.app.delete("/notes/<id>")
        @natural()
        async def remove(id: str) -> Any:
            quart.abort(404)

        assert (await shop.client.delete("/notes/1")).status_code == 204

    play(scene)


def test_a_client_that_hangs_up_finds_the_answer_when_it_comes_again() -> None:
    async def scene() -> None:
        shop = Shop().serve()
        shop.open.clear()
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": b'{"amount": 10}', "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        request = asyncio.ensure_future(shop.asgi(quart_scope(), receive, send))
        await shop.came.wait()
        left.set()
        await asyncio.sleep(0.05)
        shop.open.set()
        await request
        sent = await ask(shop.asgi, quart_scope(), b'{"amount": 10}')
        assert (sent[0]["status"], header(sent, b"idempotent-replayed"), shop.runs) == (201, [b"true"], 1)

    play(scene)


def test_a_server_that_cancels_does_not_stop_the_view() -> None:
    async def scene() -> None:
        shop = Shop().serve()
        shop.open.clear()
        request = asyncio.ensure_future(ask(shop.asgi, quart_scope(), b'{"amount": 10}'))
        await shop.came.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        shop.open.set()
        for _ in range(500):
            record = await shop.guard.lookup("POST /pay", "k", tenant="alice")
            if record is not None and record.state is State.DONE:
                break
            await asyncio.sleep(0.01)
        assert ((await shop.post()).status_code, shop.runs) == (201, 1)

    play(scene)


def test_a_view_whose_lease_is_lost_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    renew_early(monkeypatch)

    async def scene() -> None:
        shop = Shop(AsyncSemel(AsyncMemoryStore())).serve()
        shop.open.clear()
        request = asyncio.ensure_future(shop.post())
        await shop.came.wait()
        await shop.guard.release("POST /pay", "k", tenant="alice", force=True)
        shop.open.set() if (await request).status_code == 409 else pytest.fail("not stopped")
        assert ((await shop.post()).status_code, shop.runs) == (201, 2)

    play(scene)


def test_a_body_in_many_pieces_is_compared_and_read_as_a_whole() -> None:
    async def scene() -> None:
        shop = Shop().serve()
        for _ in range(2):
            sent = await ask(shop.asgi, quart_scope(), b'{"amo', b"unt", b'": 10}')
            assert body_of(sent) == b'{"amount":10,"key":"k","run":1}\n'
        other = await ask(shop.asgi, quart_scope(), b'{"amount"', b": 11}")
        assert other[0]["status"] == 422

    play(scene)


@pytest.mark.parametrize("conflicts", [2, 1000])
def test_a_view_whose_transaction_conflicts_is_run_again(
    conflicts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.http.contract.endpoint.pause_after", lambda call, tried: 0.0)
    path = str(tmp_path / "shop.db")

    async def scene() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=sa.NullPool)
        shop = Shop(AsyncSemel(AsyncSQLiteStore(path), sweep_every=None))

        @shop.app.post("/pay")
        @idempotent(connection=async_sessionmaker(engine), connection_parameter="session")
        async def pay(session: AsyncSession) -> tuple[dict[str, Any], int]:
            shop.runs += 1
            await session.execute(sa.text("CREATE TABLE IF NOT EXISTS paid (amount INTEGER)"))
            said = await quart.request.get_json()
            await session.execute(sa.text("INSERT INTO paid VALUES (:amount)"), said)
            if shop.runs <= conflicts:
                raise TransactionConflict("it met another one")
            return said, 201

        try:
            answer, retry = await shop.post(), await shop.post()
            if conflicts == 2:
                assert (answer.status_code, retry.headers["Idempotent-Replayed"], shop.runs) == (201, "true", 3)
                async with engine.connect() as connection:
                    assert (await connection.execute(sa.text("SELECT amount FROM paid"))).all() == [(10,)]
            else:
                assert (answer.status_code, answer.headers["Retry-After"], shop.runs) == (503, "1", 2 * TRIES)
        finally:
            await shop.guard.close()
            await engine.dispose()

    play(scene)


def test_forms_are_parsed_after_the_claim() -> None:
    async def scene() -> None:
        shop = Shop()

        @shop.app.post("/pay")
        @idempotent()
        async def pay() -> dict[str, str]:
            return {"amount": (await quart.request.form)["amount"]}

        answer = await shop.client.post("/pay", form={"amount": "10"}, headers=KEY)
        assert await answer.get_json() == {"amount": "10"}

    play(scene)


@pytest.mark.parametrize("settings", [{"max_request_body": 20}, {}])
def test_a_body_that_is_too_long_is_refused(settings: dict[str, Any]) -> None:
    async def scene() -> None:
        shop = Shop(**settings).serve()
        if not settings:
            shop.app.config["MAX_CONTENT_LENGTH"] = 20
        assert (await shop.post(json={"amount": "x" * 20})).status_code == 413
        assert ((await shop.post()).status_code, shop.runs) == (201, 1)

    play(scene)


def test_a_failure_frees_the_key_unless_there_are_effects_outside() -> None:
    async def scene() -> None:
        for external, runs in ((False, 2), (True, 1)):
            shop = Shop()

            @shop.app.post("/pay")
            @idempotent(external_effects=external)
            async def pay(shop: Shop = shop) -> Any:
                shop.runs += 1
                raise KeyError("broken")

            assert [(await shop.post()).status_code for _ in range(2)] == [500, 500]
            assert shop.runs == runs

    play(scene)


def test_a_store_that_is_down_is_503() -> None:
    class Down(AsyncMemoryStore):
        async def execute(self, op: Any) -> Any:
            raise StoreUnavailable("down")

    async def scene() -> None:
        shop = Shop(AsyncSemel(Down())).serve()
        assert ((await shop.post()).status_code, shop.runs) == (503, 0)

    play(scene)


def test_all_routes_are_listed_with_their_rules() -> None:
    async def scene() -> None:
        shop = Shop().serve()

        @shop.app.post("/search/<path:what>")
        @exempt("finds, and changes nothing")
        async def search(what: str) -> str:
            return what

        assert await (await shop.client.post("/search/a/b")).get_data() == b"a/b"
        found = {(each.method, each.path): type(each.rule).__name__ for each in endpoints(shop.app)}
        assert (found["POST", "/pay"], found["POST", "/search/{what}"]) == ("Idempotent", "Exempt")
        known = find_installation(shop.app)
        assert (known.framework, known.guard) == ("Quart", shop.guard)

    play(scene)


def test_routes_that_are_not_decorated_are_claimed_before_quart_sees_them() -> None:
    async def scene() -> None:
        shop = Shop(routes={"POST /pay": idempotent()})

        @shop.app.post("/pay")
        async def pay() -> dict[str, Any]:
            shop.runs += 1
            return {"run": shop.runs, "amount": (await quart.request.get_json())["amount"]}

        answers = [await shop.post(), await shop.post(), await shop.post(X_User="bob")]
        assert [await each.get_json() for each in answers] == [
            {"run": 1, "amount": 10},
            {"run": 1, "amount": 10},
            {"run": 2, "amount": 10},
        ]

    play(scene)


def test_mistakes_are_found_when_the_app_is_made() -> None:
    app = quart.Quart("shop")
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        install(app, guard=Semel(MemoryStore()), tenant=str)  # type: ignore[arg-type]
    install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=str)
    with pytest.raises(ConfigurationError, match="already"):
        install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=str)

    async def pay(op: Operation) -> None: ...

    with pytest.raises(PolicyError, match="AsyncOperation"):
        idempotent()(pay)


def test_a_declared_view_without_an_installed_middleware_says_so() -> None:
    async def scene() -> None:
        app = quart.Quart("shop")
        app.config["PROPAGATE_EXCEPTIONS"] = True

        @app.post("/pay")
        @idempotent()
        async def pay() -> str:
            return "paid"

        with pytest.raises((ConfigurationError, ExceptionGroup)) as raised:  # a group from Quart 0.23 on
            await app.test_client().post("/pay", headers=KEY)
        error = raised.value.exceptions[0] if isinstance(raised.value, ExceptionGroup) else raised.value
        assert isinstance(error, ConfigurationError)
        assert "not installed" in str(error)

    play(scene)


def quart_scope() -> dict[str, Any]:
    scope = scope_of(scheme="http", http_version="1.1", root_path="", client=None, server=None, asgi={})
    scope["headers"] = [*scope["headers"], (b"content-type", b"application/json"), (b"host", b"shop")]
    return scope


class SlowStore(AsyncMemoryStore):
    """Each Op takes some turns of the loop, so that a request can end in the middle of its claim."""

    async def execute(self, op: Any) -> Any:
        await asyncio.sleep(0)
        result = await super().execute(op)
        await asyncio.sleep(0)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["async def", "def"])
@pytest.mark.parametrize("how", ["the server cancels", "the client hangs up"])
def test_the_view_runs_once_whenever_its_request_is_given_up(how: str, plain: bool) -> None:
    """Quart runs a view in a task of its own, which goes on when the request's task is cancelled."""

    async def scene(turns: int) -> bool:
        shop = Shop(AsyncSemel(SlowStore()))

        def pay() -> tuple[dict[str, int], int]:
            shop.runs += 1
            return {"run": shop.runs}, 201

        async def pay_async() -> tuple[dict[str, int], int]:
            await asyncio.sleep(0)
            return pay()

        shop.app.post("/pay", endpoint="pay")(idempotent()(pay if plain else pay_async))
        left = asyncio.Event()
        bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                left.set()  # after its answer a request is over

        request = asyncio.ensure_future(shop.asgi(quart_scope(), receive, send))
        for _ in range(turns):
            await asyncio.sleep(0)
        running = not request.done()
        if how == "the server cancels":
            request.cancel()
        left.set()
        await asyncio.gather(request, return_exceptions=True)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        retry = await ask(shop.asgi, quart_scope(), b"{}")
        assert (retry[0]["status"], shop.runs) == (201, 1), f"after {turns} turns"
        return running

    turns = 0
    while asyncio.run(scene(turns)):
        turns += 1
    assert turns > 5
