"""Generate the sync twin of every async module that asks for one.

``make twins`` writes the twins, ``python tools/twins.py --check`` exits with 1 and a diff when one has drifted.

An async module asks for a twin in its first line, and may list what is called otherwise in it::

    # Twin: sync.py is generated from this file by make twins.
    # Twin: asyncmy -> pymysql
    # Twin: awaited=True -> awaited=False

The path is relative to the module. Each replacement is plain text, applied to the source wherever it stands as a whole
word; one that matches nothing is an error. Then the module is rewritten:

- ``async`` and ``await`` go, also from docstrings and comments; ``async with`` and the like go from messages as well.
- Names lose their async part: ``AsyncX`` → ``X``, ``x_async`` → ``x``, ``__aenter__`` → ``__enter__``, and the table
  ``NAMES`` below. In imports ``aio`` → ``sync`` and ``aio_x`` → ``x``.
- ``Awaitable[T]`` and ``Coroutine[Any, Any, T]`` → ``T``; ``AsyncGenerator[Y, S]`` → ``Generator[Y, S, None]``.
- ``asyncio.Lock`` and the like become their counterparts in ``threading`` and ``time``: see ``ASYNCIO``.
- Imports that are not used any more go, the rest is sorted and formatted by ruff.

A statement that differs is marked in the source, at its end or in the lines above it::

    self.loop = asyncio.get_running_loop()  # async only
    await asyncio.wait(tasks)  # sync: join(threads)

    # sync: for thread in threads:
    # sync:     thread.join()
    await asyncio.wait(tasks)

    # sync only: self.thread = threading.current_thread()
    self.count = 0

``async only`` leaves the statement out, ``sync:`` replaces it, and ``sync only:`` adds lines before it. A mark of a
``def``, an ``if`` or the like stands in the line above it. The code in a mark is taken as it is written. A mark that
belongs to no statement is an error.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import libcst as cst

ROOT: Final = Path(__file__).resolve().parents[1]

NAMES: Final = {
    "StopAsyncIteration": "StopIteration",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "push_async_callback": "callback",
    "push_async_exit": "push",
    "aclosing": "closing",
    "aclose": "close",
    "aiter": "iter",
    "anext": "next",
    "aio": "sync",
    **{f"__a{name}__": f"__{name}__" for name in ("enter", "exit", "iter", "next")},
}
"""Names that follow no rule."""

ASYNCIO: Final = {
    **dict.fromkeys(("Lock", "Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"), "threading"),
    "sleep": "time",
}
"""What replaces a name of asyncio: the same name, of this module."""

_HEAD = re.compile(r"# Twin: (?P<target>\S+\.py) is generated from this file by make twins\.\Z")
_WORD = re.compile(r"# Twin: (?P<old>.+?) ->(?: (?P<new>.*))?\Z")
_MARK = re.compile(r"# (?P<kind>async only\Z|sync only:|sync:) ?(?P<code>.*)\Z")
_LEFT = re.compile(r"# (?:async only$|sync only:|sync:).*", re.MULTILINE)
_NAME = re.compile(r"(?<!\w)\w+")
_ASYNC = re.compile(r"\basync (?=(?:def|for|with) )")
_AWAIT = re.compile(r"\bawait (?=[\w(])")
_ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)


class TwinError(Exception):
    """A source that no twin can be made of."""


class Pair(NamedTuple):
    source: Path
    target: Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate the sync twins of async modules.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 and a diff on a drift")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to work on")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    drifts = 0
    for pair in pairs(root):
        try:
            text = twin(pair.source.read_text("utf-8"), pair, root)
        except (TwinError, cst.ParserSyntaxError) as error:
            print(f"{pair.source}: {error}", file=sys.stderr)
            return 1
        there = pair.target.read_text("utf-8") if pair.target.exists() else ""
        if text == there:
            continue
        name = pair.target.relative_to(root)
        if options.check:
            drifts += 1
            lines = difflib.unified_diff(there.splitlines(True), text.splitlines(True), str(name), f"{name}, generated")
            sys.stdout.writelines(lines)
        else:
            pair.target.write_text(text, "utf-8")
            print(f"wrote {name}")
    if drifts:
        print(
            f"{drifts} generated files differ from their sources: edit the source, then run make twins", file=sys.stderr
        )
    return min(drifts, 1)


def pairs(root: Path) -> Iterator[Pair]:
    """Every module below src that asks for a twin, and the path of that twin."""
    for source in sorted((root / "src").rglob("*.py")):
        with source.open(encoding="utf-8") as file:
            head = _HEAD.match(file.readline().rstrip("\n"))
        if head:
            yield Pair(source, (source.parent / head["target"]).resolve())


def twin(text: str, pair: Pair, root: Path) -> str:
    """The sync module that this async one describes."""
    name = pair.source.relative_to(root).as_posix()
    module = cst.parse_module(_replaced(text)).visit(_ToSync())
    left = _LEFT.search(module.code)
    if left:
        raise TwinError(f"this mark belongs to no statement: {left[0]}")
    code = f"# Generated by make twins from {name}: do not edit.\n{module.code.lstrip()}"
    # The formatter leaves unused and unsorted names alone, so they go first.
    for command in (["check", "--fix-only", "--quiet", "--select", "F401,I001,RUF022,UP034"], ["format", "--quiet"]):
        code = _ruff(command, code, pair.target, root)
    return code


def _replaced(text: str) -> str:
    """The source without its lines about the twin, with the replacements that they name."""
    lines = text.splitlines()
    words = []
    while lines and (_HEAD.match(lines[0]) or _WORD.match(lines[0])):
        word = _WORD.match(lines.pop(0))
        if word:
            words.append((word["old"], word["new"] or ""))
    rest = "\n".join(lines) + "\n"
    for old, new in words:
        pattern = re.escape(old)
        pattern = (r"\b" if re.match(r"\w", old) else "") + pattern + (r"\b" if re.search(r"\w\Z", old) else "")
        rest, count = re.subn(pattern, lambda _, new=new: new, rest)  # type: ignore[misc]
        if not count:
            raise TwinError(f"{old!r}, to be replaced by {new!r}, does not occur")
    return rest


def _ruff(command: list[str], code: str, target: Path, root: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(target), "-"],
        input=code, capture_output=True, text=True, cwd=root, check=False,
    )  # fmt: skip
    if run.returncode:
        raise TwinError(f"ruff {command[0]}: {run.stderr.strip()}")
    return run.stdout


def _sync_name(name: str) -> str:
    """The name that an identifier has in the twin."""
    if name in NAMES:
        return NAMES[name]
    stem = name.lstrip("_")
    front = name[: len(name) - len(stem)]
    if stem.startswith("Async") and stem[5:6].isupper():
        return front + stem[5:]
    if name.endswith("_async") and len(stem) > len("_async"):
        return name.removesuffix("_async")
    return name


def _sync_text(text: str) -> str:
    """A docstring, comment or message, with the names that things have in the twin."""
    # aio and the other lowercase words of the table are left alone: in prose they may be about the async module.
    text = _ASYNC.sub("", text)
    return _NAME.sub(lambda match: _sync_name(match[0]) if "sync" in match[0].lower() else match[0], text)


class _ToSync(cst.CSTTransformer):
    # Statements with marks

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        node = super().on_leave(original_node, updated_node)
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            return _follow_marks(node)
        return node

    # async and await

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        return updated_node.with_changes(asynchronous=None)

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        return updated_node.with_changes(asynchronous=None)

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> cst.With:
        return updated_node.with_changes(asynchronous=None)

    def leave_CompFor(self, original_node: cst.CompFor, updated_node: cst.CompFor) -> cst.CompFor:
        return updated_node.with_changes(asynchronous=None)

    def leave_Await(self, original_node: cst.Await, updated_node: cst.Await) -> cst.BaseExpression:
        inner = updated_node.expression
        if isinstance(inner, _ATOMS):  # (await x).y is x.y
            return inner
        return inner.with_changes(lpar=[*updated_node.lpar, *inner.lpar], rpar=[*inner.rpar, *updated_node.rpar])

    # Types

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> cst.BaseExpression:
        name = original_node.value
        arguments = updated_node.slice
        if not isinstance(name, cst.Name):
            return updated_node
        if name.value in ("Awaitable", "Coroutine"):
            last = arguments[-1].slice
            assert isinstance(last, cst.Index)
            return last.value
        if name.value == "AsyncGenerator" and len(arguments) == 2:
            # The comma and its blank are the formatter's.
            nothing = cst.SubscriptElement(cst.Index(cst.Name("None")))
            return updated_node.with_changes(
                slice=[
                    *(
                        each.with_changes(comma=cst.Comma(cst.SimpleWhitespace(""), cst.SimpleWhitespace(" ")))
                        for each in arguments
                    ),
                    nothing,
                ]
            )
        return updated_node

    # Names and texts

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        owner = original_node.value
        if isinstance(owner, cst.Name) and owner.value == "asyncio":
            module = ASYNCIO.get(original_node.attr.value)
            if module:
                return updated_node.with_changes(value=cst.Name(module))
        return updated_node

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.FlattenSentinel[cst.BaseSmallStatement]:
        if [alias.evaluated_name for alias in original_node.names] == ["asyncio"]:
            # Those that are not used go with the other unused imports.
            names = ("asyncio", *sorted(set(ASYNCIO.values())))
            return cst.FlattenSentinel([cst.Import([cst.ImportAlias(cst.Name(name))]) for name in names])
        return updated_node

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        module = updated_node.module
        return updated_node if module is None else updated_node.with_changes(module=_sync_module(module))

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(value=_sync_name(updated_node.value))

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        return updated_node.with_changes(value=_sync_text(updated_node.value))

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        return updated_node.with_changes(value=_sync_text(updated_node.value))

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.Expr:
        value = updated_node.value
        if isinstance(value, cst.SimpleString):  # a docstring: its examples lose await too
            return updated_node.with_changes(value=value.with_changes(value=_AWAIT.sub("", value.value)))
        return updated_node

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        if _MARK.match(updated_node.value):
            return updated_node
        return updated_node.with_changes(value=_AWAIT.sub("", _sync_text(updated_node.value)))


def _follow_marks(node: Any) -> Any:
    """The statement, or what its marks put in its place."""
    marks: list[re.Match[str]] = []
    others: list[cst.EmptyLine] = []
    for line in node.leading_lines:
        mark = _MARK.match(line.comment.value) if line.comment else None
        if mark:
            marks.append(mark)
        else:
            others.append(line)
    if isinstance(node, cst.SimpleStatementLine) and node.trailing_whitespace.comment:
        mark = _MARK.match(node.trailing_whitespace.comment.value)
        if mark:
            marks.append(mark)
    if not marks:
        return node
    replacement = [mark["code"] for mark in marks if mark["kind"] == "sync:"]
    statements = _parsed([mark["code"] for mark in marks if mark["kind"] == "sync only:"])
    if replacement or any(mark["kind"] == "async only" for mark in marks):
        statements += _parsed(replacement)
    else:
        statements.append(node.with_changes(leading_lines=()))
    if not statements:
        return cst.RemoveFromParent()
    first = statements[0].with_changes(leading_lines=[*others, *statements[0].leading_lines])
    return cst.FlattenSentinel([first, *statements[1:]])


def _parsed(lines: list[str]) -> list[Any]:
    """The statements of the code in marks, with its comments."""
    module = cst.parse_module("\n".join(lines))
    statements: list[Any] = list(module.body)
    if statements:  # comments before the first statement belong to the module
        statements[0] = statements[0].with_changes(leading_lines=[*module.header, *statements[0].leading_lines])
    return statements


def _sync_module(module: cst.Attribute | cst.Name) -> cst.Attribute | cst.Name:
    """``semel.stores.aio_guard`` → ``semel.stores.guard``; the parts that are names of their own are done already."""
    if isinstance(module, cst.Name):
        return module.with_changes(value=module.value.removeprefix("aio_"))
    owner = module.value
    assert isinstance(owner, (cst.Attribute, cst.Name))
    return module.with_changes(
        value=_sync_module(owner), attr=module.attr.with_changes(value=module.attr.value.removeprefix("aio_"))
    )


if __name__ == "__main__":
    sys.exit(main())
