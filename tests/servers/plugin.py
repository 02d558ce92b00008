"""Servers in a pytest session.

A test that uses a fixture named after a kind (`postgres`, or one built on it), or `private_<kind>`, gets the markers
`<kind>` and `server` by itself. A test that picks its fixture at run time is marked by hand: `@pytest.mark.postgres`.
A fixture that starts a service in a process of its own (gunicorn, uvicorn …) asks for `starts_process`, and each
test that uses it gets the marker `process`.
A kind is started when the first test wants it: of several workers, one that runs none of its tests does without. The
tests of a costly kind go to one worker, which stops the server after the last of them: see `tests/workers.py`. The log
of a server is shown with the failure of a test that used it.

A server that is not installed: its tests are skipped with its name; when CI is set, they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack

import pytest

from tests.servers.base import Server, ServerMissing
from tests.servers.install import missing_is_an_error
from tests.servers.kinds import KINDS, costly_kind, fixtures_of, kinds_of
from tests.servers.pool import ServerPool

_pool = pytest.StashKey[ServerPool]()
_private = pytest.StashKey[list[Server]]()


def obtain(get: Callable[[str], Server], name: str) -> Server:
    """`get(name)`, with a missing server turned into a skip or, with CI set, a failure."""
    try:
        return get(name)
    except ServerMissing as missing:
        if missing_is_an_error():
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[ServerPool]:
    """The session's servers."""
    pool = request.config.stash[_pool]
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def shared_server(servers: ServerPool) -> Callable[[str], Server]:
    """The session's server of a kind, for the fixture with that kind's name: `shared_server("postgres")`."""
    return lambda name: obtain(servers.get, name)


@pytest.fixture
def private_server(request: pytest.FixtureRequest, servers: ServerPool) -> Iterator[Callable[[str], Server]]:
    """A factory: `private_server("postgres")` starts a server for this test alone, to restart, break or stop."""
    with ExitStack() as stack:

        def start(name: str) -> Server:
            server = obtain(servers.private, name)
            stack.callback(server.stop)
            request.node.stash.setdefault(_private, []).append(server)
            return server

        yield start


@pytest.fixture(scope="session")
def starts_process() -> None:
    """Requested by the fixtures that start a service in another process. It does nothing but mark their tests."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_pool] = ServerPool()
    config.addinivalue_line("markers", "server: needs a real server; added to every test that uses one")
    config.addinivalue_line("markers", "process: asks a service in a process of its own; added by `starts_process`")
    for name in KINDS:
        config.addinivalue_line("markers", f"{name}: needs a {name} server")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kinds = {fixture: name for name in KINDS for fixture in (name, f"private_{name}")}
    for item in items:
        fixtures = fixtures_of(item)
        for name in {kinds[fixture] for fixture in fixtures if fixture in kinds}:
            item.add_marker(name)
        if "private_server" in fixtures or any(marker.name in KINDS for marker in item.iter_markers()):
            item.add_marker("server")
        if "starts_process" in fixtures:
            item.add_marker("process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let a costly server rest after its last test, and start it again if there is another one after all."""
    pool = item.config.stash[_pool]
    for name in kinds_of(item):
        pool.resume(name)
    done = yield
    costly = costly_kind(item)
    if costly and nextitem and costly != costly_kind(nextitem):
        pool.rest(costly)
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Refuse a test that picked a server at run time and does not say so: `-m "not server"` would start it too."""
    request = getattr(item, "_request", None)
    used = KINDS.keys() & getattr(request, "_fixture_defs", {}).keys()
    unmarked = [
        name for name in sorted(used) if not (item.get_closest_marker(name) and item.get_closest_marker("server"))
    ]
    if unmarked:
        pytest.fail(f"it uses a server: mark it with {' and '.join(unmarked)}, and with server", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        pool = item.config.stash[_pool]
        shared = [server for name in kinds_of(item) if (server := pool.running(name))]
        for server in [*shared, *item.stash.get(_private, [])]:
            report.sections.append((f"log of {server.name} on port {server.port}", server.log_tail()))
    return report
