"""The commands in the pages, held to the programs that they call, and a page for everything that needs one.

``semel`` is parsed by its own parser, in blocks and in code spans. What is installed must be an extra, and what is made
a target. The services of pages are started and asked as the page says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import httpx
import psycopg
import pytest
import yaml

from semel import errors
from semel.cli.app import COMMANDS, make_parser
from semel.http.contract.rules import Idempotent
from semel.messaging.brokers.urls import BROKER_KINDS, BROKER_SCHEMES
from semel.observe.events import EVENTS
from semel.observe.store_state import GAUGES
from semel.sql.migrations import MYSQL, POSTGRES
from semel.stores.urls import KINDS, SCHEMES
from semel.verify.audit import RULES
from tests.servers.base import free_port
from tests.test_docs import DOCS, PAGES, ROOT, code_of, name_of, skip_without_its_framework

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OTHERS = {
    ".venv/bin/python", "celery", "cp", "curl", "export", "gunicorn", "hypercorn", "nats", "pytest", "python",
    "schemathesis", "uvicorn",
}  # fmt: skip
"""Programs that the pages call and that are not ours. How they are called is checked below, or by people."""


class Shown(NamedTuple):
    """A command line of a page."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in BLOCK.findall(page.read_text("utf-8")):
        if language in languages:
            yield text


def shown() -> Iterator[Shown]:
    for page in PAGES:
        for text in blocks(page, "console"):
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    yield Shown(name_of(page), line[2:])


COMMAND_LINES = list(shown())


def complaint(words: list[str]) -> str | None:
    """What is wrong with a call of semel; None if it can be parsed. It is not run."""
    ends = [at for at, word in enumerate(words) if word in ("|", ">", ">>", "&", "--")]
    words = words[1 : ends[0]] if ends else words[1:]
    try:
        args = make_parser().parse_args(words)
    except Exception as error:
        return str(error)
    for name, schemes in (("url", SCHEMES), ("to", BROKER_SCHEMES)):
        urls = getattr(args, name, None) or ""
        for url in [urls] if isinstance(urls, str) else urls:
            if "://" in url and url.partition(":")[0] not in schemes:
                return f"{url} names nothing that there is"
    return None


def test_every_console_block_has_a_command() -> None:
    silent = [name_of(page) for page in PAGES for text in blocks(page, "console") if not text.startswith("$ ")]
    assert silent == [], "a command begins with a dollar: what does not is its output, and not checked"


def test_every_program_in_the_pages_is_known() -> None:
    assert len(COMMAND_LINES) > 60
    assert [each for each in COMMAND_LINES if each.words[0] not in OTHERS | {"semel", "pip", "make"}] == []


def test_every_call_of_semel_in_a_block_can_be_parsed() -> None:
    """URLs are left out where the page has set SEMEL_STORE."""
    calls = [each for each in COMMAND_LINES if each.words[0] == "semel"]
    assert len(calls) > 40
    assert [(each, wrong) for each in calls if (wrong := complaint(each.words))] == []


SPAN = re.compile(r"`(semel [a-z][^`]*)`")


def test_every_call_of_semel_in_a_sentence_names_a_command_and_its_options() -> None:
    """Sentences leave out what does not matter, so an argument may be missing; what is there must be right."""
    found = 0
    options = {
        name: {option for each in (parser, *below(parser).values()) for option in each._option_string_actions}
        for name, parser in below(make_parser()).items()
    }
    wrong = []
    for page in PAGES:
        for call in SPAN.findall(re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)):
            words = call.split()
            found += 1
            given = {word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]}
            if words[1] not in options or {word for word in given if word.startswith("--")} - options[words[1]]:
                wrong.append((name_of(page), call))
    assert found > 150
    assert wrong == []


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser, or the actions of a command."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def test_a_wrong_command_is_found_out() -> None:
    assert complaint(["semel", "look", "sqlite:///a.db"])
    assert complaint(["semel", "lookup", "sqlite:///a.db", "op"])
    assert complaint(["semel", "lookup", "mongo://a", "op", "k"]) == "mongo://a names nothing that there is"
    assert complaint(["semel", "list", "sqlite:///a.db", "--stat", "done"])
    assert complaint(["semel", "list", "sqlite:///a.db", "--state", "done", "|", "head"]) is None


def test_what_is_installed_is_an_extra_and_what_is_made_is_a_target() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    targets = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    wrong = []
    for page in PAGES:
        text = page.read_text("utf-8")
        wrong += [(name_of(page), extra) for extra in re.findall(r"\bsemel\[(\w+)\]", text) if extra not in extras]
        wrong += [(name_of(page), made) for made in re.findall(r"(?:`|\$ )make (\w+)", text) if made not in targets]
    assert wrong == []


def test_what_python_runs_is_there() -> None:
    named = {
        match
        for page in PAGES
        for match in re.findall(r"python -m ((?:examples|bench)[\w.]*)", page.read_text("utf-8"))
    }
    assert named
    assert [
        name
        for name in named
        if not any((ROOT / (name.replace(".", "/") + end)).exists() for end in (".py", "/__main__.py"))
    ] == []


def test_migrations_are_listed_as_they_are() -> None:
    for page, migrations in (("use-postgres.md", POSTGRES), ("mysql.md", MYSQL)):
        listed = re.findall(r"^applied (\d+_\w+)$", (DOCS / "how-to" / page).read_text("utf-8"), re.MULTILINE)
        assert listed == [f"{number:04}_{name}" for number, name, _ in migrations.migrations()]


def test_blocks_of_other_languages_can_be_parsed() -> None:
    for page in PAGES:
        for text in blocks(page, "json"):
            json.loads(text)
        for text in blocks(page, "toml"):
            tomllib.loads(text)
        for text in blocks(page, "yaml"):
            found = yaml.safe_load(text)
            if words := found.get("command"):  # of a pod
                assert complaint(["semel", words[1], "sqlite:///a.db", *words[2:]]) is None


def test_the_line_of_the_crontab_can_be_parsed() -> None:
    (line,) = re.findall(
        r"^5 3 \* \* \*  (semel once.*)$", (DOCS / "how-to" / "run-a-command-once.md").read_text("utf-8"), re.MULTILINE
    )
    command, once, *rest = shlex.split(line)
    assert complaint([command, once, "sqlite:///a.db", *rest]) is None


def test_the_settings_of_a_role_are_sql(postgres_url: str) -> None:
    page = DOCS / "how-to" / "use-postgres.md"
    (statements,) = (text for text in blocks(page, "sql") if "ALTER ROLE" in text)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE ROLE semel")
        connection.execute(statements.encode())
        connection.rollback()


def test_links_to_other_sites_are_whole() -> None:
    """Nothing is fetched: there may be no network. A space, a dot at the end or plain http is a slip."""
    links = {
        (name_of(page), link) for page in PAGES for link in re.findall(r"\]\((\w+:[^)]*)\)", page.read_text("utf-8"))
    }
    assert len(links) > 5
    assert [
        (page, link) for page, link in links if not re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#@~%+=&?-]*)?", link)
    ] == []


# Served, and asked


SERVED = [
    "README.md",
    "docs/tutorial/a-protected-service.md",
    *(f"docs/how-to/{n}.md" for n in ("protect-a-fastapi-service", "protect-a-flask-service", "litestar", "quart")),
]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", SERVED)
def test_a_service_of_a_page_answers_its_request_twice_and_runs_once(name: str, tmp_path: Path) -> None:
    """As a reader does: save the code above the command as shop.py, start it, and send the request twice."""
    page = ROOT / name
    skip_without_its_framework(page)
    text = page.read_text("utf-8")
    block = next(b for b in blocks(page, "console") if re.match(r"\$ (uvicorn|gunicorn|hypercorn) ", b))
    above = text[: text.index(block)]
    (tmp_path / "shop.py").write_text(
        re.findall(r"^```python\n(.*?)^```", above, re.MULTILINE | re.DOTALL)[-1], "utf-8"
    )
    serve, ask = (line for line in block.replace("\\\n", " ").splitlines())
    words = shlex.split(serve[2:])
    if "--bind" in words:
        words = words[: words.index("--bind")]
    at = ["--port", "{port}"] if words[0] == "uvicorn" else ["--bind", "127.0.0.1:{port}"]
    is_answered_twice([sys.executable, "-m", *words, *at], ask[2:], tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_a_django_project_that_follows_the_page_answers_twice_and_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)  # a test of Django leaves its own there
    page = DOCS / "how-to" / "django.md"
    subprocess.run([sys.executable, "-m", "django", "startproject", "shop", "."], cwd=tmp_path, check=True, timeout=120)
    for text in blocks(page, "text"):
        if match := re.match(r"# (shop/\w+\.py)", text):
            with (tmp_path / match[1]).open("a" if "add at the end" in text else "w", encoding="utf-8") as file:
                file.write(text)
    block = next(b for b in blocks(page, "console") if "runserver" in b)
    check, serve, ask = block.replace("\\\n", " ").splitlines()
    assert (check, serve) == ("$ python manage.py check", "$ python manage.py runserver 8000")
    subprocess.run([sys.executable, "manage.py", "check"], cwd=tmp_path, check=True, timeout=120)
    is_answered_twice([sys.executable, "manage.py", "runserver", "--noreload", "{port}"], ask[2:], tmp_path)


def is_answered_twice(command: list[str], ask: str, folder: Path) -> None:
    """Start the service, and send it the request twice. A port that somebody else takes meanwhile is left to them."""
    for _ in range(5):
        port = free_port()
        with (folder / "log").open("w") as log:
            words = [word.replace("{port}", str(port)) for word in command]
            server = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            if answers := ask_twice(curl(ask, port), server):
                break
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # its workers as well
            server.wait()
    else:
        raise AssertionError((folder / "log").read_text("utf-8"))
    first, second = answers
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"


def ask_twice(request: httpx.Request, server: subprocess.Popen[bytes]) -> tuple[httpx.Response, httpx.Response] | None:
    """Return its answers, once the service is up; None if it has ended."""
    end = time.monotonic() + 120
    with httpx.Client(timeout=60) as client:
        while server.poll() is None:
            try:
                first = client.send(request)
            except httpx.ConnectError:
                assert time.monotonic() < end, "the service does not come up"
                time.sleep(0.05)
            else:
                return first, client.send(request)
    return None


def curl(line: str, port: int) -> httpx.Request:
    """The request that a call of curl sends."""
    words = shlex.split(line)
    assert words.pop(0) == "curl"
    headers, body, url, method = {}, None, "", None
    while words:
        match words.pop(0):
            case "-i":
                pass
            case "-X":
                method = words.pop(0)
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                body = words.pop(0)
            case word:
                url = word.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
    assert str(port) in url
    return httpx.Request(method or ("POST" if body else "GET"), url, headers=headers, content=body)


# A page for each


def everything() -> str:
    return "".join(page.read_text("utf-8") for page in (DOCS / "how-to").glob("*.md"))


def test_every_framework_store_and_broker_has_a_page() -> None:
    how_to = everything()
    code = "\n".join(code_of(page) for page in (DOCS / "how-to").glob("*.md"))
    http = ROOT / "src" / "semel" / "http"
    inner = {"contract", "describe", "drive", "handlers", "__init__", "__pycache__"}
    frameworks = {path.stem for path in http.iterdir()} - inner
    assert {"fastapi", "flask", "django", "litestar", "quart", "asgi", "wsgi"} <= frameworks
    assert [name for name in frameworks if f"from semel.http.{name} import" not in code] == [], "an example that runs"
    for kind in KINDS:
        classes = [kind.class_name, f"Async{kind.class_name}"]
        assert [name for name in classes if not re.search(rf"\b{name}\(", code)] == [], kind.name
        assert f"{kind.schemes[0]}:" in how_to, kind.name
    brokers = (DOCS / "how-to" / "brokers.md").read_text("utf-8")
    headings = " ".join(re.findall(r"^## (.*)$", brokers, re.MULTILINE)).lower()
    for broker in BROKER_KINDS:
        assert broker.name.split()[-1].lower() in headings or broker.name.lower() in headings, broker.name
        assert [scheme for scheme in broker.schemes if f"{scheme}://" not in brokers] == [], broker.name
    assert [
        name for name in ("Starlette", "REST framework", "Cluster", "Sentinel", "MariaDB") if name not in how_to
    ] == []


def test_every_command_is_used_in_a_how_to_page() -> None:
    how_to = everything() + (DOCS / "reference" / "cli.md").read_text("utf-8")
    plain = {"diagram", "stores", "completions"}  # nothing more to say than the reference does
    assert [command.name for command in COMMANDS if f"semel {command.name}" not in how_to] == []
    assert [c.name for c in COMMANDS if f"semel {c.name}" not in everything() and c.name not in plain] == []


def rows(page: str) -> dict[str, str]:
    """The rows of the tables of a page, by the names in their first cells."""
    found = {}
    for first, rest in re.findall(r"^\| (`[^|]*) \|(.*)\|$", (DOCS / page).read_text("utf-8"), re.MULTILINE):
        found.update(dict.fromkeys(re.findall(r"`([\w-]+)`", first), rest))
    return found


def test_every_rule_of_the_doctor_and_of_the_audit_is_explained() -> None:
    sources = ("verify/doctor.py", "stores/risks.py", "stores/redis/risks.py")
    source = "".join((ROOT / "src" / "semel" / name).read_text("utf-8") for name in sources)
    doctor = set(re.findall(r'(?:Finding|Risk)\(\s*"([a-z-]+)"', source)) | {"unknown-outcomes", "abandoned"}
    assert len(doctor) > 15
    assert doctor - set(rows("how-to/doctor.md")) == set()
    audit = rows("how-to/audit-openapi.md")
    assert {rule: severity for rule, (severity, _) in RULES.items()} == {rule: audit[rule].split()[0] for rule in RULES}


def test_every_metric_is_explained_and_every_event_in_a_query_exists() -> None:
    page = (DOCS / "how-to" / "metrics.md").read_text("utf-8")
    source = (ROOT / "src" / "semel" / "observe" / "prometheus.py").read_text("utf-8")
    counted = set(re.findall(r'"(semel_\w+)"', source)) | set(GAUGES)
    assert [name for name in counted if name not in page] == []
    names = {event.name for event in EVENTS}
    for text in (page, (DOCS / "runbook" / "alerts.md").read_text("utf-8")):
        named = {each for query in re.findall(r'event=~?"([^"]*)"', text) for each in re.split(r"\\?\|", query)}
        assert named - names == set()
    in_runbook = set(re.findall(r"\(`([a-z]+_[a-z]+)`\)", (DOCS / "runbook" / "alerts.md").read_text("utf-8")))
    assert in_runbook
    assert in_runbook - names == set()


def test_the_page_of_http_has_the_codes_of_errors_and_the_settings_of_a_route() -> None:
    page = rows("reference/http.md")
    inside = {
        "idempotency_error",
        "idempotency_lease_lost",
        "idempotency_broker_unavailable",
        "idempotency_journal_full",
    }
    for name in errors.__all__:
        error = getattr(errors, name)
        if error.code not in inside and error.code in page:
            assert page[error.code].split()[0] == str(error.status), name
            assert page[error.code].split()[2] == ("yes" if error.retryable else "no"), name
    known = {getattr(errors, name).code for name in errors.__all__}
    assert {name for name in page if name.startswith("idempotency_")} - known == set()
    settings = {field.name for field in fields(Idempotent) if field.init} - {"protect", "changes"}
    assert settings - set(page) == set()
