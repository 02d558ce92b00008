"""One service, three ways: plain WSGI claimed at the edge, plain WSGI claimed at the endpoint, and Flask.

Served by gunicorn from ``tests.http.apps_wsgi:edge()``, ``:endpoint()`` and ``:flask_app()``. It works in the folder of
``SEMEL_TEST_FOLDER``: the store, a log with a line for each run of a handler, gates to hold handlers at, and a file
that breaks the store while it exists.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from semel import Semel, SQLiteStore, Wait
from semel.engine.operation import Operation, current_operation, running
from semel.errors import StoreUnavailable
from semel.http.contract.rules import Idempotent, idempotent
from semel.http.wsgi import WSGIMiddleware
from semel.http.wsgi.middleware import current_responder
from semel.observe.events import Event, Renewed

DOCS = "https://docs.example/idempotency"


def folder() -> Path:
    return Path(os.environ["SEMEL_TEST_FOLDER"])


class Breakable(SQLiteStore):
    """Is down while there is a file called ``down``."""

    def execute(self, op: Any) -> Any:
        if (folder() / "down").exists():
            raise StoreUnavailable("secret-host: the store is down")
        return super().execute(op)


def guard() -> Semel:
    return Semel(Breakable(folder() / "semel.db", synchronous="normal"), secret=b"pepper", on_event=tell)


def tell(event: Event) -> None:
    if isinstance(event, Renewed):
        (folder() / f"renewed-{event.key}").touch()


# -- what the endpoints do


@dataclass
class Asked:
    query: dict[str, str]
    tag: str
    read: Callable[[], bytes]
    op: Operation | None = None
    if_match: str = ""


Answer = tuple[int, list[tuple[str, str]], Iterable[bytes]]
JSON = ("Content-Type", "application/json")


def log(asked: Asked) -> None:
    """A line for each run; and then wait at the gate, if there is one."""
    with open(folder() / "runs.log", "ab", buffering=0) as file:
        file.write(f"{asked.tag} {os.getpid()}\n".encode())
    gate = folder() / asked.query.get("gate", "nowhere")
    if gate.exists():
        with suppress(FileNotFoundError), open(gate, "rb") as held:
            held.read()


def pay(asked: Asked) -> Answer:
    log(asked)
    amount = json.loads(asked.read() or b"{}").get("amount")
    lines = [
        JSON,
        ("Location", "/payments/1"),
        ("Link", "</a>; rel=a"),
        ("Link", "</b>; rel=b"),
        ("ETag", '"caf\xe9"'),
        ("Set-Cookie", "secret=1"),
        ("WWW-Authenticate", "Basic"),
        ("X-Request-Id", uuid.uuid4().hex),
        ("X-RateLimit-Remaining", "7"),
        ("Access-Control-Allow-Origin", "*"),
    ]
    return 201, lines, [json.dumps({"id": uuid.uuid4().hex, "amount": amount}).encode()]


def status(asked: Asked) -> Answer:
    log(asked)
    return int(asked.query["status"]), [JSON], [json.dumps({"n": uuid.uuid4().hex}).encode()]


def broken(asked: Asked) -> Answer:
    log(asked)
    raise RuntimeError("the handler broke")


def midway(asked: Asked) -> Answer:
    log(asked)

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the answer broke")

    return 200, [JSON], chunks()


def large(asked: Asked) -> Answer:
    log(asked)
    left = int(asked.query["size"])

    def chunks() -> Iterator[bytes]:
        for at in range(0, left, 65536):
            yield b"x" * min(65536, left - at)

    return 200, [("Content-Type", "text/plain"), ("ETag", '"big"')], chunks()


def many_chunks(asked: Asked) -> Answer:
    log(asked)
    return 200, [("Content-Type", "text/plain")], (str(i).encode() + uuid.uuid4().bytes for i in range(50))


def digest(asked: Asked) -> Answer:
    log(asked)
    body = asked.read()
    return 200, [JSON], [json.dumps([len(body), hashlib.sha256(body).hexdigest(), uuid.uuid4().hex]).encode()]


def empty(asked: Asked) -> Answer:
    log(asked)
    return 204, [("ETag", f'"{uuid.uuid4().hex}"')], []


def falsy(asked: Asked) -> Answer:
    log(asked)
    return 200, [JSON], [asked.query["body"].encode()]


def zipped(asked: Asked) -> Answer:
    log(asked)
    return 200, [JSON, ("Content-Encoding", "gzip")], [gzip.compress(uuid.uuid4().bytes)]


def handle(asked: Asked) -> Answer:
    log(asked)
    op = asked.op
    assert op is None or current_operation() is op
    shown = None if op is None else [op.key, op.tenant, op.attempt, op.capture("n", lambda: 5)]
    return 200, [JSON], [json.dumps(shown).encode()]


def change(asked: Asked) -> Answer:
    """A change that only the version it was made for allows: to be asked for by ``version``, with If-Match."""
    log(asked)
    state = folder() / f"version-{asked.tag}"
    version = int(state.read_text()) if state.exists() else 0
    if asked.if_match != f'"{version}"':
        return 412, [], []
    state.write_text(str(version + 1))
    return 200, [JSON, ("ETag", f'"{version + 1}"')], [b"changed"]


ROUTES: dict[tuple[str, str], tuple[Idempotent, Callable[[Asked], Answer]]] = {
    ("POST", "/pay"): (idempotent(), pay),
    ("POST", "/refund"): (idempotent(), pay),
    ("PUT", "/pay"): (idempotent(), pay),
    ("POST", "/caf\xe9"): (idempotent(), pay),
    ("POST", "/status"): (idempotent(), status),
    ("POST", "/broken"): (idempotent(), broken),
    ("POST", "/midway"): (idempotent(), midway),
    ("POST", "/large"): (idempotent(), large),
    ("POST", "/chunks"): (idempotent(), many_chunks),
    ("POST", "/digest"): (idempotent(), digest),
    ("POST", "/empty"): (idempotent(), empty),
    ("POST", "/falsy"): (idempotent(), falsy),
    ("POST", "/zipped"): (idempotent(), zipped),
    ("POST", "/handle"): (idempotent(), handle),
    ("POST", "/optional"): (idempotent(required=False), handle),
    ("POST", "/external/status"): (idempotent(external_effects=True), status),
    ("POST", "/external/broken"): (idempotent(external_effects=True), broken),
    ("POST", "/waiting"): (idempotent(on_duplicate=Wait(30)), pay),
    ("POST", "/retrying"): (idempotent(lease=3), pay),
    ("POST", "/rejecting"): (idempotent(lease=0.3, on_abandoned="reject"), pay),
    ("POST", "/expiring"): (idempotent(ttl=0.5), pay),
    ("POST", "/no-return"): (idempotent(ttl=0.2, reject_expired_for="1h"), pay),
    ("POST", "/tenant/a"): (idempotent(scope="tenant"), pay),
    ("POST", "/tenant/b"): (idempotent(scope="tenant"), pay),
    ("POST", "/reused409"): (idempotent(reused_status=409), pay),
    ("POST", "/reused400"): (idempotent(reused_status=400), pay),
    ("POST", "/once/status"): (idempotent(guarantee="at_most_once"), status),
    ("POST", "/once/broken"): (idempotent(guarantee="at_most_once"), broken),
    ("POST", "/once/pay"): (idempotent(guarantee="at_most_once", lease=0.3), pay),
    ("POST", "/canonical"): (idempotent(canonical_json=True), pay),
    ("POST", "/without"): (idempotent(exclude=("note",)), pay),
    ("POST", "/headed"): (idempotent(fingerprint_headers=("X-Currency",)), pay),
    ("POST", "/strict"): (idempotent(key_mode="strict"), pay),
    ("POST", "/verbatim"): (idempotent(key_mode="raw"), pay),
    ("POST", "/uuid"): (idempotent(key_format="uuid"), pay),
    ("POST", "/secret"): (idempotent(keep_body=False), pay),
    ("POST", "/open"): (idempotent(on_store_error="open"), status),
    ("PUT", "/change"): (idempotent(), change),
    ("POST", "/bounded"): (idempotent(max_request_body=5000), digest),
    ("POST", "/named"): (idempotent(replay_marker="x-again"), pay),
}
OPEN: dict[tuple[str, str], Callable[[Asked], Answer]] = {
    ("GET", "/pay"): pay,
    ("POST", "/undeclared"): pay,
    ("PUT", "/undeclared"): pay,
}


def turned_away(environ: dict[str, Any]) -> int:
    """Authentication, rate limits and validation: the status to refuse with, or 0."""
    if not environ.get("HTTP_AUTHORIZATION"):
        return 401
    if environ.get("HTTP_X_LIMITED"):
        return 429
    return 422 if environ.get("HTTP_X_INVALID") else 0


def tenant_of(environ: dict[str, Any]) -> str:
    """Who it is; a token may follow."""
    user: str = environ["HTTP_AUTHORIZATION"]
    return user.partition(" ")[0]


# -- plain WSGI


def asked_of(environ: dict[str, Any]) -> Asked:
    query = {name: values[0] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
    read = environ["wsgi.input"].read
    op = current_operation()
    assert op is None or isinstance(op, Operation)
    return Asked(query, environ.get("HTTP_X_TAG", "-"), read, op, environ.get("HTTP_IF_MATCH", ""))


def plain(environ: dict[str, Any], start_response: Any, *, claim: bool) -> Iterable[bytes]:
    route = environ["REQUEST_METHOD"], environ["PATH_INFO"].encode("latin-1").decode()
    if route in OPEN:
        code, lines, body = OPEN[route](asked_of(environ))
    elif route in ROUTES:
        rule, handler = ROUTES[route]
        responder = current_responder()
        assert responder is not None
        if claim and not responder.claim(rule):
            start_response("204 No Content", [])
            return []
        attempt = responder.life.attempt
        token = running.set(attempt.operation if attempt is not None else None)
        try:
            code, lines, body = handler(asked_of(environ))
        finally:
            running.reset(token)
    else:
        code, lines, body = 404, [], []
    start_response(f"{code} Said So", lines)
    return body


def authenticated(app: Any) -> Any:
    def inner(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        refused = turned_away(environ)
        if refused:
            start_response(f"{refused} No", [("Content-Length", "0")])
            return []
        result: Iterable[bytes] = app(environ, start_response)
        return result

    return inner


def edge() -> Any:
    rules = {" ".join(route): rule for route, (rule, _) in ROUTES.items()}

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return plain(environ, start_response, claim=False)

    return authenticated(WSGIMiddleware(app, guard=guard(), tenant=tenant_of, routes=rules, docs=DOCS))


def endpoint() -> Any:
    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        yield from plain(environ, start_response, claim=True)  # a generator: nothing runs before the first chunk

    return authenticated(WSGIMiddleware(app, guard=guard(), tenant=tenant_of, docs=DOCS))


# -- Flask


def flask_app() -> Any:
    import flask

    from semel.http.flask import idempotent, install

    app = flask.Flask("service")
    app.secret_key = "not a secret"
    install(app, guard=guard(), tenant=lambda request: tenant_of(request.environ), docs=DOCS)

    @app.before_request
    def check() -> Any:
        refused = turned_away(flask.request.environ)
        return flask.Response(status=refused) if refused else None

    def answered(handler: Callable[[Asked], Answer], op: Operation | None) -> flask.Response:
        query = dict(flask.request.args)
        lines = flask.request.headers
        asked = Asked(query, lines.get("X-Tag", "-"), flask.request.get_data, op, lines.get("If-Match", ""))
        code, said, body = handler(asked)
        flask.session["user"] = "of the first call"
        return flask.Response(body, code, said)

    blueprint = flask.Blueprint("routes", "routes")
    for number, ((method, path), (rule, handler)) in enumerate(ROUTES.items()):

        def view(op: Operation, handler: Callable[[Asked], Answer] = handler) -> Any:
            return answered(handler, op)

        blueprint.add_url_rule(path, f"view{number}", idempotent(rule)(view), methods=[method])
    app.register_blueprint(blueprint)
    for number, ((method, path), handler) in enumerate(OPEN.items()):

        def open_view(handler: Callable[[Asked], Answer] = handler) -> Any:
            return answered(handler, None)

        app.add_url_rule(path, f"open{number}", open_view, methods=[method])
    return app
