"""A worker of a parallel run reports each test once, instead of four times.

That it begins, and that its fixtures were set up and torn down without trouble, is of no use to anyone, and sending it
costs as much as a small test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    # xdist's own plugin of a worker has no name, and its class is not the one that can be imported.
    plugins: set[Any] = session.config.pluginmanager.get_plugins()
    for worker in (plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor"):
        worker.sendevent = functools.partial(send_what_counts, worker.sendevent)


def send_what_counts(send: Callable[..., None], name: str, **details: Any) -> None:
    if name != "logstart" and not (name == "testreport" and is_routine(details["data"])):
        send(name, **details)


def is_routine(report: dict[str, Any]) -> bool:
    return report["when"] != "call" and report["outcome"] == "passed" and not report["sections"]
