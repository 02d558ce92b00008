"""`--cov-sparingly`: measure the coverage of a part of the tests, as `make test` does.

Tracing doubles the CPU time of a test, and most tests run lines that many others have run before them. So these are
not traced:

- a test that is marked `faults`, one that draws its examples, and the random programs of a store: they repeat for long
  what shorter tests do;
- the other rows of a test function, once one of them has reached nothing new.

A line that is shown as missed may therefore be run by a test that was not traced. `make cover` traces them all.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Generator
from typing import Any

import pytest

import semel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cov-sparingly", action="store_true", help="with --cov: do not trace what repeats itself")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    plugin: Any = session.config.pluginmanager.getplugin("_cov")
    if session.config.option.cov_sparingly and plugin and plugin.cov_controller:
        session.config.pluginmanager.register(Sparingly(plugin.cov_controller))


_ELSEWHERE = {"semel.__main__", "semel.http.django.admin", "semel.http.django.models"}
"""A command, and modules that only a Django project can import."""


class Sparingly:
    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._tracing = True
        self._reached = 0
        self._fruitless: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Collecting runs the top level of Semel's modules and little else of it: trace that alone."""
        for module in pkgutil.walk_packages(semel.__path__, "semel."):
            if module.name not in _ELSEWHERE:
                importlib.import_module(module.name)
        self._trace(False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        function, _, _ = item.nodeid.partition("[")
        self._trace(not repeats(item) and function not in self._fruitless)
        done = yield
        if self._tracing:
            before, self._reached = self._reached, sum(map(len, self._controller.cov._collector.data.values()))
            if self._reached == before:
                self._fruitless.add(function)
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._trace(True)

    def _trace(self, wanted: bool) -> None:
        if wanted != self._tracing:
            self._tracing = wanted
            (self._controller.resume if wanted else self._controller.pause)()


def repeats(item: pytest.Item) -> bool:
    """Whether the test does for long, or at random, what shorter tests do."""
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return drawn or item.name == "test_model" or item.get_closest_marker("faults") is not None
