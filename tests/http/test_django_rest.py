"""Views of Django REST framework: the claim comes after ``initial()``, and the rendered answer is what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.django_project import Project  # first: REST framework wants settings when it is imported

from django.urls import include, path  # isort: skip
from django.utils.decorators import method_decorator  # isort: skip
from django.views import View  # isort: skip
from rest_framework import serializers, viewsets  # isort: skip
from rest_framework.decorators import action as route  # isort: skip
from rest_framework.decorators import api_view  # isort: skip
from rest_framework.exceptions import PermissionDenied, Throttled  # isort: skip
from rest_framework.response import Response  # isort: skip
from rest_framework.routers import SimpleRouter  # isort: skip
from rest_framework.views import APIView  # isort: skip

from semel import MemoryStore, Operation, PolicyError, Semel
from semel.http.contract.rules import RELEASED
from semel.http.django import check_match, conditional, endpoints, etag, idempotent

KEY = {"Idempotency-Key": "k"}


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


class Payment(serializers.Serializer):  # type: ignore[misc]
    amount = serializers.IntegerField(min_value=1)


def test_what_the_framework_turns_away_is_not_claimed_and_a_replay_is_authorised_anew(
    project: Project, guard: Semel, runs: list[Any]
) -> None:
    refusal: list[Exception] = []

    class Pay(APIView):  # type: ignore[misc]
        def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super().initial(request, *args, **kwargs)
            if refusal:
                raise refusal[0]

        @idempotent()
        def post(self, request: Any, op: Operation) -> Response:
            runs.append(request.data)
            return Response({"key": op.key, "data": request.data}, status=201)

    project.serve(path("pay", Pay.as_view()))
    client = project.client()

    def ask() -> Any:
        return client.post("/pay", {"amount": 1}, content_type="application/json", headers=KEY)

    for refusal[:] in ([PermissionDenied()], [Throttled()]):
        assert ask().status_code == refusal[0].status_code  # type: ignore[attr-defined]
        assert guard.lookup("POST /pay", "k", tenant="alice") is None
    refusal.clear()
    first, again = ask(), ask()
    assert first.json() == again.json() == {"key": "k", "data": {"amount": 1}}
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.data == {"key": "k", "data": {"amount": 1}}, "it is the framework's own response"
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.headers["Content-Type"] == first.headers["Content-Type"] == "application/json"
    assert again.headers["Allow"] == "POST, OPTIONS"
    refusal[:] = [PermissionDenied()]
    assert ask().status_code == 403
    assert len(runs) == 1


def test_around_a_class_that_authorises_its_callers_it_is_refused(project: Project) -> None:
    """The claim would come first, and a replay be given to whoever sends the key."""

    class Pay(APIView):  # type: ignore[misc]
        def post(self, request: Any) -> Response:
            return Response()

    class Members(View):  # type: ignore[misc]
        def handle_no_permission(self) -> None:
            """As of Django's LoginRequiredMixin, which wants all of Django's users."""

    for view in (Pay.as_view(), Members.as_view(), api_view(["POST"])(lambda request: Response())):
        with pytest.raises(PolicyError, match="authorises its callers itself"):
            idempotent()(view)
    whole = method_decorator(idempotent(), name="dispatch")(Pay)
    project.serve(path("pay", whole.as_view()))
    with pytest.raises(PolicyError, match="authorises its callers itself"):
        project.client().post("/pay", headers=KEY)
    idempotent()(View.as_view())  # which lets everyone in


def test_a_serializers_400_is_an_answer_unless_the_route_says_otherwise(project: Project, runs: list[Any]) -> None:
    def pay(self: Any, request: Any) -> Response:
        runs.append(request.path)
        valid = Payment(data=request.data)
        valid.is_valid(raise_exception=True)
        return Response(valid.data)

    kept = type("Kept", (APIView,), {"post": idempotent()(pay)})
    freed = type("Freed", (APIView,), {"post": idempotent(released=RELEASED | {400})(pay)})
    project.serve(path("kept", kept.as_view()), path("freed", freed.as_view()))
    for where in ("/kept", "/freed"):
        for amount, status in ((0, 400), (0, 400), (1, 422 if where == "/kept" else 200)):
            answer = project.client().post(where, {"amount": amount}, content_type="application/json", headers=KEY)
            assert answer.status_code == status
    assert runs == ["/kept", "/freed", "/freed", "/freed"]


def test_view_sets_and_routers(project: Project, runs: list[Any]) -> None:
    class Payments(viewsets.ViewSet):  # type: ignore[misc]
        def list(self, request: Any) -> Response:
            return Response([])

        @idempotent()
        def create(self, request: Any, op: Operation) -> Response:
            runs.append("create")
            return Response({"key": op.key}, status=201)

        @conditional()
        def partial_update(self, request: Any, pk: str) -> Response:
            check_match(etag(7))
            return Response({"pk": pk})

        @route(detail=True, methods=["post"])
        @idempotent()
        def refund(self, request: Any, pk: str) -> Response:
            runs.append(f"refund {pk}")
            return Response({"pk": pk})

        @route(detail=True, methods=["post"])
        def undeclared(self, request: Any, pk: str) -> Response: ...

    @api_view(["GET", "POST"])
    @idempotent()
    def notify(request: Any) -> Response:
        runs.append("notify")
        return Response("said")

    router = SimpleRouter()
    router.register("payments", Payments, basename="payment")
    project.serve(path("api/", include(router.urls)), path("notify", notify))
    client = project.client()
    for _ in range(2):
        assert client.get("/api/payments/", headers=KEY).json() == []
        assert client.post("/api/payments/", headers=KEY).json() == {"key": "k"}
        assert client.post("/api/payments/3/refund/", headers=KEY).json() == {"pk": "3"}
        assert client.post("/api/payments/4/refund/", headers=KEY).json() == {"pk": "4"}
        assert client.post("/notify", headers=KEY).json() == "said"
    assert runs == ["create", "refund 3", "refund 4", "notify"]
    for tag, status in (('"6"', 412), ('"7"', 200)):
        assert client.patch("/api/payments/3/", headers={"If-Match": tag}).status_code == status
    found = {f"{each.method} {each.path}": each.rule and each.rule.kind for each in endpoints()}
    assert found == {
        "GET /api/payments/": None,
        "POST /api/payments/": "action",
        "PATCH /api/payments/{pk}/": "conditional",
        "POST /api/payments/{pk}/refund/": "action",
        "POST /api/payments/{pk}/undeclared/": None,
        "GET /notify": "action",
        "POST /notify": "action",
    }


def test_uploads_that_the_frameworks_parsers_read(project: Project, runs: list[Any]) -> None:
    from django.core.files.uploadedfile import SimpleUploadedFile

    class Upload(APIView):  # type: ignore[misc]
        @idempotent()
        def post(self, request: Any) -> Response:
            runs.append(1)
            return Response(len(request.data["file"].read()))

    project.serve(path("upload", Upload.as_view()))

    def send(size: int) -> Any:
        return project.client().post("/upload", {"file": SimpleUploadedFile("f", b"x" * size)}, headers=KEY)

    assert [send(3_000_000).json() for _ in range(2)] == [3_000_000] * 2
    assert send(3_000_001).status_code == 422
    assert runs == [1]
