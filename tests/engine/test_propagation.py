"""Keys on the way out: the same in every attempt, one per call whatever the order, and nobody else's."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import httpx
import pytest

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
    MemoryStore,
    OutgoingCall,
    PolicyError,
    Semel,
    current_operation,
    derive_key,
    in_context,
    outgoing_call,
    outgoing_headers,
    outgoing_key,
    outgoing_metadata,
)
from semel.core.keys import derive, identity, parse_header
from semel.core.lineage import Lineage, read_lineage
from semel.engine.operation.propagation import check_hosts
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
    metadata = {"idempotency-key": key, "idempotency-root": "k", "idempotency-parent": "k"}
    assert quick_engine.run(body) == [{"Idempotency-Key": key}, metadata, key, key]
    assert UUID(key).version == 8


def test_a_message_carries_the_root_of_the_chain_and_its_own_operation_as_the_parent(quick_engine: Engine) -> None:
    sent: list[dict[str, str]] = []

    def inner(key: str) -> None:
        with running().propagate("publish"):
            sent.append(outgoing_metadata())

    second = quick_engine.once(inner, operation="second")

    def body() -> Iterator[Any]:
        yield second("k2")

    quick_engine.run(body)
    lines = {name.encode(): text.encode() for name, text in sent[0].items()}
    assert read_lineage(lines) == Lineage("k", "k2"), "the receiver reads it as it reads the lineage of a request"


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


# Clients that ask for each request


HOSTS = check_hosts(["pay.example", "*.shop.example", "127.0.0.1:8001"])
CHARGES = "https://pay.example/charges"


def sent(method: str = "POST", url: str = CHARGES, body: bytes = b"{}", **settings: Any) -> str | None:
    call = outgoing_call(method, url, body, hosts=HOSTS, **settings)
    return None if call is None else call.key


def test_a_request_in_an_operation_has_a_key_and_the_lineage(quick_engine: Engine) -> None:
    def body() -> dict[str, str]:
        call = outgoing_call("POST", CHARGES, b"{}", hosts=HOSTS)
        assert call is not None
        assert UUID(call.key).version == 8
        return call.headers

    headers = quick_engine.run(body)
    assert headers == {"Idempotency-Key": ANY, "Idempotency-Root": "k", "Idempotency-Parent": "k"}
    assert sent() is None


def test_equal_requests_have_keys_of_their_own_that_are_the_same_in_every_attempt(quick_engine: Engine) -> None:
    found: list[list[Any]] = []

    def body() -> None:
        found.append([sent(), sent(), sent(), sent(body=b"other"), sent("PATCH"), sent(url=CHARGES + "/1")])
        raise Boom

    for _ in range(2):
        with pytest.raises(Boom):
            quick_engine.run(body)
    assert found[0] == found[1]
    assert len(set(found[0])) == 6


def test_the_order_of_different_requests_does_not_matter(quick_engine: Engine) -> None:
    orders = iter([[b"a", b"b", b"a"], [b"a", b"a", b"b"], [b"b", b"a", b"a"]])
    found: list[set[Any]] = []

    def body() -> None:
        found.append({(text, sent(body=text)) for text in next(orders)})
        raise Boom

    for _ in range(3):
        with pytest.raises(Boom):
            quick_engine.run(body)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3


def test_an_equal_request_after_an_unclear_outcome_is_its_retry(quick_engine: Engine) -> None:
    """Otherwise a program that retries a call by itself would charge twice."""

    def body() -> list[str]:
        def call() -> OutgoingCall:
            made = outgoing_call("POST", CHARGES, hosts=HOSTS)
            assert made is not None
            return made

        first, second = call(), call()
        second.end(known=False)
        first.end(known=False)
        again = [call(), call(), call()]
        again[0].end(known=True)
        return [each.key for each in (first, second, *again, call())]

    first, second, *again, last = quick_engine.run(body)
    assert again[:2] == [first, second]
    assert len({*again, last}) == 4


def test_threads_that_send_equal_requests_get_the_same_keys_in_every_attempt() -> None:
    found: list[list[Any]] = []

    def body() -> None:
        with ThreadPoolExecutor(4) as pool:
            found.append([each.result() for each in [pool.submit(in_context(sent)) for _ in range(16)]])
        raise Boom

    guard = Semel(MemoryStore(), sweep_every=None)
    for _ in range(2):
        with pytest.raises(Boom):
            guard.run("op", key="k", call=body)
    assert set(found[0]) == set(found[1])
    assert len(set(found[0])) == 16


def test_a_step_has_one_key_whatever_is_sent_and_a_loop_under_one_name_is_warned_of(quick_engine: Engine) -> None:
    def body() -> list[Any]:
        op = running()
        with op.propagate("charge"):
            keys = [sent(body=b"1"), sent(body=b"1")]
            with pytest.warns(UserWarning, match="the step 'charge' sends different requests, the last one to POST"):
                keys.append(sent(body=b"2"))
        with op.propagate():
            unnamed = sent()
        return [*keys, op.derive("charge"), sent(step="charge", body=b"1"), unnamed]

    *named, unnamed = quick_engine.run(body)
    assert len(set(named)) == 1
    assert unnamed not in named


def test_an_operation_inside_a_scope_of_another_sends_its_own(quick_engine: Engine) -> None:
    seen: list[Any] = []

    def inner(key: str) -> None:
        call = outgoing_call("POST", CHARGES, hosts=HOSTS)
        assert call is not None
        seen.append((call.key, call.headers["Idempotency-Parent"]))

    once = quick_engine.once(inner, operation="inner")

    def body() -> Iterator[Any]:
        with running().propagate("charge"):
            yield once("k2")
            seen.append((sent(), "k"))

    quick_engine.run(body)
    assert seen[0][1] == "k2"
    assert seen[0][0] != seen[1][0] == derive(identity("", "op", "k"), "charge")


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("https://pay.example/charges", True),
        ("http://PAY.example.:8443/charges?x=1#y", True),
        ("https://a.b.shop.example", True),
        ("http://127.0.0.1:8001/", True),
        ("http://127.0.0.1:8002/", False),
        ("http://127.0.0.1/", False),
        ("https://shop.example/", False),
        ("https://evilshop.example/", False),
        ("https://pay.example.evil.example/", False),
        ("https://pay.example@evil.example/", False),
        ("https://evil.example\\@pay.example/", False),
        ("https://evil.example/?pay.example", False),
        ("https://pay.example:port/", False),
        ("http://[::1/", False),
        ("/charges", False),
        ("", False),
    ],
)
def test_only_hosts_that_were_named_get_anything(quick_engine: Engine, url: str, named: bool) -> None:
    assert (quick_engine.run(lambda: sent(url=url)) is not None) is named


def test_without_hosts_nothing_is_sent(quick_engine: Engine) -> None:
    assert quick_engine.run(lambda: outgoing_call("POST", CHARGES, hosts=check_hosts([]))) is None


@pytest.mark.parametrize("hosts", ["pay.example", ["*"], [""], ["*."], ["https://pay.example"], ["a b"], ["a.*"]])
def test_a_wrong_host_is_refused(hosts: Any) -> None:
    with pytest.raises(PolicyError, match="host"):
        check_hosts(hosts)
    with pytest.raises(PolicyError, match="host"):
        Semel(MemoryStore()).run("op", key="k", call=lambda: outgoing_call("POST", CHARGES, hosts=hosts))


def test_a_guard_that_stores_no_readable_keys_sends_none() -> None:
    guard = Semel(MemoryStore(), sweep_every=None, readable_keys=False)

    def body() -> None:
        op = running()
        call = outgoing_call("POST", CHARGES, hosts=HOSTS)
        assert call is not None
        assert call.headers["Idempotency-Root"] == call.headers["Idempotency-Parent"] == op.id.hex()

    guard.run("op", key="secret", call=body)


@pytest.mark.parametrize(
    ("key", "root"), [("plain", "plain"), ('a "b"; c', '"a \\"b\\"; c"'), ("schlüssel", None)], ids=ascii
)
def test_a_root_that_needs_quotes_is_quoted_and_one_that_no_header_holds_is_left_out(
    key: str, root: str | None
) -> None:
    def body() -> None:
        call = outgoing_call("POST", CHARGES, hosts=HOSTS)
        assert call is not None
        assert call.headers.get("Idempotency-Root") == call.headers.get("Idempotency-Parent") == root

    Semel(MemoryStore(), sweep_every=None).run("op", key=key, call=body)


# Operations inside operations


def shown(engine: Engine, operation: str, key: str) -> tuple[Any, ...]:
    record = engine.do(engine.guard.lookup, operation, key)
    return record.key, record.root, record.parent


def test_an_operation_inside_another_has_its_lineage(quick_engine: Engine) -> None:
    seen: list[Any] = []

    def innermost(key: str) -> None:
        call = outgoing_call("POST", CHARGES, hosts=HOSTS)
        assert call is not None
        seen.append((call.headers["Idempotency-Root"], call.headers["Idempotency-Parent"]))

    third = quick_engine.once(innermost, operation="third")

    def middle(key: str) -> Iterator[Any]:
        yield third("k3")

    second = quick_engine.once(middle, operation="second")

    def body() -> Iterator[Any]:
        yield second("k2")

    quick_engine.run(body)
    assert shown(quick_engine, "op", "k") == ("k", None, None)
    assert shown(quick_engine, "second", "k2") == ("k2", "k", "k")
    assert shown(quick_engine, "third", "k3") == ("k3", "k", "k2")
    assert seen == [("k", "k3")]
    quick_engine.do(second, "k4")  # not inside of any
    assert shown(quick_engine, "second", "k4") == ("k4", None, None)
