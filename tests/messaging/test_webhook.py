"""Webhooks, against a receiver that checks each signature with the package of Standard Webhooks."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import queue
import socket
import sqlite3
import ssl
import threading
import time
import tracemalloc
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from standardwebhooks import Webhook

from semel import SQLiteStore
from semel.core.messaging.messages import Message, read_message
from semel.errors import ConfigurationError
from semel.messaging import Outbox, Relay
from semel.messaging.brokers import webhook
from semel.messaging.brokers.urls import open_broker, open_source
from semel.messaging.brokers.webhook import WebhookBroker, sign
from semel.messaging.ports import Capabilities, Delivery, DestinationDown, Refused, Sent, TryAgain
from semel.observe import events
from semel.testing.brokers import BrokerSuite

SECRET = "whsec_" + b64encode(b"0123456789abcdef0123456789abcdef").decode()


class Receiver:
    """A web server that keeps what it is sent. ``answer`` is what it answers."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.received: queue.SimpleQueue[tuple[dict[str, str], bytes]] = queue.SimpleQueue()
        self.answer: tuple[int, dict[str, str]] = (204, {})
        self.asked = 0
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()
        self.slowness = 0.0
        self.port = 0
        self.start()

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                with receiver._lock:
                    receiver.asked += 1
                    receiver._under_way += 1
                    receiver.most = max(receiver.most, receiver._under_way)
                data = self.rfile.read(int(self.headers["content-length"]))
                done = time.monotonic() + receiver.slowness
                while receiver.slowness and time.monotonic() < done:
                    time.sleep(min(0.05, receiver.slowness))
                if time.monotonic() < done:  # it has been quick again since, and whoever has asked is gone
                    self.close_connection = True
                    return
                headers = {name.lower(): text for name, text in self.headers.items()}
                status, more = receiver.answer
                if status < 300:
                    receiver.received.put((headers, data))
                with receiver._lock:
                    receiver._under_way -= 1
                self.send_response(status)
                for name, text in {"content-length": "0", **more}.items():
                    self.send_header(name, text)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 100

            def handle_error(self, *arguments: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks"


class ReceiverSource:
    """What the receiver was sent, as a source."""

    capabilities = Capabilities(name="receiver", ordered=True, pipelines=False, largest=1 << 20)

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        try:
            headers, data = await asyncio.to_thread(self._receiver.received.get, True, max(0.01, seconds))
        except queue.Empty:
            return []
        if data.decode(errors="replace").encode() == data:  # the package reads text only
            Webhook(SECRET).verify(data, headers, json_parse=False)
        names = ("host", "accept", "accept-encoding", "connection", "user-agent", "content-length", "idempotency-key")
        kept = {
            name: unquote(text)
            for name, text in headers.items()
            if name not in names and not name.startswith("webhook-")
        }
        return [Delivery(read_message(kept, data), 0, None)]

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        pass

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        raise AssertionError

    async def close(self) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


class TestBroker(BrokerSuite):
    @pytest.fixture
    def open_broker(self, receiver: Receiver) -> Callable[[], WebhookBroker]:
        return lambda: WebhookBroker(receiver.url, secret=SECRET)

    @pytest.fixture
    def open_source(self, receiver: Receiver) -> Callable[[], Any]:
        return lambda: ReceiverSource(receiver)


def message(**fields: Any) -> Message:
    return Message(**{"id": uuid4().hex, "type": "t", "data": b"{}", **fields})


def publish(broker: WebhookBroker, *messages: Message, seconds: float = 10) -> list[Any]:
    async def main() -> list[Any]:
        try:
            return list(await broker.publish(messages or [message()], time.monotonic() + seconds))
        finally:
            await broker.close()

    return asyncio.run(main())


def test_a_request_is_signed_with_every_secret_and_named_by_its_message(receiver: Receiver) -> None:
    old, new = SECRET, "whsec_" + b64encode(b"another secret of 32 characters!").decode()
    sent = message(id="m1", headers={"idempotency-key": "of the operation", "traceparent": "00-1"}, subject="a b%")
    assert publish(WebhookBroker(receiver.url, secret=[new, old]), sent) == [Sent()]
    headers, data = receiver.received.get()
    for secret in (old, new):
        Webhook(secret).verify(data, headers)
    assert (headers["webhook-id"], headers["idempotency-key"], headers["ce-id"]) == ("m1", "m1", "m1")
    assert (headers["traceparent"], headers["ce-subject"]) == ("00-1", "a%20b%25")
    at = datetime(2026, 1, 1, tzinfo=UTC)
    assert sign(SECRET, "m1", int(at.timestamp()), b"{}") == Webhook(SECRET).sign("m1", at, "{}")


@pytest.mark.parametrize(
    ("status", "retry_after", "result"),
    [
        (200, None, Sent()),
        (202, None, Sent()),
        (400, None, Refused("the receiver answered 400")),
        (401, None, Refused("the receiver answered 401")),
        (410, None, Refused("the receiver answered 410")),
        (408, None, TryAgain("the receiver answered 408")),
        (409, "2", TryAgain("the receiver answered 409", 2.0)),
        (425, None, TryAgain("the receiver answered 425")),
        (429, "120", TryAgain("the receiver answered 429", 120.0)),
        (429, "99999999", TryAgain("the receiver answered 429", 24 * 3600.0)),
        (500, "soon", TryAgain("the receiver answered 500")),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT", TryAgain("the receiver answered 503", 0.0)),
    ],
)
def test_the_answer_says_what_becomes_of_a_message(
    receiver: Receiver, status: int, retry_after: str | None, result: object
) -> None:
    receiver.answer = (status, {} if retry_after is None else {"retry-after": retry_after})
    assert publish(WebhookBroker(receiver.url, secret=SECRET)) == [result]


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    other = Receiver()
    receiver.answer = (307, {"location": other.url})
    (result,) = publish(WebhookBroker(receiver.url, secret=SECRET))
    assert isinstance(result, TryAgain)
    assert "redirects" in result.reason
    assert other.received.empty()
    other.stop()


def test_a_receiver_that_cannot_be_reached_is_down_only_if_it_is_the_default_one(receiver: Receiver) -> None:
    alive = Receiver()  # first, because it could get the port of the other one
    receiver.stop()
    dead = receiver.url
    broker = WebhookBroker(dead, secret=SECRET, private=True, connect_timeout=2)
    results = publish(broker, message(), message(destination=dead), message(destination=alive.url), message())
    assert [type(result) for result in results] == [DestinationDown, TryAgain, Sent, DestinationDown], results
    receiver.start()
    assert publish(broker) == [Sent()]
    alive.stop()


@pytest.mark.parametrize("ends", [True, False])
def test_a_message_is_sent_when_the_receiver_says_so_whatever_becomes_of_its_body(ends: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of")
        await writer.drain()
        if not ends:
            await reader.read()  # until the client gives up
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        broker = WebhookBroker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", secret=None, timeout=3)
        assert await broker.publish([message(data=b"")], time.monotonic() + 10) == [Sent()]
        await broker.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_small_answer_that_unpacks_to_a_large_one_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(60_000_000))
    connections, ended = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(bomb)}\r\n\r\n"
                writer.write(head.encode() + bomb)
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        broker = WebhookBroker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", secret=None)
        tracemalloc.start()
        try:
            for _ in range(2):
                assert await broker.publish([message(data=b"")], time.monotonic() + 10) == [Sent()]
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
        finally:
            tracemalloc.stop()
        assert connections == 1, "it is read, so that the connection can be used again"
        await broker.close()
        await ended.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_function_that_has_no_secret_for_a_message_fails_that_one_alone(receiver: Receiver) -> None:
    secrets: dict[str, Any] = {"": SECRET, "bytes": SECRET.encode(), "cut": SECRET[:-2]}
    broker = WebhookBroker(receiver.url, secret=lambda message: secrets[message.subject])
    sent, *failed = publish(broker, message(), *(message(subject=each) for each in ("unknown", "bytes", "cut")))
    assert sent == Sent()
    assert [type(each) for each in failed] == [TryAgain] * 3
    assert "KeyError" in failed[0].reason
    assert failed[1] == failed[2] == TryAgain("the function that returns the secret did not return whsec_… as text")


def test_a_relay_goes_on_with_the_others_while_the_default_receiver_is_down(receiver: Receiver, tmp_path: Path) -> None:
    alive = Receiver()  # first, because it could get the port of the other one
    receiver.stop()
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as conn:
        store = SQLiteStore(tmp_path / "shop.db")
        outbox = Outbox(store)
        with conn:
            for number in range(3):
                outbox.add(conn, "made", {}, id=f"d{number}", stream="d")
        broker = WebhookBroker(receiver.url, secret=None, private=True, connect_timeout=2)
        with Relay(store, broker, batch=2) as relay:
            for number in range(3):
                with conn:
                    outbox.add(conn, "made", {}, id=f"a{number}", stream="a", destination=alive.url)
                relay.wake()
                assert alive.received.get(timeout=10)[0]["ce-id"] == f"a{number}"
            assert not relay.report.broker_down
            receiver.start()
            assert [receiver.received.get(timeout=30)[0]["ce-id"] for _ in range(3)] == ["d0", "d1", "d2"]
            assert relay.report.failed == 0
        store.close()
    alive.stop()


def test_a_receiver_that_answers_nothing_rests_and_the_others_flow_on(receiver: Receiver, tmp_path: Path) -> None:
    """It takes connections and requests, so nobody can tell that it is down. It would hold up every batch until the
    deadline."""
    silent = Receiver()
    silent.slowness = 3600.0
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as conn:
        store = SQLiteStore(tmp_path / "shop.db")
        outbox = Outbox(store)

        def add(number: int) -> None:
            with conn:
                outbox.add(conn, "made", {}, id=f"s{number}", stream="s", destination=silent.url)
                outbox.add(conn, "made", {}, id=f"a{number}", stream="a")
            relay.wake()

        lost: list[events.BrokerLost] = []
        broker = WebhookBroker(receiver.url, secret=None, private=True, timeout=60)
        relay = Relay(store, broker, lease="3s", pause="1ms", longest_pause="1ms", on_event=keep(lost))
        add(0)
        with relay:
            wait_for(lambda: relay.report.destinations_down == 1)
            (event,) = lost
            assert event.destination == silent.url
            asked = silent.asked
            for number in range(1, 21):  # it is tried again in between, alone
                add(number)
                assert receiver.received.get(timeout=60)[0]["ce-id"] == f"a{number - 1}"
            assert receiver.received.get(timeout=60)[0]["ce-id"] == "a20"
            assert silent.asked - asked < 10, "it is not asked with every batch"
            assert (relay.report.broker_down, relay.report.dead) == ("", 0)
            silent.slowness = 0.0
            wait_for(lambda: relay.report.sent == 42)
            assert relay.report.destinations_down == 0
        assert [silent.received.get(timeout=60)[0]["ce-id"] for _ in range(21)] == [f"s{n}" for n in range(21)]
        store.close()
    silent.stop()


def keep(lost: list[events.BrokerLost]) -> Callable[[events.Event], None]:
    return lambda event: lost.append(event) if isinstance(event, events.BrokerLost) else None


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_slow_receiver_is_left_and_only_so_many_are_asked_at_the_same_time(receiver: Receiver) -> None:
    receiver.slowness = 0.05
    broker = WebhookBroker(receiver.url, secret=SECRET, concurrency=3)
    for _ in range(2):  # each in an event loop of its own
        assert publish(broker, *(message() for _ in range(12))) == [Sent()] * 12
    assert receiver.most <= 3
    receiver.slowness = 0.5
    (result,) = publish(WebhookBroker(receiver.url, secret=SECRET, timeout=0.1))
    assert isinstance(result, TryAgain)
    (result,) = publish(WebhookBroker(receiver.url, secret=SECRET), seconds=0.1)
    assert isinstance(result, TryAgain)


@pytest.mark.parametrize(
    "destination",
    [
        *("https://127.0.0.1/", "https://localhost/", "https://[::1]/", "https://10.1.2.3/", "https://0.0.0.0/"),
        *("https://169.254.169.254/latest/meta-data", "https://[::ffff:192.168.0.1]/", "https://[2002:7f00:1::]/"),
        *("https://[64:ff9b::10.1.2.3]/", "https://[64:ff9b::7f00:1]/"),  # through NAT64
        *(
            "http://example.com/",
            "ftp://example.com/",
            "file:///etc/passwd",
            "https://me:pw@example.com/",
            "https://[/",
        ),
    ],
)
def test_a_message_cannot_choose_a_private_address(destination: str) -> None:
    (result,) = publish(WebhookBroker(secret=SECRET), message(destination=destination))
    assert isinstance(result, Refused), result


def test_a_host_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("93.184.215.14", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    (result,) = publish(WebhookBroker(secret=SECRET), message(destination="https://hooks.example/"))
    assert isinstance(result, Refused)


def certificate_for(host: str) -> bytes:
    """A key and its certificate, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    secret = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*secret) + made.public_bytes(serialization.Encoding.PEM)


def test_the_request_goes_to_the_address_that_was_checked_under_the_name_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is that of the host, although the connection is made to an address."""
    pem = tmp_path / "cert.pem"
    pem.write_bytes(certificate_for("hooks.example"))
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(pem)
    receiver = Receiver(served)
    asked: list[str] = []

    def lookup(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        asked.append(host)
        address = "127.0.0.1" if host in ("hooks.example", "127.0.0.1") else "127.9.9.9"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(webhook, "_is_public", lambda address: True)
    trusts = ssl.create_default_context(cafile=str(pem))
    broker = WebhookBroker(secret=SECRET, client=lambda: httpx.AsyncClient(verify=trusts, trust_env=False))
    there = f"hooks.example:{receiver.port}"
    (result,) = publish(broker, message(destination=f"https://{there}/hooks"))
    assert result == Sent()
    assert asked.count("hooks.example") == 1  # a second answer could be another one
    assert receiver.received.get()[0]["host"] == there
    (result,) = publish(broker, message(destination=f"https://127.0.0.1:{receiver.port}/hooks"))
    assert isinstance(result, TryAgain)  # the certificate is for another name
    receiver.stop()


def test_headers_that_belong_to_the_connection_are_refused(receiver: Receiver) -> None:
    sent = [message(headers={name: "x"}) for name in ("host", "content-length", "webhook-signature")]
    assert {type(result) for result in publish(WebhookBroker(receiver.url, secret=SECRET), *sent)} == {Refused}


def test_the_secret_is_in_the_environment_and_never_shown(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SEMEL_WEBHOOK_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match="SEMEL_WEBHOOK_SECRET"):
        open_broker(receiver.url)
    monkeypatch.setenv("SEMEL_WEBHOOK_SECRET", SECRET)
    broker = open_broker(receiver.url)
    assert isinstance(broker, WebhookBroker)
    with caplog.at_level(logging.DEBUG):
        assert publish(broker) == [Sent()]
    assert SECRET not in caplog.text + repr(broker)
    with pytest.raises(ConfigurationError) as caught:
        WebhookBroker(receiver.url, secret="whsec_not really!")
    assert "really" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="nothing can be consumed"):
        open_source(receiver.url)


def test_every_receiver_may_have_a_secret_of_its_own_or_none(receiver: Receiver) -> None:
    own = WebhookBroker(receiver.url, secret=lambda sent: SECRET if sent.type == "signed" else [])
    assert publish(own, message(type="signed")) == [Sent()]
    assert publish(own) == [Sent()]
    assert publish(WebhookBroker(receiver.url, secret=None)) == [Sent()]
    assert ["webhook-signature" in receiver.received.get()[0] for _ in range(3)] == [True, False, False]
