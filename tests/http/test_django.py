"""The middleware and the decorators: what is Django's own. The contract's rows run against served projects."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connections, transaction
from django.http import FileResponse, HttpResponse, HttpResponseRedirect, JsonResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from semel import AsyncOperation, MemoryStore, Operation, Policy, Semel
from semel.core.encoding.snapshot import StoredResponse
from semel.core.ops import Complete
from semel.errors import ConfigurationError, PolicyError, StoreUnavailable
from semel.http.contract.responses import RESPONSES
from semel.http.django import check_match, conditional, etag, idempotent, natural
from semel.observe.events import Completed, Event
from tests.http.django_project import MIDDLEWARE, Project

if TYPE_CHECKING:
    from decimal import Decimal
    from pathlib import Path

    from django.http import HttpRequest

KEY = {"Idempotency-Key": "k"}
REPLAYED = "Idempotent-Replayed"


@pytest.fixture
def guard() -> Iterator[Semel]:
    with Semel(MemoryStore()) as guard:
        yield guard


@pytest.fixture
def project(guard: Semel) -> Iterator[Project]:
    with Project(guard) as project:
        yield project


@pytest.fixture
def runs() -> list[Any]:
    return []


def post(client: Client, where: str = "/pay", data: Any = b"{}", **headers: str) -> Any:
    lines = KEY | {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(where, data, content_type=lines.pop("Content-Type", "application/json"), headers=lines)


def test_views_return_what_django_views_return(project: Project, runs: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("a report")
    opened: list[Any] = []

    def answer(make: Callable[[Any], Any]) -> Any:
        def view(request: HttpRequest) -> Any:
            runs.append(1)
            return make(request)

        return idempotent()(view)

    def open_file(request: Any) -> FileResponse:
        opened.append(file.open("rb"))
        return FileResponse(opened[-1], as_attachment=True, filename="report.txt")

    template = engines["django"].from_string("Hello {{ name }}")
    project.serve(
        path("json", answer(lambda request: JsonResponse({"n": len(runs)}, status=201))),
        path("redirect", answer(lambda request: HttpResponseRedirect("/elsewhere"))),
        path("stream", answer(lambda request: StreamingHttpResponse(str(i) for i in range(3)))),
        path("file", answer(open_file)),
        path("template", answer(lambda request: TemplateResponse(request, template, {"name": "Ada"}))),
        path("empty", answer(lambda request: HttpResponse())),
    )
    bodies = {"json": b'{"n": 1}', "redirect": b"", "stream": b"012", "file": b"a report", "template": b"Hello Ada"}
    for where, body in {**bodies, "empty": b""}.items():
        first, again = (post(project.client(), f"/{where}") for _ in range(2))
        assert (first.content, again.content) == (body, body)
        assert first.status_code == again.status_code
        for name in ("Content-Type", "Location", "Content-Disposition"):
            assert first.headers.get(name) == again.headers.get(name)
        assert again.headers[REPLAYED] == "true"
        assert again.headers["Content-Length"] == str(len(body))
        first.close()
    assert len(runs) == 6
    assert [each.closed for each in opened] == [True]


def test_each_url_is_an_operation_of_its_own(project: Project) -> None:
    @idempotent()
    def ship(request: HttpRequest, number: int, op: Operation) -> JsonResponse:
        return JsonResponse({"number": number, "name": op.name, "tenant": op.tenant})

    project.serve(path("orders/<int:number>/ship", ship))
    for _ in range(2):
        for number in (1, 2):
            answer = post(project.client(), f"/orders/{number}/ship", X_User="bob")
            assert answer.json() == {"number": number, "name": f"POST /orders/{number}/ship", "tenant": "bob"}


def test_a_first_answer_is_the_views_own_response(project: Project) -> None:
    made: list[Any] = []

    @idempotent()
    def pay(request: HttpRequest) -> JsonResponse:
        made.append(JsonResponse({}))
        made[-1].note = "for a middleware outside"
        return made[-1]

    project.serve(path("pay", pay))
    answer = post(project.client())
    assert answer is made[0]
    assert answer.headers["Idempotency-Key"] == "k"


def test_the_claim_comes_after_middlewares_and_decorators_and_a_replay_is_authorised_anew(
    project: Project, guard: Semel, runs: list[Any]
) -> None:
    allowed: set[str] = set()

    def refusing(get_response: Any) -> Any:
        return lambda request: get_response(request) if "middleware" in allowed else HttpResponse(status=403)

    def permitted(view: Any) -> Any:
        return lambda request: view(request) if "decorator" in allowed else HttpResponse(status=401)

    @permitted
    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        return HttpResponse("paid")

    for order in ([MIDDLEWARE, refusing], [refusing, MIDDLEWARE]):
        project.serve(path("pay", pay), middleware=order)
        for allowed_now, status in ((set(), 403), ({"middleware"}, 401)):
            allowed = allowed_now
            assert post(project.client()).status_code == status
        assert len(runs) == 0 or guard.lookup("POST /pay", "k", tenant="alice") is not None
        allowed = {"middleware", "decorator"}
        assert post(project.client()).content == b"paid"
    assert len(runs) == 1


def test_a_body_that_a_middleware_before_has_read_counts(project: Project, runs: list[Any]) -> None:
    def logging(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            runs.append(request.body)
            return get_response(request)

        return middleware

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse(request.body)

    project.serve(path("pay", pay), middleware=[logging, MIDDLEWARE])
    client = project.client()
    assert post(client, data=b"abc").content == b"abc"
    assert post(client, data=b"abc").headers[REPLAYED] == "true"
    assert post(client, data=b"abd").status_code == 422


def test_a_body_that_cannot_be_compared_any_more_is_an_error_and_not_a_bypass(
    project: Project, runs: list[Any]
) -> None:
    def parsing(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            assert request.POST["a"] == "1"  # of multipart/form-data: the bytes are gone
            return get_response(request)

        return middleware

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        return HttpResponse()

    project.serve(path("pay", pay), middleware=[parsing, MIDDLEWARE])
    with pytest.raises(ConfigurationError, match="put that middleware after IdempotencyMiddleware"):
        project.client().post("/pay", {"a": "1"}, headers=KEY)
    assert runs == []
    project.serve(path("pay", pay), middleware=[MIDDLEWARE, parsing])
    assert [project.client().post("/pay", {"a": "1"}, headers=KEY).status_code for _ in range(2)] == [200, 200]
    assert project.client().post("/pay", {"a": "1", "b": "2"}, headers=KEY).status_code == 422
    assert runs == [1]


def test_forms_and_files_are_whole_also_where_csrf_reads_them_first(project: Project, runs: list[Any]) -> None:
    @idempotent()
    def upload(request: Any) -> JsonResponse:
        runs.append(1)
        return JsonResponse({"name": request.POST["name"], "size": len(request.FILES["file"].read())})

    project.serve(path("upload", upload), middleware=["django.middleware.csrf.CsrfViewMiddleware", MIDDLEWARE])
    client = Client(enforce_csrf_checks=True)
    client.cookies["csrftoken"] = token = "t" * 32

    def send(size: int, **fields: str) -> Any:
        # A boundary of our own: the client's is fixed, and so are the bytes.
        file = SimpleUploadedFile("big.bin", b"x" * size)
        return client.post("/upload", {"name": "big", "file": file, **fields}, headers=KEY)

    assert send(10).status_code == 403
    assert send(2_000_000, csrfmiddlewaretoken=token).json() == {"name": "big", "size": 2_000_000}
    assert send(2_000_000, csrfmiddlewaretoken=token).headers[REPLAYED] == "true"
    assert send(2_000_001, csrfmiddlewaretoken=token).status_code == 422
    assert runs == [1]


def test_a_body_is_streamed_to_a_view_that_reads_it_so(project: Project) -> None:
    @idempotent()
    def store(request: Any) -> HttpResponse:
        sizes = [len(chunk) for chunk in iter(lambda: request.read(65536), b"")]
        return HttpResponse(str(sum(sizes)))

    project.serve(path("pay", store))
    assert post(project.client(), data=b"x" * 5_000_000).content == b"5000000"  # above DATA_UPLOAD_MAX_MEMORY_SIZE


def test_a_replay_sets_no_cookie_and_leaves_the_session_alone(project: Project, runs: list[Any]) -> None:
    @idempotent()
    def login(request: Any) -> HttpResponse:
        request.session["user"] = "alice"
        response = HttpResponse("hello")
        response.set_cookie("seen", "1")
        return response

    sessions = "django.contrib.sessions.middleware.SessionMiddleware"
    for number, order in enumerate(([sessions, MIDDLEWARE], [MIDDLEWARE, sessions])):
        project.serve(path("login", login), middleware=order)
        first = post(project.client(), "/login", X_User=str(number))
        again = post(project.client(), "/login", X_User=str(number))
        assert set(first.cookies) == {"seen", "sessionid"}
        assert again.content == b"hello"
        assert set(again.cookies) == set()


def test_a_cookie_that_was_written_by_hand_goes_out_once(project: Project) -> None:
    @idempotent()
    def pay(request: HttpRequest, how: str) -> Any:
        response = StreamingHttpResponse([b"paid"]) if how == "streamed" else HttpResponse("paid")
        response["Set-Cookie"] = "a=1"
        return response

    project.serve(path("<how>", pay))
    for how in ("whole", "streamed"):
        first, again = (post(project.client(), f"/{how}") for _ in range(2))
        assert (first.headers["Set-Cookie"], first.content) == ("a=1", b"paid")
        assert "Set-Cookie" not in again.headers


def test_repeated_lines_of_a_stored_answer_are_joined(project: Project, guard: Semel) -> None:
    """Django has one line for a name; the record may be from elsewhere."""

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        raise AssertionError("it is done already")

    call = guard.make_call("POST /pay", "k", "alice", b"", Policy(), serializer=RESPONSES)
    guard.begin(call).complete(StoredResponse(299, [(b"link", b"<a>"), (b"link", b"<b>")], b"done"))  # type: ignore[union-attr]
    project.serve(path("pay", pay))
    answer = post(project.client())
    assert (answer.status_code, answer.headers["Link"], answer.content) == (299, "<a>, <b>", b"done")


@pytest.mark.parametrize("first_of_all", [True, False], ids=["outside", "inside"])
def test_gzip_gives_equal_bytes_wherever_it_stands(project: Project, first_of_all: bool) -> None:
    import gzip

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"x" * 1000)

    packing = "django.middleware.gzip.GZipMiddleware"
    project.serve(path("pay", pay), middleware=[packing, MIDDLEWARE] if first_of_all else [MIDDLEWARE, packing])
    answers = [post(project.client(), Accept_Encoding="gzip") for _ in range(2)]
    assert answers[1].headers[REPLAYED] == "true"
    for answer in answers:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert answer.headers["Content-Length"] == str(len(answer.content))
        assert gzip.decompress(answer.content) == b"x" * 1000
    if first_of_all:
        assert post(project.client()).content == b"x" * 1000


def test_lines_of_other_middlewares_are_on_replays_and_refusals_too(project: Project) -> None:
    """Without its CORS lines a browser would not show the answer to its page."""

    def cors(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            response = get_response(request)
            response["Access-Control-Allow-Origin"] = "https://shop.example"
            response["Vary"] = "Origin"
            return response

        return middleware

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse("paid")

    for order in ([cors, MIDDLEWARE], [MIDDLEWARE, cors]):
        project.serve(path("pay", pay), middleware=order)
        client = project.client()
        origin = {"Origin": "https://shop.example"}
        answers = [
            post(client, **origin),
            post(client, **origin),
            client.post("/pay", headers=origin),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        for answer in answers:
            assert answer.headers["Access-Control-Allow-Origin"] == "https://shop.example"
            assert "Idempotent-Replayed" in answer.headers["Access-Control-Expose-Headers"]
            assert answer.headers["Vary"] == "Origin"
        assert answers[2].headers["Content-Type"] == "application/problem+json"


def test_a_page_that_does_not_ask_across_origins_sees_no_lines_of_cors(project: Project) -> None:
    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse("paid")

    project.serve(path("pay", pay))
    for headers in ({}, {"Origin": "https://shop.example"}):
        answer = post(project.client(), **headers)
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert ("Access-Control-Expose-Headers" in answer.headers) is bool(headers)


def test_what_a_middleware_adds_to_the_requests_lines_may_be_any_text(project: Project, runs: list[Any]) -> None:
    def named(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            request.META["HTTP_X_NAME"] = "\u4e2d"
            request.META["HTTP_X_USER_OBJECT"] = None
            return get_response(request)

        return middleware

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        return HttpResponse("paid")

    project.serve(path("pay", pay), middleware=[named, MIDDLEWARE])
    assert [post(project.client()).status_code for _ in range(2)] == [200, 200]
    assert runs == [1]


def test_a_view_that_raises_runs_again_and_one_that_answers_404_does_not(project: Project, runs: list[Any]) -> None:
    @idempotent()
    def broken(request: HttpRequest) -> HttpResponse:
        runs.append("broken")
        raise RuntimeError("broke")

    @idempotent()
    def absent(request: HttpRequest) -> HttpResponse:
        from django.http import Http404

        runs.append("absent")
        raise Http404

    @idempotent(guarantee="at_most_once")
    def risky(request: HttpRequest) -> HttpResponse:
        runs.append("risky")
        raise RuntimeError("broke")

    project.serve(path("broken", broken), path("absent", absent), path("risky", risky))
    client = Client(raise_request_exception=False)
    for where, status in (("/broken", 500), ("/absent", 404), ("/risky", 500)):
        answers = [post(client, where) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [status, status]
        assert answers[0].content == answers[1].content
    assert runs == ["broken", "broken", "absent", "risky"]


def test_an_attempt_that_was_replaced_answers_with_its_successors_answer_and_sets_no_cookie(
    project: Project, guard: Semel
) -> None:
    @idempotent()
    def pay(request: HttpRequest, op: Operation) -> HttpResponse:
        record = guard.lookup(op.name, op.key, tenant="alice")
        assert record is not None
        guard.release(op.name, op.key, tenant="alice", force=True)
        other = Semel(guard.store, sweep_every=None)
        attempt = other.begin(
            other.make_call(op.name, op.key, "alice", record.fingerprint, Policy(), serializer=RESPONSES)
        )
        attempt.complete(StoredResponse(202, [], b"the other's"))  # type: ignore[union-attr]
        response = HttpResponse("mine", status=201)
        response.set_cookie("mine", "1")
        return response

    project.serve(path("pay", pay))
    for _ in range(2):
        answer = post(project.client())
        assert (answer.status_code, answer.content, dict(answer.cookies)) == (202, b"the other's", {})
        assert answer.headers[REPLAYED] == "true"


@pytest.mark.parametrize("on_unstored", ["deliver", "withhold"])
def test_an_answer_that_cannot_be_stored_is_sent_unless_it_is_withheld(runs: list[Any], on_unstored: Any) -> None:
    class Failing(MemoryStore):
        def execute(self, op: Any) -> Any:
            if isinstance(op, Complete):
                raise StoreUnavailable("secret-host: gone")
            return super().execute(op)

    @idempotent(completion_timeout=0.01, on_unstored=on_unstored)
    def pay(request: HttpRequest, how: str) -> Any:
        runs.append(how)
        response = HttpResponse("paid")
        response.set_cookie("paid", "1")
        return StreamingHttpResponse([b"paid"]) if how == "streamed" else response

    with Semel(Failing()) as guard, Project(guard) as project:
        project.serve(path("<how>", pay))
        for how in ("whole", "streamed"):
            answer = post(project.client(), f"/{how}")
            assert "secret-host" not in body_text(answer)
            if on_unstored == "deliver":
                assert (answer.status_code, body_text(answer)) == (200, "paid")
                assert answer.headers["Idempotent-Stored"] == "false"
            else:
                assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_outcome_unknown")
                assert dict(answer.cookies) == {}
            assert post(project.client(), f"/{how}").status_code == 409
    assert runs == ["whole", "streamed"]


def body_text(answer: Any) -> str:
    content = b"".join(answer.streaming_content) if answer.streaming else answer.content
    return str(content.decode())


# -- the view's transaction


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[str]:
    """A database with ATOMIC_REQUESTS and a table; its alias."""
    alias = "shop"
    said = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db"), "ATOMIC_REQUESTS": True}
    connections.settings[alias] = connections.configure_settings({"default": said})["default"]
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
        cursor.execute(
            "CREATE TABLE paid (n INTEGER, parent INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)"
        )
    yield alias
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


def paid(tmp_path: Path) -> int:
    """Rows that are committed: seen by another connection."""
    import sqlite3

    raw = sqlite3.connect(tmp_path / "shop.db")
    try:
        count: int = raw.execute("SELECT count(*) FROM paid").fetchone()[0]
        return count
    finally:
        raw.close()


def insert(alias: str, parent: int | None = None) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("INSERT INTO paid VALUES (1, %s)", [parent])


def test_the_answer_is_stored_after_the_views_transaction_has_committed(shop: str, tmp_path: Path) -> None:
    seen: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, Completed):
            seen.append(paid(tmp_path))

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        insert(shop)
        assert connections[shop].in_atomic_block
        seen.append(paid(tmp_path))
        return HttpResponse("paid")

    with Semel(MemoryStore(), on_event=watch) as guard, Project(guard) as project:
        project.serve(path("pay", pay))
        assert post(project.client()).content == b"paid"
    assert seen == [0, 1]


def test_a_rolled_back_view_leaves_the_key_free(project: Project, guard: Semel, shop: str, tmp_path: Path) -> None:
    fail: list[str] = ["raise", "commit"]

    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        how = fail.pop(0) if fail else ""
        insert(shop, parent=404 if how == "commit" else None)  # a parent that is not there: found at the commit
        if how == "raise":
            raise RuntimeError("broke")
        return HttpResponse("paid")

    project.serve(path("pay", pay))
    client = Client(raise_request_exception=False)
    for _ in range(2):
        assert post(client).status_code == 500
        assert paid(tmp_path) == 0
        assert guard.lookup("POST /pay", "k", tenant="alice") is None
    assert [post(client).content for _ in range(2)] == [b"paid", b"paid"]
    assert paid(tmp_path) == 1


def test_a_failed_precondition_rolls_the_view_back_and_is_not_stored(
    project: Project, guard: Semel, shop: str, tmp_path: Path
) -> None:
    version = 7

    @transaction.atomic(using="shop")
    @conditional()
    def change(request: HttpRequest) -> HttpResponse:
        insert(shop)
        check_match(etag(version))
        return HttpResponse("changed")

    project.serve(path("change", change))
    client = project.client()
    lines = KEY | {"If-Match": '"6"'}
    for headers, status, code in (
        (lines, 412, "precondition_failed"),
        ({"If-Match": '"6"'}, 412, "precondition_failed"),
        ({}, 428, "precondition_required"),
    ):
        answer = client.put("/change", b"{}", headers=headers)
        assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json")
        assert code in answer.json()["code"]
        assert paid(tmp_path) == 0
    assert guard.lookup("PUT /change", "k", tenant="alice") is None
    version = 6
    assert [client.put("/change", b"{}", headers=lines).content for _ in range(2)] == [b"changed", b"changed"]
    assert paid(tmp_path) == 1


def test_a_natural_delete_of_what_is_gone_is_done(project: Project) -> None:
    from django.http import Http404

    there = {1}

    @natural()
    def order(request: HttpRequest, number: int) -> HttpResponse:
        if number not in there:
            raise Http404
        there.remove(number)
        return HttpResponse(status=204)

    project.serve(path("orders/<int:number>", order))
    assert [project.client().delete("/orders/1").status_code for _ in range(2)] == [204, 204]
    assert project.client().get("/orders/1").status_code == 404


# -- classes


def test_methods_of_class_based_views(project: Project, runs: list[Any]) -> None:
    class Orders(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            runs.append("get")
            return HttpResponse("list")

        @idempotent()
        def post(self, request: HttpRequest, op: Operation) -> HttpResponse:
            runs.append("post")
            return HttpResponse(op.key)

        @method_decorator([csrf_exempt, idempotent(required=False)])
        def put(self, request: HttpRequest, op: Operation | None) -> HttpResponse:
            runs.append(op and op.key)
            return HttpResponse("put")

    project.serve(path("orders", Orders.as_view()))
    client = project.client()
    for _ in range(2):
        assert client.get("/orders", headers=KEY).content == b"list"
        assert client.post("/orders", headers=KEY).content == b"k"
        assert client.put("/orders", headers=KEY).content == b"put"
        assert client.put("/orders").content == b"put"
    assert client.post("/orders").status_code == 400
    assert runs == ["get", "post", "k", None, "get", None]


def test_a_view_of_two_methods_is_claimed_for_one(project: Project, runs: list[Any]) -> None:
    @idempotent()
    def form(request: HttpRequest, op: Operation | None) -> HttpResponse:
        runs.append(op and op.key)
        return HttpResponse("form")

    project.serve(path("form", form))
    for _ in range(2):
        assert project.client().get("/form", headers=KEY).status_code == 200
        assert post(project.client(), "/form").status_code == 200
    assert runs == [None, "k", None]


# -- set-up


def test_without_the_middleware_a_declared_view_does_not_run_unprotected(project: Project, runs: list[Any]) -> None:
    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        return HttpResponse()

    project.serve(path("pay", pay), middleware=[])
    with pytest.raises(ConfigurationError, match="not installed"):
        post(project.client())
    assert runs == []


def test_a_caller_without_a_tenant_is_an_error_and_not_one_of_all(project: Project, runs: list[Any]) -> None:
    @idempotent()
    def pay(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        return HttpResponse()

    project.serve(path("pay", pay), tenant=lambda request: None)
    with pytest.raises(ConfigurationError, match="after authentication"):
        post(project.client())
    assert runs == []


def test_an_anonymous_user_has_no_space_of_keys(project: Project) -> None:
    from semel.http.django import user

    class Request:
        def __init__(self, pk: int | None) -> None:
            self.user = type("User", (), {"pk": pk, "is_authenticated": pk is not None})()

    assert user(Request(7)) == "7"
    assert user(Request(None)) is None


def test_a_handle_of_the_other_kind_is_refused_when_the_view_is_declared() -> None:
    with pytest.raises(PolicyError, match="annotate op with Operation"):

        @idempotent()
        def pay(request: Any, op: AsyncOperation) -> None: ...

    with pytest.raises(PolicyError, match="annotate op with AsyncOperation"):

        @idempotent()
        async def pay_async(request: Any, op: Operation) -> None: ...


def test_a_class_and_a_generator_are_refused_when_they_are_declared() -> None:
    with pytest.raises(PolicyError, match="the method"):

        @idempotent()
        class Orders(View): ...

    with pytest.raises(PolicyError, match="generator"):

        @idempotent()
        def chunks(request: Any) -> Iterator[bytes]:
            yield b""


def test_annotations_for_the_type_checker_alone_do_no_harm(project: Project) -> None:
    @idempotent()
    def pay(request: HttpRequest, amount: Decimal, op: Operation) -> HttpResponse:
        return HttpResponse(f"{amount} {op.key}")

    class Pay(View):
        @method_decorator(idempotent())
        def post(self, request: HttpRequest, amount: Decimal, op: Operation) -> HttpResponse:
            return HttpResponse(f"{amount} {op.key}")

    project.serve(path("pay/<amount>", pay), path("class/<amount>", Pay.as_view()))
    assert post(project.client(), "/pay/3").content == b"3 k"
    assert post(project.client(), "/class/3").content == b"3 k"


def test_views_may_share_the_rules_of_the_house(project: Project) -> None:
    house = idempotent(replay_marker="x-again")

    @require_POST
    @idempotent(house, ttl="1h")
    def pay(request: HttpRequest) -> HttpResponse:
        return HttpResponse("paid")

    project.serve(path("pay", pay), docs="https://docs.example")
    assert post(project.client()).status_code == 200
    assert post(project.client()).headers["X-Again"] == "true"
    assert project.client().post("/pay").headers["Link"] == '<https://docs.example>; rel="describedby"'
    assert project.client().get("/pay").status_code == 405


def test_an_answer_too_large_to_keep_goes_through_and_is_remembered(project: Project, runs: list[Any]) -> None:
    @idempotent(max_stored_body=10)
    def large(request: HttpRequest, how: str) -> Any:
        runs.append(how)
        chunks = [b"x" * 8] * 4
        return StreamingHttpResponse(iter(chunks)) if how == "streamed" else HttpResponse(b"".join(chunks))

    project.serve(path("<how>", large))
    for how in ("streamed", "whole"):
        first = post(project.client(), f"/{how}")
        assert first.streaming is (how == "streamed")
        assert first.getvalue() == b"x" * 32
        again = post(project.client(), f"/{how}")
        assert (again.headers[REPLAYED], again.content) == ("omitted", b"")
    assert runs == ["streamed", "whole"]


def test_a_stream_that_breaks_where_effects_are_outside_is_an_answer(project: Project, runs: list[Any]) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("broke")

    @idempotent(external_effects=True)
    def pay(request: HttpRequest) -> StreamingHttpResponse:
        runs.append(1)
        return StreamingHttpResponse(chunks())

    project.serve(path("pay", pay))
    answers = [post(project.client()) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert answers[0].content == answers[1].content
    assert runs == [1]


def test_raw_bytes_of_any_kind_are_a_request(project: Project) -> None:
    @idempotent()
    def pay(request: Any) -> HttpResponse:
        return HttpResponse(io.BytesIO(request.body).read())

    project.serve(path("pay", pay))
    every = bytes(range(256))
    assert post(project.client(), data=every, Content_Type="application/octet-stream").content == every
