"""Policies of routes, what is stored for them, and what operators and hooks say in their place."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest

from semel import (
    NOT_DONE,
    AsyncMemoryStore,
    AsyncSemel,
    Codec,
    Policy,
    Recovered,
    State,
    current_operation,
)
from semel.core.encoding.snapshot import StoredResponse
from semel.core.ops import Complete, Op
from semel.engine.drive.aio_driver import AsyncLeasedAttempt
from semel.errors import LeaseLost, RecordTooLarge
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.responses import RESPONSES
from semel.http.fastapi import idempotent
from semel.observe import events
from tests.engine.driving import renew_early
from tests.http.asking import Counting, ask, at_the_edge, body_of, header, scope_of, whose

R = TypeVar("R")


def test_the_guards_policy_holds_for_routes_and_each_route_changes_its_own() -> None:
    """Two routes that share a store: neither's settings win for both."""
    guard = AsyncSemel(AsyncMemoryStore(), policy=Policy(ttl="1h", lease="7s"))
    routes = {
        "POST /as-the-guard": idempotent(required=False),
        "POST /shorter": idempotent(ttl="5m"),
        "POST /its-own": idempotent(policy=Policy(ttl="2h")),
        "POST /changed": idempotent(idempotent(policy=Policy(ttl="2h")), lease="9s"),
    }
    guarded = ASGIMiddleware(Counting(), guard=guard, tenant=whose, routes=routes)
    made = {route.removeprefix("POST "): guarded.rule(rule).policy for route, rule in routes.items()}
    assert {path: (policy.ttl, policy.lease) for path, policy in made.items()} == {
        "/as-the-guard": ("1h", "7s"),
        "/shorter": ("5m", "7s"),
        "/its-own": ("2h", 30.0),
        "/changed": ("2h", "9s"),
    }


def test_a_codec_that_takes_less_than_the_route_stores_the_answer_without_its_body() -> None:
    class Large(Counting):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.runs += 1
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * 500})

    app = Large()
    guarded = at_the_edge(app, AsyncSemel(AsyncMemoryStore(), codec=Codec(limit=200)))

    async def run() -> None:
        first, again = await ask(guarded), await ask(guarded)
        assert body_of(first) == b"x" * 500
        assert (again[0]["status"], body_of(again)) == (201, b"")
        assert header(again, b"idempotent-replayed") == [b"omitted"]

    asyncio.run(run())
    assert app.runs == 1


class NoKeys:
    """A cipher whose key service is down."""

    def encrypt(self, plaintext: bytes, context: bytes) -> bytes:
        raise ConnectionError("the key service does not answer")

    def decrypt(self, ciphertext: bytes, context: bytes) -> bytes:
        raise ConnectionError("the key service does not answer")


def test_an_answer_that_cannot_be_sealed_is_remembered_as_done() -> None:
    app = Counting()
    guard = AsyncSemel(AsyncMemoryStore(), codec=Codec(cipher=NoKeys()))
    guarded = at_the_edge(app, guard)

    async def run() -> None:
        for _ in range(2):
            sent = await ask(guarded)
            assert sent[0]["status"] == 500
            assert b"idempotency_result_not_stored" in body_of(sent)
        record = await guard.lookup("POST /pay", "k", tenant="alice")
        assert record is not None
        assert record.state is State.DONE

    asyncio.run(run())
    assert app.runs == 1


class Small(AsyncMemoryStore):
    """A store that holds snapshots of 100 bytes."""

    async def execute(self, op: Op[R]) -> R:
        if isinstance(op, Complete) and len(op.snapshot) > 100:
            raise RecordTooLarge("100 bytes at most")
        return await super().execute(op)


def test_an_answer_that_the_store_cannot_hold_is_an_event() -> None:
    heard: list[str] = []
    guard = AsyncSemel(Small(), on_event=lambda event: heard.append(event.name))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 200, "more_body": False})

    async def run() -> None:
        guarded = at_the_edge(app, guard)
        assert body_of(await ask(guarded)) == b"x" * 200
        assert header(await ask(guarded), b"idempotent-replayed") == [b"omitted"]

    asyncio.run(run())
    assert heard == ["started", "result_dropped", "completed", "replayed"]


def test_what_someone_resolves_is_the_answer() -> None:
    guard = AsyncSemel(AsyncMemoryStore())
    app = Counting()
    guarded = at_the_edge(app, guard, idempotent(policy=Policy(guarantee="at_most_once")))

    async def interrupted(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await ask(at_the_edge(interrupted, guard, idempotent(policy=Policy(guarantee="at_most_once"))))
        unknown = await ask(guarded)
        assert unknown[0]["status"] == 500
        assert b"idempotency_outcome_unknown" in body_of(unknown)
        await guard.resolve("POST /pay", "k", {"paid": True}, tenant="alice")
        sent = await ask(guarded)
        assert (sent[0]["status"], body_of(sent)) == (200, b'{"paid": true}')
        assert header(sent, b"idempotent-replayed") == [b"true"]

    asyncio.run(run())
    assert app.runs == 0


@pytest.mark.parametrize(
    ("verdict", "status", "body"),
    [
        (Recovered({"found": 1}), 200, b'{"found": 1}'),
        (Recovered(StoredResponse(201, [(b"location", b"/7")], b"found")), 201, b"found"),
        (Recovered(None), 204, b""),
        (NOT_DONE, 200, b"run 1"),
    ],
)
def test_a_recover_hook_finds_out_what_an_abandoned_attempt_did(verdict: Any, status: int, body: bytes) -> None:
    now = [1000.0]
    store = AsyncMemoryStore(clock=lambda: now[0])
    asked: list[str] = []

    async def recover() -> Any:
        operation = current_operation()
        assert operation is not None
        asked.append(operation.key)
        return verdict

    async def run() -> None:
        rule = idempotent(policy=Policy(recover=recover, lease="5s"))
        guarded = at_the_edge(Counting(), AsyncSemel(store), rule)
        dead = AsyncSemel(store)
        exchange_call = dead.make_call(
            "POST /pay", "k", "alice", b"", Policy(recover=recover, lease="5s"), serializer=RESPONSES
        )
        assert isinstance(await dead.begin(exchange_call), AsyncLeasedAttempt)
        now[0] += 60
        sent = await ask(guarded)
        assert (sent[0]["status"], body_of(sent)) == (status, body)
        assert body_of(await ask(guarded)) == body
        await dead.close()

    asyncio.run(run())
    assert asked == ["k"]


def test_a_handler_that_is_refused_a_step_because_its_lease_is_lost_answers_409() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise LeaseLost("POST /pay[k]: another owner took over")

    guard = AsyncSemel(AsyncMemoryStore())

    async def run() -> None:
        sent = await ask(at_the_edge(app, guard, idempotent(external_effects=True)))
        assert sent[0]["status"] == 409
        assert header(sent, b"retry-after") == [b"1"]

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/a\x00b", "/" + "x" * 5000, "/ä\u2028", "/\ud800"])
def test_odd_paths_are_operations_that_every_store_takes(path: str) -> None:
    seen: list[events.Event] = []
    guard = AsyncSemel(AsyncMemoryStore(), on_event=seen.append)
    app = Counting()
    guarded = ASGIMiddleware(
        app, guard=guard, tenant=whose, routes={f"POST {path}": idempotent(), f"POST {path}2": idempotent()}
    )

    async def run() -> None:
        for asked in (path, path, path + "2"):
            assert (await ask(guarded, scope_of(asked)))[0]["status"] == 200

    asyncio.run(run())
    assert app.runs == 2
    for event in seen:
        assert event.operation.isprintable()
        assert len(event.operation) < 255


def test_an_answer_outside_of_http_is_remembered_as_done() -> None:
    class Odd(Counting):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.runs += 1
            await send({"type": "http.response.start", "status": 1000, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    app = Odd()
    guarded = at_the_edge(app, rule=idempotent(external_effects=True))

    async def run() -> None:
        for _ in range(2):
            assert b"idempotency_result_not_stored" in body_of(await ask(guarded))

    asyncio.run(run())
    assert app.runs == 1


def test_an_error_that_the_policy_remembers_is_an_answer_of_500_and_replayed() -> None:
    class Refused(Exception):
        pass

    class Refusing(Counting):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.runs += 1
            raise Refused("the provider says no")

    app = Refusing()
    guarded = at_the_edge(app, rule=idempotent(remember_errors=Refused))

    async def run() -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        with pytest.raises(Refused):  # for the server's log
            await guarded(scope_of(), receive, send)
        again = await ask(guarded)
        assert sent[0]["status"] == again[0]["status"] == 500
        assert body_of(again) == body_of(sent)
        assert header(again, b"idempotent-replayed") == [b"true"]

    asyncio.run(run())
    assert app.runs == 1


@pytest.mark.parametrize("finished", [True, False])
def test_a_released_answer_of_an_owner_that_was_replaced_is_not_sent(
    finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new owner's answer is the client's, or 409: never what the old one says after it was fenced off."""
    renew_early(monkeypatch)
    guard = AsyncSemel(AsyncMemoryStore())

    class Limited(Counting):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.runs += 1
            record = await guard.lookup("POST /pay", "k", tenant="alice")
            assert record is not None
            await guard.release("POST /pay", "k", tenant="alice", force=True)
            other = AsyncSemel(guard.store)
            call = other.make_call("POST /pay", "k", "alice", record.fingerprint, Policy(), serializer=RESPONSES)
            successor = await other.begin(call)
            assert isinstance(successor, AsyncLeasedAttempt)
            if finished:
                await successor.complete(StoredResponse(202, [], b"the successor's"))
            else:
                self.successor = successor  # runs on
            try:
                await asyncio.sleep(30)  # cancelled when the lease is found lost, and deaf to it
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            await send({"type": "http.response.start", "status": 429, "headers": []})
            await send({"type": "http.response.body", "body": b"slow down"})

    async def run() -> None:
        sent = await ask(at_the_edge(Limited(), guard))
        if finished:
            assert (sent[0]["status"], body_of(sent)) == (202, b"the successor's")
        else:
            assert sent[0]["status"] == 409
            assert b"idempotency_key_in_use" in body_of(sent)

    asyncio.run(run())
