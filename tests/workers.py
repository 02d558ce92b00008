"""`--workers=N`: run the tests in N processes, which are forked when all tests are collected.

pytest-xdist would start each worker from nothing, and each would import and collect everything again: for the quick
tests that is a quarter of all their time. A fork has what its parent has collected. And since the parent knows the
tests, not only their names, it can hand them out by what they need: see `group_of`.

A worker asks for a group of tests when it begins the last test of the group before, so it always knows which test
comes next and which fixtures it can keep.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import StringIO
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

from tests.servers.kinds import costly_kind

FORK = multiprocessing.get_context("fork")
INTERRUPT_EVERY = 15.0
"""Seconds that a worker has to stop its servers, before it is interrupted again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the tests in so many processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count: int = session.config.option.workers
    if not count or session.testsfailed or session.config.option.collectonly:
        return None  # pytest goes on by itself
    # Made here, so that the workers share it, and the parent removes it in the end.
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    run_in_workers(session, count)
    return True


def group_of(item: pytest.Item) -> str:
    """Tests with the same answer go to one worker: those of a file, and all that need the same costly server."""
    return costly_kind(item) or item.nodeid.partition("::")[0]


def groups(items: Iterable[pytest.Item]) -> list[list[int]]:
    """The places of the tests of each group, in the order of their first tests."""
    found: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        found.setdefault(group_of(item), []).append(place)
    return list(found.values())


class Node:
    """Where a test ran. With it the terminal prints a line of dots, and not the name of a file before each test."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self._workerinfocache = f"[{name}]"


class Worker:
    """The parent's side of a worker."""

    def __init__(self, session: pytest.Session, number: int, others: Iterable[Connection]) -> None:
        self.connection, theirs = FORK.Pipe()
        ours = [self.connection, *others]
        self.process = FORK.Process(target=work_in_child, args=(session, theirs, ours), name=f"worker-{number}")
        self.process.start()
        theirs.close()
        self.running: int | None = None
        self.assigned: deque[int] = deque()
        """The tests that it has not begun yet."""
        self.node = Node(self.process.name)

    def assign(self, tests: list[int]) -> None:
        self.assigned.extend(tests)
        self.connection.send(tests)

    def starts(self, test: int | None) -> None:
        self.running = test
        if test is not None:
            self.assigned.remove(test)

    def receive(self) -> tuple[str, Any]:
        with suppress(EOFError, ConnectionResetError):
            if self.connection.poll():
                return self.connection.recv()  # type: ignore[no-any-return]
        return "ended", None


def run_in_workers(session: pytest.Session, count: int) -> None:
    waiting = deque(groups(session.items))
    numbers = itertools.count()
    workers: dict[Any, Worker] = {}

    def start() -> None:
        worker = Worker(session, next(numbers), workers)
        workers[worker.connection] = worker

    for _ in range(min(count, len(waiting))):
        start()
    try:
        while workers:
            # A dead worker's end of the pipe may be open still, in a process that it has forked.
            dead = [connection for connection, worker in workers.items() if worker.process.exitcode is not None]
            for connection in wait(list(workers), timeout=0 if dead else 1.0) or dead:
                worker = workers[connection]
                kind, content = worker.receive()
                if kind == "next":
                    worker.assign(waiting.popleft() if waiting else [])
                elif kind == "starts":
                    worker.starts(content)
                elif kind == "report":
                    log_report(session, worker, content)
                else:
                    del workers[connection]
                    worker.process.join()
                    report_death(session, worker)
                    if worker.assigned and worker.running is not None:  # another one does the rest of its work
                        waiting.appendleft(list(worker.assigned))
                        start()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    except Exception:
        interrupt(workers.values())
        raise
    finally:
        # A worker that is still in a test ends after it, because it cannot report it any more.
        for worker in workers.values():
            worker.connection.close()
            worker.process.join()


def interrupt(workers: Iterable[Worker]) -> None:
    """End the workers. One that has just been forked may lose the signal: Python ignores what is raised in functions
    that it calls after a fork."""
    left = list(workers)
    while left:
        for worker in left:
            os.kill(worker.process.pid or 0, signal.SIGINT)
        end = time.monotonic() + INTERRUPT_EVERY
        for worker in left:
            worker.process.join(max(0.0, end - time.monotonic()))
        left = [worker for worker in left if worker.process.exitcode is None]


def log_report(session: pytest.Session, worker: Worker, content: dict[str, Any]) -> None:
    report = session.config.hook.pytest_report_from_serializable(config=session.config, data=content)
    report.node = worker.node
    session.config.hook.pytest_runtest_logreport(report=report)


def report_death(session: pytest.Session, worker: Worker) -> None:
    code = worker.process.exitcode or 0
    if code or worker.running is not None or worker.assigned:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        test = worker.process.name if worker.running is None else session.items[worker.running].nodeid
        report = pytest.TestReport(
            test, (test, None, test), {}, "failed", f"the worker died in this test ({how})", "call", start=0, stop=0
        )
        report.node = worker.node  # type: ignore[attr-defined]
        session.config.hook.pytest_runtest_logreport(report=report)


# The child's side


class Reporter:
    """Sends the parent what it must know: not that fixtures were set up and torn down without trouble."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config = config
        self.connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            self.connection.send(("report", data))


def work_in_child(session: pytest.Session, connection: Connection, parents: Iterable[Connection]) -> None:
    for each in parents:  # a pipe that is open here would not end for the others when the parent closes it
        each.close()
    # A shell starts what it runs in the background with this signal ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = session.config
    plugins = config.pluginmanager
    # What the parent has opened belongs to the parent: the terminal, and the files that output is captured in.
    capture, terminal = plugins.getplugin("capturemanager"), plugins.getplugin("terminalreporter")
    capture.stop_global_capturing()
    terminal._tw = create_terminal_writer(config, StringIO())
    capture.start_global_capturing()
    plugins.register(Reporter(config, connection))
    tests = received(connection)
    test = next(tests, None)
    try:
        while test is not None and not session.shouldfail:
            following = next(tests, None)
            connection.send(("starts", test))
            config.hook.pytest_runtest_protocol(
                item=session.items[test], nextitem=None if following is None else session.items[following]
            )
            test = following
    except (KeyboardInterrupt, BrokenPipeError, EOFError):  # the parent has had enough
        pass
    finally:
        session._setupstate.teardown_exact(None)
        save_coverage(config)
        capture.stop_global_capturing()
        with suppress(BrokenPipeError):
            connection.send(("starts", None))


def received(connection: Connection) -> Iterator[int]:
    while True:
        connection.send(("next", None))
        tests = connection.recv()
        if not tests:
            return
        yield from tests


def save_coverage(config: pytest.Config) -> None:
    """The parent combines the files of all workers."""
    plugin: Any = config.pluginmanager.getplugin("_cov")
    if plugin and plugin.cov_controller:
        plugin.cov_controller.cov.stop()
        plugin.cov_controller.cov.save()
