"""The documentation, held to the code: its examples are run, its links lead somewhere, its generated parts are fresh.

Every ``python`` block of a page is run, in order, in one module called ``app`` and in an empty folder. What a block
prints must stand in an ``output`` block right below it. A page whose code names ``postgresql://…``,
``mysql://…`` or ``redis://…`` is run on a fresh database of the test session's server, one with ``dynamodb://…`` on
DynamoDB Local. ``console`` blocks are for people, and not run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import closing, redirect_stdout, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

import semel
from semel import Policy, errors
from semel.cli.app import COMMANDS
from semel.core.messaging.messages import InspectOutbox
from semel.core.states import mermaid
from semel.observe.events import EVENTS
from semel.sql.migrations import POSTGRES
from tests.partial_failures.nursery import Nursery
from tests.servers import DynamoDBServer
from tests.servers.install import missing_is_an_error

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
DATABASE = "postgresql://app@localhost/shop"
MYSQL = "mysql://app@localhost/shop"
REDIS = "redis://localhost:6379/0"
DYNAMODB = "dynamodb://eu-central-1/semel"
"""The databases that the pages talk about."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Examples


class Console:
    """Runs the blocks of one document and holds what they print against what the page says."""

    def __init__(self) -> None:
        self._python = PythonEvaluator()
        self._printed = ""
        self._line = 0
        self.ran = 0

    def run(self, example: Example) -> None:
        self.settle()
        written = io.StringIO()
        with redirect_stdout(written):
            self._python(example)
        self._printed, self._line = written.getvalue(), example.line
        self.ran += 1

    def compare(self, example: Example) -> None:
        printed, self._printed = self._printed, ""
        assert printed.rstrip() == str(example.parsed).rstrip(), f"the block of line {self._line} prints otherwise"

    def settle(self) -> None:
        assert not self._printed, f"the block of line {self._line} prints, and no output block shows it"


def parsed(page: Path, console: Console, database: str = DATABASE) -> Document:
    named = {"mysql": MYSQL, "redis": REDIS}.get(database.partition(":")[0], DATABASE)
    document = Document(page.read_text("utf-8").replace(named, database), str(page))
    for parser in (CodeBlockParser("python", console.run), CodeBlockParser("output", console.compare)):
        for region in parser(document):
            document.add(region)
    return document


@cache
def code_of(page: Path) -> str:
    return "\n".join(str(e.parsed) for e in parsed(page, Console()) if e.region.lexemes["arguments"] == "python")


WITH_CODE = [page for page in PAGES if code_of(page)]
ON_POSTGRES = [page for page in WITH_CODE if DATABASE in code_of(page)]
ON_MYSQL = [page for page in WITH_CODE if MYSQL in code_of(page)]
ON_REDIS = [page for page in WITH_CODE if REDIS in code_of(page)]
ON_DYNAMODB = [page for page in WITH_CODE if DYNAMODB in code_of(page)]
ALONE = [page for page in WITH_CODE if page not in (*ON_POSTGRES, *ON_MYSQL, *ON_REDIS, *ON_DYNAMODB)]


@pytest.fixture(autouse=True)
def environment_is_the_tests() -> Iterator[None]:
    """What a page adds to the environment, such as Django's settings, is not left to the tests after it."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]


@pytest.fixture(autouse=True)
def temporary_files_are_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page leaves in a temporary folder goes with the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module that a page's code is written in, and the folder it is run in."""
    module = types.ModuleType("app")
    monkeypatch.setitem(sys.modules, "app", module)
    monkeypatch.chdir(tmp_path)
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **settings))
        return opened[-1]

    # A page shows how to open a store, and rarely how to close it; the next one may take its name.
    monkeypatch.setattr(sqlite3, "connect", noted)
    yield module
    for guard in [thing for thing in vars(module).values() if isinstance(thing, semel.Semel)]:
        guard.close()
    for connection in opened:
        with suppress(sqlite3.ProgrammingError):  # another thread's own: that thread closes it
            connection.close()


def skip_without_its_framework(page: Path) -> None:
    """Not every Python has a release of each of them. Where all are installed, a missing one is an error."""
    for name in ("quart", "celery", "faststream"):
        used = re.search(rf"^(import|from) {name}\b", code_of(page), re.MULTILINE)
        if used and not importlib.util.find_spec(name) and not missing_is_an_error():
            pytest.skip(f"{name} is not installed")


def run_page(page: Path, app: types.ModuleType, database: str = DATABASE) -> None:
    skip_without_its_framework(page)
    console = Console()
    document = parsed(page, console, database)
    document.namespace = vars(app)
    for example in document:
        example.evaluate()
    console.settle()
    assert console.ran


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE, ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, app: types.ModuleType) -> None:
    run_page(page, app)


@pytest.mark.parametrize("page", ON_POSTGRES, ids=name_of)
def test_the_code_of_a_page_runs_on_postgres(page: Path, app: types.ModuleType, postgres_url: str) -> None:
    run_page(page, app, postgres_url)


@pytest.mark.parametrize("page", ON_MYSQL, ids=name_of)
def test_the_code_of_a_page_runs_on_mariadb(page: Path, app: types.ModuleType, mariadb_url: str) -> None:
    run_page(page, app, mariadb_url)


@pytest.mark.parametrize("page", ON_REDIS, ids=name_of)
def test_the_code_of_a_page_runs_on_redis(page: Path, app: types.ModuleType, redis_url: str) -> None:
    run_page(page, app, redis_url)


@pytest.mark.parametrize("page", ON_DYNAMODB, ids=name_of)
def test_the_code_of_a_page_runs_on_dynamodb(
    page: Path, app: types.ModuleType, dynamodb: DynamoDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", dynamodb.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    run_page(page, app)


def run_as_file(page: Path, folder: Path) -> str:
    """What a reader sees who copies the page's code into a file and runs it."""
    (folder / "app.py").write_text(code_of(page), "utf-8")
    finished = subprocess.run([sys.executable, "app.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return "".join(line for line in finished.stdout.splitlines(keepends=True) if line.strip())


def shown_by(page: Path) -> str:
    blocks = (str(e.parsed) for e in parsed(page, Console()) if e.region.lexemes["arguments"] == "output")
    return "".join(line for block in blocks for line in block.splitlines(keepends=True) if line.strip())


@pytest.mark.slow
def test_the_tutorial_prints_the_same_after_the_readme_and_when_it_is_run_again(tmp_path: Path) -> None:
    readme, tutorial = ROOT / "README.md", DOCS / "tutorial" / "first-steps.md"
    assert run_as_file(readme, tmp_path) == shown_by(readme)
    assert run_as_file(tutorial, tmp_path) == shown_by(tutorial)
    assert run_as_file(tutorial, tmp_path) == shown_by(tutorial)
    # The README says what happens: the parcel has left already.
    assert run_as_file(readme, tmp_path) == shown_by(readme).partition("\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test-your-code.md", "crash-your-operation.md"])
def test_the_tests_that_a_page_shows_pass(name: str, tmp_path: Path) -> None:
    code = code_of(DOCS / "how-to" / name)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["semel.testing.plugin"]\n', "utf-8")
    (tmp_path / "test_page.py").write_text(code, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    env = {**os.environ, "TMPDIR": str(tmp_path.parent)}  # the path of a socket has at most 107 characters
    finished = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
    shown = code.count("\ndef test_")
    assert f"{shown} passed" in finished.stdout, finished.stdout


WRITES_FILES = [page for page in ALONE if page.is_relative_to(DOCS) and re.search(r"\.db\b|write_text", code_of(page))]


def run_script(folder: str) -> None:
    """In a child: run ``app.py`` as a reader would, and keep what it prints."""
    os.chdir(folder)
    with open("printed", "w", encoding="utf-8") as printed, redirect_stdout(printed):
        runpy.run_path("app.py", run_name="__main__")


def import_what_pages_use() -> None:
    """In the process that the children are forked from. What is on Django wants the page's settings first."""
    for name in sorted({name for page in WRITES_FILES for name in re.findall(IMPORTED, code_of(page), re.MULTILINE)}):
        if "django" not in name and "rest_framework" not in name and importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)


IMPORTED = r"^(?:import|from) ([\w.]+)"


@pytest.fixture(scope="module")
def readers() -> Iterator[Nursery]:
    nursery = Nursery(run_script, import_what_pages_use)
    yield nursery
    nursery.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", WRITES_FILES, ids=name_of)
def test_a_page_can_be_run_again_in_the_same_folder(page: Path, readers: Nursery, tmp_path: Path) -> None:
    skip_without_its_framework(page)
    (tmp_path / "app.py").write_text(code_of(page), "utf-8")
    for _ in range(2):
        assert readers.run(str(tmp_path)) == 0
        printed = (tmp_path / "printed").read_text("utf-8")
        assert "".join(line for line in printed.splitlines(keepends=True) if line.strip()) == shown_by(page)


def test_pages_name_one_database_only() -> None:
    others = {
        name_of(page): sorted(found)
        for page in WITH_CODE
        if (
            found := set(re.findall(r"(?:postgres(?:ql)?|mysql|mariadb)://[\w@./:-]+", code_of(page)))
            - {DATABASE, MYSQL}
        )
    }
    assert not others, f"write {DATABASE} or {MYSQL}: it is what the tests replace"
    assert not set(ON_POSTGRES) & set(ON_MYSQL), "a page is run on one of them"


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\nprint(1)\n```\n```output\n2\n```\n", "prints otherwise"),
        ("```python\nprint(1)\n```\n", "no output block"),
        ("```python\nprint(1)\n```\n```python\nx = 1\n```\n", "no output block"),
        ("```python\nx = 1\n```\n```output\n1\n```\n", "prints otherwise"),
        ("```python\nassert False, 'a wrong example'\n```\n", "a wrong example"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(page: str, complaint: str, app: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page, "utf-8")
    with pytest.raises(AssertionError, match=complaint):
        run_page(path, app)


def test_the_reference_shows_what_programs_use_and_not_what_adapters_do() -> None:
    text = (DOCS / "reference" / "api.md").read_text("utf-8")
    shown = set(re.findall(r"^#### \w+\.(\w+)$", text, re.MULTILINE))
    assert {"run", "run_in_transaction", "once", "step", "capture", "derive"} <= shown
    assert not shown & {"begin", "compensate", "declared_call", "in_this_loop", "journal", "leave"}
    assert not shown & {"make_call", "perform", "undoes"}
    assert "### INJECTED\n\nA default" in text


def test_the_indexes_to_make_by_hand_are_those_of_the_schema() -> None:
    text = (DOCS / "how-to" / "use-postgres.md").read_text("utf-8")
    for _, _, statements in POSTGRES.migrations()[1:]:
        # An index of a table that the same migration makes has no rows to read.
        new = re.findall(r"CREATE TABLE (\w+)", "\n".join(statements))
        for sql in statements:
            if "CREATE INDEX" not in sql or re.search(r" ON (\w+)", sql)[1] in new:  # type: ignore[index]
                continue
            assert sql.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY") + ";" in text


def test_every_block_says_its_language_and_python_is_spelled_so() -> None:
    """A block under another name, or none, would not be run. ``py`` is an excerpt of an example: see the next test."""
    known = {"python", "py", "output", "console", "text", "sql", "mermaid", "toml", "yaml", "json", "ini", "js"}
    wrong = []
    for page in PAGES:
        inside = False
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            if match := re.match(r"\s*(`{3,}|~{3,})\s*(.*)$", line):
                inside = not inside
                if inside and (match[2] not in known or match[1] != "```"):
                    wrong.append(f"{name_of(page)}:{number}: {line.strip()}")
    assert not wrong


def test_excerpts_stand_in_the_examples() -> None:
    examples = [path.read_text("utf-8") for path in (ROOT / "examples").rglob("*.py")]
    excerpts = [
        (page, block)
        for page in PAGES
        for block in re.findall(r"^```py\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    ]
    assert excerpts
    assert [name_of(page) for page, block in excerpts if not any(block in example for example in examples)] == []


# Links

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its blocks and its code spans."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = [re.sub(r"[^\w\s-]", "", head.lower()) for head in HEADING.findall(text)]
    return {re.sub(r"[-\s]+", "-", head.strip()) for head in heads}


def test_links_lead_to_a_file_and_a_heading_that_exist() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append((name_of(page), link))
    assert not broken


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == listed


def test_every_page_is_in_the_index() -> None:
    """Readers start there, and a page that it does not name is not found."""
    index = DOCS / "index.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(prose(index))}
    assert [name_of(page) for page in DOCS.rglob("*.md") if page != index and page.resolve() not in linked] == []


def test_pages_about_services_use_a_store_that_workers_share() -> None:
    """Readers copy them. On the memory store each worker process would run a retry again, without a word."""
    services = [page for page in WITH_CODE if re.search(r"from semel\.http[. ]", code_of(page))]
    testing = {DOCS / "how-to" / "test-your-code.md"}
    assert len(services) > 6
    assert [name_of(page) for page in services if "MemoryStore(" in code_of(page) and page not in testing] == []


def build_site(folder: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    with (folder / "docs" / "index.md").open("a", encoding="utf-8") as index:
        index.write(more)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = build_site(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "tutorial" / "first-steps.html").exists()


@pytest.mark.slow
def test_a_broken_link_stops_the_site(tmp_path: Path) -> None:
    assert build_site(tmp_path, "\n[nowhere](how-to/nowhere.md)\n").returncode != 0


# What is made from the code


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "tools" / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_what_the_code_says_now() -> None:
    stale = [name_of(page) for page, _ in generator().stale()]
    assert not stale, "run: .venv/bin/python tools/docs/generate.py"


def test_the_diagram_is_one_that_mermaid_can_read() -> None:
    """Its grammar ends a label at the next colon or semicolon, and what follows is then an error."""
    head, *lines = mermaid().splitlines()
    assert head == "stateDiagram-v2"
    assert [line for line in lines if not re.fullmatch(r" +(\[\*\]|\w+) --> \w+(: [^:;#]+)?", line)] == []


def test_a_stale_part_is_found_out() -> None:
    page = "before\n<!-- generated: diagram -->\nold\n<!-- end -->\nafter\n"
    fresh = generator().filled(page)
    assert "old" not in fresh
    assert "stateDiagram-v2" in fresh
    assert fresh.startswith("before\n<!-- generated: diagram -->\n")
    assert fresh.endswith("<!-- end -->\nafter\n")
    assert generator().filled(fresh) == fresh


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="no generated part is called 'nothing'"):
        generator().filled("<!-- generated: nothing -->\n<!-- end -->\n")


def test_every_public_name_is_in_the_reference() -> None:
    api = (DOCS / "reference" / "api.md").read_text("utf-8")
    assert [name for name in semel.__all__ if f"### {name}\n" not in api and f"`{name}`" not in api] == []


def test_every_public_module_is_described_on_a_page() -> None:
    """With signatures and parameters. The modules of adapters and of their own stores have pages of another kind."""
    made = generator()
    described = {"semel", "semel.errors", *(module for modules in made.MODULES.values() for module in modules)}
    elsewhere = ("semel.cli:", "semel.core.", "semel.http.contract.", "semel.stores.")
    listed = {module for module, _, _ in made.PUBLIC if not f"{module}:".startswith(elsewhere)}
    assert listed == described
    regions = re.findall(r"<!-- generated: ([\w.-]+) -->", "".join(page.read_text("utf-8") for page in PAGES))
    assert set(made.PARTS) <= set(regions), "a part that stands on no page is read by nobody"


def test_every_command_has_a_generated_section_and_every_default_in_the_help_is_the_parsers() -> None:
    sections = dict(
        re.findall(r"^## `semel (\w+)`\n(.*?)(?=^## |\Z)", read("reference/cli.md"), re.MULTILINE | re.DOTALL)
    )
    assert [
        command.name for command in COMMANDS if f"generated: command-{command.name} -->" not in sections[command.name]
    ] == []
    option = argparse.ArgumentParser().add_argument("--lease", default="30s", help="how long (default: 10s)")
    with pytest.raises(ValueError, match="names the default 10s, and it is 30s"):
        generator()._default(option)


def test_a_token_in_the_environment_does_not_get_onto_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL_CONSOLE_TOKEN", "a-secret")
    assert "a-secret" not in generator().command("console")
    assert os.environ["SEMEL_CONSOLE_TOKEN"] == "a-secret"


def test_every_environment_variable_is_in_the_reference() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src" / "semel").rglob("*.py"))
    for_tests = {"SEMEL_DEMO_SABOTAGE"}
    page = read("reference/settings.md")
    assert [
        name for name in set(re.findall(r"\"(SEMEL_[A-Z_]+)\"", source)) - for_tests if f"`{name}`" not in page
    ] == []


def test_what_to_do_is_said_for_every_error() -> None:
    advice = read("reference/errors.md").partition("\n## What to do\n")[2].partition("\n## ")[0]
    assert [name for name in errors.__all__ if f"`{name}`" not in advice] == []


def read(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def test_every_error_and_event_is_in_its_table() -> None:
    error_page = (DOCS / "reference" / "errors.md").read_text("utf-8")
    assert [name for name in errors.__all__ if f"| `{name}` |" not in error_page] == []
    event_page = (DOCS / "reference" / "events.md").read_text("utf-8")
    assert [event.name for event in EVENTS if f"| `{event.name}` |" not in event_page] == []


def test_the_architecture_page_names_what_is_there() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    there = {path.name for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"\w+\.py\b", page)) - there == set()
    parts = {path.name for path in (ROOT / "src" / "semel").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert [part for part in sorted(parts) if f"\n  {part}/ " not in page] == []


def test_every_policy_setting_is_explained() -> None:
    page = (DOCS / "reference" / "policy.md").read_text("utf-8")
    assert [f.name for f in fields(Policy) if f.init and f"\n## `{f.name}`\n" not in page] == []


def test_the_configuration_of_debezium_names_columns_of_the_outbox(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "publish-events.md").read_text("utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    settings = json.loads(block)
    with (
        closing(semel.SQLiteStore(tmp_path / "shop.db")) as store,
        closing(sqlite3.connect(tmp_path / "shop.db")) as conn,
    ):
        store.execute(InspectOutbox(1))
        columns = {row[1] for row in conn.execute("PRAGMA table_info(semel_outbox)")}
    named = [text for name, text in settings.items() if ".table.field.event" in name or name.endswith(".by.field")]
    named += [trio.split(":")[0] for trio in settings["transforms.outbox.table.fields.additional.placement"].split(",")]
    assert len(named) == 13
    assert set(named) <= columns
