"""``semel describe``: the page of each kind of application, what stands on it, and what is said of a wrong name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.cli import main
from semel.errors import ConfigurationError
from semel.http.describe.design import find_installation

ROOT = Path(__file__).parents[2]

GUARD = """
from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Policy, Semel, Wait
from semel.core.quota import Quota

def whose(request):
    return "alice"

guard = Semel(MemoryStore(), policy=Policy(ttl="7d"), secret=b"a secret of sixteen bytes or more")
async_guard = AsyncSemel(AsyncMemoryStore(), policy=Policy(ttl="7d"), quota=Quota(live_keys=500), readable_keys=False)
"""

FASTAPI = """
from fastapi import APIRouter, FastAPI
from semel.http.fastapi import conditional, exempt, idempotent, install, natural
print("starting")
app = FastAPI()
install(app, guard=async_guard, tenant=whose, docs="https://docs.example")
router = APIRouter(prefix="/v1")

@router.post("/payments")
@idempotent(guarantee="at_most_once", key_format="uuid")
async def pay(): ...

app.include_router(router)

@app.patch("/payments/{id}")
@conditional(on_duplicate=Wait("5s"))
async def change(id: int): ...

@app.delete("/payments/{id}")
@natural()
async def remove(id: int): ...

@app.post("/search")
@exempt("reads only")
async def search(): ...

@app.post("/pay|ments")
async def forgotten(): ...

def make():
    return app

def broken():
    raise RuntimeError("no database")
"""

STARLETTE = """
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from semel.http.asgi import ASGIMiddleware
from semel.http.fastapi import idempotent

@idempotent()
async def pay(request): ...

async def plain(request): ...

app = Starlette(
    routes=[Route("/v1/payments", pay, methods=["POST"]), Route("/refunds", plain, methods=["POST"])],
    middleware=[Middleware(ASGIMiddleware, guard=async_guard, tenant=whose)],
)
"""

LITESTAR = """
from litestar import Litestar, post
from semel.http.litestar import SemelPlugin, idempotent

@post("/v1/payments")
@idempotent()
async def pay() -> None: ...

app = Litestar([pay], plugins=[SemelPlugin(guard=async_guard, tenant=whose)], logging_config=None)
"""

FLASK = """
from flask import Flask
from semel.http.flask import idempotent, install
app = Flask(__name__)
install(app, guard=guard, tenant=whose)

@app.post("/v1/payments")
@idempotent()
def pay(): ...
"""

ASGI = """
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import idempotent

class Around:
    def __init__(self, app):
        self.app = app

async def plain(scope, receive, send): ...

app = Around(ASGIMiddleware(plain, guard=async_guard, tenant=whose, routes={"POST /v1/payments": idempotent()}))
"""

WSGI = """
from flask import Flask
from semel.http.contract.rules import idempotent
from semel.http.wsgi import WSGIMiddleware
inner = Flask(__name__)

@inner.post("/v1/payments")
def pay(): ...

inner.wsgi_app = WSGIMiddleware(inner.wsgi_app, guard=guard, tenant=whose, routes={"POST /v1/payments": idempotent()})
app = inner
"""

DJANGO = """
import os
from django.conf import settings
settings.configure(
    ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["*"], DATABASES={},
    MIDDLEWARE=["semel.http.django.IdempotencyMiddleware"],
    SEMEL={"GUARD": f"{__name__}.guard", "TENANT": f"{__name__}.whose"},
)
import django
django.setup()
from django.core.wsgi import get_wsgi_application
from django.urls import path
from django.views.decorators.http import require_POST
from semel.http.django import idempotent

@require_POST
@idempotent()
def pay(request): ...

urlpatterns = [path("v1/payments", pay)]
app = get_wsgi_application()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module; its name, which no other test has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    written: list[str] = []

    def write(code: str) -> str:
        name = f"described_{abs(hash(tmp_path))}_{len(written)}"
        (tmp_path / f"{name}.py").write_text(GUARD + code)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("code", "framework", "store"),
    [
        (FASTAPI, "FastAPI", "AsyncMemoryStore"),
        (STARLETTE, "Starlette", "AsyncMemoryStore"),
        (LITESTAR, "Litestar", "AsyncMemoryStore"),
        (FLASK, "Flask", "MemoryStore"),
        (ASGI, "ASGI", "AsyncMemoryStore"),
        (WSGI, "Flask", "MemoryStore"),
    ],
)
def test_each_kind_of_application_is_described(
    code: str, framework: str, store: str, module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = module(code)
    assert main(["describe", f"{name}:app", "--json"]) == 0
    design = json.loads(capsys.readouterr().out)
    assert design["application"] == f"{name}:app"
    assert (design["framework"], design["store"]["kind"]) == (framework, store)
    assert design["tenant"] == {"found_by": f"{name}.whose"}
    routes = {f"{route['method']} {route['path']}": route for route in design["routes"]}
    assert routes["POST /v1/payments"]["class"] == "action"
    assert routes["POST /v1/payments"]["ttl"] == "7d", "the guard's policy counts"
    assert [step["answer"].split(" ", 2)[1] for step in design["example"]][:2] == ["201", "409"]


@pytest.mark.slow
def test_django_is_described(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(GUARD + DJANGO)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "semel", "describe", "project:app", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    design = json.loads(ran.stdout)
    assert (design["framework"], design["tenant"]) == ("Django", {"found_by": "project.whose"})
    assert [(route["method"], route["path"], route["ttl"]) for route in design["routes"]] == [
        ("POST", "/v1/payments", "7d")
    ]


def test_the_page_says_all_of_it(module: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    name = module(FASTAPI)
    assert main(["describe", name]) == 0
    printed = capsys.readouterr()
    page = printed.out
    assert page.startswith("## Idempotency\n"), "what the application prints is no part of the page"
    assert "starting" in printed.err
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert headings == ["Routes", "Keys", "Store", "Replays", "Errors", "Example"]
    rows = {cells[0]: cells for line in page.splitlines() if (cells := re.split(r"(?<!\\) ?\| ?", line)[1:-1])}
    assert rows["`POST /v1/payments`"][1:] == [
        "action, at most once", "Idempotency-Key, UUID, required", "this method and path", "7d", "30s", "409",
        "500 until resolved", "503, not run", "an answer: replayed",
    ]  # fmt: skip
    assert rows["`PATCH /payments/{id}`"][1] == "conditional, effectively once, needs `If-Match`"
    assert rows["`PATCH /payments/{id}`"][6] == "waits 5s, then 409"
    assert rows["`DELETE /payments/{id}`"][2] == "it says how things shall be; 404, 410 becomes 204"
    assert rows["`POST /search`"][1:] == ["exempt", "reads only"]
    assert "**Not declared**" in page
    assert "- `POST /pay|ments` (forgotten)" in page
    assert "hashed only" in page
    assert "500 live keys" in page
    assert rows["429"][1] == "`idempotency_too_many_keys`"
    assert "https://docs.example" in page
    assert all(len(re.split(r"(?<!\\)\|", line)) > 3 for line in page.splitlines() if line.startswith("|"))


def test_a_route_with_a_transaction_has_no_lease(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    in_one = FLASK.replace("@idempotent()", "@idempotent(connection=open)")
    assert main(["describe", f"{module(in_one)}:app"]) == 0
    page = capsys.readouterr().out
    (row,) = [line for line in page.splitlines() if line.startswith("| `POST /v1/payments`")]
    assert [cell.strip() for cell in row.split("|")][6] == "none: one transaction"
    assert "rolled back, runs again" in row
    assert "holds a lease" not in page
    assert "committed together, or rolled back together" in page
    assert main(["describe", f"{module(in_one)}:app", "--json"]) == 0
    (route,) = json.loads(capsys.readouterr().out)["routes"]
    assert (route["lease"], route["on_abandoned"]) == (None, "rollback")


def test_the_example_is_what_a_service_answers(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["describe", module(FASTAPI), "--json"])
    first, early, retry, other = json.loads(capsys.readouterr().out)["example"]
    assert first["request"] == early["request"] == retry["request"] != other["request"]
    body = first["answer"].partition("\n\n")[2]
    assert retry["answer"].partition("\n\n")[2] == body
    assert "Idempotent-Replayed: true" in retry["answer"]
    assert "Idempotent-Replayed" not in first["answer"]
    assert "Retry-After:" in early["answer"]
    assert json.loads(early["answer"].partition("\n\n")[2])["code"] == "idempotency_key_in_use"
    assert json.loads(other["answer"].partition("\n\n")[2])["code"] == "idempotency_key_reused"


def test_nothing_secret_is_printed(module: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    name = module(FLASK)
    for shape in ("--json", "--markdown"):
        assert main(["describe", name, shape]) == 0
        assert "sixteen bytes" not in capsys.readouterr().out


def test_a_factory_is_called(module: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    name = module(FASTAPI)
    assert main(["describe", f"{name}:make()"]) == 0
    assert "POST /v1/payments" in capsys.readouterr().out
    assert main(["describe", f"{name}:broken()"]) == 2
    assert "RuntimeError: no database" in capsys.readouterr().err


def test_a_module_in_another_folder(module: Callable[[str], str], tmp_path: Path, monkeypatch: Any) -> None:
    name = module(ASGI)
    monkeypatch.chdir(ROOT)
    assert main(["describe", name, "--app-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("nowhere_at_all:app", "there is no module nowhere_at_all in /"),
        ("nowhere_at_all.main:app", "there is no module nowhere_at_all in /"),
        ("{}:ap", "has no ap: did you mean app?"),
        ("{}:app.inner", "has no app.inner"),
        ("{}:guard", "no middleware of Semel is installed in this application (Semel)"),
        ("{}:whose", "no middleware of Semel is installed in this application (function)"),
        ("app/main.py:app", "write module:attribute"),
        (":app", "write module:attribute"),
        ("json", "has neither app nor application: write json:attribute"),
    ],
)
def test_a_wrong_name_is_explained(
    target: str, complaint: str, module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", target.format(module(ASGI))]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import nothing_like_it", "cannot be imported: No module named 'nothing_like_it'"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("Policy(ttl='soon')", "not a duration"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    code: str, complaint: str, module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", module(code)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_tenant_is_told_on_the_page(module: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", module(STARLETTE.replace(", tenant=whose", ""))]) == 0
    assert "**No tenant is set**" in capsys.readouterr().out
    alone = STARLETTE.replace(", tenant=whose", "").replace(
        "guard=async_guard", 'guard=async_guard.__class__(AsyncMemoryStore(), tenant="shop")'
    )
    assert main(["describe", module(alone)]) == 0
    assert "All callers are one tenant, `shop`." in capsys.readouterr().out


def test_a_service_that_declares_nothing_is_described_all_the_same(
    module: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", module(STARLETTE.replace("@idempotent()\n", ""))]) == 0
    page = capsys.readouterr().out
    assert "No route is declared." in page
    assert "- `POST /refunds` (plain)" in page
    assert "### Example" not in page


def test_an_object_that_wraps_itself_is_given_up_on() -> None:
    class Loop:
        @property
        def app(self) -> Loop:
            return Loop()

    with pytest.raises(ConfigurationError, match="Loop around Loop"):
        find_installation(Loop())
