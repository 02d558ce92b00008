"""What a WSGI service keeps of its requests and answers: sealed, hashed, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flask
import pytest

from semel import Codec, KeyRing, Quota, Semel, SQLiteStore
from semel.http.flask import idempotent, install

KEY = "a-key-that-nobody-may-read-0123456789"
SECRET = "card 4242 4242 4242 4242"


def service(path: Path, **settings: Any) -> tuple[Any, Semel]:
    app = flask.Flask("secrets")
    guard = Semel(SQLiteStore(path / "records.db"), **settings)
    install(app, guard=guard, tenant=lambda request: request.headers["X-User"])

    @app.post("/cards")
    @idempotent()
    def card() -> Any:
        return {"card": SECRET}

    @app.post("/tokens")
    @idempotent(keep_body=False)
    def token() -> Any:
        return flask.Response(SECRET, 201, {"Location": "/tokens/1"})

    return app.test_client(), guard


def ask(client: Any, path: str = "/cards", key: str = KEY, user: str = "alice") -> Any:
    return client.post(path, json={"pin": "1234"}, headers={"Idempotency-Key": key, "X-User": user})


def written(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.iterdir())


@pytest.mark.parametrize("sealed", [True, False])
def test_stored_answers_are_sealed_where_the_guard_has_a_cipher(tmp_path: Path, sealed: bool) -> None:
    codec = Codec(cipher=KeyRing({"k1": bytes(range(32))}) if sealed else None, compression=None)
    client, guard = service(tmp_path, codec=codec)
    first, again = ask(client), ask(client)
    assert again.data == first.data
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (SECRET.encode() in written(tmp_path)) is not sealed
    guard.close()


@pytest.mark.parametrize("kept", [True, False])
def test_keys_are_kept_as_hashes_where_the_guard_says_so(tmp_path: Path, kept: bool) -> None:
    client, guard = service(tmp_path, readable_keys=kept)
    first, again = ask(client), ask(client)
    assert again.data == first.data
    assert again.headers["Idempotency-Key"] == KEY
    assert (KEY.encode() in written(tmp_path)) is kept
    record = guard.lookup("POST /cards", KEY, tenant="alice")
    assert record is not None
    assert record.key == (KEY if kept else None)
    guard.close()


def test_a_body_that_is_not_to_be_kept_is_nowhere(tmp_path: Path) -> None:
    client, guard = service(tmp_path)
    first, again = ask(client, "/tokens"), ask(client, "/tokens")
    assert first.data == SECRET.encode()
    assert (again.status_code, again.data) == (201, b"")
    assert again.headers["Idempotent-Replayed"] == "omitted"
    assert again.headers["Location"] == "/tokens/1"
    assert SECRET.encode() not in written(tmp_path)
    guard.close()


def test_who_has_too_many_live_keys_is_told_429_and_others_are_not(tmp_path: Path) -> None:
    client, guard = service(tmp_path, quota=Quota(live_keys=2))
    assert [ask(client, key=f"key-{n}").status_code for n in range(2)] == [200, 200]
    refused = ask(client, key="key-2")
    assert refused.status_code == 429
    assert refused.json["code"] == "idempotency_too_many_keys"
    assert refused.json["retryable"] is True
    assert int(refused.headers["Retry-After"]) >= 1
    assert ask(client, key="key-0").headers["Idempotent-Replayed"] == "true"
    assert ask(client, key="key-2", user="bob").status_code == 200
    guard.close()
