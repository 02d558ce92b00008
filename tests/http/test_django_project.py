"""What is around the views: settings, the list of routes, system checks, and the tables by Django's own migrations."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.checks import run_checks
from django.http import HttpResponse
from django.test import override_settings
from django.urls import include, path, re_path
from django.views import View
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from semel import MemoryStore, NotMigrated, PostgresStore, RedisStore, Semel, SQLiteStore
from semel.errors import ConfigurationError
from semel.http.django import IdempotencyMiddleware, endpoints, exempt, idempotent, natural
from semel.http.django.handling import configuration
from semel.sql import migrations as known
from semel.sql import sync
from semel.stores.sqlite import migrate
from tests.http.django_project import MIDDLEWARE, Project

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def guard() -> Iterator[Semel]:
    with Semel(MemoryStore()) as guard:
        yield guard


@pytest.fixture
def project(guard: Semel) -> Iterator[Project]:
    with Project(guard) as project:
        yield project


def view(request: Any, **parts: Any) -> HttpResponse:
    return HttpResponse()


class Orders(View):
    def get(self, request: Any, number: int) -> HttpResponse: ...

    @idempotent()
    def post(self, request: Any, number: int) -> HttpResponse: ...

    @natural()
    def delete(self, request: Any, number: int) -> HttpResponse: ...

    def patch(self, request: Any, number: int) -> HttpResponse: ...


PATTERNS = [
    path("pay", require_POST(idempotent()(view))),
    path("hook", exempt("the sender does not repeat")(require_POST(view))),
    path("read", require_safe(view)),
    path("both", require_http_methods(["GET", "POST"])(view)),
    path("any", view),
    path("v1/", include([path("orders/<int:number>", Orders.as_view())])),
    re_path(r"^old/(?P<number>[0-9]+)/$", require_POST(view)),
]


# -- the list of routes


def test_all_routes_are_listed_with_what_they_are_declared_to_be(project: Project) -> None:
    project.serve(*PATTERNS)
    found = {f"{each.method} {each.path}": each.rule and each.rule.kind for each in endpoints()}
    assert found == {
        "POST /pay": "action",
        "POST /hook": "exempt",
        "GET /read": None,
        "GET /both": None,
        "POST /both": None,
        "POST /any": None,
        "GET /v1/orders/{number}": None,
        "POST /v1/orders/{number}": "action",
        "DELETE /v1/orders/{number}": "natural",
        "PATCH /v1/orders/{number}": None,
        "POST /old/{number}/": None,
    }
    assert [f"{each.method} {each.path}" for each in endpoints(tuple(PATTERNS[:1]))] == ["POST /pay"]


def test_what_is_not_declared_is_reported_when_django_starts(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    project.serve(*PATTERNS)
    with caplog.at_level(logging.WARNING, "semel.http"):
        from django.core.handlers.wsgi import WSGIHandler

        WSGIHandler()
    (record,) = [each for each in caplog.records if each.name == "semel.http"]
    said = record.getMessage()
    for route in ("POST /both", "POST /any", "PATCH /v1/orders/{number}", "POST /old/{number}/"):
        assert route in said
    for route in ("POST /pay", "POST /hook", "/read"):
        assert route not in said


def test_views_of_djangos_own_are_not_listed() -> None:
    from django.views.generic import RedirectView
    from django.views.i18n import set_language

    assert endpoints((path("lang", set_language), path("to", RedirectView.as_view(url="/")))) == []


# -- settings and checks


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (None, "lack SEMEL"),
        ({"TENANT": str}, "lack SEMEL"),
        ({"GUARD": "nowhere.to.be.found"}, "GUARD cannot be imported"),
        ({"GUARD": "tests.http.django_project.whose"}, "whose"),
        ({"GUARD": 7}, "not 7"),
        ({"GUARD": Semel}, "is a guard"),
        ({"GUARD": "GUARD", "TENANT": 7}, "TENANT is a function"),
        ({"GUARD": "GUARD", "TENNANT": str}, "unknown settings: TENNANT"),
    ],
)
def test_a_wrong_setting_is_named(project: Project, guard: Semel, said: Any, complaint: str) -> None:
    if said and said.get("GUARD") == "GUARD":
        said = {**said, "GUARD": guard}
    with override_settings(SEMEL=said), pytest.raises((ConfigurationError, TypeError), match=complaint):
        configuration()


def test_the_guard_may_be_named_made_or_given(project: Project, guard: Semel) -> None:
    import tests.http.django_project as module

    module.guard = guard  # type: ignore[attr-defined]
    made: list[Semel] = []

    def make() -> Semel:
        made.append(guard)
        return guard

    for said in (guard, make, make, f"{module.__name__}.guard"):
        with override_settings(SEMEL={"GUARD": said, "TENANT": f"{module.__name__}.whose"}):
            assert configuration().guard is guard
            assert configuration().tenant is module.whose
    del module.guard  # type: ignore[attr-defined]
    assert len(made) == 1


def found_by_checks() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for message in run_checks(tags=None):
        if str(message.id).startswith("semel."):
            found.setdefault(str(message.id), []).append(message.msg)
    return found


def test_the_checks_name_what_is_missing(project: Project) -> None:
    with override_settings(INSTALLED_APPS=["semel.http.django"]):
        project.serve(PATTERNS[0])
        assert found_by_checks() == {}
        project.serve(*PATTERNS[:5])
        assert [text.partition(" (")[0] for text in found_by_checks()["semel.W002"]] == ["POST /both", "POST /any"]
        project.serve(PATTERNS[0], tenant=None)
        assert list(found_by_checks()) == ["semel.W001"]
        project.serve(PATTERNS[0], middleware=[])
        assert "POST /pay" in found_by_checks()["semel.E002"][0]
        project.serve(PATTERNS[4], middleware=[])
        assert found_by_checks() == {}
        project.serve(PATTERNS[0], middleware=[MIDDLEWARE, "django.middleware.gzip.GZipMiddleware"])
        assert list(found_by_checks()) == ["semel.W003"]
        with override_settings(SEMEL={}):
            assert "semel.E001" in found_by_checks()


# -- tables


def test_there_is_a_migration_for_each_file_of_the_schema() -> None:
    """When this fails: a new file NNNN_name.sql needs a NNNN_name.py of two lines, like the one before it."""
    folder = ROOT / "src" / "semel" / "http" / "django" / "migrations"
    made = sorted(each.stem for each in folder.glob("0*.py"))
    files = {each.name for each in (ROOT / "src" / "semel" / "sql" / "schema").glob("*/*.sql")}
    assert {int(stem[:4]) for stem in made} == {int(name[:4]) for name in files}
    for before, stem in zip([None, *made], made, strict=False):
        assert f"{stem}.sql" in files
        after = f', after="{before}"' if before else ""
        assert f"Migration = migration({int(stem[:4])}{after})\n" in (folder / f"{stem}.py").read_text()


SETTINGS = """
SECRET_KEY = "x"
INSTALLED_APPS = ["semel.http.django"]
DATABASES = {"default": %r}
USE_TZ = True
"""
COMMANDS = """
import json, sys, django
from django.core.management import call_command
django.setup()
for command in json.loads(sys.argv[1]):
    call_command(*command.split(), no_color=True)
"""
AS_MYSQLDB = """
import pymysql
pymysql.version_info = (2, 2, 7, "final", 0)
pymysql.install_as_MySQLdb()
"""


def manage(folder: Path, database: dict[str, Any], *commands: str) -> str:
    """Run commands of ``manage.py``, in one process."""
    driver = AS_MYSQLDB if "mysql" in database["ENGINE"] else ""
    (folder / "project_settings.py").write_text(driver + SETTINGS % database)
    (folder / "commands.py").write_text(COMMANDS)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "commands.py", json.dumps(commands)],
        cwd=folder, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": f"{folder}:{ROOT / 'src'}", "DJANGO_SETTINGS_MODULE": "project_settings"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def server_at(url: str, engine: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "ENGINE": f"django.db.backends.{engine}", "NAME": parts.path[1:], "USER": parts.username,
        "PASSWORD": parts.password or "", "HOST": parts.hostname, "PORT": parts.port,
    }  # fmt: skip


def works_on(store: Any) -> None:
    with Semel(store) as guard:
        assert [guard.run("pay", key="k", call=lambda: 5) for _ in range(2)] == [5, 5]


@pytest.mark.slow
def test_migrate_makes_the_tables_that_the_sqlite_store_wants_and_takes_them_away(tmp_path: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}
    said = manage(
        tmp_path, database, "migrate", "makemigrations --check --dry-run", "sqlmigrate semel 0001",
        "sqlmigrate semel 0001 --backwards",
    )  # fmt: skip
    works_on(SQLiteStore(tmp_path / "shop.db", migrate=False))
    check_sqlite(tmp_path / "shop.db")
    for text in ("No changes detected", "CREATE TABLE semel_record", "DROP TABLE semel_record"):
        assert text in said
    manage(tmp_path, database, "migrate semel zero")
    assert [name for name in tables(tmp_path / "shop.db") if name.startswith("semel")] == []


@pytest.mark.slow
def test_tables_that_a_store_has_made_are_taken_over(tmp_path: Path) -> None:
    works_on(SQLiteStore(tmp_path / "shop.db"))
    manage(tmp_path, {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}, "migrate")
    check_sqlite(tmp_path / "shop.db")


@pytest.mark.slow
def test_a_file_that_came_to_a_database_late_is_made_up_for(tmp_path: Path) -> None:
    """Databases have files of the same number at different times; Django knows one number for all."""
    import sqlite3

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}
    manage(tmp_path, database, "migrate")
    raw = sqlite3.connect(tmp_path / "shop.db")
    raw.execute("DROP INDEX semel_record_tenant")
    raw.execute("DELETE FROM semel_migration WHERE version = 2")
    raw.execute("DELETE FROM django_migrations WHERE name > '0003'")
    raw.commit()
    raw.close()
    manage(tmp_path, database, "migrate")
    check_sqlite(tmp_path / "shop.db")


def check_sqlite(file: Path) -> None:
    """The migrations' own check is content: nothing is missing, and nothing differs."""
    import sqlite3

    from semel.stores.sqlite import SQLiteConnection

    raw = sqlite3.connect(file, isolation_level=None)
    try:
        sync.check(SQLiteConnection(raw), known.SQLITE)
    finally:
        raw.close()


def tables(file: Path) -> list[str]:
    import sqlite3

    raw = sqlite3.connect(file)
    try:
        return [name for (name,) in raw.execute("SELECT name FROM sqlite_master")]
    finally:
        raw.close()


def test_migrate_makes_the_tables_that_the_postgres_store_wants(tmp_path: Path, postgres_url: str) -> None:
    from semel.stores.postgres import check

    manage(tmp_path, server_at(postgres_url, "postgresql"), "migrate", "migrate semel zero", "migrate")
    check(postgres_url)
    works_on(PostgresStore(postgres_url))


def test_migrate_makes_the_tables_that_the_mysql_store_wants(tmp_path: Path, mariadb_url: str) -> None:
    from semel.stores.mysql import MySQLStore, check

    manage(tmp_path, server_at(mariadb_url, "mysql"), "migrate", "migrate semel zero", "migrate")
    check(mariadb_url)
    works_on(MySQLStore(mariadb_url))


# -- the example


@pytest.mark.slow
def test_the_example_pays_once(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "django" / "shop.py")],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    first, again, other = (line for line in ran.stdout.splitlines() if line.startswith(("201", "422")))
    assert json.loads(re.sub(r"^201 \S+ ", "", first)) == json.loads(re.sub(r"^201 \S+ ", "", again))
    assert "replayed" in again
    assert "idempotency_key_reused" in other


# -- a store without tables, and tests


def test_django_does_not_start_on_a_store_without_tables(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "empty.db", migrate=False)
    with Semel(store, sweep_every=None) as guard, Project(guard) as project:
        project.serve(PATTERNS[0])
        with override_settings(INSTALLED_APPS=["semel.http.django"]):
            assert "semel migrate" in found_by_checks()["semel.W004"][0]
        with pytest.raises(NotMigrated, match="semel migrate"):
            IdempotencyMiddleware(lambda request: None)
        migrate(tmp_path / "empty.db")
        with override_settings(INSTALLED_APPS=["semel.http.django"]):
            assert found_by_checks() == {}
        IdempotencyMiddleware(lambda request: None)


def test_django_starts_while_its_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    store = RedisStore("redis://127.0.0.1:1", retry_for=0, connect_timeout=0.2)
    with Semel(store, sweep_every=None) as guard, Project(guard) as project:
        project.serve(PATTERNS[0])
        with override_settings(INSTALLED_APPS=["semel.http.django"]):
            assert found_by_checks() == {}
        IdempotencyMiddleware(lambda request: None)
    assert "its store cannot be used" in caplog.text


TESTED = """
from django.db import connection
from django.http import HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from semel import Semel
from semel.http.django import idempotent

SECRET_KEY = "x"
INSTALLED_APPS = ["semel.http.django"]
MIDDLEWARE = ["semel.http.django.IdempotencyMiddleware"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": %(file)r}}
USE_TZ = True
ROOT_URLCONF = "shop"
guard = Semel("sqlite:///" + %(file)r, sweep_every=None)
SEMEL = {"GUARD": "shop.guard", "TENANT": lambda request: "alice"%(more)s}
ran = []


def answer(request):
    ran.append(request.path)
    return HttpResponse(f"paid {len(ran)}")


urlpatterns = [
    path("leased", csrf_exempt(idempotent()(answer))),
    path("transactional", csrf_exempt(idempotent(connection="default")(answer))),
]
"""
TEST_CASE = """
from django.db import connection
from django.test import TestCase
import shop


class Payments(TestCase):
    def test_they_happen_once(self):
        for route in ("/leased", "/transactional"):
            first, again = (self.client.post(route, headers={"Idempotency-Key": "k-1"}) for _ in range(2))
            assert first.status_code == again.status_code == 200, first.content
            assert first.content == again.content
        assert shop.guard.run("ship", key=1, call=lambda: "shipped") == "shipped"
        assert len(shop.ran) == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_tests_leave_the_developers_own_database_alone(tmp_path: Path, own: bool) -> None:
    file = tmp_path / "shop.db"
    # A test guard of one's own is used as it is; here it is the same, to see that the test would notice.
    more = ', "TEST_GUARD": "shop.guard"' if own else ""
    (tmp_path / "shop.py").write_text(TESTED % {"file": str(file), "more": more})
    (tmp_path / "tests.py").write_text(TEST_CASE)
    ran = subprocess.run(
        [sys.executable, "-m", "django", "test"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "DJANGO_SETTINGS_MODULE": "shop"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    with contextlib.closing(sqlite3.connect(file)) as raw:
        assert raw.execute("SELECT count(*) FROM semel_record").fetchone() == (2 if own else 0,)
