"""What a command works on: a store, a record, an object of the user's service. Reading never creates anything."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError, NotMigrated, SemelError

if TYPE_CHECKING:
    from semel.stores.guard import Semel

__all__ = ["STORE_VARIABLE", "URLS", "add_record", "add_store", "add_url", "load", "open_guard"]

STORE_VARIABLE: Final = "SEMEL_STORE"
"""The environment variable that names the store where the command line does not. It keeps passwords out of ``ps``."""

URLS: Final = (
    "sqlite:///app.db, postgresql://…, mysql://… or mariadb://…, redis://… (rediss:// with TLS, redis+sentinel://…, "
    "redis+cluster://…, unix:///path), dynamodb://region/table, tiered:postgresql://…,redis://…, memory:"
)
"""The URLs of stores, for the help."""
DEFAULTS: Final = ("app", "application")
"""Where ``load`` looks when only a module is named."""


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


def add_record(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("operation", metavar="OPERATION", help="the operation's name")
    parser.add_argument("key", metavar="KEY", help="the key as the caller gave it")
    parser.add_argument("--tenant", default="", metavar="T", help="the tenant that the key belongs to (default: none)")


@contextlib.contextmanager
def open_guard(url: str, *, reads_only: bool = False) -> Iterator[Semel]:
    """Open a guard on an existing store. A SQLite file is neither created nor migrated.

    :param reads_only: for a SQLite file, need no write access. The guard can only look up.
    """
    from semel.sql.migrations import SQLITE
    from semel.stores.guard import Semel
    from semel.stores.sqlite import ReadOnlySQLiteStore, open_read_only
    from semel.stores.urls import open_any_store, sqlite_path, tiers

    primary = tiers(url)[0] if url.startswith("tiered:") else url
    with contextlib.ExitStack() as stack:
        if primary.startswith("sqlite:"):
            connection = stack.enter_context(open_read_only(sqlite_path(primary)))
            if not connection.raw.execute(SQLITE.has_ledger).fetchall():
                raise NotMigrated("the database has no Semel tables: run `semel migrate URL`")
            if reads_only:
                yield stack.enter_context(Semel(ReadOnlySQLiteStore(connection), sweep_every=None))
                return
            stack.pop_all().close()
        with Semel(open_any_store(url), sweep_every=None) as guard:
            yield guard


def load(target: str, folder: str = ".") -> Any:
    """Import the object that ``module:attribute`` names, and call it if ``()`` follows."""
    name, _, path = target.partition(":")
    if not name or any(not part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{target!r} names no application: write module:attribute, like shop.main:app")
    called = path.endswith("()")
    path = path.removesuffix("()")
    module = _imported(name, folder)
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
    return _made(target, found) if called else found


def _imported(name: str, folder: str) -> Any:
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


def _made(target: str, factory: Any) -> Any:
    try:
        return factory()
    except SemelError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{target} failed: {type(error).__name__}: {error}") from error
