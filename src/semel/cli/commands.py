"""What the commands share: what a command is, its exit codes, Ctrl-C as a flag, safe output, and what it works on.

A command works on a store, a record, or an object of the user's service. Reading never creates anything.
"""

from __future__ import annotations

import argparse
import getpass
import importlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from semel.core.policy import duration
from semel.engine.audit_log import log_act
from semel.errors import ConfigurationError, NotMigrated, NotResolvable, RequestError, SemelError, StoreError

if TYPE_CHECKING:
    from semel.stores.aio_guard import AsyncSemel
    from semel.stores.guard import Semel

OK: Final = 0
"""Done."""
FAILED: Final = 1
"""The answer is no: a check failed, a verdict is not clean, there is no such record, it cannot be resolved."""
USAGE: Final = 2
"""Bad usage or set-up: an option, a URL, a key, a driver that is not installed, a database without Semel's tables."""
STORE: Final = 3
"""The store could not be reached, or refused."""
INTERRUPTED: Final = 130
"""Interrupted by Ctrl-C."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
NOTICED_WITHIN: Final = 0.05
"""Seconds."""
STORE_VARIABLE: Final = "SEMEL_STORE"
"""The URL of the store, for commands that are called without one. It keeps passwords out of ``ps``."""

URLS: Final = (
    "sqlite:///app.db, postgresql://…, mysql://… or mariadb://…, redis://… (rediss:// with TLS, redis+sentinel://…, "
    "redis+cluster://…, unix:///path), dynamodb://region/table, tiered:postgresql://…,redis://…, memory:"
)
"""The URLs of stores, for the help."""
DEFAULTS: Final = ("app", "application")
"""Where ``load`` looks when only a module is named."""


class Command(NamedTuple):
    """A command. It raises ``SemelError`` and never prints an error itself.

    Its module imports what it needs inside ``run``, so that ``--version`` and the help stay fast.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code."""


def exit_code(error: SemelError) -> int:
    """The exit code for an error."""
    if isinstance(error, StoreError):
        return STORE
    if isinstance(error, NotResolvable):
        return FAILED
    return USAGE if isinstance(error, (ConfigurationError, RequestError)) else FAILED


def positive(text: str) -> int:
    """The type of an argument that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def port_number(text: str) -> int:
    """The type of an argument that is a port."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return number


def printable(text: str) -> str:
    """Escape what is not printable, except line ends: what a store holds must not control the user's terminal.

    That includes marks that change the direction of text. Inside a JSON text the escapes mean the same characters.
    """
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def as_json(value: Any) -> str:
    """The value as JSON in one line, readable and safe to print."""
    return printable(json.dumps(value, ensure_ascii=False, default=repr))


def say(text: str, file: TextIO | None = None) -> None:
    """Print text that comes from a store."""
    print(printable(text), file=file, flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows, the first of which is the head, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def confirmed(question: str, args: argparse.Namespace, *, needs_yes: bool = False) -> bool:
    """Ask a person whether to go on. ``--yes`` answers in advance, and a script, which has no terminal, goes on.

    :param needs_yes: a script has to pass ``--yes``: this deletes for good.
    """
    if args.yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        if not needs_yes:
            return True
        raise ConfigurationError(
            f"there is no terminal to ask: {question} Pass --yes to do it, or --dry-run to see what would be done"
        )
    # A handler that only sets a flag would leave Ctrl-C without an effect until the answer is given.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        print(printable(f"{question} [y/N] "), end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    finally:
        signal.signal(signal.SIGINT, before)


def add_caution(parser: argparse.ArgumentParser) -> None:
    """Add what every command has that changes by hand what is stored."""
    parser.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def write_audit(action: str, **what: Any) -> None:
    """Say on standard error, and to the logger ``semel.audit``, who has done what by hand, when, and to which record.

    :param what: the record by its identity, never by its key: a key may be private, and logs travel far.
    """
    # At the level INFO: without any set-up, what is shown here would be shown twice.
    line = log_act(action, who_is_here(), "cli", level=logging.INFO, **what)
    say(f"semel.audit: {line}", sys.stderr)


def who_is_here() -> str:
    """Return who runs this command: ``user@host``. With sudo it is the user who called it."""
    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


class Progress:
    """A line on a terminal's standard error that is written over, once something takes longer than a moment."""

    def __init__(self) -> None:
        self._shown = False
        self._next = time.monotonic() + 1.0

    def show(self, text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.2
            self._shown = True
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be written over
            print(f"\r{text[:width]}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line, before something else is printed and at the end."""
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def ticking(text: str) -> Iterator[None]:
    """Show on a terminal for how long something has been running that cannot say how far it is."""
    began, progress, ended = time.monotonic(), Progress(), threading.Event()

    def tick() -> None:
        while not ended.wait(0.5):
            progress.show(f"{text} … {duration(round(time.monotonic() - began))}")

    thread = threading.Thread(target=tick, name="semel-ticking", daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
        progress.clear()


class StopFlag:
    """Set by a signal handler.

    Not a ``threading.Event``: a handler that interrupts the main thread inside ``Event.wait`` would wait for a lock
    that this thread holds.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> bool:
        """Sleep until the flag is set, but no longer than this. Returns whether it is set."""
        end = time.monotonic() + seconds
        while not self._set and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, NOTICED_WITHIN))
        return self._set


@contextmanager
def stop_on_signals(on_stop: Callable[[], object] | None = None) -> Iterator[StopFlag]:
    """Let the first signal set the flag, and the second raise KeyboardInterrupt.

    :param on_stop: called by the signal handler, once. It must not wait for anything.
    """
    flag = StopFlag()

    def stop(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()
        if on_stop is not None:
            on_stop()

    before = [(number, signal.signal(number, stop)) for number in SIGNALS]
    try:
        yield flag
    finally:
        for number, handler in before:
            signal.signal(number, handler)


# -- what a command works on


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", type=_plain, help=f"the store: {URLS}; may be left out if {STORE_VARIABLE} is set"
    )


def add_store(parser: argparse.ArgumentParser, default: str | None, about: str) -> None:
    """Add ``--store URL``. Without a URL it takes the one of the environment."""
    parser.add_argument(
        "--store", nargs="?", type=_plain, default=default, const=os.environ.get(STORE_VARIABLE, ""), metavar="URL",
        help=f"{about}; without URL: the one in {STORE_VARIABLE}",
    )  # fmt: skip


def _plain(url: str) -> str:
    from semel.stores.settings import plain_url

    if not url:
        raise argparse.ArgumentTypeError(f"give a URL, or set {STORE_VARIABLE}")
    return plain_url(url)


def plain_or_guard(target: str) -> str:
    return target if names_guard(target) else _plain(target)


def add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", type=plain_or_guard,
        help=f"the store: {URLS}; may be left out if {STORE_VARIABLE} is set. Or the guard of a service, "
        "shop.orders:guard, with its secret, key ring and tenant",
    )  # fmt: skip
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import a guard from (default: here)")
    parser.add_argument("operation", metavar="OPERATION", help="the operation's name")
    parser.add_argument("key", metavar="KEY", help="the key as the caller gave it")
    parser.add_argument("--tenant", default="", metavar="T", help="the tenant that the key belongs to (default: none)")


@contextmanager
def open_guard(url: str, *, reads_only: bool = False) -> Iterator[Semel]:
    """Open a guard on an existing store. A SQLite file is neither created nor migrated.

    :param reads_only: for a SQLite file, need no write access. The guard can only look up.
    """
    from semel.sql.migrations import SQLITE, check_ledger
    from semel.sql.sync import run
    from semel.stores.guard import Semel
    from semel.stores.sqlite import ReadOnlySQLiteStore, open_read_only
    from semel.stores.urls import open_any_store, sqlite_path, tiers

    primary = tiers(url)[0] if url.startswith("tiered:") else url
    with ExitStack() as stack:
        if primary.startswith("sqlite:"):
            connection = stack.enter_context(open_read_only(sqlite_path(primary)))
            if not connection.raw.execute(SQLITE.has_ledger).fetchall():
                raise NotMigrated("the database has no Semel tables: run `semel migrate URL`")
            if reads_only:
                yield stack.enter_context(Semel(ReadOnlySQLiteStore(connection), sweep_every=None))
                return
            run(check_ledger(SQLITE), connection)  # opening the store would migrate it
            stack.pop_all().close()
        with Semel(open_any_store(url), sweep_every=None) as guard:
            yield guard


def names_guard(target: str) -> bool:
    """Whether this is ``module:attribute``, and not the URL of a store."""
    from semel.stores.urls import SCHEMES

    return re.fullmatch(r"[\w.]+:[\w.]+(\(\))?", target) is not None and target.partition(":")[0] not in SCHEMES


def load_guard(target: str, folder: str) -> Semel | AsyncSemel:
    """Import the guard that ``module:attribute`` names."""
    from semel.stores.aio_guard import AsyncSemel
    from semel.stores.guard import Semel

    if ":" not in target:
        raise ConfigurationError(f"{target!r} names no guard: write module:attribute, like shop.orders:guard")
    guard = load(target, folder)
    if not isinstance(guard, (Semel, AsyncSemel)):
        raise ConfigurationError(f"{target} is a {type(guard).__name__}: name a Semel or an AsyncSemel")
    return guard


def load(target: str, folder: str = ".") -> Any:
    """Import the object that ``module:attribute`` names, and call it if ``()`` follows."""
    name, _, path = target.partition(":")
    if not name or any(not part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{target!r} names no application: write module:attribute, like shop.main:app")
    called = path.endswith("()")
    path = path.removesuffix("()")
    module = _import(name, folder)
    if not path:
        path = next((each for each in DEFAULTS if hasattr(module, each)), "")
        if not path:
            raise ConfigurationError(f"the module {name} has neither {' nor '.join(DEFAULTS)}: write {name}:attribute")
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), 1)
            raise ConfigurationError(f"{name} has no {path}" + (f": did you mean {near[0]}?" if near else ""))
        found = getattr(found, part)
    return _call(target, found) if called else found


def _import(name: str, folder: str) -> Any:
    sys.path.insert(0, os.path.abspath(folder))
    try:
        return importlib.import_module(name)
    except SemelError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(f"there is no module {error.name} in {os.path.abspath(folder)}") from error
        raise ConfigurationError(f"{name} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigurationError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _call(target: str, factory: Any) -> Any:
    try:
        return factory()
    except SemelError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{target} failed: {type(error).__name__}: {error}") from error
