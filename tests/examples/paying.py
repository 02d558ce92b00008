"""The service of the example as an operation that is killed at every point. The provider's address is in PROVIDER."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import sqlite3
import tempfile
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

SERVICE = Path(__file__).parents[2] / "examples" / "payment_provider" / "service.py"


class World(NamedTuple):
    folder: str
    provider: str
    order: str


def load() -> Any:
    spec = importlib.util.spec_from_file_location("payment_service", SERVICE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Once, and not in each of many forks; and what the first payment of a process imports.
EXAMPLE = load()
for _each in ("encodings.idna", "semel.sql.connections.sqlite"):
    importlib.import_module(_each)


def service(world: World) -> Any:
    return EXAMPLE.Service(f"{world.folder}/shop.db", world.provider, lease="150ms")


def setup() -> World:
    folder = tempfile.mkdtemp(prefix="semel-paying-")
    world = World(folder, os.environ["PROVIDER"], Path(folder).name)
    service(world).guard.close()
    return world


def pay(world: World) -> None:
    service(world).pay(world.order, 500)


def check(world: World) -> None:
    with urllib.request.urlopen(f"{world.provider}/charges", timeout=10) as answer:
        mine = [charge for charge in json.load(answer) if charge["order"] == world.order]
    assert len(mine) == 1, f"{len(mine)} charges"
    with closing(sqlite3.connect(f"{world.folder}/shop.db")) as conn:
        paid = conn.execute("SELECT charge FROM payment").fetchall()
    assert paid == [(mine[0]["id"],)], paid


def remove(world: World) -> None:
    shutil.rmtree(world.folder)
