"""The corners of WSGI itself: write(), exc_info, close(), generators, the server's file wrapper, the request body."""

from __future__ import annotations

import gc
import io
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper

import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel, current_operation
from semel.core.states import State
from semel.errors import ConfigurationError, LeaseLost
from semel.http.contract.rules import IN_MEMORY, idempotent
from semel.http.wsgi import WSGIMiddleware
from semel.http.wsgi.body import RequestBody
from semel.http.wsgi.middleware import current_responder
from semel.observe.events import Unkeyed

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class Seen:
    """What a server saw of an answer, with ``error`` where serving it raised."""

    def __init__(self) -> None:
        self.status = ""
        self.headers: list[tuple[str, str]] = []
        self.chunks: list[bytes] = []
        self.error: BaseException | None = None
        self.iterable: Any = None

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


def environ(body: bytes = b"{}", key: str | None = "k", path: str = "/x", **more: Any) -> dict[str, Any]:
    made = {
        "REQUEST_METHOD": "POST", "SCRIPT_NAME": "", "PATH_INFO": path, "QUERY_STRING": "", "SERVER_NAME": "x",
        "SERVER_PORT": "80", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr, "wsgi.file_wrapper": FileWrapper,
    }  # fmt: skip
    if key is not None:
        made["HTTP_IDEMPOTENCY_KEY"] = key
    return made | more


def serve(app: App, asked: dict[str, Any] | None = None, *, take: int | None = None) -> Seen:
    """As a server does: ``take`` chunks, where the client goes away after them."""
    seen = Seen()

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if exc_info is not None and seen.chunks:
            raise exc_info[1].with_traceback(exc_info[2])
        assert exc_info is not None or not seen.status, "begun twice"
        seen.status, seen.headers = status, list(headers)
        return seen.chunks.append

    try:
        seen.iterable = app(environ() if asked is None else asked, start_response)
        try:
            for chunk in seen.iterable:
                assert seen.status, "bytes before start_response()"
                seen.chunks.append(chunk)
                if take is not None and len(seen.chunks) >= take:
                    break
        finally:
            if hasattr(seen.iterable, "close"):
                seen.iterable.close()
    except Exception as error:
        seen.error = error
    return seen


@pytest.fixture
def guard() -> Iterator[Semel]:
    with Semel(MemoryStore(), tenant="t") as guard:
        yield guard


@pytest.fixture
def protect(guard: Semel) -> Callable[..., WSGIMiddleware]:
    def wrap(app: App, **settings: Any) -> WSGIMiddleware:
        return WSGIMiddleware(app, guard=guard, routes={"POST /x": idempotent(**settings)})

    return wrap


class Closing:
    """An answer that counts how often it is closed."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        self.closed += 1


# -- the answer


def test_what_is_written_comes_before_what_is_returned(protect: Callable[..., WSGIMiddleware]) -> None:
    runs = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        runs.append(1)
        write = start("200 Fine", [("Content-Type", "text/plain")])
        write(b"a")
        write(b"b")
        return [b"c", b"", b"d"]

    served = protect(app)
    first, again = serve(served), serve(served)
    assert (first.status, first.body) == ("200 Fine", b"abcd")
    assert (again.status, again.body, again.header("idempotent-replayed")) == ("200 OK", b"abcd", "true")
    assert len(runs) == 1


def test_too_much_is_written(protect: Callable[..., WSGIMiddleware]) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        write = start("200 OK", [("ETag", '"e"')])
        for chunk in (b"ab", b"cd", b"ef"):
            write(chunk)
        return [b"gh"]

    served = protect(app, max_stored_body=3)
    first, again = serve(served), serve(served)
    assert first.body == b"abcdefgh"
    assert (again.body, again.header("etag"), again.header("idempotent-replayed")) == (b"", '"e"', "omitted")


@pytest.mark.parametrize("external", [True, False])
def test_an_error_after_too_much_was_written_is_told_to_the_server_alone(
    protect: Callable[..., WSGIMiddleware], external: bool
) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])(b"too much")
        raise RuntimeError("broke")

    served = protect(app, max_stored_body=3, external_effects=external)
    first, again = serve(served), serve(served)
    assert isinstance(first.error, RuntimeError)
    assert (first.status, first.body) == ("200 OK", b"too much")
    assert again.status[:3] == ("500" if external else "200")


@pytest.mark.parametrize("chunks", [[b"ab", b"cd", b"ef"], [b"abcdef"]], ids=["many", "one"])
def test_the_last_chunk_of_a_large_answer_waits_until_it_is_stored(
    protect: Callable[..., WSGIMiddleware], guard: Semel, chunks: list[bytes]
) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return chunks

    states = []
    answer = iter(protect(app, max_stored_body=3)(environ(), lambda *_: None))
    for _ in answer:
        record = guard.lookup("POST /x", "k")
        assert record is not None
        states.append(record.state.name)
    assert states[-1] == "DONE"
    assert set(states[:-1]) <= {"RUNNING"}


def test_a_large_answer_is_run_to_its_end_when_the_client_goes_away(protect: Callable[..., WSGIMiddleware]) -> None:
    done = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        for n in range(5):
            yield b"chunk"
            assert current_operation() is not None  # in the context of its request, to the end
            done.append(n)

    served = protect(app, max_stored_body=3)
    serve(served, take=1)
    assert done == [0, 1, 2, 3, 4]
    assert serve(served).header("idempotent-replayed") == "omitted"


def test_a_large_answer_that_breaks_leaves_the_key_free(protect: Callable[..., WSGIMiddleware]) -> None:
    answers = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        def chunks() -> Iterator[bytes]:
            yield b"large"
            yield b"enough"
            raise RuntimeError("broke")

        start("200 OK", [])
        answers.append(Closing(chunks()))
        return answers[-1]

    served = protect(app, max_stored_body=3)
    for _ in range(2):
        assert isinstance(serve(served).error, RuntimeError)
    assert [answer.closed for answer in answers] == [1, 1]


@pytest.mark.parametrize("limit", [3, 1000], ids=["let through", "held back"])
def test_an_answer_is_closed_once(protect: Callable[..., WSGIMiddleware], limit: int) -> None:
    answer = Closing([b"abc", b"def"])

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return answer

    assert serve(protect(app, max_stored_body=limit)).body == b"abcdef"
    assert answer.closed == 1


@pytest.mark.parametrize("limit", [3, 1000], ids=["let through", "held back"])
def test_a_close_that_raises_is_a_handler_that_raises(protect: Callable[..., WSGIMiddleware], limit: int) -> None:
    runs = []

    class Broken(Closing):
        def close(self) -> None:
            super().close()
            raise RuntimeError("cleaning up broke")

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        runs.append(Broken([b"abc", b"def"]))
        start("200 OK", [])
        return runs[-1]

    served = protect(app, max_stored_body=limit)
    for _ in range(2):
        assert isinstance(serve(served).error, RuntimeError)
    assert [answer.closed for answer in runs] == [1, 1]


def test_the_answer_in_the_place_of_a_replay_is_closed_and_never_iterated(guard: Semel) -> None:
    answers = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        run = responder.claim(rule)
        start("200 OK" if run else "204 No Content", [("X-Carried", str(run)), ("Content-Type", "text/x")])
        answers.append(Closing([b"done"] if run else iter(lambda: pytest.fail("iterated"), b"")))
        return answers[-1]

    rule = idempotent()
    served = WSGIMiddleware(app, guard=guard)
    first, again = serve(served), serve(served)
    assert (first.body, again.body) == (b"done", b"done")
    assert [answer.closed for answer in answers] == [1, 1]
    assert again.header("x-carried") == "False"  # of this exchange: such as CORS and request ids
    assert [value for name, value in again.headers if name == "content-type"] == ["text/x"]


def test_a_generator_application_may_claim_while_it_is_iterated(guard: Semel) -> None:
    runs = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        if not responder.claim(rule):
            start("204 No Content", [])
            return
        runs.append(1)
        start("200 OK", [])
        yield b"a"
        yield b"b"

    rule = idempotent()
    served = WSGIMiddleware(app, guard=guard)
    assert [serve(served).body for _ in range(3)] == [b"ab"] * 3
    assert len(runs) == 1


def test_an_error_page_takes_the_place_of_an_answer_that_has_no_bytes(protect: Callable[..., WSGIMiddleware]) -> None:
    runs = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        runs.append(1)
        start("200 OK", [])
        try:
            raise RuntimeError("broke")
        except RuntimeError:
            start("500 Broken", [], sys.exc_info())
        return [b"page"]

    served = protect(app)
    for _ in range(2):
        assert (seen := serve(served)).status == "500 Broken"
        assert seen.body == b"page"
    assert len(runs) == 2


def test_an_error_page_after_bytes_is_refused_with_the_error(protect: Callable[..., WSGIMiddleware]) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        write = start("200 OK", [])
        write(b"half")
        try:
            raise RuntimeError("broke")
        except RuntimeError:
            start("500 Broken", [], sys.exc_info())
        return [b"page"]

    seen = serve(protect(app))
    assert isinstance(seen.error, RuntimeError)
    assert seen.status == ""


def test_an_answer_begun_twice_or_never_is_an_error(protect: Callable[..., WSGIMiddleware]) -> None:
    def twice(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        start("201 Created", [])
        return []

    assert isinstance(serve(protect(twice)).error, AssertionError)
    assert isinstance(serve(protect(lambda env, start: [b"x"])).error, AssertionError)
    assert isinstance(serve(protect(lambda env, start: [])).error, AssertionError)


def test_effects_outside_an_error_is_answered_stored_and_told_to_the_server(
    protect: Callable[..., WSGIMiddleware],
) -> None:
    runs = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        runs.append(1)
        raise RuntimeError("broke after the charge")

    served = protect(app, external_effects=True)
    first, again = serve(served), serve(served)
    assert isinstance(first.error, RuntimeError)
    assert again.error is None
    assert first.body == again.body == b"Internal Server Error"
    assert first.status[:3] == again.status[:3] == "500"
    assert len(runs) == 1


def test_an_error_that_the_policy_remembers_is_replayed_as_the_answer_it_was(
    protect: Callable[..., WSGIMiddleware],
) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        raise errors.pop()

    errors: list[Exception] = [KeyError("other"), ValueError("remembered"), KeyError("not remembered")]
    served = protect(app, remember_errors=(ValueError,))
    assert isinstance(serve(served).error, KeyError)
    first, again = serve(served), serve(served)
    assert isinstance(first.error, ValueError)
    assert first.body == again.body == b"Internal Server Error"
    assert again.header("idempotent-replayed") == "true"
    assert len(errors) == 1


def test_a_large_answer_that_cannot_be_stored_has_no_end(protect: Callable[..., WSGIMiddleware], guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        yield b"large"
        guard.release("POST /x", "k", force=True)
        yield b"end"

    seen = serve(protect(app, max_stored_body=3))
    assert isinstance(seen.error, ConnectionError)
    assert seen.body == b"large"


def test_a_refusal_of_an_owner_that_was_replaced_is_not_told(
    protect: Callable[..., WSGIMiddleware], guard: Semel
) -> None:
    """The lease was lost and the handler says 503: the client gets the new owner's word instead."""

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        assert responder.life.attempt is not None
        assert responder.life.attempt.lease is not None
        guard.release("POST /x", "k", force=True)
        responder.life.attempt.lease.lost = True  # as the keeper says
        if env["QUERY_STRING"]:
            raise RuntimeError("stopped")
        start("503 Stopped", [])
        return []

    served = protect(app)
    for query in ("", "raise"):
        seen = serve(served, environ(QUERY_STRING=query))
        assert seen.status[:3] == "409"
        assert b"idempotency_key_in_use" in seen.body


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_handler_leaves_the_key_free_or_abandoned_where_it_may_have_had_effects(
    protect: Callable[..., WSGIMiddleware], guard: Semel, interruption: type[BaseException]
) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        raise interruption

    with pytest.raises(interruption):
        serve(protect(app))
    assert guard.lookup("POST /x", "k") is None
    with pytest.raises(interruption):
        serve(protect(app, external_effects=True))
    record = guard.lookup("POST /x", "k")
    assert record is not None
    assert record.state is State.ABANDONED


def test_an_owner_that_was_replaced_answers_with_its_successor(
    protect: Callable[..., WSGIMiddleware], guard: Semel
) -> None:
    """The handler comes back late: what it did is not stored over the new owner's answer."""
    bodies = [b"late", b"new owner's"]

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        body = bodies.pop(0)
        if body == b"late":
            guard.release("POST /x", "k", force=True)
            guard.driver.flights.by_id.clear()  # as if in another process
            assert serve(served).body == b"new owner's"
        start("200 OK", [])
        return [body]

    served = protect(app)
    seen = serve(served)
    assert (seen.body, seen.header("idempotent-replayed")) == (b"new owner's", "true")


def test_a_handler_that_learns_that_its_lease_is_lost(protect: Callable[..., WSGIMiddleware], guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        guard.release("POST /x", "k", force=True)
        raise LeaseLost("fenced off")

    seen = serve(protect(app))
    assert seen.status[:3] == "409"
    assert b"idempotency_key_in_use" in seen.body


def test_an_application_that_raises_in_the_place_of_a_replay_is_not_hushed_up(guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        if not responder.claim(rule):
            raise RuntimeError("a bug")
        start("200 OK", [])
        return [b"done"]

    rule = idempotent()
    served = WSGIMiddleware(app, guard=guard)
    assert serve(served).body == b"done"
    assert isinstance(serve(served).error, RuntimeError)


# -- what is left alone


@pytest.mark.parametrize(
    "asked",
    [environ(path="/other"), environ(key=None, path="/other"), environ(REQUEST_METHOD="GET")],
    ids=["undeclared", "undeclared, no key", "GET"],
)
def test_an_answer_that_is_not_claimed_reaches_the_server_as_it_is(
    protect: Callable[..., WSGIMiddleware], asked: dict[str, Any]
) -> None:
    """A server knows its own file wrapper by its type, and sends the file without reading it here."""

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        wrapped: Iterable[bytes] = env["wsgi.file_wrapper"](io.BytesIO(b"file"))
        return wrapped

    seen = serve(protect(app), {**asked, "wsgi.input": io.BytesIO(b"{}")})
    assert type(seen.iterable) is FileWrapper
    assert seen.body == b"file"


def test_a_file_wrapper_of_a_claimed_route_is_captured(protect: Callable[..., WSGIMiddleware]) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        wrapped: Iterable[bytes] = env["wsgi.file_wrapper"](io.BytesIO(b"file"))
        return wrapped

    served = protect(app)
    assert [serve(served).body for _ in range(2)] == [b"file"] * 2


# -- set-up


def test_a_service_without_tenants_is_warned() -> None:
    with Semel(MemoryStore()) as guard, pytest.warns(UserWarning, match="tenant= is missing"):
        WSGIMiddleware(lambda env, start: [], guard=guard)


def test_an_async_guard_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="takes a Semel"):
        WSGIMiddleware(lambda env, start: [], guard=AsyncSemel(AsyncMemoryStore(), tenant="t"))  # type: ignore[arg-type]


def test_a_rule_for_a_get_is_refused(guard: Semel) -> None:
    with pytest.raises(ConfigurationError, match="GET /x changes nothing"):
        WSGIMiddleware(lambda env, start: [], guard=guard, routes={"GET /x": idempotent()})


@pytest.mark.parametrize("tenant", ["", None, "x" * 256])
def test_a_tenant_that_is_none_runs_nothing(guard: Semel, tenant: str | None) -> None:
    served = WSGIMiddleware(
        lambda env, start: pytest.fail("ran"),
        guard=guard,
        tenant=lambda env: tenant,
        routes={"POST /x": idempotent()},
    )
    assert isinstance(serve(served).error, ConfigurationError)


def test_an_endpoint_without_the_middleware_does_not_run_unprotected() -> None:
    with pytest.raises(ConfigurationError, match="not installed"):
        current_responder()


def test_one_rule_for_one_request_and_before_the_answer(guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        if env["PATH_INFO"] == "/late":
            start("200 OK", [])
        else:
            responder.claim(rule)
        responder.claim(rule)
        return []

    rule = idempotent()
    served = WSGIMiddleware(app, guard=guard)
    assert "claimed already" in str(serve(served).error)
    assert "has begun" in str(serve(served, environ(path="/late")).error)
    assert guard.lookup("POST /x", "k") is None


def test_a_route_of_a_mounted_application_is_known_by_its_whole_path(guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return [b"mounted"]

    served = WSGIMiddleware(app, guard=guard, routes={"POST /shop/x": idempotent()})
    assert serve(served, environ(SCRIPT_NAME="/shop")).header("idempotency-key") == "k"
    assert guard.lookup("POST /shop/x", "k") is not None
    assert serve(served).header("idempotency-key") is None


def test_a_route_may_have_parts(guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return [env["PATH_INFO"].encode()]

    served = WSGIMiddleware(app, guard=guard, routes={"POST /orders/{id}": idempotent()})
    for path in ("/orders/1", "/orders/2"):
        assert serve(served, environ(path=path)).body == path.encode()
        assert serve(served, environ(path=path)).header("idempotent-replayed") == "true"


def test_paths_that_are_no_text_are_kept_apart(guard: Semel) -> None:
    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        run = responder.claim(rule)
        start("200 OK", [])
        return [env["PATH_INFO"].encode("latin-1") if run else b""]

    rule = idempotent()
    served = WSGIMiddleware(app, guard=guard)
    for path in ("/\xff", "/\xfe", "/\u00c3\u00bf"):
        for _ in range(2):
            assert serve(served, environ(path=path)).body == path.encode("latin-1")


def test_a_request_without_a_key_says_so_in_the_events() -> None:
    told: list[str] = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return []

    with Semel(MemoryStore(), tenant="t", on_event=lambda event: told.append(event.name)) as guard:
        serve(WSGIMiddleware(app, guard=guard, routes={"POST /x": idempotent(required=False)}), environ(key=None))
    assert told == [Unkeyed.name]


# -- the body


def body_of(data: bytes, **more: Any) -> tuple[RequestBody, list[bytes]]:
    fed: list[bytes] = []
    return RequestBody(environ(data, **more), fed.append), fed


READERS: dict[str, Callable[[RequestBody], bytes]] = {
    "read": lambda body: body.read(),
    "read None": lambda body: body.read(None),
    "read by 7": lambda body: b"".join(iter(lambda: body.read(7), b"")),
    "readline": lambda body: b"".join(iter(body.readline, b"")),
    "readline by 3": lambda body: b"".join(iter(lambda: body.readline(3), b"")),
    "readlines": lambda body: b"".join(body.readlines()),
    "iterated": b"".join,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("before", [0, 5, None], ids=["spooled", "spooled midway", "not spooled"])
@pytest.mark.parametrize("ends", [True, False], ids=["chunked", "of a length"])
def test_a_body_is_fingerprinted_and_given_whole_however_it_is_read(
    read: Callable[[RequestBody], bytes], before: int | None, ends: bool
) -> None:
    data = b"one\ntwo\n\nthree and a long line that goes on" * 3
    more: dict[str, Any] = {"CONTENT_LENGTH": "", "wsgi.input_terminated": True} if ends else {}
    body, fed = body_of(data, **more)
    start = b""
    if before is not None:
        start = body.read(before)
        body.spool(1000)
        assert b"".join(fed) == data
    assert start + read(body) == data
    assert b"".join(fed) == data
    assert not body.incomplete
    assert body.read() == body.readline() == b""
    body.close()


def test_a_body_never_reads_beyond_its_length() -> None:
    fed: list[bytes] = []
    stream = io.BytesIO(b"abcNEXT REQUEST")
    body = RequestBody({"wsgi.input": stream, "CONTENT_LENGTH": "3"}, fed.append)
    body.spool(1000)
    assert (body.read(100), stream.read()) == (b"abc", b"NEXT REQUEST")
    body.close()


@pytest.mark.parametrize("length", ["", "-1", "x"])
def test_a_body_without_a_length_is_empty_where_the_server_does_not_end_it(length: str) -> None:
    body = RequestBody({"wsgi.input": io.BytesIO(b"NEXT"), "CONTENT_LENGTH": length}, lambda chunk: None)
    body.spool(1000)
    assert body.read() == b""
    assert not body.incomplete


def test_a_body_that_is_cut_is_known() -> None:
    body, _ = body_of(b"abc", CONTENT_LENGTH="10")
    body.spool(1000)
    assert body.incomplete
    body.close()


def test_a_body_that_breaks_claims_nothing_and_lets_go_of_what_it_spooled(
    protect: Callable[..., WSGIMiddleware], guard: Semel
) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError("connection reset")
            return super().read(2)

    asked = environ(b"12345", **{"wsgi.input": Broken(b"12345")})
    seen = serve(protect(lambda env, start: pytest.fail("ran")), asked)
    assert (seen.status[:3], seen.error) == ("400", None)
    assert guard.lookup("POST /x", "k") is None


def test_a_large_body_is_spooled_to_a_file_and_let_go(
    protect: Callable[..., WSGIMiddleware],
) -> None:
    spools = []

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        spools.append(env["wsgi.input"]._spool)
        assert spools[-1]._rolled
        start("200 OK", [])
        return [str(len(env["wsgi.input"].read())).encode()]

    data = b"x" * (IN_MEMORY + 1)
    assert serve(protect(app), environ(data)).body == str(len(data)).encode()
    assert spools[0].closed


# -- what is left of a request


@pytest.mark.parametrize(
    ("status", "size", "settings"),
    [(200, 10, {}), (500, 10, {}), (200, 5000, {}), (200, 10, {"keep_body": False})],
    ids=["stored", "released", "let through", "without its body"],
)
@pytest.mark.parametrize("edge", [True, False], ids=["at the edge", "at the endpoint"])
def test_nothing_of_a_request_waits_for_the_garbage_collector(
    guard: Semel, edge: bool, status: int, size: int, settings: Any
) -> None:
    left: list[weakref.ref[Any]] = []
    rule = idempotent(max_stored_body=1000, **settings)

    def app(env: dict[str, Any], start: Any) -> Iterable[bytes]:
        responder = current_responder()
        assert responder is not None
        left.append(weakref.ref(responder))
        if not edge and not responder.claim(rule):
            start("204 No Content", [])
            return []
        left.append(weakref.ref(responder._held))
        start(f"{status} Said", [])
        return [b"x" * size]

    middleware = WSGIMiddleware(app, guard=guard, routes={"POST /x": rule} if edge else None)
    gc.disable()
    try:
        seen = [serve(middleware, environ()) for _ in range(2)]  # the second is a replay, where there is one
        for each in seen:
            each.iterable = None  # a server lets go of it
        assert [each() for each in left] == [None] * len(left)
    finally:
        gc.enable()
    assert [each.status[:3] for each in seen] == [str(status)] * 2


@pytest.mark.parametrize("first", ["post", "Post", "POST"])
def test_a_method_in_lower_case_is_the_same_method(first: str) -> None:
    runs: list[str] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        runs.append(environ["REQUEST_METHOD"])
        start_response("200 OK", [])
        return [b"run %d" % len(runs)]

    guarded = WSGIMiddleware(
        app, guard=Semel(MemoryStore()), tenant=lambda environ: "alice", routes={"POST /x": idempotent()}
    )

    assert [serve(guarded, environ(REQUEST_METHOD=method)).body for method in (first, "POST")] == [b"run 1"] * 2
    assert serve(guarded, environ(REQUEST_METHOD="get")).body == b"run 2"


def test_the_tenant_is_asked_for_before_the_body_is_read() -> None:
    class Unread:
        def read(self, size: int = -1) -> bytes:
            raise AssertionError("the body of an anonymous request was read")

    def never(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        raise AssertionError("the application ran")

    guarded = WSGIMiddleware(
        never, guard=Semel(MemoryStore()), tenant=lambda environ: None, routes={"POST /x": idempotent()}
    )

    error = serve(guarded, environ(b"x" * 100, **{"wsgi.input": Unread()})).error
    assert isinstance(error, ConfigurationError)
    assert "after authentication" in str(error)
