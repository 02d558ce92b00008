"""What a command works on: a store, a record, an object of the user's service. Reading never creates anything."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from difflib import get_close_matches
from typing import Any, Final

from semel.errors import ConfigurationError, NotMigrated, SemelError
from semel.sql.migrations import SQLITE
from semel.stores.bounds import plain_url
from semel.stores.guard import Semel
from semel.stores.sqlite import open_read_only
from semel.stores.urls import open_store, sqlite_path, tiers

__all__ = ["URLS", "add_record", "add_url", "load", "open_guard"]

URLS: Final = (
    "sqlite:///app.db, postgresql://…, mysql://… or mariadb://…, redis://… (rediss:// with TLS, redis+sentinel://…, "
    "redis+cluster://…, unix:///path), dynamodb://region/table, tiered:postgresql://…,redis://…, memory:"
)
"""The URLs of stores, for the help."""
DEFAULTS: Final = ("app", "application")
"""Where ``load`` looks when only a module is named."""


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", type=plain_url, help=f"the store: {URLS}")


def add_record(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("operation", metavar="OPERATION", help="the operation's name")
    parser.add_argument("key", metavar="KEY", help="the key as the caller gave it")
    parser.add_argument("--tenant", default="", metavar="T", help="the tenant that the key belongs to (default: none)")


def open_guard(url: str) -> Semel:
    """Open a guard on an existing store. A SQLite file is neither created nor migrated."""
    primary = tiers(url)[0] if url.startswith("tiered:") else url
    if primary.partition(":")[0] == "sqlite":
        with open_read_only(sqlite_path(primary)) as connection:
            if not connection.raw.execute(SQLITE.has_ledger).fetchall():
                raise NotMigrated("the database has no Semel tables: run `semel migrate URL`")
    return Semel(open_store(url), sweep_every=None)


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
