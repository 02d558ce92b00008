"""The records in Django's admin, in a project of its own: who sees them, who settles them, and what is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """
import json, logging, sys
import django
from django.conf import settings
from semel import Policy, Semel, SQLiteStore, {guard}
from semel.stores.sqlite import AsyncSQLiteStore

plain = Semel(SQLiteStore("records.db"), policy=Policy(guarantee="at_most_once"), sweep_every=None)
guard = plain if {guard} is Semel else AsyncSemel(
    AsyncSQLiteStore("records.db"), policy=Policy(guarantee="at_most_once"), sweep_every=None
)
settings.configure(
    SECRET_KEY="x", ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], USE_TZ=True, LOGGING_CONFIG=None,
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}}},
    INSTALLED_APPS=["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
                    "django.contrib.sessions", "django.contrib.messages", "semel.http.django"],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
                "django.contrib.auth.middleware.AuthenticationMiddleware",
                "django.contrib.messages.middleware.MessageMiddleware"],
    TEMPLATES=[{{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {{
        "context_processors": ["django.template.context_processors.request",
                               "django.contrib.auth.context_processors.auth",
                               "django.contrib.messages.context_processors.messages"]}}}}],
    SEMEL={{"GUARD": guard}},
)
django.setup()
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.test import Client
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True, verbosity=0)

for number in range(3):  # a sweep of abandoned attempts would take a lease's time: write the state itself
    plain.run("pay", key=f"k{{number}}", call=int)
import sqlite3
raw = sqlite3.connect("records.db")
raw.execute("UPDATE semel_record SET state = 3, snapshot = NULL WHERE key <> 'k2'")
raw.commit()
raw.close()

lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("semel.audit").addHandler(Keep())

viewer = User.objects.create_user("viewer", password="x", is_staff=True)
viewer.user_permissions.add(Permission.objects.get(codename="view_idempotencyrecord"))
boss = User.objects.create_superuser("boss", password="x")
nobody = User.objects.create_user("nobody", password="x", is_staff=True)
where = "/admin/semel/idempotencyrecord/"
found = {{}}

def as_user(user, **options):
    client = Client(**options)
    client.force_login(user)
    return client

def ids(state):
    return {{record.key: record.id.hex() for record in plain.list(states=[state])}}

from semel.core.states import State
unknown = ids(State.UNKNOWN)
found["unknown"] = sorted(unknown)
found["nobody"] = as_user(nobody).get(where).status_code
found["anonymous"] = Client().get(where).status_code
page = as_user(viewer).get(where, {{"state": "unknown"}}).content.decode()
found["listed"] = [key for key in ("k0", "k1", "k2") if f"<td>{{key}}</td>" in page]
found["index"] = "Idempotency records" in as_user(viewer).get("/admin/").content.decode()
one = f"{{where}}{{unknown['k0']}}/change/"
shown = as_user(viewer).get(one).content.decode()
found["viewer_form"] = "Settle it" in shown
token = plain.lookup("pay", "k0").token
found["viewer_post"] = as_user(viewer).post(one, {{"way": "release", "token": token}}).status_code
found["no_csrf"] = as_user(boss, enforce_csrf_checks=True).post(one, {{"way": "release", "token": token}}).status_code
found["form"] = "Settle it" in as_user(boss).get(one).content.decode()
found["stale"] = "has changed since" in as_user(boss).post(
    one, {{"way": "release", "token": token + 1}}, follow=True).content.decode()
found["still"] = sorted(ids(State.UNKNOWN))
as_user(boss).post(one, {{"way": "release", "token": token}})
other = f"{{where}}{{unknown['k1']}}/change/"
token = plain.lookup("pay", "k1").token
bad = as_user(boss).post(other, {{"way": "resolve", "token": token, "result": "{{"}}, follow=True)
found["bad_json"] = "Nothing was changed" in bad.content.decode()
as_user(boss).post(other, {{"way": "resolve", "token": token, "result": '{{"paid": 7}}'}})
found["released"] = plain.lookup("pay", "k0") is None
found["resolved"] = plain.run("pay", key="k1", call=int)
done = f"{{where}}{{ids(State.DONE)['k2']}}/change/"
shown = as_user(boss).get(done).content.decode()
found["done_form"] = "Settle it" in shown
found["expires"] = shown.partition("<th>Expires in</th><td>")[2].partition("<")[0]
found["gone"] = as_user(boss).get(one).status_code
found["no_id"] = as_user(boss).get(where + "zz/change/").status_code
found["log"] = [entry.change_message for entry in LogEntry.objects.order_by("id")]
found["audit"] = list(lines)

def doubt(key, label):
    plain.run("pay", key=key, call=int)
    with sqlite3.connect("records.db") as raw:
        raw.execute("UPDATE semel_record SET state = 3, snapshot = NULL, key = ? WHERE key = ?", (label, key))
    raw.close()
    return plain.lookup("pay", key)

import semel.http.django.admin as views
look = views._find

def look_before_another_acts(id):
    seen = look(id)
    plain.release("pay", "k3")
    doubt("k3", "k3")
    return seen

for way in ("release", "resolve"):
    last = doubt("k3", "k3") if way == "release" else plain.lookup("pay", "k3")
    views._find = look_before_another_acts
    raced = as_user(boss).post(
        f"{{where}}{{last.id.hex()}}/change/", {{"way": way, "token": last.token, "result": "7"}}, follow=True)
    views._find = look
    now = plain.lookup("pay", "k3")
    found[f"raced_{{way}}"] = ["has changed since" in raced.content.decode(), now and now.state.name]
last = doubt("k4", "k4\\nroot\\nparent")
one = f"{{where}}{{last.id.hex()}}/change/"
found["lineage_shown"] = as_user(boss).get(one).content.decode().partition("<th>Key</th><td>")[2].partition("<")[0]
as_user(boss).post(one, {{"way": "release", "token": last.token}})
found["lineage_released"] = plain.lookup("pay", "k4") is None
print(json.dumps(found))
plain.close()
"""


@pytest.mark.process
@pytest.mark.parametrize("guard", ["Semel", "AsyncSemel"])
def test_records_are_seen_and_settled_in_the_admin(guard: str, tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(PROJECT.format(guard=guard))
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "project.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert found.pop("anonymous") == 302
    audit = found.pop("audit")
    assert [line.partition(" at ")[0] for line in audit] == ["release by boss", "resolve by boss"]
    assert all(' via="admin" id="' in line and line.endswith('operation="pay" changed=true') for line in audit)
    assert not any("k0" in line or "k1" in line for line in audit)
    assert found.pop("expires") in ("1d", "23h59m")
    assert found == {
        "unknown": ["k0", "k1"],
        "nobody": 403,
        "listed": ["k0", "k1"],
        "index": True,
        "viewer_form": False,
        "viewer_post": 403,
        "no_csrf": 403,
        "form": True,
        "stale": True,
        "still": ["k0", "k1"],
        "bad_json": True,
        "released": True,
        "resolved": {"paid": 7},
        "done_form": False,
        "gone": 404,
        "no_id": 404,
        "log": ["Released: it did not happen. pay", "Resolved: it did happen. pay"],
        "raced_release": [True, "UNKNOWN"],
        "raced_resolve": [True, "UNKNOWN"],
        "lineage_shown": "k4",
        "lineage_released": True,
    }
