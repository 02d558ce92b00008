"""Keys on the way out: the same in every attempt, one per call whatever the order, and nobody else's."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import httpx
import pytest

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
    MemoryStore,
    PolicyError,
    Semel,
    current_operation,
    derive_key,
    in_context,
    outgoing_headers,
    outgoing_key,
    outgoing_metadata,
)
from semel.core.keys import derive, identity, parse_header
from tests.engine.driving import Engine


class Boom(Exception):
    pass


def running() -> Any:
    return current_operation()


def test_a_named_scope_sends_the_derived_key_of_its_step(quick_engine: Engine) -> None:
    def body() -> list[Any]:
        with running().propagate("charge"):
            return [outgoing_headers(), outgoing_metadata(), outgoing_key(), derive_key("charge")]

    key = derive(identity("", "op", "k"), "charge")
    assert quick_engine.run(body) == [{"Idempotency-Key": key}, {"idempotency-key": key}, key, key]
    assert UUID(key).version == 8


def test_every_attempt_sends_the_same_key(quick_engine: Engine) -> None:
    sent = []

    def body() -> Any:
        with running().propagate("charge"):
            sent.append(outgoing_key())
        with running().propagate():
            sent.append(outgoing_key("POST /charges"))
        raise Boom

    for _ in range(2):
        with pytest.raises(Boom):
            quick_engine.run(body)
    assert sent[:2] == sent[2:]
    assert sent[0] != sent[1]


def test_outside_of_a_scope_nothing_is_sent(quick_engine: Engine) -> None:
    def body() -> list[Any]:
        return [outgoing_headers(), outgoing_metadata("t"), outgoing_key("t")]

    assert quick_engine.run(body) == [{}, {}, None]
    assert [outgoing_headers(), outgoing_metadata(), outgoing_key(), derive_key("charge")] == [{}, {}, None, None]


def test_the_scope_ends_with_its_block_also_by_an_error(quick_engine: Engine) -> None:
    def body() -> list[Any]:
        op = running()
        with op.propagate("outer"):
            try:
                with op.propagate("inner"):
                    assert outgoing_key() == op.derive("inner")
                    raise Boom
            except Boom:
                pass
            inside = outgoing_key() == op.derive("outer")
        return [inside, outgoing_key()]

    assert quick_engine.run(body) == [True, None]


def test_a_retry_inside_a_scope_is_the_same_call(quick_engine: Engine) -> None:
    """A key that counted the calls would charge again when the client's own retry comes."""

    def body() -> list[Any]:
        op = running()
        with op.propagate("charge"):
            named = [outgoing_key("a"), outgoing_key("a"), outgoing_key("b")]
        with op.propagate():
            by_target = [outgoing_key("a"), outgoing_key("a"), outgoing_key("b")]
        return [named, by_target]

    named, by_target = quick_engine.run(body)
    assert len(set(named)) == 1
    assert by_target[0] == by_target[1] != by_target[2]


def test_keys_do_not_depend_on_the_order_of_calls(quick_engine: Engine) -> None:
    orders = iter([["a", "b"], ["b", "a"]])
    sent: list[dict[str, Any]] = []

    def body() -> None:
        with running().propagate():
            sent.append({target: outgoing_key(target) for target in next(orders)})
        raise Boom

    for _ in range(2):
        with pytest.raises(Boom):
            quick_engine.run(body)
    assert sent[0] == sent[1]


def test_a_target_is_never_a_step(quick_engine: Engine) -> None:
    def body() -> bool:
        op = running()
        with op.propagate():
            return outgoing_key("charge") != op.derive("charge")

    assert quick_engine.run(body) is True


def test_an_unnamed_scope_asks_which_call_it_is(quick_engine: Engine) -> None:
    def body() -> None:
        with running().propagate():
            outgoing_headers()

    with pytest.raises(PolicyError, match=r"which call is this\? Name the step"):
        quick_engine.run(body)


@pytest.mark.parametrize("name", ["", "x" * 256, "line\nbreak", 5, "\ud800"])
def test_a_wrong_name_is_refused_before_anything_is_sent(name: Any) -> None:
    def body() -> None:
        with running().propagate(name):
            pytest.fail("the scope was opened")

    with pytest.raises(PolicyError, match="a step has a name of 1 to 255 printable characters"):
        Semel(MemoryStore(), sweep_every=None).run("op", key="k", call=body)


def test_an_operation_inside_another_sends_nothing_of_the_outers(quick_engine: Engine) -> None:
    seen: list[Any] = []
    inner = quick_engine.once(lambda key: seen.append(outgoing_key()), operation="inner")

    def body() -> Iterator[Any]:
        with running().propagate("charge"):
            yield inner("k2")
            seen.append(outgoing_key())

    quick_engine.run(body)
    assert seen == [None, derive(identity("", "op", "k"), "charge")]


def test_the_header_has_the_receivers_name_and_form(quick_engine: Engine) -> None:
    def body() -> list[Any]:
        with running().propagate("charge"):
            return [outgoing_headers(header="PayPal-Request-Id"), outgoing_headers(quote=True), outgoing_key()]

    named, quoted, key = quick_engine.run(body)
    assert named == {"PayPal-Request-Id": key}
    assert quoted == {"Idempotency-Key": f'"{key}"'}
    assert parse_header(quoted["Idempotency-Key"], "strict") == key


# Threads and tasks


def test_a_plain_thread_knows_nothing_unless_it_is_told() -> None:
    """Also several at once, which one context alone could not serve."""
    seen: list[Any] = []
    together = threading.Barrier(3)

    def look() -> Any:
        together.wait(10)
        seen.append(outgoing_key())
        return running()

    def body() -> None:
        op = running()
        with op.propagate("charge"), ThreadPoolExecutor(3) as pool:
            bound = in_context(look)
            found = [pool.submit(work) for work in (bound, bound, look)]
            assert [each.result(10) for each in found] == [op, op, None]
            assert seen.count(op.derive("charge")) == 2
            assert seen.count(None) == 1

    Semel(MemoryStore(), sweep_every=None).run("op", key="k", call=body)


def test_what_a_bound_function_sets_stays_its_own() -> None:
    def body() -> None:
        op = running()

        def nested() -> None:
            with op.propagate("other"):
                pass

        with op.propagate("charge"):
            in_context(nested)()
            assert outgoing_key() == op.derive("charge")

    Semel(MemoryStore(), sweep_every=None).run("op", key="k", call=body)


def test_a_bound_function_keeps_its_name_arguments_and_errors() -> None:
    def send(parcel: str, *, quick: bool = False) -> str:
        if quick:
            raise Boom
        return parcel

    bound = in_context(send)
    assert bound.__name__ == "send"
    assert bound("p") == "p"
    with pytest.raises(Boom):
        bound("p", quick=True)


def test_in_context_refuses_an_async_def() -> None:
    async def send() -> None: ...

    with pytest.raises(PolicyError, match="for plain functions"):
        in_context(send)


def test_tasks_and_to_thread_follow_by_themselves() -> None:
    async def main() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)

        async def body() -> None:
            op = running()

            async def look() -> Any:
                await asyncio.sleep(0)
                return outgoing_key()

            async def one(name: str) -> Any:
                with op.propagate(name):
                    return [await asyncio.create_task(look()), await asyncio.to_thread(outgoing_key)]

            found = await asyncio.gather(one("a"), one("b"))  # scopes of tasks that run at once do not mix
            assert found == [[op.derive("a")] * 2, [op.derive("b")] * 2]
            assert outgoing_key() is None

        await guard.run("op", key="k", call=body)

    asyncio.run(main())


# What the pages show


def test_one_line_teaches_an_httpx_client() -> None:
    seen: list[httpx.Request] = []

    def serve(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    def forward(request: httpx.Request) -> None:
        request.headers.update(outgoing_headers(f"{request.method} {request.url}"))

    guard = Semel(MemoryStore(), sweep_every=None)
    client = httpx.Client(transport=httpx.MockTransport(serve), event_hooks={"request": [forward]})

    def body() -> None:
        with running().propagate():
            client.post("https://pay.example/charges")
            client.post("https://pay.example/charges")
            client.post("https://mail.example/letters")
        client.get("https://pay.example/charges")

    guard.run("op", key="k", call=body)
    keys = [request.headers.get("Idempotency-Key") for request in seen]
    assert keys[0] == keys[1] != keys[2]
    assert keys[2] is not None
    assert keys[3] is None
