"""The public names: all there, all documented, none imported before it is asked for."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import errors
from semel.observe import events

ROOT = Path(__file__).parents[1]

PLAIN_VALUES = {"CANNOT_TELL", "INJECTED", "NOT_DONE"}


def test_every_public_name_can_be_imported() -> None:
    for name in semel.__all__:
        assert getattr(semel, name) is getattr(semel, name)
        if name in semel._HOMES:
            assert getattr(semel, name) is getattr(importlib.import_module(semel._HOMES[name]), name)


def test_every_public_name_is_documented() -> None:
    for name in sorted(set(semel.__all__) - PLAIN_VALUES):
        found = getattr(semel, name)
        assert inspect.getdoc(found), name
        if isinstance(found, type):
            assert found.__doc__, f"{name} only inherits its words"
            assert not found.__doc__.startswith(f"{name}("), f"{name} has the words of a dataclass, not its own"


def test_dir_is_complete_and_sorted() -> None:
    assert dir(semel) == sorted(semel.__all__)
    assert len(set(semel.__all__)) == len(semel.__all__)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "tools" / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_public_names_is_complete() -> None:
    page = (ROOT / "docs" / "reference" / "public-names.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (semel[\w.]*)\n(.*?)(?=^## |^<!-- end)", page, re.MULTILINE | re.DOTALL))
    listed = {module: set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) for module, text in sections.items()}
    assert listed["semel"] == set(semel._HOMES)
    assert listed["semel.errors"] == set(errors.__all__)
    assert listed == {module: set(names) for module, names in generator().public_names().items()}
    for module, names in listed.items():
        home = importlib.import_module(module)
        assert [name for name in names if not hasattr(home, name)] == [], module


SAME = {"semel.natural.aio": "semel.natural", "semel.http.quart": "semel.http.flask"}
"""Modules with the names of another one, which the page mentions there."""


@pytest.mark.parametrize("module", SAME)
def test_modules_that_are_said_to_have_the_same_names_do(module: str) -> None:
    def names(module: str) -> set[str]:  # without importing it: its framework may not be installed
        path = ROOT / "src" / module.replace(".", "/")
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))
        found = [node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)]
        return set(ast.literal_eval(found[0]))

    assert names(module) == names(SAME[module])


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
INSIDE = {("semel.stores.mysql.connections", "MySQLSettings")}
"""A page connects with PyMySQL to the database of the test run by it; a reader's own program has its own parameters."""


def test_pages_and_examples_import_public_names_only() -> None:
    public = {module: set(names) for module, names in generator().public_names().items()}
    public["semel"] = set(semel.__all__)
    public |= {module: public[same] for module, same in SAME.items()}
    public["semel.observe.events"] |= {event.__name__ for event in events.EVENTS}
    imports = re.compile(r"^ *from (semel[\w.]*) import \(?([\w, \n]+?)\)?(?: *#.*)?$", re.MULTILINE)
    for page in PAGES:
        imported = imports.findall(page.read_text("utf-8"))
        found = {(module, name.partition(" as ")[0].strip()) for module, names in imported for name in names.split(",")}
        private = {(m, n) for m, n in found if n and n not in public.get(m, ()) and f"{m}.{n}" not in public}
        assert private - INSIDE == set(), page


def test_every_error_of_the_tree_is_public() -> None:
    defined = {
        name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, errors.SemelError)
    }
    assert defined == set(errors.__all__)
    assert {"SemelError", "ConfigurationError", "RequestError", "OutcomeError", "StoreError"} <= set(semel.__all__)
    tree = errors.__doc__ or ""
    assert [name for name in defined if name not in tree] == []


def test_every_error_knows_its_hints() -> None:
    codes: dict[str, type] = {}
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert 400 <= cls.status < 600
        assert cls.code.startswith(("idempotency_", "precondition_"))
        assert isinstance(cls.retryable, bool)
        if cls.status in (409, 429, 503) and name not in ("NotResolvable", "ConditionFailed"):
            assert cls.retryable, name
        codes.setdefault(cls.code, cls)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'semel' has no attribute 'Idempotent'"):
        semel.Idempotent  # noqa: B018


def test_importing_semel_imports_only_its_errors() -> None:
    probe = "import sys, semel; print(*sorted(m for m in sys.modules if m.startswith('semel')))"
    run = subprocess.run([sys.executable, "-I", "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["semel", "semel.errors"]


def test_a_sync_program_does_not_import_asyncio() -> None:
    probe = (
        "import sys, semel; g = semel.Semel(semel.MemoryStore(), sweep_every=None); "
        "g.run('op', key='k', call=lambda: 1); print('semel.engine.aio' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-I", "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


def test_star_import_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from semel import *", names)
    assert set(semel.__all__) <= set(names)


def test_the_type_checker_and_the_run_time_agree_about_the_names() -> None:
    """What stands under TYPE_CHECKING is what ``__getattr__`` finds."""
    source = inspect.getsource(semel)
    block = source[source.index("if TYPE_CHECKING:") : source.index("__version__")]
    promised = {line.split(" as ")[1] for line in block.splitlines() if " as " in line}
    assert promised == set(semel._HOMES)


def test_the_package_is_typed() -> None:
    assert (Path(semel.__file__).parent / "py.typed").exists()


def test_public_signatures_have_resolvable_hints() -> None:
    for cls in (semel.Semel, semel.AsyncSemel):
        for name in ("once", "run", "run_outcome", "lookup", "resolve", "release", "sweep"):
            assert "return" in typing.get_type_hints(getattr(cls, name), include_extras=True)
