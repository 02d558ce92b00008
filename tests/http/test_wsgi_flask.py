"""The Flask extension: what is Flask's own. The contract's rows run against a served Flask app in the other modules."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import flask
import pytest
from flask.views import MethodView

from semel import AsyncOperation, MemoryStore, Operation, Semel, current_operation
from semel.errors import ConfigurationError, PolicyError
from semel.http.flask import idempotent, install

if TYPE_CHECKING:
    from decimal import Decimal

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def guard() -> Iterator[Semel]:
    with Semel(MemoryStore()) as guard:
        yield guard


@pytest.fixture
def app(guard: Semel) -> flask.Flask:
    app = flask.Flask("shop")
    app.secret_key = "not a secret"
    install(app, guard=guard, tenant=lambda request: request.headers.get("X-User", "alice"))
    return app


@pytest.fixture
def runs() -> list[Any]:
    return []


def test_views_return_what_flask_views_return(app: flask.Flask, runs: list[Any]) -> None:
    @app.post("/dict")
    @idempotent()
    def as_dict() -> dict[str, int]:
        runs.append(1)
        return {"n": len(runs)}

    @app.post("/tuple")
    @idempotent()
    def as_tuple() -> tuple[str, int, dict[str, str]]:
        runs.append(1)
        return "text", 202, {"Location": "/1"}

    @app.post("/generator")
    @idempotent()
    def as_generator() -> flask.Response:
        @flask.stream_with_context
        def chunks() -> Iterator[str]:
            runs.append(1)
            yield flask.request.path
            yield "!"

        return flask.Response(chunks())

    client = app.test_client()
    for path, body in (("/dict", b'{"n":1}\n'), ("/tuple", b"text"), ("/generator", b"/generator!")):
        first, again = (client.post(path, headers=KEY) for _ in range(2))
        assert first.data == again.data == body
        assert first.status_code == again.status_code
        assert first.headers.get("Location") == again.headers.get("Location")
        assert again.headers["Idempotent-Replayed"] == "true"
    assert len(runs) == 3


def test_each_url_is_an_operation_of_its_own(app: flask.Flask) -> None:
    @app.post("/orders/<int:number>/ship")
    @idempotent()
    def ship(number: int, op: Operation) -> dict[str, Any]:
        return {"number": number, "name": op.name, "tenant": op.tenant}

    client = app.test_client()
    for _ in range(2):
        for number in (1, 2):
            answer = client.post(f"/orders/{number}/ship", headers=KEY | {"X-User": "bob"})
            assert answer.json == {"number": number, "name": f"POST /orders/{number}/ship", "tenant": "bob"}


def test_the_claim_comes_after_before_request_and_a_replay_is_authorised_anew(
    app: flask.Flask, guard: Semel, runs: list[Any]
) -> None:
    allowed = False

    @app.before_request
    def check() -> Any:
        return None if allowed else ("no", 403)

    @app.post("/pay")
    @idempotent()
    def pay() -> str:
        runs.append(1)
        return "paid"

    client = app.test_client()
    assert client.post("/pay", headers=KEY).status_code == 403
    assert guard.lookup("POST /pay", "k", tenant="alice") is None
    allowed = True
    assert client.post("/pay", headers=KEY).data == b"paid"
    allowed = False
    assert client.post("/pay", headers=KEY).status_code == 403
    assert len(runs) == 1


def test_a_body_that_before_request_has_read_counts(app: flask.Flask, runs: list[Any]) -> None:
    @app.before_request
    def validate() -> None:
        flask.request.get_json()

    @app.post("/pay")
    @idempotent()
    def pay() -> Any:
        runs.append(1)
        return flask.request.get_json()

    client = app.test_client()
    assert client.post("/pay", headers=KEY, json={"a": 1}).json == {"a": 1}
    assert client.post("/pay", headers=KEY, json={"a": 1}).headers["Idempotent-Replayed"] == "true"
    assert client.post("/pay", headers=KEY, json={"a": 2}).status_code == 422
    assert client.post("/pay", headers=KEY, data=b"{", content_type="application/json").status_code == 400
    assert len(runs) == 1


def test_forms_and_files_are_read_after_the_claim(app: flask.Flask) -> None:
    @app.post("/upload")
    @idempotent()
    def upload() -> dict[str, Any]:
        return {"name": flask.request.form["name"], "size": len(flask.request.files["file"].read())}

    parts = [("name", "", b"big"), ("file", '; filename="big.bin"', b"x" * 2_000_000)]
    body = b"".join(
        b'--cut\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more.encode(), data)
        for name, more, data in parts
    )
    answer = app.test_client().post(
        "/upload", headers=KEY, data=body + b"--cut--\r\n", content_type="multipart/form-data; boundary=cut"
    )
    assert answer.json == {"name": "big", "size": 2_000_000}


@pytest.mark.parametrize("chunked", [False, True], ids=["of a length", "chunked"])
def test_a_body_that_flask_would_not_take_is_not_read_by_the_claim_either(
    app: flask.Flask, guard: Semel, chunked: bool
) -> None:
    app.config["MAX_CONTENT_LENGTH"] = 200_000

    @app.post("/pay")
    @idempotent()
    def pay() -> str:
        return str(len(flask.request.get_data()))

    def post(size: int) -> tuple[int, int]:
        stream = io.BytesIO(b"x" * size)
        more: dict[str, Any] = (
            {"environ_overrides": {"wsgi.input_terminated": True}} if chunked else {"content_length": size}
        )
        answer = app.test_client().post("/pay", headers=KEY, input_stream=stream, **more)
        return answer.status_code, stream.tell()

    status, read = post(5_000_000)
    assert status == 413
    assert read < 300_000
    assert guard.lookup("POST /pay", "k", tenant="alice") is None
    assert post(200_000)[0] == 200


def test_a_replay_leaves_session_and_g_alone_and_sets_no_cookie(app: flask.Flask, runs: list[Any]) -> None:
    @app.post("/login")
    @idempotent()
    def login() -> str:
        flask.session["user"] = "alice"
        flask.g.user = "alice"
        return "hello"

    @app.after_request
    def look(response: flask.Response) -> flask.Response:
        runs.append((flask.session.get("user"), flask.g.get("user")))
        return response

    first = app.test_client().post("/login", headers=KEY)
    again = app.test_client().post("/login", headers=KEY)
    assert "Set-Cookie" in first.headers
    assert "Set-Cookie" not in again.headers
    assert again.data == b"hello"
    assert runs == [("alice", "alice"), (None, None)]


def test_lines_that_after_request_adds_are_on_replays_and_refusals_too(app: flask.Flask) -> None:
    """Without its CORS lines a browser would not show the answer to its page."""

    @app.after_request
    def cors(response: flask.Response) -> flask.Response:
        response.headers["Access-Control-Allow-Origin"] = "https://shop.example"
        response.headers["Vary"] = "Origin"
        return response

    @app.post("/pay")
    @idempotent()
    def pay() -> str:
        return "paid"

    client = app.test_client()
    answers = [client.post("/pay", headers=KEY), client.post("/pay", headers=KEY), client.post("/pay")]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    for answer in answers:
        assert answer.headers["Access-Control-Allow-Origin"] == "https://shop.example"
        assert "Idempotent-Replayed" in answer.headers["Access-Control-Expose-Headers"]
        assert answer.headers["Vary"] == "Origin"
    assert answers[2].content_type == "application/problem+json"


def test_a_view_that_raises_runs_again_and_one_that_aborts_does_not(app: flask.Flask, runs: list[Any]) -> None:
    @app.post("/broken")
    @idempotent()
    def broken() -> str:
        runs.append("broken")
        raise RuntimeError("broke")

    @app.post("/absent")
    @idempotent()
    def absent() -> str:
        runs.append("absent")
        flask.abort(404)

    client = app.test_client()
    assert [client.post("/broken", headers=KEY).status_code for _ in range(2)] == [500, 500]
    assert [client.post("/absent", headers=KEY).status_code for _ in range(2)] == [404, 404]
    assert runs == ["broken", "broken", "absent"]


def test_an_error_that_flask_lets_through_frees_the_key(app: flask.Flask, guard: Semel) -> None:
    app.testing = True

    @app.post("/broken")
    @idempotent()
    def broken() -> str:
        raise RuntimeError("broke")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broke"):
            app.test_client().post("/broken", headers=KEY)
    assert guard.lookup("POST /broken", "k", tenant="alice") is None


def own_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: asyncio.run(function(*args, **kwargs))


def test_async_views_are_not_silently_unsupported(app: flask.Flask, runs: list[Any]) -> None:
    try:
        import asgiref  # noqa: F401
    except ImportError:
        app.async_to_sync = own_loop  # type: ignore[method-assign]

    @app.post("/pay")
    @idempotent()
    async def pay(op: Operation) -> dict[str, Any]:
        await asyncio.sleep(0)
        runs.append(current_operation() is op)
        return {"key": op.key}

    client = app.test_client()
    assert [client.post("/pay", headers=KEY).json for _ in range(2)] == [{"key": "k"}] * 2
    assert runs == [True]


def test_class_views_and_views_of_two_methods(app: flask.Flask, runs: list[Any]) -> None:
    class Orders(MethodView):
        decorators = [idempotent()]  # noqa: RUF012

        def get(self, **kwargs: Any) -> str:
            runs.append("get")
            return "list"

        def post(self, **kwargs: Any) -> str:
            runs.append("post")
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))

    @app.route("/form", methods=["GET", "POST"])
    @idempotent()
    def form(op: Operation | None) -> str:
        runs.append(flask.request.method if op else "no operation")
        return "form"

    client = app.test_client()
    for path in ("/orders", "/form"):
        for _ in range(2):
            assert client.get(path, headers=KEY).status_code == 200
            assert client.post(path, headers=KEY).status_code == 200
        assert client.post(path).status_code == 400
    assert runs == ["get", "post", "get", "no operation", "POST", "no operation"]


def test_methods_of_a_class_view_are_decorated_one_by_one(app: flask.Flask) -> None:
    class Order(MethodView):
        def get(self, number: int) -> str:
            return f"order {number}"

        @idempotent(required=False)
        def put(self, number: int, op: Operation | None) -> str:
            return f"{number} {op.key if op else None}"

    app.add_url_rule("/orders/<int:number>", view_func=Order.as_view("order"))
    client = app.test_client()
    assert client.get("/orders/1").data == b"order 1"
    assert client.put("/orders/1", headers=KEY).data == b"1 k"
    assert client.put("/orders/1").data == b"1 None"


def test_a_failure_that_the_policy_remembers_is_replayed_as_the_500_it_was(app: flask.Flask, runs: list[Any]) -> None:
    @app.post("/pay")
    @idempotent(guarantee="at_most_once")
    def pay() -> str:
        runs.append(1)
        raise RuntimeError("broke")

    client = app.test_client()
    first, again = client.post("/pay", headers=KEY), client.post("/pay", headers=KEY)
    assert (first.status_code, again.status_code) == (500, 500)
    assert first.data == again.data
    assert len(runs) == 1


# -- set-up


def test_an_app_has_one_guard_and_views_have_rules_of_the_house(guard: Semel, runs: list[Any]) -> None:
    house = idempotent(replay_marker="x-again")
    blueprint = flask.Blueprint("payments", __name__, url_prefix="/payments")

    @blueprint.post("/")
    @idempotent(house, ttl="1h")
    def pay() -> str:
        runs.append(1)
        return "paid"

    app = flask.Flask("later")
    install(app, guard=guard, tenant=lambda request: "alice", docs="https://docs.example")
    app.register_blueprint(blueprint)
    client = app.test_client()
    assert client.post("/payments/", headers=KEY).status_code == 200
    assert client.post("/payments/", headers=KEY).headers["X-Again"] == "true"
    assert client.post("/payments/").headers["Link"] == '<https://docs.example>; rel="describedby"'
    assert app.extensions["semel"].guard is guard
    with pytest.raises(ConfigurationError, match="already"):
        install(app, guard=guard, tenant=lambda request: "alice")


def test_without_the_extension_a_declared_view_does_not_run_unprotected(runs: list[Any]) -> None:
    app = flask.Flask("bare")

    @app.post("/pay")
    @idempotent()
    def pay() -> str:
        runs.append(1)
        return "paid"

    app.testing = True
    with pytest.raises(ConfigurationError, match="not installed"):
        app.test_client().post("/pay", headers=KEY)
    assert runs == []


def test_no_tenant_is_a_loud_warning(guard: Semel) -> None:
    with pytest.warns(UserWarning, match="tenant= is missing"):
        install(flask.Flask("open"), guard=guard)


def test_an_async_handle_is_refused_when_the_view_is_declared() -> None:
    with pytest.raises(PolicyError, match="annotate op with Operation"):

        @idempotent()
        def pay(op: AsyncOperation) -> str:
            return ""


def test_annotations_for_the_type_checker_alone_do_no_harm(app: flask.Flask) -> None:
    @app.post("/pay/<amount>")
    @idempotent()
    def pay(amount: Decimal, op: Operation) -> str:
        return f"{amount} {op.key}"

    assert app.test_client().post("/pay/3", headers=KEY).data == b"3 k"


def test_an_unknown_setting_is_an_error_at_once() -> None:
    with pytest.raises(PolicyError, match="unknown setting tll"):
        idempotent(tll="1h")


def test_a_view_that_is_asked_for_in_lower_case_is_the_same_operation(app: flask.Flask) -> None:
    runs: list[str] = []

    @app.post("/pay")
    @idempotent()
    def pay() -> str:
        runs.append(flask.request.method)
        return f"run {len(runs)}"

    client = app.test_client()
    answers = [client.post("/pay", headers=KEY, environ_overrides={"REQUEST_METHOD": m}) for m in ("post", "POST")]
    assert [answer.text for answer in answers] == ["run 1", "run 1"]
