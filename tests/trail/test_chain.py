"""One request through all hops, with one history: client, two services, outbox, relay and consumer."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import flask
import httpx

from semel import Semel, SQLiteStore, current_operation
from semel.client.httpx import IdempotencyTransport
from semel.http.flask import idempotent, install
from semel.messaging import Inbox, Relay
from semel.trail import Trail, TrailReader
from tests.client.clients import QUICK
from tests.messaging.recording_broker import RecordingBroker
from tests.messaging.sources import ListSource


class LosesFirst(httpx.WSGITransport):
    """The answer to the first request is lost."""

    lost = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not self.lost:
            self.lost = True
            raise httpx.ReadTimeout("lost on purpose")
        return response


def test_the_story_of_one_key_begins_in_the_client_and_ends_at_the_consumer(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    history = f"sqlite:///{tmp_path / 'history.db'}"
    with (
        closing(SQLiteStore(path)) as store,
        Trail(history, service="shop") as shop,
        Trail(history, service="shipping") as shipping,
        Trail(history, service="ledger") as ledger,
        Trail(history, service="browser") as browser,
        Semel(store, tenant="acme", on_event=shop) as pay_guard,
        Semel(store, tenant="acme", on_event=shipping) as ship_guard,
    ):
        second = flask.Flask("shipping")
        install(second, guard=ship_guard)

        def connect() -> Any:
            return closing(sqlite3.connect(path, isolation_level=None))

        @second.post("/parcels")
        @idempotent(connection=connect)
        def ship() -> Any:
            op: Any = current_operation()
            op.emit("shipped", {"parcel": 1})
            return {"parcel": 1}, 201

        first = flask.Flask("shop")
        install(first, guard=pay_guard)
        inner = IdempotencyTransport(httpx.WSGITransport(app=second), hosts=["ship.internal"], on_event=shop)

        @first.post("/orders")
        @idempotent()
        def order() -> Any:
            with httpx.Client(transport=inner) as client:
                return client.post("http://ship.internal/parcels", json={}).json(), 201

        outer = IdempotencyTransport(LosesFirst(app=first), retry=QUICK, on_event=browser)
        with httpx.Client(transport=outer) as client:
            key = client.post("http://shop.example/orders", json={}).extensions["idempotency"].key

        broker = RecordingBroker()
        Relay(store, broker, on_event=shipping).drain()

        @Inbox(store).handler("ledger", connect=connect, on_event=ledger)
        def apply(message: Any, connection: Any) -> None:
            pass

        apply.drain(ListSource([*broker.taken, *broker.taken]))

    with closing(SQLiteStore(tmp_path / "history.db")) as store:
        reader = TrailReader(store)
        lineage = reader.lineage(reader.link(key))
        told = [(each.who.partition("@")[0], each.kind) for each in lineage]
    assert told == [
        ("shop", "started"),
        ("shipping", "started"),
        ("shipping", "emitted"),
        ("shipping", "completed"),
        ("shop", "call_ended"),
        ("shop", "completed"),
        ("browser", "call_retried"),
        ("shop", "replayed"),
        ("browser", "call_ended"),
        ("ledger", "applied"),
        ("ledger", "skipped"),
    ]
