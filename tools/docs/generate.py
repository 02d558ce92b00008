"""The generated parts of the documentation, made from the code so that they cannot drift from it.

A page marks a region, and this script fills it::

    <!-- generated: events -->
    ...
    <!-- end -->

Run it by hand (``python tools/docs/generate.py``), or let ``make docs`` do so. A test
holds that the committed pages are what the script would write now. What is not in a region is written by people.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import runpy
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from unittest import mock

import semel
from semel import errors
from semel.cli.app import COMMANDS, make_parser
from semel.cli.commands import URLS
from semel.core import policy, states
from semel.messaging.brokers.urls import BROKER_KINDS
from semel.observe import events

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
_REGION: Final = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LEVELS: Final = {10: "debug", 20: "info", 30: "warning", 40: "error"}


def filled(text: str) -> str:
    """A page with its regions made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in PARTS:
            raise KeyError(f"no generated part is called {name!r}; there are: {', '.join(sorted(PARTS))}")
        return f"{match[1]}\n{PARTS[name]().strip()}\n\n{match[3]}"

    return _REGION.sub(fill, text)


def stale() -> list[tuple[Path, str]]:
    """The pages that are not what they should be, and what they should be."""
    pages = [(page, page.read_text("utf-8")) for page in sorted(DOCS.rglob("*.md"))]
    return [(page, fresh) for page, text in pages if (fresh := filled(text)) != text]


# -- the parts --------------------------------------------------------------------------------------------------------


def diagram() -> str:
    return f"```mermaid\n{states.mermaid()}\n```"


def transitions() -> str:
    rows = []
    for (state, move), target in states.TRANSITIONS.items():
        who = "the owner, by its token" if move in states.OWNER_MOVES else _WHO[move]
        rows.append(f"| {state.name} | {move.value} | {target.name} | {who} |")
    return _table("from | move | to | whose move it is", rows)


_WHO: Final = {
    states.Move.CLAIM: "any caller",
    states.Move.LEASE_ENDS: "the store's clock",
    states.Move.TAKE_OVER: "any caller whose policy allows it",
    states.Move.REFUSE: "any caller, or a sweep",
    states.Move.EXPIRE: "the store's clock",
    states.Move.RESOLVE_DONE: "a person, or a program that looked",
    states.Move.RESOLVE_ABSENT: "a person, or a program that looked",
    states.Move.FREE: "a person who wants it to run again",
}


EVERY_EVENT: Final = {f.name for f in fields(events.Event)}


def event_table() -> str:
    rows = []
    for event in events.EVENTS:
        own = ", ".join(f"`{f.name}`" for f in fields(event) if f.name not in EVERY_EVENT)
        level, when = _LEVELS[event.level], _summary(event)
        rows.append(f"| `{event.name}` | {event.source} | `{event.__name__}` | {level} | {own} | {when} |")
    return _table("name | source | class | level | its own fields | when", rows)


def error_tree() -> str:
    drawing = (errors.__doc__ or "").split("::\n\n", 1)[1].split("\n\nEvery error", 1)[0]
    return f"```text\n{inspect.cleandoc(drawing)}\n```"


def error_table() -> str:
    rows = []
    for name in sorted(errors.__all__, key=lambda n: _lineage(getattr(errors, n))):
        error = getattr(errors, name)
        may = "yes" if error.retryable else "no"
        rows.append(f"| `{name}` | {error.status} | `{error.code}` | {may} | {_summary(error)} |")
    return _table("error | HTTP status | code | may be sent again | meaning", rows)


def _lineage(cls: type) -> list[int]:
    order = {c: i for i, c in enumerate(vars(errors).values()) if isinstance(c, type)}
    return [order[c] for c in reversed(cls.__mro__) if c in order and issubclass(c, errors.SemelError)]


PLAIN_NONE: Final = ("max_run_time", "recover", "reject_expired_for")
"""Settings whose None means what it says, and not "as the guarantee says"."""


def policy_table() -> str:
    rows = []
    for f in fields(policy.Policy):
        if f.init:
            default = "as the guarantee says" if f.default is None and f.name not in PLAIN_NONE else f"`{f.default!r}`"
            rows.append(f"| `{f.name}` | {default} |")
    return _table("setting | default", rows)


def api() -> str:
    listed = {name for _, names in GROUPS for name in names}
    if listed != set(semel.__all__):
        raise KeyError(f"GROUPS and semel.__all__ differ in {sorted(listed ^ set(semel.__all__))}")
    parts = []
    for title, names in GROUPS:
        parts.append(f"## {title}")
        if names == _CAUGHT:
            parts.append("The errors that programs catch: " + ", ".join(f"`{name}`" for name in sorted(names)) + ".")
            parts.append("All of them are in `semel.errors`: see [the page of errors](errors.md).")
        else:
            parts += [_described(name) for name in names]
    return "\n\n".join(parts)


_CAUGHT: Final = tuple(name for name in errors.__all__ if name in semel.__all__)

GROUPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("Guards", ("Semel", "AsyncSemel")),
    ("Stores", ("MemoryStore", "SQLiteStore", "PostgresStore", "MySQLStore", "RedisStore", "DynamoDBStore",
                "AsyncMemoryStore", "AsyncSQLiteStore", "AsyncPostgresStore", "AsyncMySQLStore", "AsyncRedisStore",
                "AsyncDynamoDBStore",
                "TieredStore", "AsyncTieredStore", "RedisCache", "AsyncRedisCache",
                "Store", "AsyncStore")),
    ("Stores by URL", ("open_store", "open_async_store", "migrate_store")),
    ("Policies", ("Policy", "Wait", "Quota")),
    ("Inside a handler", ("Operation", "AsyncOperation", "current_operation", "INJECTED")),
    ("Keys on the way out", ("outgoing_call", "OutgoingCall", "outgoing_headers", "outgoing_metadata", "outgoing_key",
                             "derive_key", "in_context")),
    ("Recovery and resumption", ("Recovered", "NOT_DONE", "CANNOT_TELL", "Resumer", "AsyncResumer", "ResumeReport")),
    ("What comes back", ("Outcome", "StatementResult", "Record", "State", "Swept", "Listing", "Size")),
    ("Keys, results, encryption", ("KeyFormat", "Serializer", "Codec", "KeyRing")),
    ("Events", ("log_events",)),
    ("Errors", _CAUGHT),
)  # fmt: skip


TWINS: Final = {"AsyncSemel": "Semel", "AsyncOperation": "Operation", "AsyncResumer": "Resumer"}
"""Their methods are described once."""
SAID_TWICE: Final = ("once", "capture")
WITHOUT_MEMBERS: Final = {name for _, names in GROUPS[1:2] for name in names if name not in ("Store", "AsyncStore")}
"""The stores: what they do is described at Store."""
MADE_BY_US: Final = {"Operation", "AsyncOperation", "Entry", "JournalReport", "Receipt"}
FOR_ADAPTERS: Final = {
    "begin", "compensate", "declared_call", "Semel.emit", "AsyncSemel.emit", "in_this_loop",
    "journal", "leave", "make_call", "perform", "undoes",
}  # fmt: skip
"""Members of guards and handles that our own adapters use, and programs have no use for."""


MODULES: Final = {
    "client": ("semel.client", *(f"semel.client.{each}" for each in ("httpx", "requests", "aiohttp", "urllib3"))),
    "api-http": tuple(f"semel.http.{each}" for each in ("fastapi", "litestar", "django", "flask", "asgi", "wsgi",
                                                        "describe")),
    "api-messaging": ("semel.messaging", "semel.messaging.ports", *(f"semel.messaging.brokers.{each}" for each in
                      ("kafka", "rabbitmq", "nats", "redis_streams", "sqs", "sns", "webhook")),
                      "semel.messaging.faststream", "semel.messaging.dynamodb"),
    "api-natural": ("semel.natural",),
    "api-observe": ("semel.observe.events", "semel.observe.prometheus", "semel.observe.otel", "semel.observe.structlog",
                    "semel.trail", "semel.console"),
    "api-testing": ("semel.testing.plugin", "semel.testing.faulty", "semel.testing.crashpoints",
                    "semel.testing.conformance", "semel.testing.brokers", "semel.testing.natural"),
}  # fmt: skip
"""The public modules whose names are described on a page, by the name of the region. ``semel`` itself: see ``api``."""


def modules(region: str) -> str:
    parts = []
    homes: dict[Any, str] = {}
    for module in MODULES[region]:
        home = import_module(module)
        parts.append(f"## {module}")
        again = []
        for name in public_names()[module]:
            thing = getattr(home, name)
            if homes.setdefault(getattr(thing, "__func__", id(thing)), module) == module:
                parts.append(_described(name, home))
            else:
                again.append(name)
        if again:
            first = homes[getattr(thing := getattr(home, again[0]), "__func__", id(thing))]
            parts.append(f"{', '.join(f'`{name}`' for name in again)}: see `{first}`.")
    return "\n\n".join(parts)


def _described(name: str, home: types.ModuleType = semel) -> str:
    thing = inspect.unwrap(getattr(home, name))
    if not isinstance(thing, (type, types.FunctionType, types.MethodType)):
        return f"### {name}\n\n{_prose(_constant_doc(home.__name__, name))}"
    signature = "" if name in MADE_BY_US else _signature(name, thing)
    parts = [f"### {name}", signature, _prose(thing.__doc__ or "")]
    if isinstance(thing, type):
        parts += ["" if name in MADE_BY_US else _prose(_own_doc(thing, "__init__")), _attributes(thing)]
        for member, value in [] if name in WITHOUT_MEMBERS else _members(thing):
            if name in TWINS and hasattr(getattr(semel, TWINS[name]), member) and member not in SAID_TWICE:
                continue
            heading = f"#### {name}.{member}"
            if isinstance(value, property):
                parts += [heading, _prose(value.__doc__ or "")]
            else:
                parts += [heading, _signature(member, value), _prose(value.__doc__ or "")]
    return "\n\n".join(filter(None, parts))


def _members(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties, its own first, then those of its bases of ours."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("semel."):
            for name, value in vars(base).items():
                plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if not name.startswith("_") and isinstance(plain, (types.FunctionType, property)):
                    found.setdefault(name, plain)
    return [
        (name, value)
        for name, value in found.items()
        if value.__doc__ and FOR_ADAPTERS.isdisjoint({name, f"{cls.__name__}.{name}"})
    ]


def _attributes(cls: type) -> str:
    """The texts below a class's attributes, as a list. Without fields of a dataclass that callers cannot set."""
    computed = {field.name for field in fields(cls) if not field.init} if is_dataclass(cls) else set()
    docs = _attribute_docs(cls)
    return "\n".join(f"- `{name}`: {text}" for name, text in docs.items() if name[0] != "_" and name not in computed)


def _attribute_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, text in pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                found[name] = _one_line(doc)
    return found


def _own_doc(cls: type, name: str) -> str:
    """The text of a method, which may be inherited from a base of ours."""
    ours = (vars(base) for base in cls.__mro__ if base.__module__.startswith("semel."))
    function = next((members[name] for members in ours if name in members), None)
    return (getattr(function, "__doc__", None) or "") if isinstance(function, types.FunctionType) else ""


def _constant_doc(package: str, name: str) -> str:
    """Return the text below the assignment of a constant, from whichever module of the package defines it."""
    pattern = re.compile(rf'^{name}\b(?:(?!\n\n).)*?\n"""(.*?)"""', re.MULTILINE | re.DOTALL)
    for module, loaded in sorted(sys.modules.items()):
        # A folder of SQL files is a module without a file, if something has read its files as resources.
        ours = f"{module}.".startswith(f"{package}.") and getattr(loaded, "__file__", None)
        if ours and (match := pattern.search(inspect.getsource(loaded))):
            return match[1]
    return ""


def _signature(name: str, thing: Any) -> str:
    if isinstance(thing, type) and (
        getattr(thing, "_is_protocol", False) or issubclass(thing, (BaseException, int, Enum))
    ):
        return ""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    shown = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    words = [_parameter(p) for p in shown]
    if keyword := next((i for i, p in enumerate(shown) if p.kind is p.KEYWORD_ONLY), None):
        words.insert(keyword, "*")
    elif keyword == 0:
        words.insert(0, "*")
    returns = signature.return_annotation
    arrow = (
        "" if returns in (inspect.Signature.empty, None, "None") or isinstance(thing, type) else f" -> {_type(returns)}"
    )
    prefix = "async " if inspect.iscoroutinefunction(thing) else ""
    line = f"{prefix}{name}({', '.join(words)}){arrow}"
    if len(line) > 100:
        line = f"{prefix}{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"
    return f"```text\n{line}\n```"


def _parameter(p: inspect.Parameter) -> str:
    text: str = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(p.kind.name, "") + p.name
    if p.annotation is not p.empty:
        text += f": {_type(p.annotation)}"
    if p.default is not p.empty:
        shown = p.default.__name__ if callable(p.default) and hasattr(p.default, "__name__") else repr(p.default)
        if " object at 0x" in shown or len(shown) > 60:
            shown = "..."
        text += f" = {shown}" if p.annotation is not p.empty else f"={shown}"
    return text


def _type(annotation: Any) -> str:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:semel\.[\w.]+|typing|collections\.abc|events)\.", "", text).strip("'\"")


def _summary(thing: Any) -> str:
    return _ticks(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].replace("\n", " "))


def _prose(doc: str) -> str:
    """A docstring as Markdown: single back-ticks, and parameters as a list."""
    text = _ticks(inspect.cleandoc(doc)) if doc else ""
    text = re.sub(r"^:param (\w+): *", r"- `\1`: ", text, flags=re.MULTILINE)
    lead, dash, items = text.partition("- `")  # Markdown wants a blank line before a list
    return _code_blocks(f"{lead.rstrip()}\n\n{dash}{items}".strip() if dash and lead else text)


def _code_blocks(text: str) -> str:
    """``::`` and an indented block become a fence."""
    out: list[str] = []
    inside = False
    for line in text.split("\n"):
        if line.strip() == "::":
            out.append("```text")
            inside = True
        elif inside and line and not line.startswith(" "):
            while out[-1] == "":
                out.pop()
            out += ["```", "", line]
            inside = False
        elif not (inside and line == "" and out[-1] == "```text"):
            out.append(line[4:] if inside else line)
    return "\n".join([*out, "```"] if inside else out)


def _ticks(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


# -- settings ---------------------------------------------------------------------------------------------------------

SETTINGS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("Guards", "semel", ("Semel", "Quota", "Wait", "Resumer")),
    ("What is stored", "semel", ("Codec", "KeyRing")),
    ("Stores", "semel", ("MemoryStore", "SQLiteStore", "PostgresStore", "AsyncPostgresStore", "MySQLStore",
                         "RedisStore", "DynamoDBStore", "TieredStore", "RedisCache")),
    ("HTTP: the application", "semel.http.fastapi", ("install",)),
    ("HTTP: the middleware", "semel.http.asgi", ("ASGIMiddleware",)),
    ("HTTP: a route", "semel.http.contract.rules", ("Idempotent", "Conditional", "Natural")),
    ("Clients", "semel.client.httpx", ("IdempotencyTransport",)),
    ("Retries and the journal of a client", "semel.client", ("Retry", "RetryQuota", "Journal")),
    ("Messages", "semel.messaging", ("AsyncOutbox", "AsyncRelay", "AsyncInbox", "AsyncInbox.handler")),
    *((f"Brokers: {kind.name}", kind.broker.partition(":")[0],
       tuple(each.partition(":")[2] for each in (kind.broker, kind.source) if each)) for kind in BROKER_KINDS),
    ("Metrics", "semel.observe.prometheus", ("PrometheusMetrics", "StoreMetrics")),
    ("Traces", "semel.observe.otel", ("OpenTelemetryMetrics", "OpenTelemetrySpans", "OpenTelemetryStoreMetrics")),
    ("The history of events", "semel.trail", ("Trail",)),
    ("The console", "semel.console", ("Console",)),
)  # fmt: skip
"""What has settings. The async or sync twin of each has the same ones."""
OBVIOUS: Final = {"protect", "policy", "changes", "precondition"}
"""Fields that callers do not set themselves."""
VARIABLES: Final = (
    ("semel.cli.commands", "STORE_VARIABLE"), ("semel.cli.messages.relay", "BROKER_VARIABLE"),
    ("semel.cli.console", "TOKEN_VARIABLE"), ("semel.messaging.brokers.webhook", "SECRET_VARIABLE"),
)  # fmt: skip
"""The constants that name an environment variable which Semel reads."""


def settings() -> str:
    parts = []
    for title, module, names in SETTINGS:
        parts.append(f"## {title}")
        for name in names:
            thing: Any = import_module(module)
            for step in name.split("."):
                thing = getattr(thing, step)
            shown = f"{thing.decorator}()" if hasattr(thing, "decorator") else name
            table = _table("setting | default | means", _setting_rows(name, thing))
            parts.append(f"### `{shown}`\n\n{_summary(thing)}\n\n{table}")
    return "\n\n".join(parts)


def _setting_rows(name: str, thing: Any) -> list[str]:
    if is_dataclass(thing) and thing.__init__.__doc__ is None:
        docs = {k: v for base in reversed(thing.__mro__[:-1]) for k, v in _attribute_docs(base).items()}
        own = [f for f in fields(thing) if f.name in thing.__annotations__ and f.init and f.name not in OBVIOUS]
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in own}
    else:
        text = f"{thing.__doc__ or ''}\n\n{(thing.__init__.__doc__ or '') if isinstance(thing, type) else ''}"
        found = re.findall(r":param (\w+): *(.*?)(?=\n *:param|\n\n|\Z)", text, re.DOTALL)
        docs = {parameter: _one_line(words) for parameter, words in found}
        parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
        unset: dict[Any, Any] = {inspect.Parameter.VAR_KEYWORD: {}}
        defaults = {p.name: unset.get(p.kind, MISSING) if p.default is p.empty else p.default for p in parameters}
    if silent := [each for each, value in defaults.items() if each not in docs and value is not MISSING]:
        raise KeyError(f"settings of {name} say nothing: {', '.join(silent)}; give each a :param")
    return [
        f"| `{name}` | {_shown_default(value)} | {docs[name]} |" for name, value in defaults.items() if name in docs
    ]


def _shown_default(value: Any) -> str:
    if value is MISSING:
        return "required"
    if isinstance(value, frozenset):
        return "the statuses from 500, and others" if 500 in value else ", ".join(f"`{v}`" for v in sorted(value))
    text = repr(getattr(value, "name", value)) if not callable(value) else f"{value.__name__}"
    return f"`{text}`" if len(text) < 40 else "…"


def environment() -> str:
    rows = [f"| `{getattr(import_module(m), name)}` | {_one_line(_constant_doc(m, name))} |" for m, name in VARIABLES]
    return _table("variable | means", rows)


# -- the command line -------------------------------------------------------------------------------------------------

EXIT_CODES: Final = {
    "exit-codes": ("semel.cli.commands", ("OK", "FAILED", "USAGE", "STORE", "INTERRUPTED")),
    "exit-codes-once": ("semel.cli.once", ("REUSED", "BUSY", "DOUBTFUL", "NOT_RUN", "NOT_EXECUTABLE", "NOT_FOUND")),
}
"""The constants of exit codes, by the name of their table."""
_DEFAULT: Final = re.compile(r" ?\(default: (.*?)\)(?!s)")


def exit_codes(table: str) -> str:
    module, names = EXIT_CODES[table]
    home = import_module(module)
    rows = [f"| {getattr(home, name)} | {_one_line(_constant_doc(module, name))} |" for name in names]
    return _table("exit code | means", rows)


def command(name: str) -> str:
    """How a command is called, and a table of its arguments and options; of each of its actions, if it has some."""
    parser = _commands()[name]
    actions = _subparsers(parser)
    if actions is None:
        return _usage(parser)
    words = {choice.dest: choice.help or "" for choice in actions._choices_actions}
    return "\n\n".join(
        f"### `semel {name} {action}`\n\n{_sentence(words[action])}\n\n{_usage(below)}"
        for action, below in actions.choices.items()
    )


def _commands() -> dict[str, argparse.ArgumentParser]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
    with mock.patch.dict(os.environ, outside, clear=True):  # some are the defaults of options
        found = _subparsers(make_parser())
    return dict(found.choices) if found else {}


def _subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
    return next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)


def _usage(parser: argparse.ArgumentParser) -> str:
    shown = [action for action in parser._actions if action.dest != "help"]
    shown.sort(key=lambda action: bool(action.option_strings))
    positional = [_spelling(a) + ("…" if a.nargs == "+" else "") for a in shown if not a.option_strings]
    required = [_spelling(action) for action in shown if action.option_strings and action.required]
    optional = ["[options]"] if len(shown) > len(positional) else []
    line = " ".join([parser.prog, *positional, *required, *optional]).replace("\\", "")
    line += " -- command args…" if parser.prog == "semel once" else ""
    rows = [f"| `{_spelling(action)}` | {_default(action)} | {_meaning(parser, action)} |" for action in shown]
    return f"```text\n{line}\n```\n\n{_table('argument | default | means', rows)}" if rows else f"```text\n{line}\n```"


def _spelling(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or "\\|".join(map(str, action.choices or ())))
    if action.nargs == "?":
        value = f"[{value}]"
    return f"{action.option_strings[-1]} {value}".strip() if action.option_strings else value


def _default(action: argparse.Action) -> str:
    """The default as the help names it, which must be the parser's; else the parser's own."""
    if action.required and action.option_strings:
        return "required"
    value = f"{action.default:g}" if isinstance(action.default, float) else str(action.default or "")
    named = _DEFAULT.search(argparse.HelpFormatter("semel")._expand_help(action))
    if named is None:
        return f"`{value}`" if value not in ("", "0s") else ""
    if value in ("", "."):
        return named[1]
    if named[1] != value:
        raise ValueError(f"the help of {action.option_strings} names the default {named[1]}, and it is {value}")
    return f"`{value}`"


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = argparse.HelpFormatter("semel")._expand_help(action) if action.help else ""
    text = _DEFAULT.sub("", text).replace(URLS, "[its URL](#stores-by-url)").replace("|", "\\|")
    text = text.replace("the stores: [its URL](", "the stores: [their URLs](")
    text = re.sub(r"(?<![\w`])(--[a-z][a-z-]*|SEMEL_[A-Z_]+)", r"`\1`", text)
    if not text:
        raise ValueError(f"{parser.prog}: {_spelling(action)} has no help")
    return text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _one_line(text: str) -> str:
    return " ".join(_ticks(text).split())


def partial_failures() -> str:
    table = runpy.run_path(str(ROOT / "tests" / "partial_failures" / "table.py"))  # the tests prove every cell of it
    parts = []
    for mode in table["Mode"]:
        rows = []
        for cell in table["cells_of"](mode):
            again = ("after the lease: " if cell.waits else "") + cell.retry.value
            effects = str(cell.effects) if cell.effects == 1 else f"**{cell.effects}**"
            rows.append(f"| {cell.moment.value} | {cell.first.value} | {again} | {effects} | {cell.state.name} |")
        words = mode.value[0].upper() + mode.value[1:]
        head = "failure | the first caller gets | the same call again | effects | record"
        parts.append(f"## {mode.name.replace('_', ' ').capitalize()}\n\n{words}.\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def store_failures() -> str:
    table = runpy.run_path(str(ROOT / "tests" / "partial_failures" / "by_store.py"))  # names the test of each claim
    head = "what holds | what does not | what to set"
    rows = lambda claims: [f"| {case} | {c.holds} | {c.breaks} | {c.remedy} |" for case, c in claims.items()]  # noqa: E731
    parts = [f"### In every store\n\n{_table(f'failure | {head}', rows(table['EVERYWHERE']))}"]
    parts += [f"### {name}\n\n{_table(f'store | {head}', rows(by))}" for name, by in table["BY_STORE"].items()]
    return "\n\n".join(parts)


def message_pitfalls() -> str:
    table = runpy.run_path(str(ROOT / "tests" / "messaging" / "pitfalls.py"))  # names the tests of each row
    parts = []
    for name, pitfalls in table["PITFALLS"].items():
        rows = [f"| {mistake} | {p.effect} | {p.instead} |" for mistake, p in pitfalls.items()]
        parts.append(f"## {name}\n\n{_table('the mistake | what happens | what Semel does', rows)}")
    return "\n\n".join(parts)


def schema(dialect: str) -> str:
    folder = ROOT / "src" / "semel" / "sql" / "schema" / dialect
    parts = [
        f"`{file.name}`:\n\n```sql\n{file.read_text('utf-8').strip()}\n```" for file in sorted(folder.glob("*.sql"))
    ]
    return "\n\n".join(parts)


def _table(head: str, rows: list[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + " --- |" * columns, *rows])


_STORE_SETUP: Final = ("check", "check_async", "migrate", "migrate_async")
PUBLIC: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("semel", "What programs use. Everything is imported when it is first used.", ()),
    ("semel.errors", "The whole [tree of errors](errors.md).", ()),
    ("semel.http.fastapi", "FastAPI and Starlette.", ()),
    ("semel.http.litestar", "Litestar.", ()),
    ("semel.http.flask", "Flask. `semel.http.quart` has the same names, for Quart.", ()),
    ("semel.http.django", "Django and Django REST framework.", ()),
    ("semel.http.asgi", "Any ASGI application.", ()),
    ("semel.http.wsgi", "Any WSGI application.", ()),
    ("semel.http.describe", "OpenAPI documents.", ()),
    ("semel.http.contract.rules", "Defaults of `released=` and `replay_headers=`, to extend.",
     ("RELEASED", "REPLAY_HEADERS")),
    ("semel.http.contract.responses", "The error responses, for other adapters.", ("problem",)),
    ("semel.client", "[Clients that keep their keys](../how-to/use-the-client.md).", ()),
    ("semel.client.httpx", "The client for httpx.", ()),
    ("semel.client.requests", "The client for requests.", ()),
    ("semel.client.aiohttp", "The client for aiohttp.", ()),
    ("semel.client.urllib3", "The client for urllib3.", ()),
    ("semel.messaging", "[Messages](../how-to/publish-events.md) that commit with your rows.", ()),
    ("semel.messaging.ports", "What the adapter of a broker implements and returns.", (
        "Broker", "BrokerDown", "Capabilities", "Delivery", "Refused", "SeekableSource", "Sent", "Source", "TryAgain",
    )),
    ("semel.messaging.brokers.kafka", "Kafka.", ("KafkaBroker", "KafkaSource")),
    ("semel.messaging.brokers.rabbitmq", "RabbitMQ.", ("RabbitMQBroker", "RabbitMQSource")),
    ("semel.messaging.brokers.nats", "NATS JetStream. All brokers: [which one](../how-to/brokers.md).",
     ("NATSBroker", "NATSSource")),
    ("semel.messaging.brokers.redis_streams", "Redis Streams.", ("RedisStreamsBroker", "RedisStreamsSource")),
    ("semel.messaging.brokers.sqs", "Amazon SQS.", ("SQSBroker", "SQSSource")),
    ("semel.messaging.brokers.sns", "Amazon SNS.", ("SNSBroker",)),
    ("semel.messaging.brokers.webhook", "Webhooks.", ("WebhookBroker",)),
    ("semel.messaging.faststream", "[FastStream](../how-to/faststream.md).", ()),
    ("semel.messaging.dynamodb", "Messages that are written with the completion of an operation on DynamoDB.", ()),
    ("semel.trail", "[The history of events](../how-to/keep-a-history.md).", ()),
    ("semel.console", "[The web console](../how-to/console.md).", ()),
    ("semel.natural", "Changes that a repeat does not make again. `semel.natural.aio`: the same, awaited.", ()),
    ("semel.stores.sqlite", "Tables in SQLite.", ("migrate",)),
    ("semel.stores.postgres", "Tables in PostgreSQL.", _STORE_SETUP),
    ("semel.stores.mysql", "Tables in MySQL and MariaDB.", _STORE_SETUP),
    ("semel.stores.dynamodb", "The table in DynamoDB.",
     ("check", "cloudformation", "iam_policy", "migrate", "terraform")),
    ("semel.observe.events", "[Events](events.md). The classes are listed there.",
     ("EVENTS", "Event", "EventHook", "EventHooks")),
    ("semel.observe.structlog", "[Logs events](../how-to/watch-events.md#log-them) by structlog.",
     ("structlog_events",)),
    ("semel.observe.otel", "[Counts and traces](../how-to/tracing.md) with OpenTelemetry.",
     ("OpenTelemetryMetrics", "OpenTelemetrySpans", "OpenTelemetryStoreMetrics")),
    ("semel.observe.prometheus", "[Counts events](../how-to/metrics.md).", ("PrometheusMetrics", "StoreMetrics")),
    ("semel.core.ops", "What a [store of your own](stores.md#the-contract-of-a-store) executes and returns.", (
        "Op", "Claim", "Claimed", "Existing", "Record", "Renew", "Complete", "CompleteWith", "NotWritten", "Release",
        "SaveStep", "Lookup", "Resolve", "Sweep", "Swept", "Count", "Resumable", "Abandoned", "Page",
        "ListRecords", "Listing", "Measure", "Size",
    )),
    ("semel.core.states", "[The table of states](states.md).", ("State", "Move", "Takeover", "TRANSITIONS")),
    ("semel.testing.conformance", "[Proves a store](../how-to/prove-a-store.md).", (
        "FAMILIES", "AsyncStage", "AsyncStoreSuite", "Batch", "Elapse", "Elsewhere", "Linger", "ManualClock", "Script",
        "Stage", "StoreSuite", "Together", "WaitForChange", "async_machine_for", "check", "machine_for", "play",
        "play_async",
    )),
    ("semel.testing.brokers", "[Proves a broker's adapter](../how-to/brokers.md#prove-an-adapter-of-your-own).", ()),
    ("semel.testing.crashpoints", "[Kills an operation](../how-to/crash-your-operation.md) at every point.", ()),
    ("semel.testing.faulty", "Stores that fail on purpose.", ()),
    ("semel.testing.natural", "Proves that a route is natural.", ()),
    ("semel.testing.plugin", "Fixtures for pytest.", ()),
    ("semel.cli", "The command line.", ("main",)),
)  # fmt: skip
"""Every public module, what it is for, and its public names; empty: its ``__all__``."""


def public_names() -> dict[str, tuple[str, ...]]:
    """The public names by module; those of ``semel`` without the errors, which ``semel.errors`` lists."""
    found = {module: names or tuple(import_module(module).__all__) for module, _, names in PUBLIC}
    found["semel"] = tuple(name for name in found["semel"] if name not in errors.__all__)
    return found


def public_table() -> str:
    parts = []
    for module, words, _ in PUBLIC:
        rows = [
            f"| `{name}` | {_first_sentence(module, name)} |" for name in sorted(public_names()[module], key=str.lower)
        ]
        parts += [f"## {module}", words, _table("name | what it is", rows)]
    return "\n\n".join(parts)


def _first_sentence(module: str, name: str) -> str:
    """Of a docstring, or of the text below a constant."""
    thing = inspect.unwrap(getattr(import_module(module), name))
    doc = thing.__doc__ if isinstance(thing, (type, types.FunctionType, types.MethodType)) else None
    if doc is None:
        doc = _constant_doc(module, name)
    text = " ".join(_ticks(inspect.cleandoc(doc).partition("\n\n")[0]).split())
    if not text:
        raise KeyError(f"{module}.{name} is public and says nothing: give it a docstring")
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].rstrip(":.") + "."


PARTS: Final[dict[str, Callable[[], str]]] = {
    "diagram": diagram,
    "transitions": transitions,
    "events": event_table,
    "error-tree": error_tree,
    "error-table": error_table,
    "policy": policy_table,
    "api": api,
    "public-names": public_table,
    "partial-failures": partial_failures,
    "store-failures": store_failures,
    "message-pitfalls": message_pitfalls,
    "schema-postgres": lambda: schema("postgres"),
    "schema-mysql": lambda: schema("mysql"),
    "schema-sqlite": lambda: schema("sqlite"),
    **{region: partial(modules, region) for region in MODULES},
    "settings": settings,
    "environment": environment,
    **{f"command-{each.name}": partial(command, each.name) for each in COMMANDS},
    **{table: partial(exit_codes, table) for table in EXIT_CODES},
}


def main() -> int:
    pages = stale()
    for page, text in pages:
        page.write_text(text, "utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
