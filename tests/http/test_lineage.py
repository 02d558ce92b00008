"""Lineage on the way in: root and parent are in the record, in every store, and prove nothing."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Record, Semel, State, current_operation, open_store
from semel.cli import main
from semel.core.lineage import Lineage, label, read_label, read_lineage, write_lineage
from semel.engine.operation.propagation import outgoing_call
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import idempotent
from semel.http.wsgi import WSGIMiddleware
from semel.stores.urls import migrate_store
from tests.http.asking import ask

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FAMILY = {"Idempotency-Root": "order-1001", "Idempotency-Parent": "5f0c"}
ROUTES = {"POST /pay": idempotent()}


def over_wsgi(
    guard: Semel, handler: Callable[[], Any], key: str = "k", rule: Any = ROUTES["POST /pay"], **headers: str
) -> str:
    """Send one request. Returns its status line."""
    statuses: list[str] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        handler()
        start_response("201 Created", [])
        return [b"paid"]

    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "wsgi.input": io.BytesIO()}
    for name, value in {"Idempotency-Key": key, **headers}.items():
        environ["HTTP_" + name.upper().replace("-", "_")] = value
    middleware = WSGIMiddleware(app, guard=guard, tenant=lambda request: "alice", routes={"POST /pay": rule})
    answer = middleware(environ, lambda status, headers, error=None: statuses.append(status))
    b"".join(answer)
    return statuses[0]


def found(guard: Semel, key: str = "k") -> Record:
    record = guard.lookup("POST /pay", key, tenant="alice")
    assert record is not None
    return record


STORES = [
    "memory",
    "sqlite",
    *(
        pytest.param(name, marks=[getattr(pytest.mark, mark), pytest.mark.server])
        for name, mark in [
            ("postgres_url", "postgres"), ("mariadb_url", "mariadb"), ("redis_url", "redis"), ("dynamodb", "dynamodb"),
        ]
    ),
    pytest.param("tiered", marks=[pytest.mark.redis, pytest.mark.server]),
]  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_every_store_shows_root_and_parent_while_it_runs_and_when_it_is_done(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    if name == "memory":
        guard = Semel(MemoryStore())
    else:
        url = f"sqlite:///{tmp_path}/s.db"
        if name == "dynamodb":
            url = request.getfixturevalue(name).table()
        elif name == "tiered":
            url = f"tiered:{url},{request.getfixturevalue('redis_url')}"
        elif name != "sqlite":
            url = request.getfixturevalue(name)
        migrate_store(url)
        guard = Semel(open_store(url))
    seen: list[Record] = []
    with guard:
        assert over_wsgi(guard, lambda: seen.append(found(guard)), **FAMILY) == "201 Created"
        for record in (*seen, found(guard)):
            assert (record.key, record.root, record.parent) == ("k", "order-1001", "5f0c")
        assert seen[0].state is State.RUNNING
        assert found(guard).state is State.DONE
        assert over_wsgi(guard, lambda: pytest.fail("it ran again")) == "201 Created"  # also without the lineage
        assert over_wsgi(guard, lambda: None, key="other") == "201 Created"
        assert (found(guard, "other").key, found(guard, "other").root) == ("other", None)


def test_a_route_in_a_transaction_of_its_own_shows_it_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    migrate_store(url)

    @contextmanager
    def connection() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as opened:
            yield opened

    with Semel(open_store(url)) as guard:
        over_wsgi(guard, lambda: None, rule=idempotent(connection=connection), **FAMILY)
        assert (found(guard).key, found(guard).root, found(guard).parent) == ("k", "order-1001", "5f0c")


def test_over_asgi_the_handler_knows_it_and_sends_it_on() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        op = current_operation()
        assert op is not None
        call = outgoing_call("POST", "https://pay.example/charges", hosts=["pay.example"])
        assert call is not None
        seen.append((op.lineage, call.headers))
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> Record | None:
        guard = AsyncSemel(AsyncMemoryStore())
        service = ASGIMiddleware(app, guard=guard, tenant=lambda scope: "alice", routes=ROUTES)
        headers = {**FAMILY, "traceparent": TRACE, "Idempotency-Key": "k"}
        lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await ask(service, {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": lines})
        return await guard.lookup("POST /pay", "k", tenant="alice")

    record = asyncio.run(main())
    assert record is not None
    assert (record.key, record.root, record.parent) == ("k", "order-1001", "5f0c")
    lineage, sent = seen[0]
    assert lineage == Lineage("order-1001", "5f0c", TRACE)
    assert sent.pop("Idempotency-Key") != "k"
    assert sent == {"Idempotency-Root": "order-1001", "Idempotency-Parent": "k", "traceparent": TRACE}


def test_the_lineage_is_no_part_of_the_identity_or_the_fingerprint() -> None:
    runs: list[int] = []
    with Semel(MemoryStore()) as guard:
        for headers in (FAMILY, {}, {"Idempotency-Root": "another"}):
            assert over_wsgi(guard, lambda: runs.append(1), **headers) == "201 Created"
        assert found(guard).root == "order-1001"
    assert runs == [1]


@pytest.mark.parametrize(
    "root", ["", "a b", '"open', "x" * 256, "a,b", "\x80", "line\nbreak", "a\x00b"], ids=lambda text: ascii(text[:9])
)
def test_a_malformed_lineage_is_dropped_and_the_request_runs(root: str) -> None:
    runs: list[Lineage] = []

    def handler() -> None:
        op = current_operation()
        assert op is not None
        runs.append(op.lineage)

    with Semel(MemoryStore()) as guard:
        headers = {"Idempotency-Root": root, "Idempotency-Parent": root, "traceparent": TRACE[:-1] + "g"}
        assert over_wsgi(guard, handler, **headers) == "201 Created"
        assert (found(guard).key, found(guard).root, found(guard).parent) == ("k", None, None)
    assert runs == [Lineage()]


def test_a_guard_without_readable_keys_stores_no_lineage() -> None:
    with Semel(MemoryStore(), readable_keys=False) as guard:
        over_wsgi(guard, lambda: None, **FAMILY)
        assert (found(guard).key, found(guard).root) == (None, None)


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    migrate_store(url)
    with Semel(open_store(url)) as guard:
        over_wsgi(guard, lambda: None, **FAMILY)
        over_wsgi(guard, lambda: None, key="alone")
    shown = []
    for key in ("k", "alone"):
        assert main(["lookup", url, "POST /pay", key, "--tenant", "alice", "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert (shown[0]["key"], shown[0]["root"], shown[0]["parent"]) == ("k", "order-1001", "5f0c")
    assert not {"root", "parent"} & set(shown[1])


# The pure part


def lines(**headers: str) -> dict[bytes, bytes]:
    return {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}


@pytest.mark.parametrize(
    ("key", "root", "parent", "kept"),
    [
        ("k", "r", "p", ("r", "p")),
        ("k", "r", "", ("r", None)),
        ("k" * 120, "r" * 100, "p" * 33, ("r" * 100, "p" * 33)),
        ("k" * 120, "r" * 100, "p" * 34, ("r" * 100, None)),
        ("k" * 120, "r" * 134, "p", (None, None)),
        ("k" * 255, "r", "p", (None, None)),
    ],
)
def test_the_label_has_at_most_the_length_of_a_key(
    key: str, root: str, parent: str, kept: tuple[str | None, str | None]
) -> None:
    stored = label(key, lines(idempotency_root=root, idempotency_parent=parent))
    assert len(stored) <= 255
    record = read_label(Record(b"", State.DONE, 1, 1, b"", None, 0.0, 0.0, 0.0, key=stored))
    assert (record.key, record.root, record.parent) == (key, *kept)


@pytest.mark.parametrize("key", ["plain", "a b", 'q"u\\ote', "a,b;c", "x" * 255])
def test_what_is_written_is_read(key: str) -> None:
    headers = write_lineage(Lineage(key, key, TRACE))
    read = read_lineage({name.lower().encode(): value.encode() for name, value in headers.items()})
    assert read == Lineage(key, key, TRACE)


@pytest.mark.parametrize(
    "trace", ["ff" + TRACE[2:], TRACE.upper(), TRACE + "-extra", "00-" + "0" * 32 + TRACE[35:], "", "x" * 9000]
)
def test_a_wrong_trace_is_left_out(trace: str) -> None:
    assert read_lineage(lines(traceparent=trace)) == Lineage()
