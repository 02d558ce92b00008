"""The handler answered, and its answer could not be stored: the client gets it, and does not repeat the effect."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import fastapi
import flask
import httpx
import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel, SQLiteStore, StoreUnavailable
from semel.core.ops import Complete, Renew
from semel.http import fastapi as on_fastapi
from semel.http import flask as on_flask
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import idempotent
from semel.http.wsgi import WSGIMiddleware
from semel.testing.faults import until
from tests.engine.driving import renew_early
from tests.engine.scripted import AsyncScriptedStore, Script, ScriptedStore

pytestmark = pytest.mark.slow  # most of it waits for the next try to store

BIG = b"x" * 2000
KINDS = ["flask", "flask at the edge", "fastapi", "fastapi at the edge"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.engine.drive.backlog.SLOWEST_PAUSE", 0.05)


class Shop:
    """A service whose store can be told to fail, and how often its handler ran."""

    def __init__(self, kind: str, **settings: Any) -> None:
        self.script = Script()
        self.runs = 0
        self.settings = {"completion_timeout": "20ms", "lease": "30s", "max_stored_body": 1000, **settings}
        self.guard: Any
        self.post: Callable[[str], Any]
        self.is_async = kind.startswith("fastapi")
        if self.is_async:
            self._start_fastapi("edge" in kind)
        else:
            self._start_flask("edge" in kind)

    def work(self, name: str) -> bytes:
        self.runs += 1
        if name == "broken":
            raise RuntimeError("broken")
        return BIG if name == "big" else b"paid"

    def _start_flask(self, at_the_edge: bool) -> None:
        app = flask.Flask("shop")
        self.guard = Semel(ScriptedStore(MemoryStore(), self.script), sweep_every=None)
        if at_the_edge:
            app.post("/<name>")(lambda name: flask.Response(self.work(name), mimetype="text/plain"))
            routes = {f"POST /{name}": idempotent(**self.settings) for name in ("pay", "big", "broken")}
            app.wsgi_app = WSGIMiddleware(  # type: ignore[method-assign]
                app.wsgi_app, guard=self.guard, tenant=lambda environ: "alice", routes=routes
            )
        else:
            on_flask.install(app, guard=self.guard, tenant=lambda request: "alice")

            @app.post("/<name>")
            @on_flask.idempotent(**self.settings)
            def pay(name: str) -> flask.Response:
                return flask.Response(self.work(name), mimetype="text/plain")

        client = app.test_client()
        self.post = lambda path: client.post(path, headers={"Idempotency-Key": "k1"})
        self.close = self.guard.close

    def _start_fastapi(self, at_the_edge: bool) -> None:
        app: Any = fastapi.FastAPI()
        self.guard = AsyncSemel(AsyncScriptedStore(AsyncMemoryStore(), self.script), sweep_every=None)

        async def pay(name: str) -> fastapi.Response:
            return fastapi.Response(self.work(name), media_type="text/plain")

        if at_the_edge:
            app.post("/{name}")(pay)
            routes = {f"POST /{name}": idempotent(**self.settings) for name in ("pay", "big", "broken")}
            served: Any = ASGIMiddleware(app, guard=self.guard, tenant=lambda scope: "alice", routes=routes)
        else:
            on_fastapi.install(app, guard=self.guard, tenant=lambda request: "alice")
            app.post("/{name}")(on_fastapi.idempotent(**self.settings)(pay))
            served = app
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        def in_loop(work: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(30)

        async def send(path: str) -> httpx.Response:
            transport = httpx.ASGITransport(served, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post(path, headers={"Idempotency-Key": "k1"}, timeout=30)

        def close() -> None:
            in_loop(self.guard.close())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

        self.post = lambda path: in_loop(send(path))
        self.close = close

    def stored(self) -> None:
        until(lambda: not self.guard.driver.keeper.backlog, 20, "the answer is stored")


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Iterator[Callable[..., Shop]]:
    """Makes a service, and closes it after the test."""

    def make(kind: str, **settings: Any) -> Shop:
        made = Shop(kind, **settings)
        request.addfinalizer(made.close)
        return made

    return make


def obediently(post: Callable[[], Any]) -> Any:
    """A client that retries for as long as it is told to."""
    for _ in range(50):
        answer = post()
        if answer.status_code < 500 and answer.status_code != 409:
            return answer
        if answer.status_code == 500 and "Retry-After" not in answer.headers:
            return answer
        time.sleep(0.05)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("kind", KINDS)
def test_an_obedient_client_has_the_effect_once(shop: Callable[..., Shop], kind: str) -> None:
    served = shop(kind)
    served.script.on(Complete, before=StoreUnavailable("down"), times=40)
    answer = obediently(lambda: served.post("/pay"))
    assert (answer.status_code, answer.text, served.runs) == (200, "paid", 1)
    assert answer.headers["Idempotent-Stored"] == "false"
    assert answer.headers["Idempotency-Key"] == "k1"
    in_the_meantime = served.post("/pay")
    assert in_the_meantime.status_code in (409, 200)
    served.stored()
    replay = served.post("/pay")
    assert (replay.status_code, replay.text, replay.headers["Idempotent-Replayed"]) == (200, "paid", "true")
    assert "Idempotent-Stored" not in replay.headers
    assert served.runs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_retries_in_spite_of_its_answer_finds_the_key_in_use(
    shop: Callable[..., Shop], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_early(monkeypatch)
    served = shop(kind, lease="30s")
    renewed = served.script.on(Renew)
    served.script.on(Complete, before=StoreUnavailable("down"), times=10**6)
    assert served.post("/pay").headers["Idempotent-Stored"] == "false"
    renewed.took_effect.wait()
    assert served.post("/pay").status_code == 409
    assert served.runs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_route_may_withhold_it(shop: Callable[..., Shop], kind: str) -> None:
    served = shop(kind, on_unstored="withhold")
    served.script.on(Complete, before=StoreUnavailable("down"), times=8)
    answer = obediently(lambda: served.post("/pay"))
    assert answer.status_code == 500
    problem = answer.json if isinstance(answer, flask.Response) else answer.json()
    assert (problem["code"], problem["retryable"]) == ("idempotency_outcome_unknown", False)
    assert "paid" not in answer.text
    served.stored()
    assert served.post("/pay").text == "paid"
    assert served.runs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_was_let_through_is_not_cut_off(shop: Callable[..., Shop], kind: str) -> None:
    served = shop(kind)
    served.script.on(Complete, before=StoreUnavailable("down"), times=8)
    answer = served.post("/big")
    assert (answer.status_code, answer.text) == (200, BIG.decode())
    served.stored()
    replay = served.post("/big")
    assert (replay.status_code, replay.headers["Idempotent-Replayed"], served.runs) == (200, "omitted", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_failure_is_delivered_too(shop: Callable[..., Shop], kind: str) -> None:
    served = shop(kind, external_effects=True)
    served.script.on(Complete, before=StoreUnavailable("down"), times=8)
    answer = served.post("/broken")
    assert (answer.status_code, answer.headers["Idempotent-Stored"]) == (500, "false")
    served.stored()
    assert served.post("/broken").headers["Idempotent-Replayed"] == "true"
    assert served.runs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_away_for_good(shop: Callable[..., Shop], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has its answer. When Semel gives up, the lease ends: the next request is as after a crash."""
    monkeypatch.setattr("semel.engine.drive.backlog.KEEP_TRYING", 0.2)
    served = shop(kind, lease="200ms")
    served.script.on(Complete, before=StoreUnavailable("down"), times=10**6)
    assert served.post("/pay").headers["Idempotent-Stored"] == "false"
    served.stored()
    assert obediently(lambda: served.post("/pay")).status_code == 200
    assert served.runs == 2


@pytest.mark.parametrize("origin", [None, "https://shop.example"])
def test_a_script_in_a_browser_may_read_the_mark(shop: Callable[..., Shop], origin: str | None) -> None:
    served = shop("flask")
    served.script.on(Complete, before=StoreUnavailable("down"), times=8)
    client: Any = served.post.__closure__[0].cell_contents  # type: ignore[attr-defined]
    headers = {"Idempotency-Key": "k1", **({} if origin is None else {"Origin": origin})}
    exposed = client.post("/pay", headers=headers).headers.get("Access-Control-Expose-Headers", "")
    assert ("Idempotent-Stored" in exposed) == (origin is not None)


def test_what_did_not_commit_is_no_success(tmp_path: Path) -> None:
    """In a transaction the answer and the rows are one: without the answer there are no rows, so a retry is right."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY)")
    app, fails = flask.Flask("shop"), [True]

    @contextmanager
    def connect() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            yield connection

    with Semel(SQLiteStore(path), sweep_every=None) as guard:
        on_flask.install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @on_flask.idempotent(connection=connect, connection_parameter="connection", completion_timeout="20ms")
        def pay(connection: sqlite3.Connection) -> str:
            connection.execute("INSERT INTO payments DEFAULT VALUES")
            if fails.pop() if fails else False:
                connection.execute("PRAGMA query_only = ON")  # so that the record cannot be written
            return "paid"

        client = app.test_client()
        refused = client.post("/pay", headers={"Idempotency-Key": "k1"})
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        assert "Idempotent-Stored" not in refused.headers
        assert client.post("/pay", headers={"Idempotency-Key": "k1"}).get_data(as_text=True) == "paid"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM payments").fetchone() == (1,)
