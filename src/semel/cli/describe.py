"""``semel describe``: the "Idempotency" section of a service's design, written from the service itself."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from contextlib import redirect_stdout
from difflib import get_close_matches
from typing import Any

from semel.cli.exits import OK
from semel.errors import ConfigurationError, SemelError

NAME = "describe"
HELP = "Print what a service promises: routes, keys, store, replay contract, errors, an example."
DEFAULTS = ("app", "application")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app", metavar="MODULE:APP", help="the application, as a server is given it: shop.main:app, shop:make_app()"
    )
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import it from (default: here)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--markdown", action="store_true", help="a section for a design document (default)")
    shape.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from semel.cli.design_page import page
    from semel.http.describe.design import design_of
    from semel.http.describe.installed import installed_in

    with redirect_stdout(sys.stderr):  # what the application prints is no part of the page
        design = design_of(args.app, installed_in(load(args.app, args.app_dir)))
    print(json.dumps(design, indent=2, ensure_ascii=False) if args.json else page(design))
    return OK


def load(target: str, folder: str = ".") -> Any:
    """The object that ``module:attribute`` names; called, if ``()`` follows."""
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
