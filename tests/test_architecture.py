"""The shape of the code, held: which part may import which, what `import semel` costs, how modules look."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "semel"

# Each layer imports from layers above it in this table and from itself; parts on one line do not import each other.
LAYERS = (
    ("core",),
    ("codec",),
    ("engine",),
    ("sql",),
    ("stores",),
    ("natural", "http", "client", "messaging", "trail"),
    ("gateway", "console", "verify"),
    ("demo",),
    ("cli",),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
TOP = (*LAYERS[-3], *LAYERS[-2], *LAYERS[-1])

# What touches the world. Core is handed time, randomness and answers; it never fetches them.
WORLDLY = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "select", "selectors", "signal", "threading"),
    *("ftplib", "http", "imaplib", "poplib", "smtplib", "socket", "socketserver", "ssl", "urllib", "wsgiref", "xmlrpc"),
    *("ctypes", "dbm", "fcntl", "fileinput", "glob", "io", "mmap", "os", "pathlib", "shelve", "shutil", "sqlite3"),
    *("getpass", "logging", "platform", "subprocess", "syslog", "tempfile", "zoneinfo"),
    *("random", "secrets", "time", "uuid"),
}
# Their pure types; a ZoneInfo reads the time zone database, which is as constant as the code.
HARMLESS = {"pathlib": {"PurePath"}, "uuid": {"UUID"}, "zoneinfo": {"ZoneInfo"}}
WORLDLY_BUILTINS = frozenset({"open", "print", "input", "breakpoint"})

VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
LONGEST_MODULE = 700
MODULES_AT_FIRST = 45
"""What `import semel` may bring along, of the standard library and of its own."""
MODULES_IN_USE = 200
"""... and the first use of a guard with a store in memory."""


class Import(NamedTuple):
    line: int
    module: str  # absolute
    names: tuple[str, ...]  # of `from module import names`, else empty


def modules() -> dict[str, Path]:
    """Every module below src/semel by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("semel", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """All imports at any depth, those for the type checker only excepted. `package` resolves the relative ones."""
    for node in walk_run_time(tree):
        match node:
            case ast.Import():
                yield from (Import(node.lineno, alias.name, ()) for alias in node.names)
            case ast.ImportFrom():
                base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*base, *filter(None, [node.module])])
                yield Import(node.lineno, module, tuple(alias.name for alias in node.names))
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ):
                if name in ("import_module", "__import__"):
                    yield Import(node.lineno, module, ())


def walk_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from (other, *walk_run_time(other))
        else:
            yield from (node, *walk_run_time(node))


def targets(found: Import, known: frozenset[str]) -> Iterator[str]:
    """The modules of ours that an import reaches: `from semel.observe import events` reaches semel.observe.events."""
    if found.module.split(".")[0] != "semel":
        return
    submodules = [f"{found.module}.{name}" for name in found.names if f"{found.module}.{name}" in known]
    yield from submodules
    if len(submodules) < len(found.names) or not found.names:
        yield found.module


def part(module: str) -> str:
    """The part of the library that a module belongs to: `semel.sql.program` → sql; the root is ''."""
    name = module.partition(".")[2].partition(".")[0]
    return "cli" if name == "__main__" else name


def objection(importer: str, imported: str) -> str | None:
    """Why this import is against the arrows, or None."""
    source, target = part(importer), part(imported)
    if source in ("", "testing"):  # the root only re-exports; testing stands beside everything
        return None
    if source == "errors":
        return "errors imports nothing of ours"
    if target == "errors" or (imported == "semel.observe.events" and importer != "semel.errors"):
        return None
    if importer == "semel.observe.events":
        return "observe.events is a leaf"
    if target == "testing":
        return "testing is imported by nothing"
    if source == target:
        return None
    if source == "observe":
        below = target in RANK and RANK[target] < RANK["messaging"]
        return None if below else "a sink knows stores and what is below them"
    if source not in RANK:
        return f"{source} has no layer: give it one in LAYERS"
    if target == "":
        return None if source in TOP else "the root imports everything: name the module instead"
    if target == "observe":
        return None if source in TOP else "of observe, only observe.events may be imported"
    if target not in RANK:
        return f"{target} has no layer: give it one in LAYERS"
    if RANK[target] >= RANK[source]:
        return f"{source} must not know {target}"
    return None


def worldly(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """What a module of core must not touch: (line, name)."""
    for found in imports(tree, package):
        top = found.module.split(".")[0]
        if top == "semel":
            continue
        if top not in sys.stdlib_module_names:
            yield found.line, f"{top} is not in the standard library"
        elif top in WORLDLY and (not found.names or set(found.names) - HARMLESS.get(found.module, set())):
            yield found.line, f"imports {found.module}"
    for node in walk_run_time(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WORLDLY_BUILTINS:
            yield node.lineno, f"calls {node.func.id}()"


@cache
def parsed() -> list[tuple[str, str, Path, ast.Module]]:
    """(module, its package, path, tree) of all that is below src/semel."""
    found = []
    gc.disable()  # nothing of it is garbage, and to look at it again and again takes longer than to parse it
    for module, path in modules().items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found.append((module, package, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    gc.freeze()
    gc.enable()
    return found


@cache
def imported() -> list[tuple[str, Path, Import]]:
    """(module, path, import) of all imports below src/semel."""
    return [(module, path, found) for module, package, path, tree in parsed() for found in imports(tree, package)]


@pytest.fixture(scope="module", autouse=True)
def forget_the_trees() -> Iterator[None]:
    """They are 400,000 objects: every later garbage collection of the session would look at them."""
    yield
    parsed.cache_clear()
    imported.cache_clear()


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE.parent)}:{line}"


def report(violations: list[str]) -> None:
    assert not violations, "\n  ".join(["", *violations])


# The arrows


def test_dependencies_point_one_way() -> None:
    known = frozenset(modules())
    report(
        [
            f"{where(path, found.line)}: imports {target}: {why}"
            for module, path, found in imported()
            for target in targets(found, known)
            if (why := objection(module, target))
        ]
    )


def test_core_touches_nothing_of_the_world() -> None:
    report(
        [
            f"{where(path, line)}: {what}"
            for module, package, path, tree in parsed()
            if part(module) == "core"
            for line, what in worldly(tree, package)
        ]
    )


def test_no_imports_go_in_a_circle() -> None:
    """An import inside a function counts too: it hides a cycle and does not break it."""
    known = frozenset(modules())
    graph: dict[str, set[str]] = {module: set() for module in known}
    for module, _, found in imported():
        graph[module].update(target for target in targets(found, known) if target in known and target != module)
    report(
        [
            f"{' → '.join(cycle)}: an import cycle. Move what both need into a module that neither owns."
            for cycle in cycles(graph)
        ]
    )


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One way around for each knot of modules that reach each other, ending where it began."""
    reach = {module: reachable(graph, module) for module in graph}
    found: list[list[str]] = []
    seen: set[str] = set()
    for start in sorted(graph):
        knot = {module for module in reach[start] if start in reach[module]}
        if not knot or start in seen:
            continue
        seen |= knot
        trails = [[start]]
        while trails[0][-1] != start or len(trails[0]) == 1:  # the shortest way back, breadth first
            trail = trails.pop(0)
            ahead = sorted(graph[trail[-1]] & knot)
            trails += [[*trail, module] for module in ahead if module == start or module not in trail]
        found.append(trails[0])
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """All that `start` imports, directly or not; `start` itself only if it is on a cycle."""
    found: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += graph[module]
    return found


def test_a_cycle_is_found_and_shown() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert cycles(graph) == [["a", "b", "c", "a"]]
    graph["c"] = {"d"}
    assert cycles(graph) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("semel.core.flows", "semel.engine.sync"),
        ("semel.core.flows", "semel.stores"),
        ("semel.engine.sync", "semel.sql.program"),
        ("semel.engine.sync", "semel"),
        ("semel.sql.program", "semel.stores.sql"),
        ("semel.http.asgi", "semel.client.retry"),
        ("semel.console.app", "semel.verify"),
        ("semel.demo.service", "semel.cli.main"),
        ("semel.console.app", "semel.demo.service"),
        ("semel.stores.memory", "semel.cli"),
        ("semel.stores.memory", "semel.testing.faults"),
        ("semel.stores.memory", "semel.observe.prometheus"),
        ("semel.stores.memory", "semel.observe"),
        ("semel.http.asgi", "semel.observe.prometheus"),
        ("semel.observe.prometheus", "semel.messaging.relay"),
        ("semel.observe.events", "semel.core.keys"),
        ("semel.observe.events", "semel.observe.log"),
        ("semel.errors", "semel.core.states"),
        ("semel.errors", "semel.observe.events"),
        ("semel.novelty", "semel.core"),
    ],
)
def test_the_rule_objects(importer: str, imported: str) -> None:
    assert objection(importer, imported)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("semel.engine.sync", "semel.core.flows"),
        ("semel.stores.sql", "semel.sql.program"),
        ("semel.stores.sql", "semel.stores.memory"),
        ("semel.http.asgi", "semel.engine.aio"),
        ("semel.cli.describe", "semel.http.asgi"),
        ("semel.cli.describe", "semel.demo.service"),
        ("semel.cli.describe", "semel"),
        ("semel.demo.service", "semel"),
        ("semel.demo.service", "semel.console"),
        ("semel.__main__", "semel.cli"),
        ("semel.core.flows", "semel.errors"),
        ("semel.core.flows", "semel.observe.events"),
        ("semel.observe.prometheus", "semel.observe.events"),
        ("semel.observe.prometheus", "semel.core.ops"),
        ("semel.demo.service", "semel.observe.prometheus"),
        ("semel.observe.events", "semel.errors"),
        ("semel.testing.faults", "semel.cli"),
        ("semel", "semel.engine.sync"),
    ],
)
def test_the_rule_allows(importer: str, imported: str) -> None:
    assert objection(importer, imported) is None


def test_imports_are_seen_wherever_they_hide() -> None:
    text = """
import semel.cli as c
from . import program
from ..core import keys, flows
from .. import errors
if TYPE_CHECKING:
    from semel.stores import memory
else:
    from semel.stores import tiered
def f():
    from semel.http.asgi import X
    importlib.import_module("semel.client")
"""
    known = frozenset(
        {"semel.sql.program", "semel.core.keys", "semel.core.flows", "semel.errors", "semel.stores.tiered"}
    )
    seen = [target for found in imports(ast.parse(text), "semel.sql") for target in targets(found, known)]
    assert seen == [
        "semel.cli",
        "semel.sql.program",
        "semel.core.keys",
        "semel.core.flows",
        "semel.errors",
        "semel.stores.tiered",
        "semel.http.asgi",
        "semel.client",
    ]


def test_the_world_is_seen_wherever_it_hides() -> None:
    text = """import os.path
import hashlib
from uuid import UUID
def f():
  from uuid import uuid4
  import attrs
  open('x')
"""
    assert [line for line, _ in worldly(ast.parse(text), "semel.core")] == [1, 5, 6, 7]


# What `import semel` costs

PROBE = """
import sys
before = set(sys.modules)
import semel
print(*sorted(set(sys.modules) - before))
semel.Semel, semel.MemoryStore
print(*sorted(set(sys.modules) - before))
"""


@cache
def fresh_import() -> tuple[list[str], list[str]]:
    """Import semel in a new interpreter: the modules that came with it, and with the first use of a guard."""
    # Coverage would bring its own modules along.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTHON"))}
    run = subprocess.run([sys.executable, "-I", "-c", PROBE], env=environ, capture_output=True, text=True, check=True)
    at_first, in_use = run.stdout.splitlines()
    return at_first.split(), in_use.split()


def test_import_brings_only_the_standard_library() -> None:
    _, modules = fresh_import()
    names = {name.partition(".")[0] for name in modules if not name.startswith("_sysconfigdata")}
    assert "semel" in names
    assert [name for name in names if name != "semel" and name not in sys.stdlib_module_names] == []


def test_import_is_quick() -> None:
    """Counted, not timed: what is not imported takes no time."""
    at_first, in_use = fresh_import()
    assert len(at_first) <= MODULES_AT_FIRST, at_first
    assert len(in_use) <= MODULES_IN_USE, in_use
    assert not {"asyncio", "ssl", "sqlite3", "logging.config"} & set(at_first)


# How modules look


def test_modules_are_short_and_say_what_they_are_for() -> None:
    violations = []
    for module, _, path, tree in parsed():
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > LONGEST_MODULE:
            violations.append(f"{where(path, length)}: {length} lines, {LONGEST_MODULE} at most: split it by idea")
        if not ast.get_docstring(tree):
            violations.append(f"{where(path, 1)}: no docstring that says what it is for")
        if VAGUE_NAMES & {name.strip("_") for name in module.split(".")}:
            violations.append(f"{where(path, 1)}: a name that says nothing")
    report(violations)


def test_one_place_decides_whether_a_store_is_sync_or_async() -> None:
    """Otherwise a store may be sync to its guard and async to its outbox."""
    places = [
        module
        for module, _, _, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("iscoroutinefunction")
        and ast.unparse(node.args[0]).endswith((".execute", ".execute_many"))
    ]
    assert places == ["semel.engine.ports"]


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for _, _, path, tree in parsed():
        if not generated(path):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(where(path, node.lineno))
    report(
        [
            f"class {name} is defined in {' and '.join(found)}: give each its own name"
            for name, found in sorted(places.items())
            if len(found) > 1
        ]
    )


def test_no_base_class_leaves_a_method_to_others() -> None:
    """A base that calls a method it does not have cannot be read alone: use a Protocol, an argument or a part."""
    report(
        [
            f"{where(path, node.lineno)}: NotImplementedError: take a Protocol, an argument or composition"
            for _, _, path, tree in parsed()
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id == "NotImplementedError"
        ]
    )


def generated(path: Path) -> bool:
    """Whether `make twins` wrote this module."""
    return path.read_text(encoding="utf-8").startswith("# Generated by make twins")
