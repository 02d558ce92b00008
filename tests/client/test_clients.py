"""Every client keeps its key: the same tests for all HTTP libraries, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import io
import json
import socket
import ssl
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import urllib3
from requests.auth import HTTPDigestAuth

from semel import ConfigurationError, KeyExpired, KeyReused, MemoryStore, NoAnswer, OutcomeUnknown, Semel
from semel.client import Journal, Receipt, Retry
from semel.client.aiohttp import IdempotencyClientMiddleware
from semel.client.flow import Answer, Settings, deliver
from semel.client.httpx import AsyncIdempotencyTransport, IdempotencyTransport
from semel.client.journal import FindEntries
from semel.client.requests import IdempotencyAdapter
from semel.client.urllib3 import IdempotencyPoolManager
from semel.observe.events import Event
from tests.client.clients import CLIENTS, HANG_UP, OK, QUICK, TRUNCATED, Client, RequestsClient, Server, http, problem


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def other() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


Make = Callable[..., Client]


@pytest.fixture(params=CLIENTS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Client] = []

    def make(**settings: Any) -> Client:
        made.append(CLIENTS[request.param](**settings))
        return made[-1]

    make.general = CLIENTS[request.param].general  # type: ignore[attr-defined]
    yield make
    for client in made:
        client.close()


def receipt(client: Client, *args: Any, **kwargs: Any) -> Receipt:
    found = client.send(*args, **kwargs).receipt
    assert found is not None
    return found


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_write_gets_a_key_of_its_own(make: Make, server: Server, method: str) -> None:
    client = make()
    first = client.send(method, f"{server.url}/payments", b"{}")
    assert first.status == 201
    assert first.body == b'{"charged": 10}'
    assert first.receipt == Receipt(server.keys[0] or "", "succeeded", False, 1)
    assert uuid.UUID(server.keys[0]).version == 4
    client.send(method, f"{server.url}/payments", b"{}")
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_are_sent_as_they_are(make: Make, server: Server, method: str) -> None:
    server.script = [http(503)]
    found = make().send(method, f"{server.url}/payments")
    assert (found.status, found.receipt, server.keys) == (503, None, [None])


def test_other_methods_may_be_named(make: Make, server: Server) -> None:
    client = make(methods=("PUT",))
    assert receipt(client, "PUT", server.url).key
    assert client.send("POST", server.url).receipt is None


def test_a_key_of_the_caller_is_kept_for_any_method(make: Make, server: Server) -> None:
    server.script = [http(503), OK]
    found = receipt(make(), "PUT", server.url, b"{}", {"Idempotency-Key": "pay-7"})
    assert found == Receipt("pay-7", "succeeded", False, 2)
    assert server.keys == ["pay-7", "pay-7"]


@pytest.mark.parametrize("failure", [HANG_UP, TRUNCATED, http(503), http(429), http(425), http(500), http(408)])
def test_an_unclear_answer_is_retried_with_the_same_key_and_bytes(make: Make, server: Server, failure: bytes) -> None:
    server.script = [failure, failure, OK]
    found = receipt(make(), "POST", f"{server.url}/payments", b'{"amount": 10}')
    assert (found.outcome, found.attempts) == ("succeeded", 3)
    assert len(set(server.keys)) == 1
    assert [seen.body for seen in server.seen] == [b'{"amount": 10}'] * 3


def test_an_answer_that_cannot_be_decompressed_is_none(make: Make, server: Server) -> None:
    server.script = [http(201, b"cut off", Content_Encoding="gzip"), OK]
    found = make().send("POST", server.url, b"{}")
    assert (found.status, found.body) == (201, b'{"charged": 10}')
    assert found.receipt is not None
    assert (found.receipt.outcome, found.receipt.attempts) == ("succeeded", 2)
    assert len(set(server.keys)) == 1


def test_a_replay_is_told_apart(make: Make, server: Server) -> None:
    server.script = [HANG_UP, http(201, b"1", Idempotent_Replayed="true")]
    found = receipt(make(), "POST", server.url)
    assert (found.outcome, found.replayed, found.attempts) == ("succeeded", True, 2)
    server.script = [http(201, Idempotent_Replayed="omitted")]
    assert receipt(make(), "POST", server.url).replayed


def test_hooks_are_told_of_retries_and_of_the_end(make: Make, server: Server) -> None:
    told: list[Event] = []
    server.script = [http(503), http(201, b"1", Idempotent_Replayed="true"), http(400), HANG_UP, HANG_UP]
    client = make(on_event=[told.append], retry=Retry(attempts=2, base="10ms"))
    url = server.url.replace("//", "//user:secret@") + "/payments?card=4711"
    client.send("POST", url, b"{}")
    client.send("POST", url, b"{}")
    with pytest.raises(NoAnswer):
        client.send("POST", url, b"{}")
    assert [event.name for event in told] == [
        "call_retried", "call_ended", "call_ended", "call_retried", "call_unknown"
    ]  # fmt: skip
    assert {event.route for event in told} == {f"POST {server.url}"}
    assert {event.operation for event in told} == {f"POST {server.url}/payments"}
    assert [event.key for event in told[:2]] == server.keys[:2]
    retried, ended, rejected, _, unknown = (dataclasses.asdict(event) for event in told)
    assert (retried["attempts"], retried["reason"]) == (1, "status 503")
    assert (ended["outcome"], ended["attempts"], ended["replayed"]) == ("succeeded", 2, True)
    assert (rejected["outcome"], rejected["attempts"]) == ("rejected", 1)
    assert unknown["attempts"] == 2


def test_a_409_is_retried_if_it_says_so(make: Make, server: Server) -> None:
    server.script = [problem(409, True, Retry_After="0"), OK]
    assert receipt(make(), "POST", server.url).outcome == "succeeded"
    server.script = [http(409, Retry_After="0"), OK]
    assert receipt(make(), "POST", server.url).outcome == "succeeded"


@pytest.mark.parametrize("answer", [problem(409, False, Retry_After="0"), http(409), http(422), http(400), http(404)])
def test_a_definite_refusal_is_final(make: Make, server: Server, answer: bytes) -> None:
    server.script = [answer, OK]
    found = receipt(make(), "POST", server.url)
    assert (found.outcome, found.attempts) == ("rejected", 1)


@pytest.mark.parametrize("status", [401, 403, 404, 409, 307])
def test_a_refusal_after_an_unclear_attempt_says_nothing_about_it(make: Make, server: Server, status: int) -> None:
    server.script = [HANG_UP, http(status)]
    assert receipt(make(), "POST", server.url, follow=False).outcome == "unknown"


def test_a_refusal_that_is_a_replay_is_the_outcome(make: Make, server: Server) -> None:
    server.script = [HANG_UP, http(404, Idempotent_Replayed="true")]
    assert receipt(make(), "POST", server.url).outcome == "rejected"


def test_an_answer_that_stays_unclear_is_unknown(make: Make, server: Server) -> None:
    server.script = [http(503)]
    found = make(retry=Retry(attempts=3, base=0, quota=None)).send("POST", server.url)
    assert found.status == 503
    assert found.receipt == Receipt(server.keys[0] or "", "unknown", False, 3)


def test_a_server_that_does_not_know_the_outcome_is_not_asked_again(make: Make, server: Server) -> None:
    server.script = [problem(500, False)]
    found = receipt(make(), "POST", server.url)
    assert (found.outcome, found.attempts) == ("unknown", 1)


def test_a_server_that_has_forgotten_the_answer_does_not_say_that_nothing_was_done(make: Make, server: Server) -> None:
    body = json.dumps({"code": KeyExpired.code, "retryable": False}).encode()
    server.script = [http(422, body, Content_Type="application/problem+json")]
    assert receipt(make(), "POST", server.url).outcome == "unknown"


@pytest.mark.parametrize("failure", [HANG_UP, TRUNCATED])
def test_no_answer_is_an_error_with_the_key(make: Make, server: Server, failure: bytes) -> None:
    server.script = [failure]
    client = make(retry=Retry(attempts=2, base=0, quota=None))
    with pytest.raises(NoAnswer) as caught:
        client.send("POST", server.url, b"{}")
    error = caught.value
    assert (error.key, error.attempts, error.outcome) == (server.keys[0], 2, "unknown")
    assert error.key in str(error)
    assert isinstance(error, OutcomeUnknown)
    assert isinstance(error, make.general)  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, make.general)  # type: ignore[attr-defined]


def test_a_server_that_is_not_there_is_tried_again(make: Make, server: Server) -> None:
    server.close()
    with pytest.raises(NoAnswer) as caught:
        make(retry=Retry(attempts=3, base=0, quota=None)).send("POST", server.url)
    assert caught.value.attempts == 3
    assert "It was not sent" in str(caught.value)


def test_a_server_that_goes_away_may_have_executed_it(make: Make, server: Server) -> None:
    def go(_: object) -> bytes:
        server.close()
        return HANG_UP

    server.script = [go]
    with pytest.raises(NoAnswer, match="It may have been executed"):
        make(retry=Retry(attempts=3, base=0, quota=None)).send("POST", server.url)


def test_a_slow_answer_is_tried_again(make: Make, server: Server) -> None:
    late = threading.Event()

    def slow(_: object) -> bytes:
        late.wait(10)
        return OK

    server.script = [slow, OK]
    found = receipt(make(timeout=0.2), "POST", server.url)
    late.set()
    assert found.attempts >= 2
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("moment", ["in a pause", "while it connects", "before the answer"])
def test_the_end_of_the_total_timeout_of_aiohttp_is_an_unknown_outcome(
    server: Server, tmp_path: Path, moment: str
) -> None:
    late = threading.Event()

    class Connector(aiohttp.TCPConnector):
        async def connect(self, *args: Any, **kwargs: Any) -> Any:
            if moment == "while it connects" and server.seen:
                await asyncio.Event().wait()
            return await super().connect(*args, **kwargs)

    def answer(_: object) -> bytes:
        if moment == "before the answer":
            late.wait(10)
        return http(503, Retry_After="60") if moment == "in a pause" else HANG_UP

    async def main() -> None:
        with Journal(tmp_path / "calls.db") as journal:
            middleware = IdempotencyClientMiddleware(retry=QUICK, journal=journal)
            limit = aiohttp.ClientTimeout(total=0.3)
            async with aiohttp.ClientSession(
                middlewares=[middleware], timeout=limit, connector=Connector(force_close=True)
            ) as session:
                with pytest.raises(NoAnswer, match="may have been executed") as caught:
                    await session.post(server.url, data=b"{}")
                assert isinstance(caught.value, TimeoutError)
                assert isinstance(caught.value, aiohttp.ClientConnectionError)
                assert (caught.value.key, caught.value.attempts >= 1) == (server.keys[0], True)
                await journal.execute_async(FindEntries())  # all before it is done
                assert [(entry.key, entry.state) for entry in journal.entries()] == [(server.keys[0], "in doubt")]
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling() == 0

    server.script = [answer]
    asyncio.run(main())
    late.set()


def test_a_cancelled_call_of_aiohttp_is_cancelled(server: Server) -> None:
    """Not taken for the end of its timeout."""

    async def main() -> None:
        middleware = IdempotencyClientMiddleware(retry=QUICK)
        limit = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(middlewares=[middleware], timeout=limit) as session:
            call = asyncio.create_task(session.post(server.url, data=b"{}"))
            while not server.seen:  # noqa: ASYNC110 a thread fills it
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    server.script = [http(503, Retry_After="60")]
    asyncio.run(main())


def test_the_mistake_of_the_caller_is_the_error_of_the_library(make: Make) -> None:
    with pytest.raises(Exception) as caught:
        make().send("POST", "nonsense://127.0.0.1/")
    assert not isinstance(caught.value, NoAnswer)


class BrokenHTTP2Server:
    """Reads each request to its end, and then sends a frame that no client accepts."""

    def __init__(self) -> None:
        self.requests = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, events = pytest.importorskip("h2.connection"), pytest.importorskip("h2.events")
        config = pytest.importorskip("h2.config").H2Configuration(client_side=False)
        with suppress(OSError):  # until it is closed
            while True:
                client, _ = self.listener.accept()
                with client:
                    state, found = connection.H2Connection(config), []
                    state.initiate_connection()
                    while not any(isinstance(event, events.StreamEnded) for event in found):
                        client.sendall(state.data_to_send())
                        found = state.receive_data(client.recv(65536))
                    self.requests += 1
                    client.sendall(b"\0\0\0\x01\x04\0\0\0\0")  # HEADERS of no stream
                    client.recv(65536)


@pytest.mark.parametrize("name", ["httpx", "httpx-async"])
def test_an_answer_that_breaks_the_rules_of_http2_does_not_say_that_nothing_was_sent(name: str) -> None:
    pytest.importorskip("h2")
    server, kind = BrokenHTTP2Server(), httpx.HTTPTransport if name == "httpx" else httpx.AsyncHTTPTransport
    transport = kind(http1=False, http2=True)
    with closing(server.listener), closing(CLIENTS[name](retry=Retry(attempts=1), transport=transport)) as client:
        with pytest.raises(NoAnswer, match="It may have been executed"):
            client.send("POST", server.url, b"{}")
        assert server.requests == 1


@pytest.mark.parametrize("name", ["httpx", "httpx-async"])
def test_a_header_that_httpx_refuses_is_the_mistake_of_the_caller(name: str, server: Server) -> None:
    with closing(CLIENTS[name]()) as client, pytest.raises(httpx.LocalProtocolError) as caught:
        client.send("POST", server.url, b"{}", headers={"X-Name": "two\nlines"})
    assert not isinstance(caught.value, NoAnswer)
    assert server.seen == []


def test_a_call_after_the_failure_of_another_is_judged_by_its_own(make: Make, server: Server, tmp_path: Path) -> None:
    server.script = [HANG_UP]
    client = make(retry=Retry(attempts=2, base=0, quota=None), journal=tmp_path / "calls.db")
    try:
        raise ssl.SSLCertVerificationError("the certificate of another server")
    except ssl.SSLCertVerificationError:
        with pytest.raises(NoAnswer, match="It may have been executed"):
            client.send("POST", server.url)
    assert len(server.seen) == 2
    with Journal(tmp_path / "calls.db") as journal:
        assert [entry.key for entry in journal.entries()] == server.keys[:1]


def test_a_body_that_can_be_read_once_is_refused_before_it_is_sent(make: Make, server: Server) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was sent"):
        make().send("POST", server.url, iter([b"a", b"b"]))
    assert server.seen == []


def test_a_file_is_sent_again_from_its_start(make: Make, server: Server) -> None:
    client = make()
    server.script = [HANG_UP, OK]
    if type(client).__name__ == "AsyncHttpxClient":
        pytest.skip("httpx.AsyncClient takes no plain files")
    with tempfile.TemporaryFile() as file:
        file.write(b"a long text")
        file.seek(0)
        client.send("POST", server.url, file)
    assert [seen.body for seen in server.seen] == [b"a long text"] * 2
    server.script = [HANG_UP, OK]
    client.send("POST", server.url, io.BytesIO(b"another"))
    assert [seen.body for seen in server.seen[2:]] == [b"another"] * 2


def test_the_key_may_be_quoted_and_the_header_have_another_name(make: Make, server: Server) -> None:
    found = receipt(make(quote_keys=True), "POST", server.url)
    assert server.keys == [f'"{found.key}"']
    found = receipt(make(header="PayPal-Request-Id", new_key=lambda: "order-7"), "POST", server.url)
    assert (server.seen[1].headers["paypal-request-id"], found.key) == ("order-7", "order-7")
    assert receipt(make(), "POST", server.url, b"", {"Idempotency-Key": '"a\\"b"'}).key == 'a"b'


# Redirects


@pytest.mark.parametrize("status", [307, 308])
def test_the_key_follows_a_redirect_on_the_same_server(make: Make, server: Server, status: int) -> None:
    server.script = [http(status, Location="/moved"), HANG_UP, OK]
    found = receipt(make(), "POST", f"{server.url}/payments", b"{}")
    assert [seen.path for seen in server.seen] == ["/payments", "/moved", "/moved"]
    assert server.keys == [found.key] * 3
    assert found.outcome == "succeeded"


@pytest.mark.parametrize("own", [{}, {"Idempotency-Key": "mine"}])
def test_the_key_does_not_follow_a_redirect_to_another_server(
    make: Make, server: Server, other: Server, own: dict[str, str]
) -> None:
    server.script = [http(307, Location=f"{other.url}/payments")]
    other.script = [http(503)]
    found = receipt(make(), "POST", f"{server.url}/payments", b"{}", own)
    assert other.keys == [None]  # and it is sent once: nothing makes a second attempt safe
    assert found == Receipt(server.keys[0] or "", "unknown", False, 1)


def test_no_key_comes_back_on_the_way_through_another_server(make: Make, server: Server, other: Server) -> None:
    server.script = [http(307, Location=f"{other.url}/payments")]
    other.script = [http(307, Location="/moved"), OK]
    assert make().send("POST", server.url, b"{}").status == 201
    assert other.keys == [None, None]


def test_a_redirect_to_another_server_is_not_followed_after_an_unclear_attempt(
    make: Make, server: Server, other: Server
) -> None:
    server.script = [HANG_UP, http(307, Location=f"{other.url}/payments")]
    with pytest.raises(NoAnswer, match="another server") as caught:
        make().send("POST", f"{server.url}/payments", b"{}")
    assert caught.value.key == server.keys[0]
    assert other.seen == []


def test_the_doubt_about_an_unclear_attempt_follows_a_redirect(make: Make, server: Server) -> None:
    server.script = [HANG_UP, http(307, Location="/moved"), http(401)]
    assert receipt(make(), "POST", f"{server.url}/payments", b"{}").outcome == "unknown"


def test_after_a_redirect_the_next_call_has_its_own_key(make: Make, server: Server) -> None:
    client = make()
    server.script = [http(307, Location="/moved"), OK]
    client.send("POST", f"{server.url}/payments", follow=False)
    client.send("POST", f"{server.url}/orders")
    client.send("POST", f"{server.url}/moved")
    assert len(set(server.keys)) == 3


def test_a_call_to_where_another_was_redirected_has_its_own_key(make: Make, server: Server) -> None:
    server.script = [http(307, Location="/moved"), OK]
    client = make()
    client.send("POST", f"{server.url}/payments", b"{}", follow=False)
    client.send("POST", f"{server.url}/moved", b"{}")
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize("total", [None, 30.0])
@pytest.mark.parametrize("limits", [{"allow_redirects": False}, {"max_redirects": 1}], ids=["not followed", "too many"])
def test_in_one_task_aiohttp_leaves_no_key_to_the_next_call(server: Server, limits: Any, total: float | None) -> None:
    """aiohttp copies no key when it follows a redirect, so the middleware must know the call by another sign."""
    server.script = [http(307, Location="/moved"), OK, http(307, Location="/moved"), OK]

    async def calls() -> list[Receipt]:
        middleware = IdempotencyClientMiddleware(retry=QUICK)
        timeout = aiohttp.ClientTimeout(total=total)
        async with aiohttp.ClientSession(middlewares=[middleware], timeout=timeout) as session:
            with suppress(aiohttp.TooManyRedirects):
                await session.post(f"{server.url}/payments", data=b"{}", **limits)
            other = await session.post(f"{server.url}/moved", data=b"{}")
            followed = await session.post(f"{server.url}/payments", data=b"{}")
            return [vars(response)["idempotency"] for response in (other, followed)]

    other, followed = asyncio.run(calls())
    assert [seen.path for seen in server.seen] == ["/payments", "/moved", "/payments", "/moved"]
    assert server.keys[1:] == [other.key, followed.key, followed.key]
    assert len(set(server.keys)) == 3


def test_in_one_task_aiohttp_reads_another_page_than_a_redirect_named(server: Server) -> None:
    server.script = [http(303, Location="/payments/7"), OK]

    async def calls() -> Any:
        async with aiohttp.ClientSession(middlewares=[IdempotencyClientMiddleware(retry=QUICK)]) as session:
            await session.post(f"{server.url}/payments", data=b"{}", allow_redirects=False)
            return await session.get(f"{server.url}/payments/7")

    assert "idempotency" not in vars(asyncio.run(calls()))


def test_a_page_that_shows_the_result_gets_no_key(make: Make, server: Server, other: Server) -> None:
    server.script = [http(303, Location=f"{other.url}/payments/7")]
    other.script = [http(404)]
    found = make().send("POST", f"{server.url}/payments", b"{}")
    assert (found.status, other.seen[0].method, other.keys) == (404, "GET", [None])
    assert not {"content-length", "transfer-encoding"} & set(other.seen[0].headers)
    assert found.receipt == Receipt(server.keys[0] or "", "succeeded", False, 1)


def test_a_request_without_a_body_stays_one(make: Make, server: Server) -> None:
    make().send("GET", server.url, headers={"Idempotency-Key": "k"})
    assert not {"content-length", "transfer-encoding"} & set(server.seen[0].headers)


def test_the_key_follows_the_same_host_to_https_and_nowhere_else() -> None:
    settings = Settings(retry=Retry())
    for target, follows in (
        ("https://pay.example/charges", True),
        ("https://pay.example:8443/charges", False),
        ("https://other.example/charges", False),
    ):
        first = settings.intent("POST", "http://pay.example/charges", {})
        assert first is not None
        moved = Answer(308, {"Location": target}, bytes, None)
        flow = deliver(first, settings.retry, False)
        assert next(flow) == "send"
        with pytest.raises(StopIteration):
            flow.send(moved)
        second = settings.intent("POST", target, first.adds)
        assert second is not None
        assert bool(second.adds) == follows


@pytest.mark.parametrize("retries", [False, urllib3.Retry(0, raise_on_redirect=False)], ids=["none", "returned"])
def test_a_redirect_that_urllib3_is_not_to_follow_is_returned(server: Server, retries: Any) -> None:
    server.script = [http(303, Location="/result")]
    with closing(IdempotencyPoolManager(retry=QUICK)) as manager:
        response: Any = manager.request("POST", server.url, body=b"{}", retries=retries)
    assert (response.status, response.idempotency.outcome) == (303, "succeeded")
    assert [seen.method for seen in server.seen] == ["POST"]


def test_digest_authentication_goes_through_the_adapter(server: Server) -> None:
    challenge = 'Digest realm="a", nonce="b", qop="auth"'
    server.script = [http(401, WWW_Authenticate=challenge), HANG_UP, OK]
    client = RequestsClient()
    client.session.auth = HTTPDigestAuth("user", "password")
    found = receipt(client, "POST", server.url, b"{}")
    client.close()
    assert (found.outcome, found.attempts) == ("succeeded", 2)
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("name", ["httpx", "httpx-async"])
def test_a_form_with_a_file_is_sent_again_as_it_was(name: str, tmp_path: Path) -> None:
    bodies = []

    def service(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        if len(bodies) == 1:
            raise httpx.ReadError("lost")
        return httpx.Response(201)

    network = httpx.MockTransport(service)
    (tmp_path / "a.txt").write_text("a long text")
    with (tmp_path / "a.txt").open("rb") as file:
        if name == "httpx":
            with httpx.Client(transport=IdempotencyTransport(network, retry=QUICK)) as client:
                client.post("http://pay.example", files={"file": file}, data={"a": "b"})
        else:

            async def main() -> None:
                async with httpx.AsyncClient(transport=AsyncIdempotencyTransport(network, retry=QUICK)) as client:
                    await client.post("http://pay.example", files={"file": file}, data={"a": "b"})

            asyncio.run(main())
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    assert b"a long text" in bodies[0]


def test_the_body_of_an_answer_can_be_streamed(server: Server) -> None:
    text = gzip.compress(b"a long text")
    server.script = [HANG_UP, http(200, text, Content_Encoding="gzip")]
    with httpx.Client(transport=IdempotencyTransport(retry=QUICK)) as client:
        with client.stream("POST", server.url) as streamed:
            assert b"".join(streamed.iter_bytes()) == b"a long text"
        with client.stream("POST", server.url) as streamed:
            assert b"".join(streamed.iter_raw()) == text
        assert client.post(server.url).elapsed.total_seconds() >= 0
    session = requests.Session()
    session.mount("http://", IdempotencyAdapter(retry=QUICK))
    assert b"".join(session.post(server.url, stream=True).iter_content(3)) == b"a long text"
    session.close()
    manager = IdempotencyPoolManager(retry=QUICK)
    assert manager.request("POST", server.url, preload_content=False).read() == b"a long text"
    manager.close()


# The journal


def test_the_journal_is_empty_when_the_answer_is_in_hand(make: Make, server: Server, tmp_path: Path) -> None:
    with Journal(tmp_path / "calls.db") as journal:
        client = make(journal=journal)

        def look(_: object) -> bytes:
            (entry,) = journal.entries()
            assert (entry.state, entry.body, entry.method) == ("in flight", b"{}", "POST")
            return OK

        for answer in (look, http(422)):
            server.script = [answer]
            client.send("POST", f"{server.url}/payments?a=b", b"{}")
            assert journal.entries() == []


def test_what_ended_unclear_is_finished_by_a_resume(make: Make, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    client = make(journal=path, headers={"Authorization": "Bearer old"}, retry=Retry(attempts=1, quota=None))
    server.script = [HANG_UP]
    sent = {"Content-Type": "application/json", "Cookie": "a=b", "X-Api-Key": "s3cret", "X-Other": "1"}
    with pytest.raises(NoAnswer):
        client.send("POST", f"{server.url}/payments?a=b%20c", b'{"amount": 10}', sent)
    server.script = [http(503)]
    assert receipt(client, "POST", f"{server.url}/orders", b"{}").outcome == "unknown"
    stored = path.read_bytes() + Path(f"{path}-wal").read_bytes()
    assert b"amount" in stored
    for secret in (b"Bearer", b"s3cret", b"a=b;", b"X-Other"):
        assert secret not in stored
    client.close()

    told: list[Event] = []
    again = make(journal=path, headers={"Authorization": "Bearer new"}, on_event=told.append)
    server.script = [http(200, Idempotent_Replayed="true"), http(503), http(422)]
    report = again.resume()
    assert [entry.url for entry in report.finished] == [f"{server.url}/payments?a=b%20c"]
    assert [entry.url for entry in report.rejected] == [f"{server.url}/orders"]
    assert (report.unknown, report.expired, len(report)) == ([], [], 2)
    first, second = server.seen[0], server.seen[2]
    assert (second.path, second.body, second.key) == (first.path, first.body, first.key)
    assert second.headers["authorization"] == "Bearer new"
    assert second.headers["content-type"] == "application/json"
    assert again.resume().as_dict() == {"finished": [], "rejected": [], "unknown": [], "expired": []}
    assert [event.name for event in told] == [
        "call_resumed", "call_ended", "call_resumed", "call_retried", "call_ended"
    ]  # fmt: skip
    assert [event.key for event in told[:2]] == [report.finished[0].key] * 2
    assert told[0].route == f"POST {server.url}"


def test_a_resume_does_not_believe_a_refusal_of_its_secrets(make: Make, server: Server, tmp_path: Path) -> None:
    with Journal(tmp_path / "calls.db") as journal:
        client = make(journal=journal, retry=Retry(attempts=1, quota=None))
        server.script = [HANG_UP, http(401)]
        with pytest.raises(NoAnswer):
            client.send("POST", server.url, b"{}")
        assert len(client.resume().unknown) == 1
        assert [entry.state for entry in journal.entries()] == ["in doubt"]
        server.script = [HANG_UP]
        assert len(client.resume().unknown) == 1
        server.script = [OK]
        assert len(client.resume().finished) == 1


def test_one_entry_that_cannot_be_sent_does_not_hinder_the_others(make: Make, server: Server, tmp_path: Path) -> None:
    client = make(journal=tmp_path / "calls.db", retry=Retry(attempts=1, quota=None))
    server.script = [HANG_UP]
    for path in ("first", "second"):
        with pytest.raises(NoAnswer):
            client.send("POST", f"{server.url}/{path}", b"{}")
    circle = http(307, Location="/first")
    server.script = [lambda seen: circle if seen.path == "/first" else OK]
    report = client.resume()
    assert [entry.url[-6:] for entry in report.unknown] == ["/first"]
    assert [entry.url[-6:] for entry in report.finished] == ["second"]


def test_a_resume_follows_a_redirect(make: Make, server: Server, tmp_path: Path) -> None:
    client = make(journal=tmp_path / "calls.db", retry=Retry(attempts=1, quota=None))
    server.script = [HANG_UP, http(308, Location="/moved"), http(503)]
    with pytest.raises(NoAnswer):
        client.send("POST", server.url, b"{}")
    report = client.resume()
    assert len(report.unknown) == 1  # it is still there, whether or not the client follows redirects
    server.script = [OK]
    assert len(client.resume().finished) == 1
    assert len(set(server.keys)) == 1


def test_a_redirect_leaves_only_an_unclear_attempt_before_it_in_the_journal(
    make: Make, server: Server, tmp_path: Path
) -> None:
    """The other URL may be another operation to the server, so its answer says nothing about the first attempt."""
    with Journal(tmp_path / "calls.db") as journal:
        client = make(journal=journal)
        server.script = [http(307, Location="/moved"), OK]
        assert receipt(client, "POST", f"{server.url}/payments", b"{}").outcome == "succeeded"
        assert journal.entries() == []
        server.script = [HANG_UP, http(307, Location="/moved"), OK, http(307, Location="/moved"), OK]
        key = receipt(client, "POST", f"{server.url}/payments", b"{}").key
        assert [(entry.key, entry.url) for entry in journal.entries()] == [(key, f"{server.url}/payments")]
        assert [entry.key for entry in client.resume().finished] == [key]
        assert journal.entries() == []


def test_a_key_in_doubt_with_another_body_is_not_sent(make: Make, server: Server, tmp_path: Path) -> None:
    client = make(journal=tmp_path / "calls.db", retry=Retry(attempts=1, quota=None))
    server.script = [HANG_UP]
    with pytest.raises(NoAnswer):
        client.send("POST", server.url, b"1", {"Idempotency-Key": "k"})
    with pytest.raises(KeyReused, match="'k'"):
        client.send("POST", server.url, b"2", {"Idempotency-Key": "k"})
    assert len(server.seen) == 1
    server.script = [http(403)]
    assert receipt(client, "POST", server.url, b"1", {"Idempotency-Key": "k"}).outcome == "unknown"


def test_a_client_without_a_journal_has_nothing_to_resume(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="no journal"):
        make().resume()


def test_the_time_limit_of_retries_is_kept(make: Make, server: Server) -> None:
    server.script = [http(503, Retry_After="30")]
    assert receipt(make(retry=QUICK.__class__(time="10s", quota=None)), "POST", server.url).attempts == 1


# Inside an operation


def test_a_call_of_an_operation_carries_its_derived_key_to_named_hosts_only(
    make: Make, server: Server, other: Server
) -> None:
    client = make(hosts=[f"127.0.0.1:{server.port}"])

    def ship() -> None:
        for _ in range(2):
            client.send("POST", f"{server.url}/parcels", b"{}")
        client.send("POST", f"{other.url}/parcels", b"{}")
        client.send("POST", f"{server.url}/parcels", b"{}", {"Idempotency-Key": "own"})

    def once() -> None:
        with Semel(MemoryStore(), sweep_every=None) as guard:
            guard.run("ship", key="order-7", call=ship)

    once()
    first = server.keys
    once()
    assert len(set(first)) == 3  # two equal calls have two keys ...
    assert server.keys == first * 2  # ... which are the same in another attempt
    assert first[2] == "own"
    assert [seen.headers.get("idempotency-parent") for seen in server.seen[:3]] == ["order-7"] * 3
    assert other.keys[0] != other.keys[1]
    assert "idempotency-parent" not in other.seen[0].headers


def test_an_equal_call_after_an_unknown_outcome_is_its_retry(make: Make, server: Server) -> None:
    client = make(hosts=["127.0.0.1"], retry=Retry(attempts=1, quota=None))
    server.script = [HANG_UP, OK]

    def ship() -> None:
        with pytest.raises(NoAnswer):
            client.send("POST", f"{server.url}/parcels", b"{}")
        client.send("POST", f"{server.url}/parcels", b"{}")
        client.send("POST", f"{server.url}/parcels", b"{}")

    with Semel(MemoryStore(), sweep_every=None) as guard:
        guard.run("ship", key="order-7", call=ship)
    assert server.keys[0] == server.keys[1] != server.keys[2]


def test_the_lineage_does_not_follow_a_redirect_to_another_server(make: Make, server: Server, other: Server) -> None:
    client = make(hosts=[f"127.0.0.1:{server.port}"])
    server.script = [http(307, Location=f"{other.url}/parcels")]
    with Semel(MemoryStore(), sweep_every=None) as guard:
        guard.run("ship", key="order-7", call=lambda: client.send("POST", f"{server.url}/parcels", b"{}").status)
    assert "idempotency-root" in server.seen[0].headers
    assert not [name for name in other.seen[0].headers if name.startswith("idempotency")]
